"""Run folders made by hand, with matrices, curves and reports of known content: what a report page is tested on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from icl_mechinterp.circuits import History
from icl_mechinterp.results import HeadVerdict, Measurement, ProbeReport, ProbeResult
from icl_mechinterp.runs import Run, load_run

D, HEADS = 5, 2
THEORY = {"optimal_step": 0.889, "best_loss": 0.2425, "bayes_risk": 0.2151}
PLANTED = 1e4
"""Value of every entry of KQ that has no meaning."""

_NAMES = [*(f"x{i + 1}" for i in range(D)), "y"]


def make_run(
    path: Path,
    *,
    seeds: Sequence[int] = (0,),
    n_steps: int = 40,
    reports: Sequence[ProbeReport] | None = None,
    history: bool = True,
    **config: Any,
) -> Run:
    """A finished run of two heads, d = 5: positive and negative, omega about .15, mu about 2.9."""
    path.mkdir(parents=True)
    settings = {
        "schema_version": 1,
        "task": {"kind": "linear_regression", "d": D, "context": 40, "noise": 0.1},
        "model": {"n_heads": HEADS, "n_layers": 1},
        "training": {"steps": 500 * max(n_steps - 1, 0), "optimizer": "adam", "lr": 0.001},
        "seeds": list(seeds),
        "probes": ["structure", "equivalence"],
        "versions": {"icl_mechinterp": "0.1.0", "torch": "2.13.0"},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(settings | config, sort_keys=False))
    if history:
        write_history(path, seeds, n_steps)
    written = [make_report(seed=seed, step=500 * (n_steps - 1)) for seed in seeds] if reports is None else reports
    (path / "probes.jsonl").write_text("".join(report.to_json() + "\n" for report in written))
    return load_run(path)


def write_history(path: Path, seeds: Sequence[int], n_steps: int, *, spoil: float | None = None) -> None:
    """Metrics and circuits; `spoil` replaces the last row's loss, omega and one entry of each KQ."""
    dims = {"kq": ("layer", "head", "key", "query"), "ov": ("layer", "head", "out", "token")}
    labels = {"seed": list(seeds), "key": _NAMES, "query": _NAMES, "token": _NAMES, "out": ["y"]}
    heads = dict.fromkeys(("omega", "mu", "share"), ("layer", "head"))
    circuits = History(path / "history.zarr", "circuits", dims=dims, labels=labels)
    metrics = History(path / "history.zarr", "metrics", dims={"loss": (), **heads}, labels={"seed": list(seeds)})
    for index in range(n_steps):
        grown = 1 / (1 + np.exp(-(index - 12) / 2.5))
        generator = np.random.default_rng(index)
        omega, mu = _signed(len(seeds), 0.15 * grown, generator), _signed(len(seeds), 2.93 * grown, generator)
        loss = 0.2425 + 0.85 * (1 - grown) ** 2 + 0.01 * generator.random(len(seeds))
        kq, ov = _matrices(omega, mu, generator)
        if spoil is not None and index == n_steps - 1:
            loss[:], omega[:], kq[..., 0, 1] = spoil, spoil, spoil
        metrics.add(500 * index, {"loss": loss, "omega": omega, "mu": mu, "share": np.full_like(omega, 0.5)})
        circuits.add(500 * index, {"kq": kq, "ov": ov})
    for history in (metrics, circuits):
        history.flush()


def make_report(
    *, seed: int = 0, step: int = 19_500, algorithm: str = "none", verdict: str | None = None
) -> ProbeReport:
    """A report with measurements of every status; odd seeds have their negative head first, as in `write_history`."""
    sign = 1 if seed % 2 == 0 else -1
    labels = ("positive", "negative")[::sign]
    heads = (
        HeadVerdict(0, 0, labels[0], sign * 0.1482, sign * 2.93, 0.499, 0.494),
        HeadVerdict(0, 1, labels[1], sign * -0.1491, sign * -2.92, 0.501, 0.496),
    )
    judged = Measurement.judged
    structure = (
        judged("off_diagonal_energy", 0.0015, threshold=0.01, reference=0.0),
        judged("within_head_spread", 0.0121, threshold=0.05, reference=0.0),
        judged("ov_last_entry", 0.9997, threshold=0.995, rule=">", reference=1.0),
        judged("zero_sum", 0.0412, threshold=0.03, reference=0.0),
        Measurement("effective_step", 0.8812, reference=0.889),
        Measurement.undecided("manifold_gap", "the solution manifold asks for heads of both signs", threshold=0.03),
    )
    equivalence = (
        judged("loss", 0.2443, stderr=0.0003, threshold=0.2596, reference=0.2425, unit="y^2"),
        judged("distance_debiased_gd", 0.0021, stderr=0.0001, threshold=0.005, reference=0.0, unit="Var(yhat)"),
        judged("shift_labels", 0.0305, stderr=0.002, threshold=0.031, reference=0.0, unit="Var(yhat)"),
    )
    sentence = "This model is not debiased gradient descent: it fails zero_sum (0.0412, needs < 0.03)."
    return ProbeReport(
        heads=heads,
        results=(ProbeResult("structure", structure), ProbeResult("equivalence", equivalence)),
        verdict=verdict or sentence,
        algorithm=algorithm,
        task={"d": D},
        model={"n_heads": HEADS},
        probe_seed=0,
        step=step,
        seed=seed,
        notes=("H1 has label_key_leakage .06 with 1 % of the mass: it does not decide.",),
    )


def _signed(n_seeds: int, size: float, generator: np.random.Generator) -> np.ndarray:
    """`[seed layer head]`; every second seed has its negative head first."""
    signs = np.array([[1.0, -1.0] if seed % 2 == 0 else [-1.0, 1.0] for seed in range(n_seeds)])[:, None]
    return (signs * size + 0.004 * generator.standard_normal(signs.shape)).astype(np.float32)


def _matrices(omega: np.ndarray, mu: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    kq = 0.003 * generator.standard_normal((*omega.shape, D + 1, D + 1))
    kq[..., :D, :D] += omega[..., None, None] * np.eye(D)
    kq[..., :, D] = PLANTED
    ov = 0.02 * generator.standard_normal((*mu.shape, 1, D + 1))
    ov[..., 0, D] = mu
    return kq.astype(np.float32), ov.astype(np.float32)
