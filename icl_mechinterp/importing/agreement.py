"""Does the imported model predict what the original does? And which reading, which scale does?"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from .._types import Predictions, Prompts
from ..errors import ConfigError
from ..models import hooked_prediction
from ..tasks import Task, generator_for
from .build import build_imported, set_scale
from .layouts import ModelWeights
from .readings import Reading
from .state import WeightsError

Original: TypeAlias = tuple[Any, Any] | Callable[[torch.Tensor], Any]
"""`(z, yhat)`, or a function that predicts from z."""

_PROMPTS = 64
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference, relative to the size of the predictions, that rounding explains."""


class Reference(NamedTuple):
    """What the original predicts.

    Attributes:
        z: prompts.
        yhat: its predictions on them.
        tolerance: what rounding allows, by the least precise dtype involved.
    """

    z: Prompts
    yhat: Predictions
    tolerance: float


class Fit(NamedTuple):
    """A reading with a scale, and how far its predictions are from the original's (`None` without a reference)."""

    reading: Reading
    scale: float
    difference: float | None


def resolve_reference(
    predictions: Any, task: Task, dtype: torch.dtype, stored: Sequence[torch.dtype]
) -> Reference | None:
    """Prompts and predictions in the model's dtype; `None` stays `None`.

    Args:
        predictions: `(z, yhat)` or a function of z; it is called once, on prompts of the task.
        task: gives the prompts and the shapes.
        dtype: of the imported model.
        stored: the dtypes in the file, before half precision was widened.

    Raises:
        ConfigError: something else, other shapes, or values that are not finite.
    """
    if predictions is None:
        return None
    if callable(predictions):
        z = task.sample(_PROMPTS, generator=generator_for(0, "probe"), dtype=dtype).z
        with torch.no_grad():
            predictions = (z, predictions(z.clone()))
    if not isinstance(predictions, tuple | list) or len(predictions) != 2:
        raise ConfigError(
            f"predictions is a pair (z, yhat) or a function of z; got a {type(predictions).__name__}. Give the "
            f"prompts and "
            "what the original predicts on them.",
            field="predictions",
        )
    z, yhat = (torch.as_tensor(values).detach().cpu() for values in predictions)
    kinds = [kind for kind in (*stored, z.dtype, yhat.dtype) if kind in TOLERANCES]
    width = task.d + task.n_out
    if z.ndim == 3 and yhat.ndim == 1 and task.n_out == 1:
        yhat = yhat[:, None]
    if z.ndim != 3 or z.shape[0] < 1 or z.shape[1] < 2 or z.shape[2] != width or yhat.shape != (len(z), task.n_out):
        raise ConfigError(
            f"predictions must be z [batch pos {width}] with one yhat [batch {task.n_out}]; got {tuple(z.shape)} and "
            f"{tuple(yhat.shape)}. Give whole prompts, the query last, with the query's labels zero.",
            field="predictions",
        )
    if not bool(z.isfinite().all() and yhat.isfinite().all()):
        raise ConfigError("predictions hold NaN or infinite values. Give others.", field="predictions")
    if bool(z[:, -1, task.d :].any()):
        raise ConfigError(
            "predictions have prompts whose query has labels that are not zero; the query's labels are what is "
            "predicted. "
            "Set z[:, -1, d:] to zero.",
            field="predictions",
        )
    return Reference(z.to(dtype), yhat.to(dtype), max(TOLERANCES[kind] for kind in kinds))


def relative_differences(
    weights: ModelWeights, task: Task, scales: Iterable[float], reference: Reference
) -> dict[float, float]:
    """Per scale, the largest difference to the original's predictions, relative to their root mean square."""
    differences = {}
    model = build_imported(weights, task, 1.0)
    size = reference.yhat.square().mean().sqrt() + torch.finfo(reference.yhat.dtype).tiny
    for scale in scales:
        set_scale(model, scale)
        with torch.no_grad():
            predicted = hooked_prediction(model, reference.z)
        difference = float((predicted - reference.yhat).abs().max() / size)
        differences[scale] = difference if math.isfinite(difference) else math.inf
    return differences


def candidate_scales(weights: ModelWeights, task: Task) -> dict[float, str]:
    """Attention scales in use, with what they are called."""
    d_head, width = weights.layers[0].W_Q.shape[-1], task.d + task.n_out
    scales: dict[float, str] = {}
    for name, size in (("d_head", d_head), ("(d + N)", width), ("d", task.d)):
        scales.setdefault(1 / math.sqrt(size), f"1/sqrt({name})" if name[0] != "(" else "1/sqrt(d + N)")
        scales.setdefault(1 / size, f"1/{name}")
    scales.setdefault(1.0, "1")
    scales.setdefault(1 / task.context, "1/L")
    return scales


def choose(
    admitted: Sequence[Reading], scale: float | None, reference: Reference | None, task: Task, origin: str
) -> Fit:
    """The one reading and scale; by the original's predictions where they are given.

    Raises:
        WeightsError: several readings remain, or none predicts what the original does.
        ConfigError: the scale is not known.
    """
    if reference is None:
        if len(admitted) > 1:
            raise WeightsError(_several(admitted, origin))
        if scale is None:
            raise ConfigError(_no_scale(admitted[0], task, origin), field="scale")
        return Fit(admitted[0], scale, None)
    tried = [
        Fit(reading, factor, difference)
        for reading in admitted
        for factor, difference in relative_differences(
            reading.weights, task, [scale] if scale is not None else candidate_scales(reading.weights, task), reference
        ).items()
    ]
    fits = [fit for fit in tried if (fit.difference or 0.0) <= reference.tolerance]
    if not fits:
        raise WeightsError(_none_fits(tried, reference, scale is not None))
    if len(fits) > 1:
        raise WeightsError(_several_fit(fits))
    return fits[0]


def _several(admitted: Sequence[Reading], origin: str) -> str:
    listed = "".join(f"\n  {reading.text}" for reading in admitted)
    return (
        f"the shapes in {origin} can be read in {len(admitted)} ways:{listed}\nName the one that is meant (--layout, "
        f"--n-heads "
        "on the command line), or give predictions= of the original, which decide."
    )


def _no_scale(reading: Reading, task: Task, origin: str) -> str:
    listed = ", ".join(f"{value:.6g} ({name})" for value, name in candidate_scales(reading.weights, task).items())
    return (
        f"scale, the factor on the attention logits, is not known: weights do not contain it, and {origin} does not "
        f"say it. "
        f"Give scale= (--scale on the command line); usual are {listed}; the papers' code has 1/sqrt(d_head), their "
        f"formula 1. "
        "Or give predictions= of the original, from which it is found."
    )


def _none_fits(tried: Sequence[Fit], reference: Reference, scale_given: bool) -> str:
    best = min(tried, key=lambda fit: fit.difference or 0.0)
    other = (
        "another scale than the one given, "
        if scale_given
        else "a scale that is none of the usual ones (give scale=), "
    )
    return (
        f"the imported model does not predict what the original does: the largest difference is "
        f"{best.difference:.3g} of the "
        f"predictions' size on {len(reference.z)} prompts, and rounding allows {reference.tolerance:.1g}. Closest of "
        f"{len(tried)} reading(s) is {best.reading.text} with scale {best.scale:.6g}. The original may have {other}a "
        f"query that "
        "attends to itself, another activation than softmax, normalisation, or heads that interleave. State what it "
        "has, or "
        "check that prompts and predictions belong together."
    )


def _several_fit(fits: Sequence[Fit]) -> str:
    listed = "".join(f"\n  {fit.reading.text}, scale={fit.scale:.6g}" for fit in fits[:6])
    listed += f"\n  and {len(fits) - 6} more" if len(fits) > 6 else ""
    return (
        f"{len(fits)} readings predict what the original does on the prompts given:{listed}\nName the one that is "
        f"meant, or "
        "give prompts that tell them apart (attention that is nearly uniform does not)."
    )
