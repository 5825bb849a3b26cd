"""Which named algorithm does the model realise? Causal abstraction by interchange of the query, the keys or the values.

Two prompts are drawn; the query, the keys or the values are taken from the second, in the model and in a high-level
algorithm alike, and their answers compared:

    score = 1 - E(yhat* - y_high*)^2 / Var(yhat*),   the least of the three interchanges

An algorithm's query is x_q, its keys are the covariates x_l and its values the labels y_l. All five are weights that
query and keys make, applied to values:

    debiased GD       (eta/L) (x_l - xbar) . x_q                 keys in the mean xbar too
    GD                (eta/L) x_l . x_q
    ridge             x_l . (X^T X + lambda I)^-1 x_q            keys in the Gram matrix too, which no label enters
    Nadaraya-Watson   mu softmax_l(omega x_l . x_q)
    mean of labels    c / L                                      neither query nor keys

Agreement on whole prompts (the distances of `equivalence`) can come about because beta ties keys and values together;
once they come from two prompts, only the algorithm's own way of joining them is left. There debiased and vanilla GD
differ by 1/L of the variance, several times what they differ by on whole prompts.

The *normaliser* asks where the debiasing lives. Each head's softmax denominator is taken from a second context (same
query, so it is a function of that context alone), and the change D compared with the change of debiased GD when xbar is
the second context's: to first order in omega, the denominators of a pair are where xbar comes from. Vanilla GD predicts
no change.

Interchange on the query's row: arXiv 2106.02997 (causal abstraction), applied to the heads of 2503.12734.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from transformer_lens import HookedTransformer

from .. import theory
from .._types import Checked, Predictions, Prompts, Tensor
from ..circuits import Circuits
from ..circuits.capture import recorded
from ..errors import ConfigError, ModelError
from ..models import Coordinates, reason_not_fused
from ..models import _tl as tl
from ..results import HeadVerdict, Measurement, ProbeResult
from ..tasks import Batch, Task, generator_for
from .equivalence import fit_kernel, preconditioned
from .row import Row, attend, forward_prediction, require_same_as_model
from .statistics import (
    CONFIDENCE,
    Context,
    Estimate,
    Judge,
    LabelLaw,
    Moments,
    Response,
    Series,
    conditional_moments,
    interval,
    judge_at,
    label_law,
    mean,
    pattern_weights,
    ratio_influence,
    ratio_of_means,
    row_response,
    row_weights,
    variance_terms,
    with_labels,
)
from .structure import is_isotropic
from .thresholds import THRESHOLDS, Thresholds

ALGORITHMS = ("debiased_gd", "gd", "ridge", "nadaraya_watson", "mean_of_labels")
PARTS = ("query", "keys", "values")

_PROMPTS = 20_000
_FIT_PROMPTS = 2000
_CHUNK, _SCORES = 1024, 2**20  # prompts at a time; fewer where their attention scores would fill more than 8 MB
_LOOSEST = 0.05  # of the predictions' size, where the weights have few digits
_CHECK_PROMPTS = 16
_ROUNDING = 1e4 * float(np.finfo(np.float64).eps)  # what rounding leaves of a zero, relative to what was subtracted

Interchangeable: TypeAlias = Callable[[Prompts, Prompts, Prompts], Predictions]
"""`(queries, keys, values) -> yhat`: a model whose query, keys and values come from three prompts."""

Level: TypeAlias = Literal["circuits", "hooks", "inputs"]
"""Where parts are exchanged: in the circuits of one layer; at hook_k and hook_v of a forward whose attention is not what
its circuits say (another activation, a hook that changes it); or in the prompt, for models that are a black box here."""


class LowLevel(NamedTuple):
    """A model that can be taken apart.

    Attributes:
        run: the model with query, keys and values from three prompts.
        level: where they are exchanged.
        row: its circuits, where they are all there is to it.
    """

    run: Interchangeable
    level: Level
    row: Row | None = None


class HighLevel(NamedTuple):
    """A named algorithm: weights that query and keys make, applied to the labels.

    Attributes:
        name: of `ALGORITHMS`.
        weights: prompts -> what each label of the context is multiplied with, `[batch key_pos]`.
        parameters: what it was fitted with.
    """

    name: str
    weights: Callable[[Prompts], Tensor]
    parameters: Mapping[str, float]


# --- the low level ----------------------------------------------------------------------------------------------------


def low_level(
    model: HookedTransformer, circuits: Circuits, task: Task, coordinates: Coordinates | None = None
) -> LowLevel:
    """The model at the deepest level at which its parts can be exchanged faithfully.

    Circuits, when the model computes what they say. Else hooks, when attention carries all that the query learns of the
    context: context tokens moved at hook_k and hook_v must give what moving them in the prompt gives. Else the prompt.
    """
    batch = task.sample(_CHECK_PROMPTS, generator=generator_for(0, "fit"), dtype=torch.float64)
    if reason_not_fused(model) is None:
        row = Row.of(circuits)
        try:
            require_same_as_model(row, model, batch.z, coordinates)
            return row_level(row)
        except ModelError:
            pass  # its forward is not its circuits: look at the forward
    by_inputs = input_level(lambda z: forward_prediction(model, z, coordinates), task.d)
    if model.cfg.n_layers == 1:
        by_hooks = LowLevel(_Hooked(model, coordinates), "hooks")
        context, query = batch.z[: _CHECK_PROMPTS // 2], batch.z[_CHECK_PROMPTS // 2 :]
        moved = [level.run(query, context, context) for level in (by_hooks, by_inputs)]
        size = float(moved[1].square().mean().sqrt())
        if (
            float((moved[0] - moved[1]).abs().max())
            <= min(1e4 * torch.finfo(next(model.parameters()).dtype).eps, _LOOSEST) * size
        ):
            return by_hooks
    return by_inputs


def row_level(row: Row) -> LowLevel:
    """Exchange inside the circuits of a one-layer model."""

    def run(queries: Prompts, keys: Prompts, values: Prompts) -> Predictions:
        return attend(row.scores(queries, keys), row.values(values)).sum(1)

    return LowLevel(run, "circuits", row)


def input_level(predict: Callable[[Prompts], Predictions], d: int) -> LowLevel:
    """Exchange in the prompt: any predictor, with the covariates of `keys` and the labels of `values`."""
    return LowLevel(lambda queries, keys, values: predict(recombine(queries, keys, values, d)), "inputs")


def recombine(queries: Prompts, keys: Prompts, values: Prompts, d: int) -> Prompts:
    """Prompts with the query of `queries`, the covariates of `keys` and the labels of `values`."""
    context = torch.cat([keys[:, :-1, :d], values[:, :-1, d:]], -1)
    return torch.cat([context, queries[:, -1:]], 1)


class _Hooked:
    """A one-layer model's own forward, with hook_k and hook_v replaced by what other prompts put there."""

    def __init__(self, model: HookedTransformer, coordinates: Coordinates | None) -> None:
        self.model, self.coordinates = model, coordinates

    def __call__(self, queries: Prompts, keys: Prompts, values: Prompts) -> Predictions:
        handles = []
        replacements = {"k": self._seen("k", keys), "v": self._seen("v", values)}
        try:
            for name, replacement in replacements.items():
                point = tl.hook_point(self.model, 0, name)
                handles.append(point.register_forward_hook(_replaced_by(replacement)))
            return forward_prediction(self.model, queries, self.coordinates)
        finally:
            for handle in handles:
                handle.remove()

    def _seen(self, name: str, prompts: Prompts) -> Tensor:
        with recorded(self.model, name) as activations:
            forward_prediction(self.model, prompts, self.coordinates)
        return activations[name][0]


def _replaced_by(replacement: Tensor) -> Callable[..., Tensor]:
    def replace(module: torch.nn.Module, inputs: object, output: Tensor) -> Tensor:
        return replacement

    return replace


# --- the high level ---------------------------------------------------------------------------------------------------


def candidates(low: LowLevel, heads: Sequence[HeadVerdict], task: Task, *, seed: int) -> tuple[HighLevel, ...]:
    """The named algorithms, with the parameters that suit the model best; found on other prompts than the probe's.

    Steps are the model's own, sum mu omega, where its circuits are the model; else those that fit its predictions. With
    a covariance they are in units of A*, and the kernel compares keys with A* x_q (see `equivalence`).
    """
    batch = task.sample(_FIT_PROMPTS, generator=generator_for(seed, "fit"), dtype=torch.float64)
    yhat = torch.cat([low.run(part, part, part) for part in batch.z.split(_part(low, task))])

    def fitted(unit: Predictions) -> float:
        square = float(unit.square().mean())
        return float((unit * yhat).mean()) / square if square > 0 else 0.0

    unit = preconditioned(batch.z, task)
    own = sum(h.mu * h.omega for h in heads) if heads and low.level == "circuits" and is_isotropic(task) else None
    debiased, vanilla = (
        float(own) if own is not None else fitted(answer)
        for answer in (theory.debiased_gd(unit, 1.0), theory.gd(unit, 1.0))
    )
    omega, mu = fit_kernel(lambda z: low.run(z, z, z), batch, task)
    penalty = task.d * task.noise / getattr(task, "coefficient_scale", 1.0) ** 2
    level = fitted(theory.nadaraya_watson(batch.z, 0.0, 1.0))  # a kernel of scale zero averages the labels
    return (
        HighLevel(
            "debiased_gd", lambda z: theory.debiased_gd.weights(preconditioned(z, task), debiased), {"step": debiased}
        ),
        HighLevel("gd", lambda z: theory.gd.weights(preconditioned(z, task), vanilla), {"step": vanilla}),
        HighLevel("ridge", lambda z: theory.ridge.weights(z, penalty), {"penalty": penalty}),
        HighLevel(
            "nadaraya_watson",
            lambda z: theory.nadaraya_watson.weights(preconditioned(z, task), omega, mu),
            {"kernel_omega": omega, "kernel_mu": mu},
        ),
        HighLevel("mean_of_labels", lambda z: theory.nadaraya_watson.weights(z, 0.0, level), {"coefficient": level}),
    )


# --- the probe --------------------------------------------------------------------------------------------------------


def interchange(
    low: LowLevel,
    heads: Sequence[HeadVerdict],
    task: Task,
    *,
    prompts: Checked[int] = _PROMPTS,
    seed: int = 0,
    thresholds: Thresholds = THRESHOLDS,
    confidence: float = CONFIDENCE,
) -> ProbeResult:
    """Scores of every named algorithm under interchange, and where the debiasing lives.

    The score of debiased GD is held against `thresholds.interchange`; every other algorithm passes when its score is
    lower by a paired interval. Which algorithm the model realises stands in each detail (see `realised_algorithm`).

    Args:
        low: the model, from `low_level`, `row_level` or `input_level`.
        heads: its taxonomy, which gives the model's own step; may be empty.
        task: draws the prompts.
        prompts: how many pairs of prompts.
        seed: of the prompts; the same seed gives the same result.
        thresholds: bounds that decide.
        confidence: of the intervals that decide.
    """
    if isinstance(prompts, bool) or not isinstance(prompts, int) or prompts < 2:
        raise ConfigError(f"prompts must be a whole number of at least 2; got {prompts!r}.", field="prompts")
    if task.n_out != 1:
        return _undecided(f"the task has {task.n_out} label slots; interchange is asked of models with one")
    high = candidates(low, heads, task, seed=seed)
    chunks = [
        _series(low, high, first, second, task) for first, second in _pairs(task, prompts, seed, _part(low, task))
    ]
    sample = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    if not all(np.isfinite(values).all() for values in sample.values()):
        return _undecided("the model's predictions are not all finite")
    if any(_is_constant(sample, part) for part in PARTS):
        return _undecided("the model predicts a constant: its variance is zero")
    scores = {algorithm.name: _score(sample, algorithm.name) for algorithm in high}
    detail = {
        "prompts": prompts,
        "level": low.level,
        "realised": _realised(scores, thresholds.interchange, confidence),
    }
    measured = [_measured(algorithm, scores, thresholds.interchange, detail, confidence) for algorithm in high]
    return ProbeResult(
        "interchange", (*measured, _normaliser(sample, thresholds.normaliser, low, judge_at(confidence)))
    )


def realised_algorithm(result: ProbeResult) -> str:
    """The algorithm that the model realises, of `ALGORITHMS`; "none", or "undecided" where it could not be asked.

    It has the highest score, that score's interval lies above the bound, and a paired interval excludes the runner-up.
    """
    return result["interchange_debiased_gd"].detail.get("realised", "undecided")


class _Score(NamedTuple):
    """Of one algorithm, the least of the three interchanges.

    Attributes:
        estimate: with its standard error.
        influence: how much each prompt moves it; scores of the same prompts are compared through these.
        parts: the score of each interchange.
    """

    estimate: Estimate
    influence: Float[np.ndarray, " prompt"]
    parts: dict[str, float]


def _score(sample: Series, name: str) -> _Score:
    scored = {}
    for part in PARTS:
        squares, spread = sample[f"{part}/{name}"], _spread(sample, part)
        gap = ratio_of_means(squares, spread)
        scored[part] = Estimate(1 - gap.value, gap.stderr), -ratio_influence(squares, spread)
    least = min(scored, key=lambda part: scored[part][0].value)
    estimate, influence = scored[least]
    return _Score(estimate, influence, {part: other.value for part, (other, _) in scored.items()})


def _spread(sample: Series, part: str) -> Float[np.ndarray, " prompt"]:
    return variance_terms(Moments(sample[f"{part}/first"], sample[f"{part}/second"]))


def _is_constant(sample: Series, part: str) -> bool:
    """Its spread is what rounding leaves of its size."""
    size = float(sample[f"{part}/second"].mean())
    return float(_spread(sample, part).mean()) <= _ROUNDING * abs(size)


def _lower(score: _Score, than: _Score, confidence: float) -> bool | None:
    """Whether a score is lower than another, by a paired interval; `None` when the interval cannot tell."""
    difference = interval(
        mean(than.influence - score.influence + than.estimate.value - score.estimate.value), confidence=confidence
    )
    return None if not difference.excludes(0.0) else difference.low > 0


def _realised(scores: Mapping[str, _Score], bound: float, confidence: float) -> str:
    ranked = sorted(scores, key=lambda name: -scores[name].estimate.value)
    best, runner_up = scores[ranked[0]], scores[ranked[1]]
    clear = interval(best.estimate, confidence=confidence).low > bound and _lower(runner_up, best, confidence) is True
    return ranked[0] if clear else "none"


def _measured(
    algorithm: HighLevel,
    scores: Mapping[str, _Score],
    bound: float,
    detail: Mapping[str, object],
    confidence: float,
) -> Measurement:
    name, (estimate, _, parts) = f"interchange_{algorithm.name}", scores[algorithm.name]
    detail = {**detail, **algorithm.parameters, "parts": parts}
    if algorithm.name == "debiased_gd":
        return judge_at(confidence)(
            name, estimate.value, stderr=estimate.stderr, threshold=bound, rule=">", reference=1.0, detail=detail
        )
    debiased = scores["debiased_gd"]
    lower = _lower(scores[algorithm.name], debiased, confidence)
    return Measurement(
        name,
        estimate.value,
        stderr=estimate.stderr,
        threshold=debiased.estimate.value,
        rule="<",
        passed=lower,
        required=True,
        reason=None if lower is not None else "not told apart from debiased GD: draw more prompts",
        detail=detail,
    )


def _normaliser(sample: Series, bound: float, low: LowLevel, judge: Judge) -> Measurement:
    name, rest = "normaliser", {"threshold": bound, "rule": ">"}
    if low.row is None:
        why = f"the model is taken apart at its {low.level}, where no softmax denominator is known"
        return Measurement.undecided(name, why, **rest)
    size = float(sample["normaliser/change"].mean())
    if size <= _ROUNDING * float(sample["query/second"].mean()):
        return Measurement.undecided(
            name, "its denominators are the same in every context: no head has a scale", **rest
        )
    gap = ratio_of_means(sample["normaliser/gap"], sample["normaliser/change"])
    value = 1 - gap.value
    return judge(name, value, stderr=gap.stderr, reference=1.0, **rest)


def _undecided(reason: str) -> ProbeResult:
    names = (*(f"interchange_{name}" for name in ALGORITHMS), "normaliser")
    return ProbeResult("interchange", tuple(Measurement.undecided(name, reason) for name in names))


# --- per prompt -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Prompts:
    """A chunk of prompts and what their labels were made of."""

    z: Prompts
    context: Context


def _series(
    low: LowLevel, high: Sequence[HighLevel], first: Batch, second: Batch, task: Task
) -> dict[str, Float[np.ndarray, " prompt"]]:
    """Squares whose averages give the scores: `<part>/<algorithm>`, and the model's `<part>/first`, `<part>/second`."""
    one, two = (_Prompts(batch.z, Context.of(batch, task)) for batch in (first, second))
    law = label_law(task)
    series = {}
    for part in PARTS:
        queries, keys, values = (two if part == name else one for name in PARTS)
        model = _model_response(low, queries, keys, values, law)
        moments = conditional_moments(model, values.context.covariates, law)
        series |= {f"{part}/first": moments.first, f"{part}/second": moments.second}
        prompts = _with_query(keys.z, queries.z)
        for algorithm in high:
            answer = Response.linear(algorithm.weights(prompts), values.context)
            gap = model - (answer if _integrates(low, law) else answer.plain(values.context))
            series[f"{part}/{algorithm.name}"] = conditional_moments(gap, values.context.covariates, law).second
    if low.row is not None:
        step = next(a for a in high if a.name == "debiased_gd").parameters["step"]
        change = normaliser_change(low.row, one.z, two.z, one.context)
        predicted = Response.linear(_centring_change(preconditioned(one.z, task), two.z, step, task.d), one.context)
        if not _integrates(low, law):
            change, predicted = change.plain(one.context), predicted.plain(one.context)
        for name, response in (("change", change), ("gap", change - predicted)):
            series[f"normaliser/{name}"] = conditional_moments(response, one.context.covariates, law).second
    return series


def _integrates(low: LowLevel, law: LabelLaw | None) -> bool:
    """Whether labels can be averaged over exactly."""
    return low.row is not None and law is not None


def _model_response(
    low: LowLevel, queries: _Prompts, keys: _Prompts, values: _Prompts, law: LabelLaw | None
) -> Response:
    if low.row is None or not _integrates(low, law):
        return Response.sampled(low.run(queries.z, keys.z, values.z)[:, 0], values.context)
    if keys is values:
        return row_response(low.row, _with_query(keys.z, queries.z), values.context)
    # keys from another prompt than values: the labels that keys read are given, and those of the values act linearly
    weights, offset = row_weights(low.row, queries.z, keys.z, values.z)
    return Response.linear(weights, values.context, offset)


def _with_query(z: Prompts, queries: Prompts) -> Prompts:
    return torch.cat([z[:, :-1], queries[:, -1:]], 1)


def normaliser_change(row: Row, first: Prompts, second: Prompts, context: Context) -> Response:
    """D: how the model's answer to `first` changes when every head's denominator is that of the context of `second`.

    Args:
        row: the model.
        first: prompts.
        second: prompts whose contexts give sum_l exp(z_l^T KQ z_query), with the query of `first`.
        context: what the labels of `first` were made of.
    """

    def weights_of(row: Row, first: Prompts, second: Prompts) -> tuple[Tensor, Tensor]:
        scores, others = row.scores(first, first), row.scores(first, second)
        moved = (scores - torch.logsumexp(others, -1, keepdim=True)).exp()
        return pattern_weights(row, moved - torch.softmax(scores, -1), first)

    weights, offset = weights_of(row.blind_to_label_keys(), first, second)
    linear = Response.linear(weights, context, offset)
    if not row.reads_label_keys:
        return linear

    def departure(sign: float) -> Tensor:
        flipped = [with_labels(z, sign * z[:, :-1, row.d], row.d) for z in (first, second)]
        weights, offset = weights_of(row, *flipped)
        return offset + sign * (weights * context.labels[:, :-1]).sum(1) - (linear.offset + sign * linear.swing)

    return Response(linear.weights, linear.offset, linear.swing, torch.stack([departure(1.0), departure(-1.0)]))


def _centring_change(first: Prompts, second: Prompts, step: float, d: int) -> Float[Tensor, "batch key_pos"]:
    """Weights of the change of debiased GD when xbar is the second context's: -(eta/L) (xbar' - xbar) . x_q."""
    moved = (second - first)[:, :-1, :d].mean(1)
    context = first.shape[1] - 1
    change = -(step / context) * (moved * first[:, -1, :d]).sum(1, keepdim=True)
    return change.expand(-1, context)


def _part(low: LowLevel, task: Task) -> int:
    """Prompts at a time."""
    n_heads = 1 if low.row is None else len(low.row.kq)
    return max(1, min(_CHUNK, _SCORES // (n_heads * task.context)))


def _pairs(task: Task, prompts: int, seed: int, part: int) -> Iterator[tuple[Batch, Batch]]:
    generator = generator_for(seed, "probe")
    for start in range(0, prompts, part):
        size = min(part, prompts - start)
        first, second = (task.sample(size, generator=generator, dtype=torch.float64) for _ in range(2))
        yield first, second
