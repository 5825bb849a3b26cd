"""What the probes can say about somebody else's model, and why they cannot say the rest."""

from collections.abc import Callable, Sequence

import torch
from transformer_lens import HookedTransformer

from .._types import Predictions, Prompts
from ..circuits import Snapshot
from ..errors import ModelError
from ..probes import THRESHOLDS, classify, probe, structure
from ..probes.equivalence import equivalence
from ..probes.fidelity import deciding_nothing
from ..probes.row import Row, affordable
from ..probes.verdict import conclude
from ..results import HeadVerdict, Measurement, ProbeReport, ProbeResult
from ..tasks import Task

Ask = Callable[[str, Callable[[], ProbeResult]], ProbeResult | None]
"""Asks one probe by name; `None` when it failed and is skipped."""


def weight_report(snapshot: Snapshot, task: Task, reason: str | None, ask: Ask, notes: Sequence[str]) -> ProbeReport:
    """The report of a capture: what the weights say."""
    heads = classify(snapshot.circuits)
    return _report(snapshot, task, heads, [_structure(snapshot, heads, task, reason, ask)], notes)


def full_report(
    model: HookedTransformer,
    snapshot: Snapshot,
    task: Task,
    reason: str | None,
    ask: Ask,
    notes: Sequence[str],
    *,
    predict: Callable[[Prompts], Predictions],
    probes: Sequence[str],
    prompts: int | None,
    plain: bool,
) -> ProbeReport:
    """The report at the end: every probe that can be asked.

    Args:
        model: what was trained.
        snapshot: of it as it is now.
        task: draws the prompts.
        reason: why its matrices decide nothing, if so.
        ask: asks one probe.
        notes: of the run so far.
        predict: the model's own predictions.
        probes: names of the probes.
        prompts: how many; by default as many as `probe` takes.
        plain: the model's prompts are its residual stream, and it is called as our models are.
    """
    heads = classify(snapshot.circuits)
    by_circuits = snapshot.circuits.n_layers == 1 and reason is None

    def function() -> ProbeResult:
        asked = Row.of(snapshot.circuits) if by_circuits else _in_chunks(predict, snapshot.circuits.n_heads)
        # a step that is read off matrices which are not the model would be somebody else's step
        return equivalence(asked, () if reason else heads, task, prompts=prompts, seed=0)

    def others(name: str) -> ProbeResult:
        if not plain or not by_circuits:
            why = reason or "it is asked of one-layer models on bare prompts"
            return ProbeResult(name, (Measurement.undecided(name, why),))
        try:
            return probe(model, task, probes=(name,), prompts=prompts)[name]
        except ModelError as error:
            return ProbeResult(name, (Measurement.undecided(name, str(error)),))

    results = []
    for name in probes:
        if name == "structure":
            results.append(_structure(snapshot, heads, task, reason, ask))
        elif name == "equivalence":
            results.append(ask(name, function))
        else:
            results.append(ask(name, lambda name=name: others(name)))
    return _report(snapshot, task, heads, results, notes)


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
