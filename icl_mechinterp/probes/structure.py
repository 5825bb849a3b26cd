"""Do the matrices look as the theory says: diagonal, homogeneous KQ; OV that reads the label and sums to zero?

All on identifiable entries only. Where a head is meant, the value is the mean over non-dummy heads weighted by their
share of sum |mu omega|, and the worst head stands in the detail: a head with 1 % of the mass must neither decide nor
hide. Structural values have no standard error, for they are not estimated from prompts.

Sources: 2503.12734, sections 3 and 4 (patterns, solution manifold); the formulas of each measurement are in the table
of the documentation.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from .. import theory
from ..circuits import Circuits
from ..results import HeadVerdict, Measurement, ProbeResult
from ..tasks import Task
from .row import not_one_layer_one_label
from .statistics import label_law
from .taxonomy import head_diagonals, label_outputs
from .thresholds import THRESHOLDS, Thresholds

NAMES = (
    "off_diagonal_energy",
    "within_head_spread",
    "across_head_spread",
    "label_key_leakage",
    "ov_last_entry",
    "sign_matching",
    "zero_sum",
    "effective_step",
    "effective_step_gap",
    "manifold_gap",
)
_OF_THEORY = ("effective_step_gap", "manifold_gap")
_ISOTROPIC_ONLY = ("off_diagonal_energy", "within_head_spread", *_OF_THEORY)


def structure(
    circuits: Circuits, heads: Sequence[HeadVerdict], task: Task, thresholds: Thresholds = THRESHOLDS
) -> ProbeResult:
    """The structural measurements of a model.

    Args:
        circuits: of the model.
        heads: its taxonomy; empty when the heads of the model cannot be classified.
        task: gives d, L and sigma^2 for the theoretical values.
        thresholds: bounds that decide.
    """
    if not heads:
        reason = not_one_layer_one_label(circuits)
        return ProbeResult("structure", tuple(Measurement.undecided(name, reason) for name in NAMES))
    measurements = {m.name: m for m in (*_per_head(circuits, heads, thresholds), *_sums(heads, task, thresholds))}
    reason = reason_without_theory(task)
    if reason is not None:
        without = _OF_THEORY if is_isotropic(task) else _ISOTROPIC_ONLY
        measurements |= {name: Measurement.undecided(name, reason) for name in without}
    return ProbeResult("structure", tuple(measurements[name] for name in NAMES))


def _per_head(circuits: Circuits, heads: Sequence[HeadVerdict], bounds: Thresholds) -> list[Measurement]:
    """Departures that belong to a head, averaged over the heads that matter."""
    d = circuits.d
    kq, ov = circuits.kq[0].double().numpy(), circuits.ov[0, :, 0].double().numpy()
    diagonals, omegas = head_diagonals(circuits), np.array([h.omega for h in heads])
    tiny = np.finfo(np.float64).tiny
    # A diagonal of both signs can have a mean of zero. The floor keeps its relative departures finite, and because the
    # same size stands in the head's weight, |mu| size, they count as |mu| times the departure whatever the mean is.
    floor = np.finfo(np.float64).eps * np.abs(diagonals).mean(1)
    size = np.maximum(np.maximum(np.abs(omegas), floor), tiny)
    mass = np.abs(label_outputs(circuits)) * size
    energy = np.maximum((kq[:, :d, :d] ** 2).sum((1, 2)), tiny)
    values = {
        "off_diagonal_energy": 1 - (diagonals**2).sum(1) / energy,
        "within_head_spread": diagonals.std(1) / size,
        "label_key_leakage": np.abs(kq[:, d:, :d]).max((1, 2)) / size,
        "ov_last_entry": np.abs(label_outputs(circuits)) / np.maximum(np.linalg.norm(ov, axis=1), tiny),
        "sign_matching": (np.sign(omegas) == np.sign(label_outputs(circuits))).astype(float),
    }
    references = {"ov_last_entry": 1.0, "sign_matching": 1.0}
    measured = []
    for name, value in values.items():
        high_is_good = name in references
        rest: dict[str, Any] = {
            "threshold": getattr(bounds, name),
            "rule": ">" if high_is_good else "<",
            "reference": references.get(name, 0.0),
        }
        measured.append(_weighted(name, value, mass, heads, **rest))
    return [*measured, _across_head_spread(heads, bounds)]


def _across_head_spread(heads: Sequence[HeadVerdict], bounds: Thresholds) -> Measurement:
    """Weighted standard deviation of |omega| over gamma."""
    active = [h for h in heads if h.label != "dummy"]
    if len(active) < 2:
        reason = f"{len(active)} head(s) carry mass; a spread across heads needs two"
        return Measurement.undecided("across_head_spread", reason, threshold=bounds.across_head_spread)
    gamma = mean_scale(heads)
    if gamma == 0:
        reason = "every diagonal has mean zero; there is no scale to compare"
        return Measurement.undecided("across_head_spread", reason, threshold=bounds.across_head_spread)
    weights, scales = _weights(active), np.abs([h.omega for h in active])
    spread = float(np.sqrt((weights * (scales - gamma) ** 2).sum()) / gamma)
    detail = {"gamma": gamma, "per_head": {h.name: abs(h.omega) for h in active}}
    return Measurement.judged(
        "across_head_spread", spread, threshold=bounds.across_head_spread, reference=0.0, detail=detail
    )


def _sums(heads: Sequence[HeadVerdict], task: Task, bounds: Thresholds) -> list[Measurement]:
    """What the heads are together: the zero sum, the step, the manifold."""
    mus, omegas = np.array([h.mu for h in heads]), np.array([h.omega for h in heads])
    total = float(np.abs(mus).sum())
    step = float(mus @ omegas)
    noise = task.noise / signal_variance(task)
    optimal = theory.optimal_step(task.d, task.context, noise)
    zero_sum = float(abs(mus.sum()) / total) if total > 0 else float("nan")
    return [
        Measurement.judged(
            "zero_sum",
            zero_sum,
            threshold=bounds.zero_sum,
            reference=0.0,
            detail={"sum": float(mus.sum()), "total": total},
        ),
        Measurement("effective_step", step, reference=optimal if reason_without_theory(task) is None else None),
        Measurement.judged(
            "effective_step_gap", abs(step / optimal - 1), threshold=bounds.effective_step_gap, reference=0.0
        ),
        _manifold_gap(heads, task, noise, bounds),
    ]


def _manifold_gap(heads: Sequence[HeadVerdict], task: Task, noise: float, bounds: Thresholds) -> Measurement:
    """The larger of |mu_+/mu_gamma - 1| and |mu_-/mu_gamma - 1| (2503.12734, eq. 3.3)."""
    sums = {sign: sum(h.mu for h in heads if h.label == sign) for sign in ("positive", "negative")}
    if not all(any(h.label == sign for h in heads) for sign in sums):
        reason = "the solution manifold asks for heads of both signs"
        return Measurement.undecided("manifold_gap", reason, threshold=bounds.manifold_gap)
    gamma = mean_scale(heads)
    mu_gamma = theory.solution_manifold(gamma, task.d, task.context, noise)
    gap = max(abs(abs(total) / mu_gamma - 1) for total in sums.values())
    detail = {"gamma": gamma, "mu_gamma": mu_gamma, "mu_positive": sums["positive"], "mu_negative": sums["negative"]}
    return Measurement.judged("manifold_gap", gap, threshold=bounds.manifold_gap, reference=0.0, detail=detail)


def mean_scale(heads: Sequence[HeadVerdict]) -> float:
    """gamma: |omega| averaged over non-dummy heads by share; NaN when there are none."""
    active = [h for h in heads if h.label != "dummy"]
    return float(_weights(active) @ np.abs([h.omega for h in active])) if active else float("nan")


def is_isotropic(task: Task) -> bool:
    """Whether the covariates have no covariance of their own, as the formulas of a step that is one number ask."""
    return getattr(task, "covariance", None) is None


def reason_without_theory(task: Task) -> str | None:
    """Why the references of isotropic linear regression say nothing about a task, or `None` where they do."""
    if label_law(task) is None:
        return f"its reference is known for Gaussian linear regression, and this task is a {type(task).__name__}"
    if not is_isotropic(task):
        return "the covariates have a covariance, and this measurement's reference is for isotropic ones"
    return None


def target_variance(task: Task) -> float:
    """E t^2 = c^2 tr(Sigma)/d + sigma^2, the loss of predicting zero."""
    covariance = getattr(task, "covariance", None)
    mean_variance = 1.0 if covariance is None else float(np.trace(np.asarray(covariance))) / task.d
    return signal_variance(task) * mean_variance + task.noise


def preconditioner(task: Task) -> Float[np.ndarray, "d d"] | None:
    """A*, the best matrix step of debiased GD for covariates with a covariance; `None` where it is a number times I."""
    covariance = getattr(task, "covariance", None)
    if covariance is None:
        return None
    return theory.optimal_preconditioner(covariance, task.context, task.noise / signal_variance(task))


def signal_variance(task: Task) -> float:
    """c^2: the theory's formulas are for a signal of variance one, so noise enters as sigma^2 / c^2."""
    return getattr(task, "coefficient_scale", 1.0) ** 2


def _weighted(
    name: str,
    values: Float[np.ndarray, " head"],
    mass: Float[np.ndarray, " head"],
    heads: Sequence[HeadVerdict],
    *,
    threshold: float,
    rule: Any,
    **rest: Any,
) -> Measurement:
    active = [h for h in heads if h.label != "dummy"]
    if not active:
        return Measurement.undecided(name, "no head carries mass", threshold=threshold, rule=rule)
    chosen, weights = values[[h.head for h in active]], mass[[h.head for h in active]]
    worst = active[int(np.argmin(chosen) if rule == ">" else np.argmax(chosen))]
    detail = {
        "worst_head": worst.name,
        "worst": float(values[worst.head]),
        "worst_share": worst.share,
        "per_head": {h.name: float(values[h.head]) for h in active},
    }
    return Measurement.judged(
        name, float(weights @ chosen / weights.sum()), threshold=threshold, rule=rule, detail=detail, **rest
    )


def _weights(active: Sequence[HeadVerdict]) -> Float[np.ndarray, " head"]:
    """Shares of the active heads, scaled to sum to one; equal when every mean is zero."""
    shares = np.array([h.share for h in active])
    return shares / shares.sum() if shares.sum() > 0 else np.full(len(active), 1 / len(active))
