"""Does the model compute debiased gradient descent? Its predictions beside those of named algorithms.

A distance is E(yhat - y_other)^2 / Var(yhat), on prompts drawn for the probe, labels included; float64. The one number
estimated with help from theory is the loss: the exact risk of debiased GD with the model's own step is a control
variate, which takes most of the Monte-Carlo error away.

With a covariance Sigma the step is eta A*, A* the matrix of least risk (`theory.optimal_preconditioner`) and eta the number
that fits the model best: gradient descent on queries A* x_q, which is how it is computed here. The one kernel compares
keys with A* x_q too.

Sources: predictors and risks, 2503.12734 sections 3.4 to 3.6; covariances, section 4.3.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import minimize_scalar

from .. import theory
from .._types import Predictions, Prompts
from ..results import HeadVerdict, Measurement, ProbeResult
from ..tasks import Batch, Task, generator_for
from .row import Row
from .statistics import (
    Context,
    Estimate,
    LabelLaw,
    Moments,
    Response,
    Series,
    at_both_lengths,
    compare,
    label_law,
    mean,
    quantile,
    ratio_of_means,
    row_response,
    sequential,
    square,
    variance_terms,
    wants_prompts,
    with_labels,
)
from .structure import is_isotropic, preconditioner, signal_variance, target_variance
from .thresholds import THRESHOLDS, Thresholds

Predictor: TypeAlias = Callable[[Prompts], Predictions]

BUDGET, BUDGET_SAMPLED = 100_000, 20_000
"""Most prompts of a growing sample: for a model whose labels can be averaged over, and for one that is only asked."""

_LOOKS = 3  # the first at a quarter of the budget: with fewer prompts intervals of small distances cover too little
_CHUNK, _SCORES = 2048, 2**20  # prompts at a time; fewer where their attention scores would fill more than 8 MB
_FIT_PROMPTS = 2000  # at most; a quarter of those that are measured, but 500, where a checkpoint looks quickly
_SCAN_PROMPTS = 500  # enough to tell 25 kernels apart; the search around the best one uses all
_ALTERNATIVES = ("gd", "ridge", "nadaraya_watson")
_ROUNDING = 1e3 * float(np.finfo(np.float64).eps)  # of E yhat^2: a variance below it is rounding of a constant
_NOTHING = 1e-10  # of the loss: a variance below it is float32's rounding of large terms that cancel
_CONSTANT = "the model predicts a constant: its variance is zero"
_SEVERAL = "the task has several label slots, and the named algorithms predict one"


def equivalence(
    model: Row | Predictor,
    heads: Sequence[HeadVerdict],
    task: Task,
    *,
    prompts: int | None = None,
    seed: int,
    thresholds: Thresholds = THRESHOLDS,
) -> ProbeResult:
    """The functional measurements of a model.

    Of a `Row` everything is averaged over labels exactly and over queries of two lengths (see `statistics`); a predictor
    is asked on the prompts drawn, and the same standard error takes about ten times as many.

    Args:
        model: the circuits of a one-layer model that is nothing else, or predictions in float64.
        heads: its taxonomy, which gives the model's own step sum mu omega; empty: the step that fits best.
        task: draws the prompts.
        prompts: how many; by default the sample grows, over three looks up to `BUDGET` (`BUDGET_SAMPLED`), until every
            measurement is decided.
        seed: of the prompts; the same seed gives the same report.
        thresholds: bounds that decide.
    """
    if task.n_out != 1:
        return _undecided(_SEVERAL)
    predict = model.predict if isinstance(model, Row) else model
    law = label_law(task) if isinstance(model, Row) else None
    budget, looks = (prompts, 1) if prompts is not None else (BUDGET if law else BUDGET_SAMPLED, _LOOKS)
    size = min(_FIT_PROMPTS, max(_SCAN_PROMPTS, budget // 4))
    fit = task.sample(size, generator=generator_for(seed, "fit"), dtype=torch.float64)
    own = is_isotropic(task) and bool(heads)  # omega, a mean diagonal, is no step in units of A*
    step = float(sum(h.mu * h.omega for h in heads)) if own else _fitted_step(predict, fit, task)
    algorithms = _Algorithms(
        step, *fit_kernel(predict, fit, task), penalty=task.d * task.noise / signal_variance(task), task=task
    )
    half = Batch(fit.z[: size // 2], fit.target[: size // 2])
    control = _control_coefficient(_series(model, half, task, algorithms, law))
    generator = generator_for(seed, "probe")

    def draw(count: int) -> Series:
        batches = _batches(task, count, generator, n_heads=len(model.kq) if isinstance(model, Row) else 1)
        parts = [_series(model, batch, task, algorithms, law) for batch in batches]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def judge(sample: Series, confidence: float) -> list[Measurement]:
        drawn = len(sample["loss"])
        sampled = _Sample(sample, quantile(confidence), {"prompts": drawn, "confidence": confidence, "step": step})
        return [
            _loss(sampled, control, task, step, thresholds),
            *_distances(sampled, thresholds, algorithms),
            *_shifts(sampled, thresholds),
        ]

    def decide(sample: Series, confidence: float) -> list[Measurement] | None:
        measured = judge(sample, confidence)
        return None if any(wants_prompts(m) for m in measured) else measured

    looked = sequential(draw, decide, budget=budget, looks=looks)
    return ProbeResult("equivalence", tuple(looked.decision or judge(looked.sample, looked.confidence)))


def fit_kernel(predict: Predictor, batch: Batch, task: Task) -> tuple[float, float]:
    """The one Nadaraya-Watson kernel (omega, mu) that fits the model's predictions best on these prompts.

    mu has a closed form given omega; omega is found by a scan over both signs and a bounded search around its best.
    """
    prediction, z = predict(batch.z), preconditioned(batch.z, task)

    def kernel(omega: float, prompts: int = len(prediction)) -> tuple[float, float]:
        yhat, basis = prediction[:prompts], theory.nadaraya_watson(z[:prompts], omega, 1.0)
        mu = float((basis * yhat).mean() / basis.square().mean())
        return float((yhat - mu * basis).square().mean()), mu

    widest = 3.0 / np.sqrt(task.d)  # beyond it a kernel picks the one nearest example
    grid = np.linspace(-widest, widest, 25)
    best = min(grid.tolist(), key=lambda omega: kernel(omega, _SCAN_PROMPTS)[0])
    spacing = float(grid[1] - grid[0])
    search = {"bounds": (best - spacing, best + spacing), "method": "bounded", "options": {"maxiter": 20}}
    omega = float(minimize_scalar(lambda omega: kernel(omega)[0], **search).x)  # pyright: ignore[reportAttributeAccessIssue]
    return omega, kernel(omega)[1]


def preconditioned(z: Prompts, task: Task) -> Prompts:
    """Prompts with the query A* x_q; the same prompts for isotropic covariates."""
    matrix = preconditioner(task)
    if matrix is None:
        return z
    moved = z.clone()
    moved[:, -1, : task.d] = z[:, -1, : task.d] @ torch.from_numpy(matrix).to(z).mT
    return moved


class _Algorithms(NamedTuple):
    """The named algorithms with the parameters that suit the model."""

    step: float
    omega: float
    mu: float
    penalty: float
    task: Task

    def responses(self, z: Prompts, context: Context) -> dict[str, Response]:
        moved = preconditioned(z, self.task)
        # beta has variance c^2/d per coordinate, so the Bayes predictor is ridge with penalty d sigma^2 / c^2
        weights = {
            "debiased_gd": theory.debiased_gd.weights(moved, self.step),
            "gd": theory.gd.weights(moved, self.step),
            "ridge": theory.ridge.weights(z, self.penalty),
            "nadaraya_watson": theory.nadaraya_watson.weights(moved, self.omega, self.mu),
        }
        return {name: Response.linear(value, context) for name, value in weights.items()}

    def gd(self, z: Prompts, context: Context) -> Response:
        """Vanilla gradient descent alone."""
        return Response.linear(theory.gd.weights(preconditioned(z, self.task), self.step), context)


class _Sample(NamedTuple):
    """What was drawn, and how it is judged.

    Attributes:
        series: see `_series`.
        half_width: of the intervals, in standard errors.
        detail: that every measurement carries.
    """

    series: Series
    half_width: float
    detail: Mapping[str, Any]

    @property
    def spread(self) -> Float[np.ndarray, " prompt"]:
        """Its average is Var(yhat)."""
        return variance_terms(Moments(self.series["first"], self.series["second"]))

    @property
    def is_constant(self) -> bool:
        second, loss = float(self.series["second"].mean()), float(self.series["loss"].mean())
        return float(self.spread.mean()) <= max(_ROUNDING * second, _NOTHING * loss)

    def ratio(self, name: str) -> Estimate:
        """E(square) / Var(yhat)."""
        return ratio_of_means(self.series[name], self.spread)

    def judged(self, name: str, estimate: Estimate, **rest: Any) -> Measurement:
        rest = {"detail": self.detail, **rest}
        return Measurement.judged(name, estimate.value, stderr=estimate.stderr, half_width=self.half_width, **rest)


def _series(model: Row | Predictor, batch: Batch, task: Task, algorithms: _Algorithms, law: LabelLaw | None) -> Series:
    """Per prompt and by name, with these averages: those of `compare`; `loss_debiased_gd`, the loss of debiased GD; and
    the squares of how model and vanilla GD move when covariates or labels of the context are shifted by one."""
    drawn = Context.of(batch, task)

    def respond(z: Prompts, context: Context, shift: float = 0.0) -> Response:
        if isinstance(model, Row) and law:
            return row_response(model, z, context, shift=shift)
        return Response.sampled(model_answers(with_labels(z, z[:, :-1, task.d] + shift, task.d)), context)

    def model_answers(z: Prompts) -> Float[torch.Tensor, " batch"]:
        return (model.predict(z) if isinstance(model, Row) else model(z))[:, 0]

    def compared(z: Prompts, context: Context) -> Series:
        others = algorithms.responses(z, context)
        lost = square(Response.target(context) - others["debiased_gd"], context, law)
        return {**compare(respond(z, context), others, context, law), "loss_debiased_gd": lost}

    if law:
        parts = [
            {name: values * at.importance for name, values in compared(at.z, at.context).items()}
            for at in at_both_lengths(batch, task)  # pyright: ignore[reportArgumentType] - a task with a law is linear
        ]
        series = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    else:
        series = compared(batch.z, drawn)
    before, gd = respond(batch.z, drawn), algorithms.gd(batch.z, drawn)
    moved = batch.z.clone()
    moved[:, :-1, : task.d] += 1.0
    gd_moved = algorithms.gd(moved, drawn)
    gd_lifted = Response.linear(gd.weights[:, :-1], drawn, gd.weights.sum(1))
    moves = {
        "shift_covariates": respond(moved, drawn) - before,
        "shift_labels": respond(batch.z, drawn, 1.0) - before,
        "gd_shift_covariates": gd_moved - gd,
        "gd_shift_labels": gd_lifted - gd,
    }
    return series | {name: square(move, drawn, law) for name, move in moves.items()}


def _control_coefficient(series: Series) -> float:
    """How much of debiased GD's error to take off the model's: what leaves the least variance, found on other prompts.

    Near 1 for debiased GD. At a fixed 1, models that have little to do with their own step (one that overshoots it) get
    a larger error than plain prompts give.
    """
    errors, control = series["loss"], series["loss_debiased_gd"]
    spread = float(control.var())
    return float((errors * (control - control.mean())).mean()) / spread if spread > 0 else 0.0


def _loss(sample: _Sample, coefficient: float, task: Task, step: float, bounds: Thresholds) -> Measurement:
    """E(target - yhat)^2, with the exact risk of debiased GD as control variate."""
    errors, control = sample.series["loss"], sample.series["loss_debiased_gd"]
    if label_law(task) is None:
        value, stderr = mean(errors)
        reason = f"no best loss is known for a {type(task).__name__}"
        return Measurement("loss", value, "y^2", stderr, required=True, reason=reason, detail=sample.detail)
    variance = signal_variance(task)
    noise, matrix = task.noise / variance, preconditioner(task)
    optimal = 1.0 if matrix is not None else float(theory.optimal_step(task.d, task.context, noise))
    bayes = {} if matrix is not None else {"bayes_risk": variance * theory.bayes_risk(task.d, task.context, noise)}

    def risk(eta: float) -> float:
        if matrix is None:
            return variance * float(theory.debiased_gd_risk(eta, task.d, task.context, noise))
        return variance * theory.preconditioned_risk(eta * matrix, task.covariance, task.context, noise)  # pyright: ignore

    rest, stderr = mean(errors - coefficient * control)
    best = risk(optimal)
    return sample.judged(
        "loss",
        Estimate(rest + coefficient * risk(step), stderr),
        threshold=best + bounds.excess_loss * (target_variance(task) - best),
        reference=best,
        unit="y^2",
        detail={**sample.detail, **bayes},
    )


def _distances(sample: _Sample, bounds: Thresholds, algorithms: _Algorithms) -> list[Measurement]:
    """Distance to debiased GD against its bound; each alternative must be farther away, by a paired interval."""
    if sample.is_constant:
        return [Measurement.undecided(f"distance_{name}", _CONSTANT) for name in ("debiased_gd", *_ALTERNATIVES)]
    detail = {**sample.detail, "kernel_omega": algorithms.omega, "kernel_mu": algorithms.mu}
    nearest, bound = sample.ratio("distance_debiased_gd"), bounds.distance_debiased_gd
    rest = {"unit": "Var(yhat)", "detail": detail}
    measured = [sample.judged("distance_debiased_gd", nearest, threshold=bound, reference=0.0, **rest)]
    for name in (f"distance_{algorithm}" for algorithm in _ALTERNATIVES):
        value, stderr = sample.ratio(name)
        difference = mean(sample.series[name] - sample.series["distance_debiased_gd"])
        farther = sample.judged(name, difference, threshold=0.0, rule=">").passed
        reason = None if farther is not None else "not told apart from debiased GD: draw more prompts"
        against = {"threshold": nearest.value, "rule": ">", "passed": farther, "required": True, "reason": reason}
        measured.append(Measurement(name, value, stderr=stderr, **against, **rest))
    return measured


def _shifts(sample: _Sample, bounds: Thresholds) -> list[Measurement]:
    """Debiased GD does not move when every context covariate, or label, moves by one; vanilla GD does."""
    names = ("shift_covariates", "shift_labels")
    if sample.is_constant:
        return [Measurement.undecided(name, _CONSTANT) for name in names]
    variance = float(sample.spread.mean())
    measured = []
    for name in names:
        vanilla = float(sample.series[f"gd_{name}"].mean() / variance)
        # a model without a step of its own has a vanilla that does not move either: then rounding decides
        bound = max(bounds.shift * vanilla, float(np.finfo(np.float32).eps))
        measured.append(
            sample.judged(
                name,
                sample.ratio(name),
                threshold=bound,
                reference=0.0,
                unit="Var(yhat)",
                detail={**sample.detail, "vanilla_gd": vanilla},
            )
        )
    return measured


def _undecided(reason: str) -> ProbeResult:
    names = ("loss", *(f"distance_{name}" for name in ("debiased_gd", *_ALTERNATIVES)))
    measured = (Measurement.undecided(name, reason) for name in (*names, "shift_covariates", "shift_labels"))
    return ProbeResult("equivalence", tuple(measured))


def _fitted_step(predict: Predictor, batch: Batch, task: Task) -> float:
    basis = theory.debiased_gd(preconditioned(batch.z, task), 1.0)
    square = float(basis.square().mean())
    return float((basis * predict(batch.z)).mean()) / square if square > 0 else 0.0


def _batches(task: Task, prompts: int, generator: torch.Generator, *, n_heads: int) -> Iterator[Batch]:
    size = max(1, min(_CHUNK, _SCORES // (n_heads * task.context)))
    for start in range(0, prompts, size):
        yield task.sample(min(size, prompts - start), generator=generator, dtype=torch.float64)
