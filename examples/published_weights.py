"""Probes weights and curves that somebody else published, and prints them beside a run of our own.

    python examples/published_weights.py [RUN]

The KQ matrices were printed in the authors' released notebook, the OV entries and the error curves read off their
figures (to about 1 %). RUN is a two-head run folder, such as the one `icl-mechinterp demo` leaves in runs/demo.
"""

import json
import sys
from pathlib import Path

import torch
from transformer_lens import HookedTransformer

import icl_mechinterp as icl
from icl_mechinterp import theory
from icl_mechinterp.models import from_circuits

PUBLISHED = json.loads((Path(__file__).parent / "published_isotropic.json").read_text())
TASK = icl.LinearRegression(d=5, context=40, noise=0.1)


def published_model(name: str, mus: list[float] | None = None) -> HookedTransformer:
    """A published model: its printed KQ, and an OV that reads the label only, as its figure shows."""
    kq = torch.tensor(PUBLISHED["kq"][name], dtype=torch.float64)
    ov = torch.zeros(len(kq), 1, TASK.d + 1, dtype=torch.float64)
    ov[:, 0, -1] = torch.tensor(PUBLISHED["ov_label"][name] if mus is None else mus)
    return from_circuits(TASK, kq, ov, dtype=torch.float64)


def print_reports(reports: dict[str, icl.ProbeReport]) -> None:
    """One column per model, one line per measurement."""
    print(f"{'':38}" + "".join(f"{name:>22}" for name in reports))
    first = next(iter(reports.values()))
    for probe, measurement in first.measurements:
        cells = [report[probe][measurement.name] for report in reports.values()]
        texts = [f"{m.text} {'' if m.passed is None else 'ok' if m.passed else 'FAILS'}" for m in cells]
        print(f"{probe + '.' + measurement.name:38}" + "".join(f"{text:>22}" for text in texts))
    for name, report in reports.items():
        print(f"\n{name}: {report.verdict}")


def print_curves() -> None:
    """Published test error by prompt length beside what theory gives debiased GD with the published step."""
    curves = PUBLISHED["mse_by_length"]
    kq = torch.tensor(PUBLISHED["kq"]["two_head"], dtype=torch.float64)
    omegas = torch.diagonal(kq, dim1=1, dim2=2)[:, : TASK.d].mean(1)
    step = float(omegas @ torch.tensor(PUBLISHED["ov_label"]["two_head"], dtype=torch.float64))
    print(f"\ntest error by prompt length, trained at L = 40; theory: debiased GD with the published step {step:.3f}")
    print("     L  published H=2   theory  published H=1")
    for context, two, one in zip(curves["context"], curves["heads_2"], curves["heads_1"], strict=True):
        risk = theory.debiased_gd_risk(step, TASK.d, context, TASK.noise)
        print(f"{context:6}  {two:13.4f}  {risk:7.4f}  {one:13.4f}")


def main() -> None:
    reports = {"published H=2": icl.probe(published_model("two_head"), TASK)}
    # mu of the published single head stands in no matrix; 1.485 is the middle of the figure's 1.48 to 1.49, sign of KQ
    reports["published H=1"] = icl.probe(published_model("one_head", [-1.485]), TASK)
    if len(sys.argv) > 1:
        run = icl.load_run(sys.argv[1])
        reports["our run"] = icl.probe(run.model(), run.task)
    print_reports(reports)
    print_curves()


if __name__ == "__main__":
    main()
