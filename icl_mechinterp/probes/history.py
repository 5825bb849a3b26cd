"""What a run keeps of every capture: two histories on disk, and the rows that go into them.

`metrics` holds losses, omega, mu and share per head and the structural measurements; `circuits` holds KQ, OV and the
attention on the fixed prompts. Training, imported weights and attached loops all write the same ones, and hold them
against the same `theory_lines`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import theory
from ..circuits import History, Snapshot
from ..results import ProbeReport
from ..tasks import Task
from .structure import NAMES, reason_without_theory, signal_variance

_PER_HEAD = ("omega", "mu", "share")
_MATRICES = {"kq": ("layer", "head", "key", "query"), "ov": ("layer", "head", "out", "token")}


def open_histories(
    path: Path, snapshot: Snapshot, seeds: Sequence[int], *, scalars: Sequence[str]
) -> tuple[History, History]:
    """The histories of a run, created when needed.

    Args:
        path: the zarr store.
        snapshot: gives names and axes; with gradients, these are kept as well.
        seeds: labels of the seed axis.
        scalars: names of the numbers per seed that are no measurements (`loss`, ...).

    Returns:
        `metrics` and `circuits`.
    """
    names = list(snapshot.circuits.token_names)
    numbers: dict[str, Sequence[str]] = dict.fromkeys((*scalars, *NAMES), ())
    matrices: dict[str, Sequence[str]] = {**_MATRICES, "attention": ("layer", "head", "prompt", "pos")}
    if snapshot.kq_gradient is not None:
        matrices |= {f"{name}_gradient": axes for name, axes in _MATRICES.items()}
    labels: Mapping[str, Sequence[Any]] = {
        "seed": seeds,
        "key": names,
        "query": names,
        "token": names,
        "out": names[snapshot.circuits.d :],
    }
    metrics = {**numbers, **dict.fromkeys(_PER_HEAD, ("layer", "head"))}
    return (
        History(path, "metrics", dims=metrics, labels={"seed": seeds}),
        History(path, "circuits", dims=matrices, labels=labels),
    )


def metrics_row(
    snapshots: Sequence[Snapshot], reports: Sequence[ProbeReport | None], **scalars: np.ndarray
) -> dict[str, np.ndarray]:
    """One row of `metrics`, float32 `[seed ...]`; NaN where there is no report or a measurement has no value.

    Args:
        snapshots: of every seed.
        reports: of every seed, from its weights.
        scalars: the numbers that were announced.
    """
    shape = (len(reports), snapshots[0].circuits.n_layers, snapshots[0].circuits.n_heads)
    row = {name: np.asarray(values, dtype=np.float32) for name, values in scalars.items()}
    for name in _PER_HEAD:
        values = [[getattr(head, name) for head in report.heads] if report else [] for report in reports]
        row[name] = np.array([v or np.full(shape[1:], np.nan).ravel() for v in values], dtype=np.float32).reshape(shape)
    for name in NAMES:
        values = [report["structure"][name].value if report and _has_structure(report) else None for report in reports]
        row[name] = np.array([np.nan if value is None else value for value in values], dtype=np.float32)
    return row


def circuits_row(snapshots: Sequence[Snapshot]) -> dict[str, np.ndarray]:
    """One row of `circuits`, float32 `[seed ...]`."""
    found = {
        "kq": [s.circuits.kq for s in snapshots],
        "ov": [s.circuits.ov for s in snapshots],
        "attention": [s.attention for s in snapshots],
        "kq_gradient": [s.kq_gradient for s in snapshots],
        "ov_gradient": [s.ov_gradient for s in snapshots],
    }
    kept = {name: [value for value in values if value is not None] for name, values in found.items()}
    return {name: torch.stack(values).float().numpy() for name, values in kept.items() if values}


def theory_lines(task: Task) -> dict[str, float]:
    """What theory expects of a task: `optimal_step`, `best_loss`, `bayes_risk`; empty where it has no formula."""
    if reason_without_theory(task) is not None or task.n_out != 1:
        return {}
    variance = signal_variance(task)
    noise = task.noise / variance
    step = theory.optimal_step(task.d, task.context, noise)
    return {
        "optimal_step": step,
        "best_loss": variance * theory.debiased_gd_risk(step, task.d, task.context, noise),
        "bayes_risk": variance * theory.bayes_risk(task.d, task.context, noise),
    }


def _has_structure(report: ProbeReport) -> bool:
    return any(result.probe == "structure" for result in report.results)
