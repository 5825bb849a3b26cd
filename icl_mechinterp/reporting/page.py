"""What the report page shows, as plain values: records and arrays of a run arranged for the template.

Counting statuses and choosing what to draw is all that happens here. A part of a run that is missing or cannot be read
becomes a remark on the page, so that a report of a broken run says what is broken.
"""

import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import xarray as xr
import yaml
from markupsafe import Markup

from .. import visualisation as vis
from ..circuits import Circuits
from ..errors import RunError
from ..results import HeadVerdict, Measurement, ProbeReport
from ..runs import Run
from .explanations import EXPLANATIONS

SEEDS_SHOWN = 3
INTERACTIVE_HEADS = 8
_KINDS = {
    "structure": "Structure",
    "equivalence": "Function",
    "ablation": "Ablation",
    "patching": "Patching",
    "interchange": "Interchange",
    "dynamics": "Dynamics",
}
_SETTINGS = ("task", "model", "training", "seeds", "probes")  # what a config file may say
T = TypeVar("T")


@dataclass(frozen=True)
class Light:
    """One kind of evidence: its required measurements counted by status; `status` is the worst of them."""

    title: str
    status: str
    passed: int
    failed: int
    undecided: int


@dataclass(frozen=True)
class Row:
    """One measurement as the table has it."""

    probe: str
    name: str
    value: str
    unit: str
    bound: str
    reference: str
    status: str
    required: bool
    reason: str
    explanation: str


@dataclass(frozen=True)
class Layer:
    """The pictures of one layer: static images, and interactive figures of its first heads (none without a script)."""

    title: str
    kq: Markup
    ov: Markup
    interactive: tuple[tuple[str, Markup, Markup], ...]


@dataclass(frozen=True)
class SeedPage:
    """Everything shown of one seed; `stacked` when its pictures are too wide to stand beside the heads."""

    seed: int
    stacked: bool
    report: ProbeReport | None
    lights: tuple[Light, ...]
    rows: tuple[Row, ...]
    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class RunPage:
    """Everything shown of one run.

    Attributes:
        anchor: id of its section.
        title, path: name of the run folder, and the folder as it was given.
        subtitle: the task in one line.
        remarks: parts that are missing or could not be read.
        seeds: the first few seeds in full.
        verdicts: seed, algorithm and sentence of every seed that has a report.
        counts: how many seeds are which algorithm, most frequent first.
        circuits_step: the step of the matrices shown.
        trajectories: the picture; empty without a history.
        config, facts, commands: how it was made.
    trained_here: whether its settings train it again; else it was attached to somebody's loop, or imported.
    """

    anchor: str
    title: str
    path: str
    subtitle: str
    remarks: tuple[str, ...]
    n_seeds: int
    seeds: tuple[SeedPage, ...]
    verdicts: tuple[tuple[int | None, str, str], ...]
    counts: tuple[tuple[str, int], ...]
    circuits_step: int | None
    trajectories: Markup
    config: str
    facts: tuple[tuple[str, str], ...]
    commands: tuple[str, ...]
    trained_here: bool


def run_page(run: Run, anchor: str, theory_lines: Mapping[str, float], *, interactive: bool) -> RunPage:
    """Reads a run and arranges it.

    Args:
        run: finished or growing.
        anchor: id of its section, unique in the page.
        theory_lines: `optimal_step`, `best_loss`, `bayes_risk`; missing ones are not drawn.
        interactive: whether the page has the script that interactive figures need.
    """
    remarks: list[str] = []
    reports = _read(lambda: run.final_reports, (), "its probe reports cannot be read", remarks)
    metrics = _group(lambda: run.metrics, "training curves", "omega", remarks)
    circuits = _group(lambda: run.circuits, "circuits", "kq", remarks)
    if not reports:
        remarks.append("it has no probe report yet, so there is no verdict; a report is written at every checkpoint")
    by_seed = {report.seed: report for report in reports}
    shown = run.seeds[:SEEDS_SHOWN]
    return RunPage(
        anchor=anchor,
        title=run.path.name or str(run.path),
        path=str(run.path),
        subtitle=_task_line(run),
        remarks=tuple(remarks),
        n_seeds=len(run.seeds),
        seeds=tuple(
            _seed_page(run, by_seed.get(seed), circuits, index, anchor, interactive=interactive and index == 0)
            for index, seed in enumerate(shown)
        ),
        verdicts=tuple((report.seed, report.algorithm, report.verdict) for report in reports),
        counts=tuple(Counter(report.algorithm for report in reports).most_common()),
        circuits_step=None if circuits is None else int(circuits["step"][-1]),
        trajectories=_trajectories(run, metrics, by_seed, theory_lines),
        config=yaml.safe_dump({k: run.config[k] for k in _SETTINGS if k in run.config}, sort_keys=False),
        facts=_facts(run.config),
        commands=_commands(run),
        trained_here=run.is_trained_here,
    )


def number(value: Any) -> str:
    """A number as a person reads it; a dash for none, words for what is not finite."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:.4g}" if math.isfinite(value) else f"not finite ({value})"


def _seed_page(
    run: Run, report: ProbeReport | None, circuits: xr.Dataset | None, index: int, anchor: str, *, interactive: bool
) -> SeedPage:
    return SeedPage(
        seed=run.seeds[index],
        stacked=circuits is not None and (circuits.sizes["head"] > 2 or circuits.sizes["key"] > 8),
        report=report,
        lights=() if report is None else _lights(report),
        rows=() if report is None else tuple(_row(probe, m) for probe, m in report.measurements),
        layers=_layers(run, report, circuits, index, f"{anchor}-s{index}", interactive=interactive),
    )


def _lights(report: ProbeReport) -> tuple[Light, ...]:
    """Structure and function always, asked or not; other probes where they ran."""
    found = {result.probe: [m for m in result.values() if m.required] for result in report.results}
    names = dict.fromkeys(["structure", "equivalence", *found])
    return tuple(_light(_KINDS.get(name, name), found.get(name, [])) for name in names)


def _light(title: str, measurements: Sequence[Measurement]) -> Light:
    count = Counter(m.status for m in measurements)
    worst = next((status for status in ("failed", "undecided", "passed") if count[status]), "not asked")
    return Light(title, worst, count["passed"], count["failed"], count["undecided"])


def _row(probe: str, m: Measurement) -> Row:
    return Row(
        probe=probe,
        name=m.name,
        value=number(m.value) if m.stderr is None else f"{number(m.value)} ± {m.stderr:.1g}",
        unit="" if m.unit == "1" else m.unit,
        bound="–" if m.threshold is None else f"{m.rule} {number(m.threshold)}",
        reference=number(m.reference),
        status=m.status,
        required=m.required,
        reason=m.reason or "",
        explanation=EXPLANATIONS.get(m.name, ""),
    )


def _layers(
    run: Run, report: ProbeReport | None, circuits: xr.Dataset | None, index: int, prefix: str, *, interactive: bool
) -> tuple[Layer, ...]:
    if circuits is None:
        return ()
    last = circuits.isel(step=-1, seed=index)
    found = Circuits(
        torch.as_tensor(last["kq"].values.astype(np.float64)),
        torch.as_tensor(last["ov"].values.astype(np.float64)),
        run.task.d,
        scale=(),  # contained in the matrices
    )
    verdicts = _verdicts(report)
    return tuple(
        _layer(
            found,
            layer,
            [verdicts.get((layer, head)) for head in range(found.n_heads)],
            f"{prefix}-l{layer}",
            interactive=interactive,
        )
        for layer in range(found.n_layers)
    )


def _layer(
    found: Circuits, layer: int, verdicts: Sequence[HeadVerdict | None], prefix: str, *, interactive: bool
) -> Layer:
    kq, ov = found.kq[layer].numpy(), found.ov[layer].numpy()
    identifiable, names = found.identifiable[layer].numpy(), found.token_names
    heads = [_head_title(layer, head, verdict) for head, verdict in enumerate(verdicts)]
    kq_limit, ov_limit = vis.symmetric_limit(kq, identifiable), vis.symmetric_limit(ov)
    kq_alt = (
        f"Heat maps of KQ for {', '.join(heads)}: rows are keys and columns queries, {names[0]} to {names[-1]}; "
        f"colours from {-kq_limit:.3g} (orange) to {kq_limit:.3g} (blue); hatched entries have no meaning."
    )
    ov_alt = (
        f"Heat map of OV, one row per head ({', '.join(heads)}), columns are tokens {names[0]} to {names[-1]}; "
        f"colours from {-ov_limit:.3g} (orange) to {ov_limit:.3g} (blue)."
    )
    figures = []
    for head in range(min(found.n_heads, INTERACTIVE_HEADS) if interactive else 0):
        masked = np.where(identifiable, kq[head], np.nan).T  # CircuitsVis: rows are queries
        element = f"{prefix}-h{head}"
        pattern = vis.attention_pattern(masked, names, element_id=f"{element}-kq", limit=kq_limit)
        tokens = [
            vis.colored_tokens(row, names, element_id=f"{element}-ov{out}", limit=ov_limit)
            for out, row in enumerate(ov[head])
        ]
        figures.append((heads[head], Markup(pattern), Markup("".join(tokens))))
    return Layer(
        title=f"Layer {layer}" if found.n_layers > 1 else "",
        kq=Markup(vis.as_image(vis.kq_heatmaps(kq, identifiable=identifiable, names=names, heads=heads), alt=kq_alt)),
        ov=Markup(vis.as_image(vis.ov_heatmap(ov, names=names, heads=heads), alt=ov_alt)),
        interactive=tuple(figures),
    )


def _head_title(layer: int, head: int, verdict: HeadVerdict | None) -> str:
    name = f"H{head}" if layer == 0 else f"L{layer}H{head}"
    return name if verdict is None else f"{name} {verdict.label}"


def _trajectories(
    run: Run,
    metrics: xr.Dataset | None,
    by_seed: Mapping[int | None, ProbeReport],
    theory_lines: Mapping[str, float],
) -> Markup:
    if metrics is None:
        return Markup("")
    omega, mu = metrics["omega"].values, metrics["mu"].values
    figure = vis.trajectories(
        metrics["step"].values,
        loss=metrics["loss"].values if "loss" in metrics else np.full(omega.shape[:2], np.nan),
        effective_step=metrics["effective_step"].values if "effective_step" in metrics else None,
        omega=omega,
        mu=mu,
        groups=[_groups(omega.shape[2:], by_seed.get(seed), many=len(run.seeds) > 1) for seed in run.seeds],
        theory_lines=theory_lines,
    )
    steps = metrics["step"].values
    alt = (
        f"Four line charts over training steps {steps[0]} to {steps[-1]}: training loss, effective step, omega of each "
        "head and mu of each head, with the values that theory expects as horizontal lines."
    )
    return Markup(vis.as_image(figure, alt=alt))


def _groups(shape: tuple[int, ...], report: ProbeReport | None, *, many: bool) -> list[str]:
    """What a head's line is called: by its name and label in one seed, by its label alone over several."""
    verdicts = _verdicts(report)
    places = [(layer, head) for layer in range(shape[0]) for head in range(shape[1])]
    if many:
        return [verdicts[place].label if place in verdicts else "not classified" for place in places]
    return [_head_title(*place, verdicts.get(place)) for place in places]


def _verdicts(report: ProbeReport | None) -> dict[tuple[int, int], HeadVerdict]:
    return {} if report is None else {(h.layer, h.head): h for h in report.heads}


def _read(ask: Callable[[], T], missing: T, remark: str, remarks: list[str]) -> T:
    try:
        return ask()
    except RunError as error:
        remarks.append(f"{remark}: {str(error).rstrip('.')}")
        return missing


def _group(ask: Callable[[], xr.Dataset], what: str, needed: str, remarks: list[str]) -> xr.Dataset | None:
    """A group of the history; `None` when it cannot be read, or holds nothing yet."""
    dataset = _read(ask, None, f"its {what} cannot be read", remarks)
    if dataset is not None and (needed not in dataset or not dataset.sizes["step"]):
        remarks.append(f"it has no {what} yet, because nothing was captured")
        return None
    return dataset


def _task_line(run: Run) -> str:
    task, model = run.config["task"], run.config["model"]
    parts = [f"{key} {number(task[key])}" for key in ("d", "context", "noise") if key in task]
    heads = model.get("n_heads") if isinstance(model, Mapping) else None
    if heads is not None:
        parts.append(f"{heads} heads in {model.get('n_layers', 1)} layer(s)")
    return ", ".join([str(task.get("kind", "linear_regression")).replace("_", " "), *parts])


def _facts(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Versions and whatever else the config records beyond its settings."""
    versions = config.get("versions") or {}
    facts = dict(versions) if isinstance(versions, Mapping) else {}
    facts |= {k: v for k, v in config.items() if k not in (*_SETTINGS, "versions") and v is not None}
    return tuple((str(name).replace("_", " "), str(value)) for name, value in facts.items())


def _commands(run: Run) -> tuple[str, ...]:
    path = shlex.quote(str(run.path))
    asked = [f"icl-mechinterp report {path}"]
    if not run.config.get("attached") or run.config["attached"].get("checkpoints"):
        asked.insert(0, f"icl-mechinterp probe {path}")
    return (("icl-mechinterp train config.yaml --out NEW_FOLDER",) if run.is_trained_here else ()) + tuple(asked)
