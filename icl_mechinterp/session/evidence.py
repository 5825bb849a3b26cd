"""What the probes can say about somebody else's model, and why they cannot say the rest."""

from collections.abc import Callable, Sequence

import torch

from .._types import Predictions, Prompts
from ..circuits import Snapshot
from ..probes import THRESHOLDS, classify, structure
from ..probes.fidelity import deciding_nothing
from ..probes.interchange import input_level, row_level
from ..probes.report import questions
from ..probes.row import Row, affordable, not_one_layer_one_label
from ..probes.verdict import conclude
from ..results import HeadVerdict, ProbeReport, ProbeResult
from ..tasks import Task

Ask = Callable[[str, Callable[[], ProbeResult]], ProbeResult | None]
"""Asks one probe by name; `None` when it failed and is skipped."""


def weight_report(snapshot: Snapshot, task: Task, reason: str | None, ask: Ask, notes: Sequence[str]) -> ProbeReport:
    """The report of a capture: what the weights say."""
    heads = classify(snapshot.circuits)
    return _report(snapshot, task, heads, [_structure(snapshot, heads, task, reason, ask)], notes)


def full_report(
    snapshot: Snapshot,
    task: Task,
    reason: str | None,
    ask: Ask,
    notes: Sequence[str],
    *,
    predict: Callable[[Prompts], Predictions],
    probes: Sequence[str],
    prompts: int | None,
) -> ProbeReport:
    """The report at the end: every probe that can be asked.

    Args:
        snapshot: of what was trained, as it is now.
        task: draws the prompts.
        reason: why its matrices decide nothing, if so.
        ask: asks one probe.
        notes: of the run so far.
        predict: the model's own predictions.
        probes: names of the probes.
        prompts: how many; by default as many as `probe` takes.
    """
    found, heads = snapshot.circuits, classify(snapshot.circuits)
    if heads and reason is None:
        row = model = Row.of(found)
        low = row_level(row)
    else:
        row = reason or not_one_layer_one_label(found)
        model = _in_chunks(predict, found.n_heads)
        low = input_level(model, task.d)
    asked = questions(found, heads, task, model=model, low=low, row=row, reason=reason, prompts=prompts, seed=0)
    return _report(snapshot, task, heads, [ask(name, asked[name]) for name in probes], notes)


def _structure(
    snapshot: Snapshot, heads: Sequence[HeadVerdict], task: Task, reason: str | None, ask: Ask
) -> ProbeResult | None:
    result = ask("structure", lambda: structure(snapshot.circuits, heads, task))
    return result if result is None or reason is None or not heads else deciding_nothing(result, reason)


def _report(
    snapshot: Snapshot,
    task: Task,
    heads: tuple[HeadVerdict, ...],
    results: Sequence[ProbeResult | None],
    notes: Sequence[str],
) -> ProbeReport:
    asked = tuple(result for result in results if result is not None)
    verdict = conclude(heads, asked, THRESHOLDS)
    found = snapshot.circuits
    sentence = verdict.sentence if asked else "Undecided: no probe could be asked of this model."
    return ProbeReport(
        heads=heads,
        results=asked,
        verdict=sentence,
        algorithm=verdict.algorithm if asked else "undecided",
        task=task.to_dict(),
        model={"n_layers": found.n_layers, "n_heads": found.n_heads, "attention_scale": list(found.scale)},
        probe_seed=0,
        notes=(*verdict.notes, *notes),
    )


def _in_chunks(predict: Callable[[Prompts], Predictions], n_heads: int) -> Callable[[Prompts], Predictions]:
    """Predictions a few prompts at a time: a full forward pass of thousands would take gigabytes for its scores."""

    def predictions(z: Prompts) -> Predictions:
        return torch.cat([predict(part) for part in z.split(affordable(n_heads, z.shape[1]))])

    return predictions
