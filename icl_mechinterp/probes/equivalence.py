"""Does the model compute debiased gradient descent? Its predictions beside those of named algorithms.

A distance is E(yhat - y_other)^2 / Var(yhat), on prompts drawn for the probe, labels included; float64. The one number
estimated with help from theory is the loss: the exact risk of debiased GD with the model's own step is a control
variate, which takes most of the Monte-Carlo error away.

Sources: predictors and risks, 2503.12734 sections 3.4 to 3.6.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import minimize_scalar
from transformer_lens import HookedTransformer

from .. import theory
from .._types import Predictions, Prompts
from ..circuits import Circuits
from ..models import reason_not_fused
from ..models.fused import Collapsed, fused_prediction
from ..results import HeadVerdict, Measurement, ProbeResult
from ..tasks import Batch, Task, generator_for
from .row import forward_prediction
from .statistics import Estimate, mean, ratio_of_means
from .structure import is_isotropic, signal_variance
from .thresholds import THRESHOLDS, Thresholds

Predictor: TypeAlias = Callable[[Prompts], Predictions]

_CHUNK = 4096  # prompts at a time: 8 MB of float64 per copy at d = 5, L = 40
_FIT_PROMPTS = 2000  # at most; a quarter of those that are measured, but 500, where a checkpoint looks quickly
_SCAN_PROMPTS = 500  # enough to tell 25 kernels apart; the search around the best one uses all
_ALTERNATIVES = ("gd", "ridge", "nadaraya_watson")
_CONSTANT = "the model predicts a constant: its variance is zero"


Series: TypeAlias = dict[str, Float[np.ndarray, " prompt"]]
"""Per prompt and by name: `target`, `prediction` of the model, those of the named algorithms, and how model and vanilla
GD move when the context is shifted (`shift_covariates`, `gd_shift_covariates`, ...)."""


def model_predictor(model: HookedTransformer, circuits: Circuits) -> Predictor:
    """The model's predictions in float64: through its circuits where they are all there is to it, else its forward."""
    if reason_not_fused(model) is None:
        collapsed = Collapsed(circuits.kq[:1].double(), circuits.ov[:1].double())
        return lambda z: fused_prediction(collapsed, z[None])[0]

    return lambda z: forward_prediction(model, z)


def equivalence(
    predict: Predictor,
    heads: Sequence[HeadVerdict],
    task: Task,
    *,
    prompts: int,
    seed: int,
    thresholds: Thresholds = THRESHOLDS,
) -> ProbeResult:
    """The functional measurements of a model.

    Args:
        predict: the model's predictions, float64.
        heads: its taxonomy, which gives the model's own step sum mu omega; empty: the step that fits best.
        task: draws the prompts.
        prompts: how many.
        seed: of the prompts; the same seed gives the same report.
        thresholds: bounds that decide.
    """
    fit = task.sample(
        min(_FIT_PROMPTS, max(_SCAN_PROMPTS, prompts // 4)), generator=generator_for(seed, "fit"), dtype=torch.float64
    )
    step = float(sum(h.mu * h.omega for h in heads)) if heads else _fitted_step(predict, fit)
    kernel = fit_kernel(predict, fit, task)
    batches = [_series(predict, batch, task, step, kernel) for batch in _batches(task, prompts, seed)]
    sample = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    detail = {"prompts": prompts, "step": step}
    measurements = [
        _loss(sample, step, _control_coefficient(predict, fit, step), task, thresholds, detail),
        *_distances(sample, task, thresholds, {**detail, "kernel_omega": kernel[0], "kernel_mu": kernel[1]}),
        *_shifts(sample, thresholds),
    ]
    return ProbeResult("equivalence", tuple(measurements))


def fit_kernel(predict: Predictor, batch: Batch, task: Task) -> tuple[float, float]:
    """The one Nadaraya-Watson kernel (omega, mu) that fits the model's predictions best on these prompts.

    mu has a closed form given omega; omega is found by a scan over both signs and a bounded search around its best.
    """
    prediction = predict(batch.z)

    def kernel(omega: float, prompts: int = len(prediction)) -> tuple[float, float]:
        yhat, basis = prediction[:prompts], theory.nadaraya_watson(batch.z[:prompts], omega, 1.0)
        mu = float((basis * yhat).mean() / basis.square().mean())
        return float((yhat - mu * basis).square().mean()), mu

    widest = 3.0 / np.sqrt(task.d)  # beyond it a kernel picks the one nearest example
    grid = np.linspace(-widest, widest, 25)
    best = min(grid.tolist(), key=lambda omega: kernel(omega, _SCAN_PROMPTS)[0])
    spacing = float(grid[1] - grid[0])
    search = {"bounds": (best - spacing, best + spacing), "method": "bounded", "options": {"maxiter": 20}}
    omega = float(minimize_scalar(lambda omega: kernel(omega)[0], **search).x)  # pyright: ignore[reportAttributeAccessIssue]
    return omega, kernel(omega)[1]


def _series(predict: Predictor, batch: Batch, task: Task, step: float, kernel: tuple[float, float]) -> Series:
    z, target = batch
    # beta has variance c^2/d per coordinate, so the Bayes predictor is ridge with penalty d sigma^2 / c^2
    penalty = task.d * task.noise / signal_variance(task)
    values = {
        "target": target,
        "prediction": predict(z),
        "debiased_gd": theory.debiased_gd(z, step),
        "gd": theory.gd(z, step),
        "ridge": theory.ridge(z, penalty),
        "nadaraya_watson": theory.nadaraya_watson(z, *kernel),
    }
    for name, coordinates in (("covariates", slice(0, task.d)), ("labels", slice(task.d, None))):
        moved = _shifted(z, coordinates)
        values[f"shift_{name}"] = predict(moved) - values["prediction"]
        values[f"gd_shift_{name}"] = theory.gd(moved, step) - values["gd"]
    return {name: value.reshape(-1).numpy() for name, value in values.items()}


def _control_coefficient(predict: Predictor, batch: Batch, step: float) -> float:
    """How much of debiased GD's error to take off the model's: what leaves the least variance, found on other prompts.

    Near 1 for debiased GD. At a fixed 1, models that have little to do with their own step (one that overshoots it) get
    a larger error than plain prompts give.
    """
    errors = (batch.target - predict(batch.z)).square()
    control = (batch.target - theory.debiased_gd(batch.z, step)).square()
    spread = float(control.var(correction=0))
    return float((errors * (control - control.mean())).mean()) / spread if spread > 0 else 0.0


def _loss(
    sample: Series, step: float, coefficient: float, task: Task, bounds: Thresholds, detail: Mapping[str, float]
) -> Measurement:
    """E(target - yhat)^2, with the exact risk of debiased GD as control variate where theory knows it."""
    errors = (sample["target"] - sample["prediction"]) ** 2
    if not is_isotropic(task):
        return Measurement("loss", float(errors.mean()), stderr=mean(errors).stderr, detail=detail)
    variance = signal_variance(task)
    noise = task.noise / variance
    control = (sample["target"] - sample["debiased_gd"]) ** 2
    difference = errors - coefficient * control
    value = float(difference.mean()) + coefficient * variance * theory.debiased_gd_risk(
        step, task.d, task.context, noise
    )
    best = variance * theory.debiased_gd_risk(
        theory.optimal_step(task.d, task.context, noise), task.d, task.context, noise
    )
    threshold = best + bounds.excess_loss * (variance + task.noise - best)
    bayes = variance * theory.bayes_risk(task.d, task.context, noise)
    return Measurement.judged(
        "loss",
        value,
        stderr=mean(difference).stderr,
        threshold=threshold,
        reference=best,
        unit="y^2",
        detail={**detail, "bayes_risk": bayes},
    )


def _distances(sample: Series, task: Task, bounds: Thresholds, detail: Mapping[str, float]) -> list[Measurement]:
    """Distance to debiased GD against its bound; each alternative must be farther away, by a paired interval."""
    names = [f"distance_{name}" for name in ("debiased_gd", *_ALTERNATIVES)]
    if _is_constant(sample["prediction"]):
        return [Measurement.undecided(name, _CONSTANT) for name in names]
    squared = {n: (sample["prediction"] - sample[n]) ** 2 for n in ("debiased_gd", *_ALTERNATIVES)}
    if not is_isotropic(task):
        # The values stay useful, but a model that preconditions would be called wrong by a step that is one number.
        reason = "the covariates have a covariance, and gradient descent with a step that is one number is no reference"
        return [
            Measurement(name, value, "Var(yhat)", stderr, required=True, reason=reason, detail=detail)
            for name, key in zip(names, squared, strict=True)
            for value, stderr in [_ratio(squared[key], sample["prediction"])]
        ]
    nearest, stderr = _ratio(squared["debiased_gd"], sample["prediction"])
    measured = [
        Measurement.judged(
            names[0],
            nearest,
            stderr=stderr,
            threshold=bounds.distance_debiased_gd,
            reference=0.0,
            unit="Var(yhat)",
            detail=detail,
        )
    ]
    for name in _ALTERNATIVES:
        value, stderr = _ratio(squared[name], sample["prediction"])
        farther = Measurement.judged(
            name,
            float((squared[name] - squared["debiased_gd"]).mean()),
            stderr=mean(squared[name] - squared["debiased_gd"]).stderr,
            threshold=0.0,
            rule=">",
        )
        reason = None if farther.passed is not None else "not told apart from debiased GD: draw more prompts"
        measured.append(
            Measurement(
                f"distance_{name}",
                value,
                unit="Var(yhat)",
                stderr=stderr,
                threshold=nearest,
                rule=">",
                passed=farther.passed,
                required=True,
                reason=reason,
                detail=detail,
            )
        )
    return measured


def _shifts(sample: Series, bounds: Thresholds) -> list[Measurement]:
    """Debiased GD does not move when every context covariate, or label, moves by one; vanilla GD does."""
    names = ("shift_covariates", "shift_labels")
    if _is_constant(sample["prediction"]):
        return [Measurement.undecided(name, _CONSTANT) for name in names]
    variance = float(sample["prediction"].var())
    measured = []
    for name in names:
        value, stderr = _ratio(sample[name] ** 2, sample["prediction"])
        vanilla = float((sample[f"gd_{name}"] ** 2).mean() / variance)
        measured.append(
            Measurement.judged(
                name,
                value,
                stderr=stderr,
                # a model without a step of its own has a vanilla that does not move either: then rounding decides
                threshold=max(bounds.shift * vanilla, float(np.finfo(np.float32).eps)),
                reference=0.0,
                unit="Var(yhat)",
                detail={"vanilla_gd": vanilla},
            )
        )
    return measured


def _is_constant(prediction: Float[np.ndarray, " prompt"]) -> bool:
    """Its spread is what rounding leaves of its size."""
    eps = float(np.finfo(np.float64).eps)
    return float(prediction.std()) <= 100 * eps * float(np.abs(prediction).max())


def _ratio(squares: Float[np.ndarray, " prompt"], prediction: Float[np.ndarray, " prompt"]) -> Estimate:
    """E(squares) / Var(prediction)."""
    return ratio_of_means(squares, (prediction - prediction.mean()) ** 2)


def _fitted_step(predict: Predictor, batch: Batch) -> float:
    basis = theory.debiased_gd(batch.z, 1.0)
    return float((basis * predict(batch.z)).mean() / basis.square().mean())


def _shifted(z: Prompts, coordinates: slice) -> Prompts:
    moved = z.clone()
    moved[:, :-1, coordinates] += 1.0
    return moved


def _batches(task: Task, prompts: int, seed: int) -> Iterator[Batch]:
    generator = generator_for(seed, "probe")
    for start in range(0, prompts, _CHUNK):
        yield task.sample(min(_CHUNK, prompts - start), generator=generator, dtype=torch.float64)
