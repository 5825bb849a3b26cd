"""Uncertainty of what is estimated over prompts: exact means over labels, ratios, intervals, repeated looks.

Squared differences of predictors are heavy-tailed (kurtosis up to 5e4), so intervals from plain draws cover too little.
Most of the tail comes from the labels, and over them the mean is known: with covariates X and x_q given,

    yhat = w^T y + b,   y = X beta + eps,   beta ~ N(0, (c^2/d) I),   eps ~ N(0, sigma^2)
    E[yhat^2 | X, x_q] = (c^2/d) |X^T w|^2 + sigma^2 |w|^2 + b^2                       (derived here; any law of X)

X and y run over the context *and* the query, so that the target is a response too: weight one on the query's label. Its
difference from a prediction gives the loss, sigma^2 + (c^2/d) |x_q - X^T w|^2 + sigma^2 |w|^2 + b^2.

A model whose keys read labels is linear in them only nearly: yhat = w^T y + b + r(y) with the departure r. Labels y and
-y have the same law, so

    E yhat^2 = E[(w^T y + b)^2] + E 1/2 sum_{y, -y} r (2 (w^T y + b) + r)

where the first term is exact and only the second is sampled. It stays unbiased whatever r is; and because r is even in
y to leading order (the softmax's response to labels times labels), the two signs cancel the term 2 r w^T y, which would
otherwise dominate.

What tail is left is that of the query: the third-order term by which two softmax heads differ from gradient descent makes
squared distances grow as |x_q|^6. So every prompt is asked twice, with its query as drawn and stretched by s to the length
at which such a square has most of its mean, and the two are weighted (the balance heuristic of importance sampling, Veach
and Guibas 1995) so that averages are those over queries as the task draws them:

    E f(x_q) = 1/2 E [v(x_q) f(x_q) + v(s x_q) f(s x_q)],   v(x) = 2 / (1 + s^-d exp(|x|^2 (1 - s^-2) / 2)),  s^2 = (d + 6)/d

(for covariates N(0, I); |x|^2 is x^T Sigma^-1 x in general). v is bounded by 2.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import ndtri

from .. import theory
from .._types import Prompts, Tensor
from ..errors import ConfigError
from ..results import Measurement, ProbeResult
from ..tasks import Batch, LinearRegression, Task
from .row import Row

Series: TypeAlias = dict[str, np.ndarray]
"""Numbers per prompt, by name; the first axis of each is the prompt."""

Judge: TypeAlias = Callable[..., Measurement]
"""Takes what `Measurement.judged` takes."""

Decision = TypeVar("Decision")

CONFIDENCE = 0.95


# --- answers that are linear in the labels, or nearly -----------------------------------------------------------------


class LabelLaw(NamedTuple):
    """How labels come about given covariates.

    Attributes:
        coefficient: variance c^2/d of each coefficient.
        noise: variance sigma^2 of the label noise.
    """

    coefficient: float
    noise: float


def label_law(task: Task) -> LabelLaw | None:
    """The law of a task's labels, or `None` where it is not known to be one Gaussian linear function."""
    if not isinstance(task, LinearRegression) or type(task).sample is not LinearRegression.sample:
        return None
    return LabelLaw(task.coefficient_scale**2 / task.d, task.noise)


class Context(NamedTuple):
    """What the labels of prompts are made of, query included.

    Attributes:
        covariates: x_1 ... x_L, x_q.
        labels: y_1 ... y_L, and the query's label, which is the target.
    """

    covariates: Float[Tensor, "batch pos d"]
    labels: Float[Tensor, "batch pos"]

    @classmethod
    def of(cls, batch: Batch, task: Task) -> "Context":
        """Of prompts with one label slot."""
        assert task.n_out == 1, "label moments are for one label slot"
        return cls(batch.z[..., : task.d], torch.cat([batch.z[:, :-1, task.d], batch.target], 1))


@dataclass(frozen=True)
class Response:
    """Answers yhat(y) = w^T y + b + r(y) to prompts; sums and differences are responses again.

    Attributes:
        weights: w, on the labels of context and query.
        offset: b, what the labels do not change.
        swing: w^T y at the labels drawn.
        departure: r at y and at -y.
    """

    weights: Float[Tensor, "batch pos"]
    offset: Float[Tensor, " batch"]
    swing: Float[Tensor, " batch"]
    departure: Float[Tensor, "sign batch"]

    @classmethod
    def linear(
        cls,
        weights: Float[Tensor, "batch key_pos"],
        context: Context,
        offset: Float[Tensor, " batch"] | None = None,
    ) -> "Response":
        """Exactly linear in the context's labels."""
        padded = torch.nn.functional.pad(weights, (0, 1))
        zero = torch.zeros_like(padded[:, 0])
        swing = (padded * context.labels).sum(1)
        return cls(padded, zero if offset is None else offset, swing, torch.stack([zero, zero]))

    @classmethod
    def target(cls, context: Context) -> "Response":
        """The query's label itself."""
        weights = torch.zeros_like(context.labels)
        weights[:, -1] = 1.0
        zero = torch.zeros_like(weights[:, 0])
        return cls(weights, zero, context.labels[:, -1], torch.stack([zero, zero]))

    @classmethod
    def sampled(cls, answers: Float[Tensor, " batch"], context: Context) -> "Response":
        """Nothing known but the answers drawn: moments are then plain averages.

        Compare it with others that are `plain` as well: two nearly equal answers, of which one is averaged over the
        labels and one is not, would differ by the whole sampling noise.
        """
        zero = torch.zeros_like(answers)
        return cls(torch.zeros_like(context.labels), zero, zero, torch.stack([answers, answers]))

    @property
    def answers(self) -> Float[Tensor, " batch"]:
        """The answers at the labels drawn."""
        return self.offset + self.swing + self.departure[0]

    def plain(self, context: Context) -> "Response":
        """The same answers with what is known about them forgotten."""
        return Response.sampled(self.answers, context)

    def __add__(self, other: "Response") -> "Response":
        return Response(*(mine + its for mine, its in zip(self._parts, other._parts, strict=True)))

    def __sub__(self, other: "Response") -> "Response":
        return Response(*(mine - its for mine, its in zip(self._parts, other._parts, strict=True)))

    @property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.weights, self.offset, self.swing, self.departure


def row_response(row: Row, z: Prompts, context: Context, *, shift: float = 0.0) -> Response:
    """What a one-layer model answers on prompts, all labels moved by `shift`; exactly linear where no key reads labels.

    Args:
        row: the model.
        z: prompts with the labels of `context`; their covariates may have been moved.
        context: what the labels were made of.
        shift: added to every context label after they were drawn.
    """
    scores, d = row.blind_to_label_keys().scores(z, z), row.d
    weights, offset = pattern_weights(row, torch.softmax(scores, -1), z)
    linear = Response.linear(weights, context, offset + shift * weights.sum(1))
    if not row.reads_label_keys:
        return linear
    per_label = torch.einsum("bx,hx->bh", z[:, -1, :d], row.kq[:, d, :d]).unsqueeze(-1)

    def departure(sign: float) -> Float[Tensor, " batch"]:
        labels = sign * context.labels[:, :-1] + shift
        weights, offset = pattern_weights(row, torch.softmax(scores + per_label * labels.unsqueeze(1), -1), z)
        return (weights * labels).sum(1) + offset - (linear.offset + sign * linear.swing)

    return Response(linear.weights, linear.offset, linear.swing, torch.stack([departure(1.0), departure(-1.0)]))


def row_weights(
    row: Row, queries: Prompts, keys: Prompts, values: Prompts
) -> tuple[Float[Tensor, "batch key_pos"], Float[Tensor, " batch"]]:
    """w and b of yhat = w^T y + b with y the labels of `values`, at the attention of `queries` to `keys`."""
    return pattern_weights(row, torch.softmax(row.scores(queries, keys), -1), values)


def pattern_weights(
    row: Row, pattern: Float[Tensor, "batch head key_pos"], values: Prompts
) -> tuple[Float[Tensor, "batch key_pos"], Float[Tensor, " batch"]]:
    """The same at a given pattern, which need not sum to one."""
    into_labels, into_covariates = row.ov[:, 0, row.d], row.ov[:, 0, : row.d]
    weights = torch.einsum("bhl,h->bl", pattern, into_labels)
    attended = torch.einsum("bhl,blx->bhx", pattern, values[:, :-1, : row.d])
    return weights, torch.einsum("bhx,hx->b", attended, into_covariates)


def with_labels(z: Prompts, labels: Float[Tensor, "batch key_pos"], d: int) -> Prompts:
    """The same prompts with other context labels."""
    relabelled = z.clone()
    relabelled[:, :-1, d] = labels
    return relabelled


class Moments(NamedTuple):
    """Per prompt; their averages over prompts are E yhat and E yhat^2.

    Attributes:
        first: mean over the labels of the answer.
        second: mean over the labels of its square. Single values can be negative where a departure was sampled.
    """

    first: Float[np.ndarray, " prompt"]
    second: Float[np.ndarray, " prompt"]


def conditional_moments(response: Response, covariates: Float[Tensor, "batch pos d"], law: LabelLaw | None) -> Moments:
    """Mean over beta and noise, given the covariates that the labels belong to: exact for the linear part.

        second = (c^2/d) |X^T w|^2 + sigma^2 |w|^2 + b^2 + 1/2 sum_{+-} r_+- (2 (b +- w^T y) + r_+-)

    Args:
        response: of a model, an algorithm, or a difference of two.
        covariates: of context and query, `Context.covariates`.
        law: of the labels; `None` where unknown, for responses without weights.
    """
    exact = response.offset.square()
    if law is None:
        assert not bool(response.weights.any()), "weights on labels of an unknown law: compare plain responses"
    else:
        pulled = torch.einsum("bp,bpx->bx", response.weights, covariates)
        exact = exact + law.coefficient * pulled.square().sum(1) + law.noise * response.weights.square().sum(1)
    signs = torch.tensor([[1.0], [-1.0]], dtype=response.swing.dtype)
    departure = response.departure
    sampled = (departure * (2 * (response.offset + signs * response.swing) + departure)).mean(0)
    return Moments((response.offset + departure.mean(0)).numpy(), (exact + sampled).numpy())


def compare(model: Response, others: Mapping[str, Response], context: Context, law: LabelLaw | None) -> Series:
    """Per prompt, with averages E yhat, E yhat^2, E(target - yhat)^2 and E(yhat - other)^2.

    Args:
        model: its response.
        others: responses of named algorithms.
        context: what the labels of all of them were made of.
        law: of the labels; `None` where they cannot be averaged over: then all is taken at the labels drawn.

    Returns:
        `first`, `second`, `loss`, and `distance_<name>` for every other.
    """
    first, second = conditional_moments(model if law else model.plain(context), context.covariates, law)
    series = {"first": first, "second": second, "loss": square(Response.target(context) - model, context, law)}
    return series | {f"distance_{name}": square(other - model, context, law) for name, other in others.items()}


def square(response: Response, context: Context, law: LabelLaw | None) -> Float[np.ndarray, " prompt"]:
    """Mean over the labels of an answer's square, per prompt; its square at the labels drawn where no law is known."""
    return conditional_moments(response if law else response.plain(context), context.covariates, law).second


class AtLength(NamedTuple):
    """Prompts with queries of one of the two lengths at which they are asked.

    Attributes:
        z: the prompts.
        context: what their labels are made of. The query's is its mean given those of the context, which gives the same
            averages (the answers to be compared with it know no more) and less noise.
        importance: 1/2 v(x_q), with which what is found here is weighted.
    """

    z: Prompts
    context: Context
    importance: Float[np.ndarray, " prompt"]


def at_both_lengths(batch: Batch, task: LinearRegression) -> tuple[AtLength, AtLength]:
    """The prompts with their queries as drawn, and stretched; see the module's formula."""
    d = task.d
    stretch = math.sqrt((d + 6) / d)
    found = []
    for factor in (1.0, stretch):
        z = batch.z.clone()
        z[:, -1, :d] *= factor
        query = z[:, -1, :d]
        if task.covariance_root is not None:
            query = torch.linalg.solve(task.covariance_root, query.mT).mT
        longer = torch.exp(query.square().sum(1) * (1 - stretch**-2) / 2) * stretch**-d
        expected = theory.ridge(z, d * task.noise / task.coefficient_scale**2)
        context = Context(z[..., :d], torch.cat([z[:, :-1, d], expected], 1))
        found.append(AtLength(z, context, (1 / (1 + longer)).numpy()))
    return found[0], found[1]


# --- ratios and intervals ---------------------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """A number estimated over prompts, with its standard error."""

    value: float
    stderr: float


class Interval(NamedTuple):
    """A two-sided confidence interval."""

    low: float
    high: float

    def excludes(self, value: float) -> bool:
        return not self.low <= value <= self.high


def mean(values: Float[np.ndarray, " prompt"]) -> Estimate:
    """Average and its standard error."""
    return Estimate(float(values.mean()), _stderr(values))


def variance_terms(moments: Moments) -> Float[np.ndarray, " prompt"]:
    """Per prompt, with average Var(yhat) = E yhat^2 - (E yhat)^2; the denominator of every distance.

    Their spread is the right one for the delta method, for the mean's own error moves the average by second order only.
    """
    centre = moments.first.mean()
    return moments.second - centre * (2 * moments.first - centre)


def ratio_of_means(numerator: Float[np.ndarray, " prompt"], denominator: Float[np.ndarray, " prompt"]) -> Estimate:
    """E(numerator) / E(denominator), both over the same prompts, with its standard error by the delta method."""
    influence = ratio_influence(numerator, denominator)
    return Estimate(float(numerator.mean() / denominator.mean()), _stderr(influence))


def ratio_influence(
    numerator: Float[np.ndarray, " prompt"], denominator: Float[np.ndarray, " prompt"]
) -> Float[np.ndarray, " prompt"]:
    """How much each prompt moves the ratio, (n - R d) / mean(d); differences of ratios have differences of these."""
    centre = denominator.mean()
    return (numerator - numerator.mean() / centre * denominator) / centre


def interval(estimate: Estimate, *, confidence: float = CONFIDENCE) -> Interval:
    """The normal interval; conditional moments are light-tailed enough for it (coverage: reports/LOG.md)."""
    half = quantile(confidence) * estimate.stderr
    return Interval(estimate.value - half, estimate.value + half)


def quantile(confidence: float) -> float:
    """Half-width of a two-sided normal interval, in standard errors: 1.96 at .95."""
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence must be between 0 and 1; got {confidence!r}. Use 0.95.", field="confidence")
    return float(ndtri(0.5 + confidence / 2))


def judge_at(confidence: float) -> Judge:
    """`Measurement.judged` with intervals of this confidence."""
    return partial(Measurement.judged, half_width=quantile(confidence))


def _stderr(values: Float[np.ndarray, " prompt"]) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values)))


# --- a growing sample -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Looked(Generic[Decision]):
    """What a growing sample came to.

    Attributes:
        decision: of the last look; `None` when the budget left it open.
        sample: everything drawn.
        prompts: how many.
        looks: how many looks it took.
        confidence: of the intervals at each look; all of them hold together with the confidence asked for.
    """

    decision: Decision | None
    sample: Series
    prompts: int
    looks: int
    confidence: float


def sequential(
    draw: Callable[[int], Mapping[str, np.ndarray]],
    decide: Callable[[Series, float], Decision | None],
    *,
    budget: int,
    looks: int = 6,
    confidence: float = CONFIDENCE,
) -> Looked[Decision]:
    """Draws until a decision is reached, doubling the sample between at most `looks` looks.

    Stopping at the first look that happens to decide makes ordinary intervals cover .6 to .8. Here the error is split
    over the looks (Bonferroni): each interval has confidence 1 - (1 - confidence) / looks, so that all hold together.

    Args:
        draw: so many more prompts' numbers, by name.
        decide: takes everything drawn and the confidence that its intervals must have; `None` for "draw more".
        budget: most prompts to draw.
        looks: at most; the first is at budget / 2^(looks - 1) prompts.
        confidence: of the decision.

    Raises:
        ConfigError: fewer than one look, or too few prompts for two at the first.
    """
    if looks < 1 or budget < 2**looks:
        raise ConfigError(
            f"a growing sample needs looks of at least 1 and a budget of at least 2^looks; got looks {looks!r} and "
            f"budget {budget!r}. Allow more prompts or fewer looks.",
            field="budget",
        )
    per_look = 1 - (1 - confidence) / looks
    parts: list[Mapping[str, np.ndarray]] = []
    drawn = 0
    for look in range(1, looks + 1):
        size = budget // 2 ** (looks - look)
        parts.append(draw(size - drawn))
        drawn = size
        sample = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        decision = decide(sample, per_look)
        if decision is not None or look == looks:
            return Looked(decision, sample, drawn, look, per_look)
    raise AssertionError("the last look returns")


def asked_again(
    ask: Callable[[int, float], ProbeResult], *, prompts: int, looks: int = 3, confidence: float = CONFIDENCE
) -> ProbeResult:
    """A probe on twice as many prompts while a measurement is undecided for want of them; the error split as above.

    Args:
        ask: the probe on so many prompts, with intervals of this confidence.
        prompts: at the first look.
        looks: at most.
        confidence: of all looks together.
    """
    per_look = 1 - (1 - confidence) / looks
    for look in range(looks):
        result = ask(prompts * 2**look, per_look)
        if not any(wants_prompts(m) for m in result.measurements):
            break
    return result  # pyright: ignore[reportPossiblyUnbound] - there is at least one look


def wants_prompts(measurement: Measurement) -> bool:
    """Undecided, and more prompts would narrow its interval."""
    return measurement.status == "undecided" and measurement.threshold is not None and measurement.stderr is not None
