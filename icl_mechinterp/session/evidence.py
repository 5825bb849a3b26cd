"""What the probes can say about somebody else's model, and why they cannot say the rest.

The structural probes read matrices. That is evidence only where the matrices are all there is to the model, and this is
not argued from its parts (normalisation, biases, MLPs, positions, hooks, an embedding) but measured: the circuits'
predictions on the fixed prompts are held against the model's own. Where they differ, structural measurements keep their
values and are undecided, with the difference and the likely cause as reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformer_lens import HookedTransformer

from .._types import Predictions, Prompts
from ..circuits import Circuits, Snapshot
from ..errors import ModelError
from ..models import Coordinates, reason_not_fused
from ..models.fused import Collapsed, fused_prediction
from ..probes import THRESHOLDS, classify, probe, structure
from ..probes.equivalence import equivalence
from ..probes.verdict import conclude
from ..results import HeadVerdict, Measurement, ProbeReport, ProbeResult
from ..tasks import Task

CIRCUIT_GAP = 1e-3
"""Of Var(yhat): a fifth of the distance at which a model still counts as debiased gradient descent."""

_UNEXPLAINED = 1e-3
_PROMPTS, _PROMPTS_HOOKED = 100_000, 5_000  # as `probe`
_BYTES = 64 * 2**20

Ask = Callable[[str, Callable[[], ProbeResult]], ProbeResult | None]
"""Asks one probe by name; `None` when it failed and is skipped."""


def circuit_prediction(circuits: Circuits, z: Prompts) -> Predictions:
    """What a one-layer model of nothing but these circuits predicts, float64."""
    collapsed = Collapsed(circuits.kq[:1].double(), circuits.ov[:1].double())
    return fused_prediction(collapsed, z.double()[None])[0]


def circuit_gap(snapshot: Snapshot, z: Prompts) -> float:
    """E(yhat - yhat of the circuits)^2 / Var(yhat) on the fixed prompts; NaN with several layers."""
    if snapshot.circuits.n_layers != 1:
        return float("nan")
    yhat = snapshot.prediction.double()
    missed = float((yhat - circuit_prediction(snapshot.circuits, z)).square().mean())
    variance = float(yhat.var(correction=0))
    if missed <= torch.finfo(torch.float32).eps ** 2:  # rounding of a model that predicts next to nothing
        return 0.0
    return missed / variance if variance > 0 else float("inf")


def reason_more_than_circuits(model: HookedTransformer, snapshot: Snapshot, gap: float) -> str | None:
    """Why the matrices of a one-layer model decide nothing about it, or `None` when they do."""
    dtype = next(model.parameters()).dtype
    if torch.finfo(dtype).eps > torch.finfo(torch.float32).eps:
        return f"the weights are {str(dtype).removeprefix('torch.')}, and matrices of so few digits decide nothing"
    if snapshot.circuits.n_layers != 1 or gap <= CIRCUIT_GAP:
        return None
    causes = [reason_not_fused(model), *_causes_in_embedding(snapshot.coordinates)]
    found = [cause for cause in causes if cause]
    cause = (
        " and ".join(found) or "a hook, positions, attention to the query, or its embedding past the heads adds to it"
    )
    return (
        f"the circuits alone do not give this model's predictions (distance {gap:.2g} of their variance, allowed "
        f"{CIRCUIT_GAP:g}): {cause}"
    )


def _causes_in_embedding(coordinates: Coordinates | None) -> list[str]:
    if coordinates is None:
        return []
    causes = ["its embedding may add a bias or positions"] if coordinates.embed is not None else []
    for share, name in zip(coordinates.unexplained, ("embedding", "read-out"), strict=True):
        if share > _UNEXPLAINED:
            causes.append(f"a linear map leaves {share:.1%} of its {name} unexplained")
    return causes


def undecided(result: ProbeResult, reason: str) -> ProbeResult:
    """The same values, none of which decides."""
    changed = [
        m if m.status == "reported" else replace(m, passed=None, required=True, reason=m.reason or reason)
        for m in result.measurements
    ]
    return ProbeResult(result.probe, tuple(changed))


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
    count = prompts or (_PROMPTS if by_circuits else _PROMPTS_HOOKED)

    def function() -> ProbeResult:
        if by_circuits:
            predictor = lambda z: circuit_prediction(snapshot.circuits, z)  # noqa: E731
        else:
            predictor = _in_chunks(predict, snapshot.circuits.n_heads)
        # a step that is read off matrices which are not the model would be somebody else's step
        return equivalence(predictor, () if reason else heads, task, prompts=count, seed=0)

    def others(name: str) -> ProbeResult:
        if not plain or not by_circuits:
            why = reason or "it is asked of one-layer models on bare prompts"
            return ProbeResult(name, (Measurement.undecided(name, why),))
        try:
            return probe(model, task, probes=(name,), prompts=count)[name]
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
    return result if result is None or reason is None or not heads else undecided(result, reason)


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
        size = max(1, _BYTES // (8 * n_heads * z.shape[1] ** 2))
        return torch.cat([predict(chunk) for chunk in z.split(size)])

    return predictions
