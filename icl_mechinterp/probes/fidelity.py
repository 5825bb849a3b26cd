"""Are a model's circuits all there is to it?

The structural probes read matrices. That is evidence only where the matrices are all there is to the model, and this is
not argued from its parts (normalisation, biases, MLPs, positions, hooks, an embedding) but measured: the circuits'
predictions on a few prompts are held against the model's own. Where they differ, structural measurements keep their
values and are undecided, with the difference and the likely cause as reason.
"""

from dataclasses import replace

import torch
from transformer_lens import HookedTransformer

from .._types import Predictions, Prompts
from ..circuits import Circuits
from ..models import Coordinates, reason_not_fused
from ..models.fused import Collapsed, fused_prediction
from ..results import ProbeResult
from .thresholds import THRESHOLDS, Thresholds

_NOTHING = 1e-10  # of the labels' size squared: rounding of a model that predicts next to nothing
_UNEXPLAINED = 1e-3  # share of the variance of an embedding


def circuit_prediction(circuits: Circuits, z: Prompts) -> Predictions:
    """What a one-layer model of nothing but these circuits predicts, float64."""
    collapsed = Collapsed(circuits.kq[:1].double(), circuits.ov[:1].double())
    return fused_prediction(collapsed, z.double()[None])[0]


def circuit_gap(prediction: Predictions, circuits: Circuits, z: Prompts) -> float:
    """E(yhat - yhat of the circuits)^2 / Var(yhat) on some prompts; NaN with several layers."""
    if circuits.n_layers != 1:
        return float("nan")
    yhat = prediction.double()
    missed = float((yhat - circuit_prediction(circuits, z)).square().mean())
    variance = float(yhat.var(correction=0))
    labels = float(z[:, :-1, circuits.d :].double().square().mean())
    if missed <= _NOTHING * labels:
        return 0.0
    return missed / variance if variance > 0 else float("inf")


def reason_more_than_circuits(
    model: HookedTransformer,
    circuits: Circuits,
    gap: float,
    coordinates: Coordinates | None,
    thresholds: Thresholds = THRESHOLDS,
) -> str | None:
    """Why the matrices of a one-layer model decide nothing about it, or `None` when they do."""
    dtype = next(model.parameters()).dtype
    if torch.finfo(dtype).eps > torch.finfo(torch.float32).eps:
        return f"the weights are {str(dtype).removeprefix('torch.')}, and matrices of so few digits decide nothing"
    if circuits.n_layers != 1 or gap <= thresholds.circuit_gap:
        return None
    causes = [reason_not_fused(model), *_causes_in_embedding(coordinates)]
    found = [cause for cause in causes if cause]
    cause = (
        " and ".join(found) or "a hook, positions, attention to the query, or its embedding past the heads adds to it"
    )
    return (
        f"the circuits alone do not give this model's predictions (distance {gap:.2g} of their variance, allowed "
        f"{thresholds.circuit_gap:g}): {cause}"
    )


def _causes_in_embedding(coordinates: Coordinates | None) -> list[str]:
    if coordinates is None:
        return []
    causes = ["its embedding may add a bias or positions"] if coordinates.embed is not None else []
    for share, name in zip(coordinates.unexplained, ("embedding", "read-out"), strict=True):
        if share > _UNEXPLAINED:
            causes.append(f"a linear map leaves {share:.1%} of its {name} unexplained")
    return causes


def deciding_nothing(result: ProbeResult, reason: str) -> ProbeResult:
    """The same values, none of which decides."""
    changed = [
        m if m.status == "reported" else replace(m, passed=None, required=True, reason=m.reason or reason)
        for m in result.measurements
    ]
    return ProbeResult(result.probe, tuple(changed))
