"""Which part of which head carries a change of the prompt to the prediction?

Activation patching runs the model on one prompt, the receiver, with an activation taken from its run on another, the
donor. The direction is always named: *noising* patches the corrupted prompt's activation into the clean run, *denoising*
the clean one's into the corrupted run. Path patching says by which way a change arrives: query -> head, key -> head and
value -> head change what one head computes with, head -> output what is read of it. On one layer heads add up, so their
effects on the output sum to the total effect; query, key and value do not, and come with their interactions,

    m(S) = sum_{T in S} (-1)^{|S| - |T|} o_h(T),   sum over the 7 nonempty S of m(S) = o_h(all) - o_h(none),

o_h(T) the head's output with the sources in T from the donor. That sum is exact for any model, linear or not.

Metrics need no logits: the change E(yhat_patched - yhat_receiver)^2 / Var(yhat), and the share of loss restored,
(loss_corrupted - loss_patched) / (loss_corrupted - loss_clean), 0 where the corrupted run is and 1 where the clean one
is, all losses against the clean target. Prompts are continuous, so pairs can be chosen for which theory knows the
patched output: that of the idealised heads (omega, mu), and where all heads are patched that of debiased GD.

This file patches the query's row of one-layer models; `hook_patching` does it through hooks, at any depth and width.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations, product
from math import sqrt
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Bool, Float

from .. import theory
from .._types import Checked, Predictions, Prompts, Targets
from ..errors import ConfigError
from ..models.fused import Collapsed, fused_prediction
from ..results import HeadVerdict, Measurement, ProbeResult
from ..tasks import Batch, Task, generator_for
from .ablation import Subject, is_near, mean_error, ratio_error, subject_or_reason
from .equivalence import Predictor
from .row import Outputs, Row, attend
from .statistics import CONFIDENCE, Judge, judge_at
from .structure import is_isotropic, signal_variance
from .thresholds import THRESHOLDS, Thresholds

Direction: TypeAlias = Literal["noising", "denoising"]
"""Receiver and donor: the clean and the corrupted prompt, or the other way round."""

Source: TypeAlias = Literal["query", "key", "value"]
"""What a head computes with: the query token, the context tokens as keys, the context tokens as values."""

Path: TypeAlias = Literal["query", "key", "value", "scores", "pattern", "output"]
"""What is patched: a source, or an activation. The values are both; scores and pattern differ only when some of their
positions are patched."""

NAMES = ("path_sum_gap", "head_loss_share")
PAIRS = ("other_beta", "other_query", "covariates_shifted", "labels_shifted", "example_moved", "other_prompt")
"""Corrupted prompts: other coefficients on the same covariates; another query; every context covariate, or label, moved
by one; the covariates of the first example moved by one; all of another prompt."""

PerPrompt: TypeAlias = Float[torch.Tensor, " prompt"]
Chosen: TypeAlias = Bool[torch.Tensor, "head key_pos"]

AGREEMENT = 0.02
"""Of Var(yhat), or of the predicted change when that is larger. Trained models, two to four heads: all patches agree."""

_SOURCES: tuple[Source, ...] = ("query", "key", "value")
_REACHES: dict[Path, tuple[Source, ...]] = {
    "query": ("query",),
    "key": ("key",),
    "value": ("value",),
    "scores": ("query", "key"),
    "pattern": ("query", "key"),
    "output": _SOURCES,
}
_CHUNK = 256  # prompts at a time, so that scores and values stay in the cache
_ANISOTROPIC = "the covariates have a covariance, and (omega, mu) describe heads for isotropic ones"
_RESOLVED = 4.0  # standard errors by which a loss must move before a share of that says something


@dataclass(frozen=True)
class Pair:
    """Clean prompts with their targets, and their corrupted counterparts.

    Attributes:
        name: one of `PAIRS`, or a name of your own.
        clean, corrupted: prompts of equal shape.
        target: of the clean prompts.
    """

    name: str
    clean: Prompts
    corrupted: Prompts
    target: Targets

    def ends(self, direction: Direction) -> tuple[Prompts, Prompts]:
        """Receiver and donor."""
        return (self.clean, self.corrupted) if direction == "noising" else (self.corrupted, self.clean)


@dataclass(frozen=True)
class Metrics:
    """How far a patched run is from the receiver's, in numbers that need no logits.

    Attributes:
        change, change_stderr: E(yhat_patched - yhat_receiver)^2 / Var(yhat), yhat the model's on the clean prompts.
        restored, restored_stderr: (loss_corrupted - loss_patched) / (loss_corrupted - loss_clean); `None` where the
            corruption moves the loss by less than four standard errors.
    """

    change: float
    change_stderr: float
    restored: float | None
    restored_stderr: float | None


@dataclass(frozen=True)
class Patch:
    """One patch, beside what theory predicts.

    Attributes:
        pair: name of the pair of prompts.
        direction: which of them received.
        path: what was patched.
        heads: in which heads.
        metrics: of the model.
        predicted: of the idealised heads on the same prompts; their change, too, over the model's Var(yhat).
        debiased_gd_change: of debiased GD with the model's own step; `None` when only some heads are patched.
        agrees: the change is what the idealised heads predict, within `AGREEMENT`.
    """

    pair: str
    direction: Direction
    path: Path
    heads: tuple[int, ...]
    metrics: Metrics
    predicted: Metrics
    debiased_gd_change: float | None
    agrees: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "heads": list(self.heads)}


@dataclass(frozen=True)
class PathShare:
    """How much of a change of the prompt arrives through one path of one head.

    Attributes:
        pair: name of the pair of prompts.
        head: which.
        path: "output", the sources ("query", "key", "value") or their interactions ("query key", ...).
        share, stderr: E[effect total] / E[total^2]; over the heads the outputs sum to 1, and so do the other seven.
        predicted: the same of the idealised heads.
    """

    pair: str
    head: int
    path: str
    share: float
    stderr: float
    predicted: float


@dataclass(frozen=True)
class Runs:
    """One row run on both prompts of a pair, and on every mixture of their query, keys and values."""

    row: Row
    pair: Pair

    @cached_property
    def outputs(self) -> dict[frozenset[Source], Outputs]:
        """Every head's output, by the sources that are from the corrupted prompt."""
        parts = zip(self.pair.clean.split(_CHUNK), self.pair.corrupted.split(_CHUNK), strict=True)
        runs = [_eight_runs(self.row, clean, corrupted) for clean, corrupted in parts]
        return {sources: torch.cat([run[sources] for run in runs]) for sources in runs[0]}

    @property
    def clean(self) -> Outputs:
        return self.outputs[frozenset()]

    @property
    def corrupted(self) -> Outputs:
        return self.outputs[frozenset(_SOURCES)]

    @property
    def total(self) -> Predictions:
        """The total effect: what the corruption does to the prediction."""
        return self.corrupted.sum(1) - self.clean.sum(1)

    def receiver(self, direction: Direction) -> Outputs:
        return self.clean if direction == "noising" else self.corrupted

    def patched(self, path: Path, heads: Sequence[int], direction: Direction = "noising") -> Predictions:
        """The receiver's prediction with a part of some heads from the donor."""
        donated = frozenset(_REACHES[path])
        donor = self.outputs[donated if direction == "noising" else frozenset(_SOURCES) - donated]
        receiver = self.receiver(direction)
        return torch.where(chosen_at(heads, receiver.shape[1])[:, None], donor, receiver).sum(1)

    @cached_property
    def interactions(self) -> dict[str, Outputs]:
        """m(S) of every nonempty set of sources: what each adds to every head's output, beyond its subsets.

        The seven sum to o_h(corrupted) - o_h(clean), whatever the model (inclusion-exclusion).
        """
        terms = {}
        for members in _nonempty(_SOURCES):
            term = torch.zeros_like(self.clean)
            for subset in [(), *_nonempty(members)]:
                term += (-1) ** (len(members) - len(subset)) * self.outputs[frozenset(subset)]
            terms[" ".join(members)] = term
        return terms

    def metrics(self, prediction: Predictions, direction: Direction, spread: PerPrompt) -> Metrics:
        """Of a patched prediction; `spread` is the model's (yhat - E yhat)^2."""
        change, change_stderr = ratio_error((prediction - self.receiver(direction).sum(1)).square().flatten(), spread)
        clean, corrupted, now = (
            (self.pair.target - yhat).square().flatten()
            for yhat in (self.clean.sum(1), self.corrupted.sum(1), prediction)
        )
        if not _is_resolved(corrupted - clean):
            return Metrics(change, change_stderr, None, None)
        return Metrics(change, change_stderr, *ratio_error(corrupted - now, corrupted - clean))


def patching(
    row: Row | str,
    heads: Sequence[HeadVerdict],
    task: Task,
    *,
    prompts: int = 2000,
    seed: int = 0,
    thresholds: Thresholds = THRESHOLDS,
    confidence: float = CONFIDENCE,
) -> ProbeResult:
    """The measurements of activation and path patching.

    Args:
        row: from `row_or_reason`; a reason leaves everything undecided.
        heads: taxonomy of the model.
        task: draws the prompts.
        prompts: how many.
        seed: of the prompts.
        thresholds: bounds that decide.
        confidence: of the intervals that decide.
    """
    generator = generator_for(seed, "probe")
    batch = task.sample(prompts, generator=generator, dtype=torch.float64)
    subject = subject_or_reason(row, heads, batch)
    if isinstance(subject, str):
        return _undecided(subject)
    pairs = [make_pair(name, batch, task, generator) for name in PAIRS]
    measured = [
        _path_sum_gap(subject, pairs, other_engine(subject.row), thresholds),
        _head_loss_share(subject, thresholds, judge_at(confidence), anisotropic=not is_isotropic(task)),
    ]
    return ProbeResult("patching", tuple(measured))


def other_engine(row: Row) -> Predictor:
    """The same model by the engine that trains, which knows nothing of paths."""
    collapsed = Collapsed(row.kq[None], row.ov[None])
    return lambda z: fused_prediction(collapsed, z[None])[0]


def make_pair(name: str, batch: Batch, task: Task, generator: torch.Generator) -> Pair:
    """The clean prompts and corrupted ones of a kind for which theory knows the patched output.

    Args:
        name: one of `PAIRS`.
        batch: the clean prompts.
        task: what they were drawn from.
        generator: draws the other coefficients.

    Raises:
        ConfigError: an unknown name.
    """
    z, d = batch.z.clone(), task.d
    if name == "other_beta":
        # y + delta^T x is what the same covariates and noise give with coefficients beta + delta
        delta = torch.randn(len(z), d, 1, generator=generator, dtype=z.dtype) * sqrt(signal_variance(task) / d)
        z[:, :-1, d:] += z[:, :-1, :d] @ delta
    elif name == "other_query":
        z[:, -1] = z[:, -1].roll(1, 0)
    elif name == "covariates_shifted":
        z[:, :-1, :d] += 1.0
    elif name == "labels_shifted":
        z[:, :-1, d:] += 1.0
    elif name == "example_moved":
        z[:, 0, :d] += 1.0
    elif name == "other_prompt":
        z = z.roll(1, 0)
    else:
        raise ConfigError(f"there is no pair '{name}'; choose from {', '.join(PAIRS)}.", field="pair")
    return Pair(name, batch.z, z, batch.target)


def patched(
    row: Row,
    receiver: Prompts,
    donor: Checked[Prompts],
    path: Path,
    *,
    heads: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
) -> Predictions:
    """The receiver's prediction with one part of its computation from the donor.

    Args:
        row: the model.
        receiver, donor: prompts of equal shape.
        path: which part.
        heads: in which heads; all by default.
        positions: at which context tokens; all by default. A head's output has no positions.

    Raises:
        ConfigError: positions of an output, or prompts of different shapes.
    """
    require_same_shape(receiver, donor)
    if path == "output" and positions is not None:
        raise ConfigError(
            f"positions {list(positions)} were given for a head's output, which has none; patch 'value' or 'pattern'.",
            field="positions",
        )
    n_heads, length = row.kq.shape[0], receiver.shape[1] - 1
    chosen = chosen_at(heads, n_heads)[:, None] & chosen_at(positions, length)
    parts = zip(receiver.split(_CHUNK), donor.split(_CHUNK), strict=True)
    return torch.cat([_patched(row, own, other, path, chosen) for own, other in parts])


def patch(
    model: Runs,
    ideal: Runs,
    path: Path,
    *,
    heads: Sequence[int] | None = None,
    direction: Direction = "noising",
    step: float | None = None,
) -> Patch:
    """One patch of the model beside the same patch of the idealised heads, and of debiased GD.

    Args:
        model, ideal: runs on the same pair.
        path: what is patched.
        heads: in which heads; all by default.
        direction: which prompt receives.
        step: of debiased GD, where it is to be compared: only when all heads are patched.
    """
    pair, everywhere = model.pair, tuple(range(model.clean.shape[1]))
    heads = everywhere if heads is None else tuple(heads)
    clean = model.clean.sum(1)
    spread = (clean - clean.mean()).square().flatten()
    found, predicted = (
        runs.metrics(runs.patched(path, heads, direction), direction, spread) for runs in (model, ideal)
    )
    gradient = None
    if step is not None and heads == everywhere:
        moved, still = (theory.debiased_gd(z, step) for z in _mixed(*pair.ends(direction), _REACHES[path], model.row.d))
        gradient = ratio_error((moved - still).square().flatten(), spread)[0]
    agrees = is_near(found.change, predicted.change, AGREEMENT)
    return Patch(pair.name, direction, path, heads, found, predicted, gradient, agrees)


def path_shares(model: Runs, ideal: Runs) -> tuple[PathShare, ...]:
    """Each head's share of the total effect, by output and by source with interactions."""
    found, predicted = ({"output": runs.corrupted - runs.clean, **runs.interactions} for runs in (model, ideal))
    shares = []
    for head, path in product(range(model.clean.shape[1]), found):
        value, stderr = _share(found[path][:, head], model.total)
        shares.append(
            PathShare(model.pair.name, head, path, value, stderr, _share(predicted[path][:, head], ideal.total)[0])
        )
    return tuple(shares)


def _path_sum_gap(subject: Subject, pairs: Sequence[Pair], predict: Predictor, bounds: Thresholds) -> Measurement:
    """|sum of path effects - total effect| / total, root mean squares, worst over pairs and over the two sums.

    The total effect comes from the fused engine, so it is not the same sum written twice. A model that a corruption does
    not move has no total effect to divide by; then the spread of the predictions stands in.
    """
    spread = float(subject.outputs.sum(1).std())
    step = sum(h.mu * h.omega for h in subject.heads)
    gaps, patches = {}, []
    for pair in pairs:
        runs, ideal = Runs(subject.row, pair), Runs(subject.ideal, pair)
        total = predict(pair.corrupted) - predict(pair.clean)
        clean = predict(pair.clean)
        by_head = torch.stack([runs.patched("output", [h.head]) - clean for h in subject.heads]).sum(0)
        by_source = torch.stack(list(runs.interactions.values())).sum((0, 2))
        gaps[pair.name] = max(_rms(effects - total) for effects in (by_head, by_source)) / max(_rms(total), spread)
        patches += _patches(runs, ideal, step)
        if pair.name == "other_prompt":
            shares = path_shares(runs, ideal)
    worst = max(gaps, key=lambda name: gaps[name])
    return Measurement.judged(
        "path_sum_gap",
        gaps[worst],
        threshold=bounds.path_sum_gap,
        reference=0.0,
        detail={
            "prompts": len(subject.batch.z),
            "worst_pair": worst,
            "agree": sum(p.agrees for p in patches),
            "of": len(patches),
            "patches": [p.to_dict() for p in patches],
            "shares": [asdict(share) for share in shares],
        },
    )


def _patches(runs: Runs, ideal: Runs, step: float) -> list[Patch]:
    """All heads by every path; single heads by their output, both ways where everything about the prompt changes."""
    found = [patch(runs, ideal, path, step=step) for path in ("query", "key", "value", "scores", "output")]
    directions = get_args(Direction) if runs.pair.name == "other_prompt" else ("noising",)
    for head, direction in product(range(runs.clean.shape[1]), directions):
        found.append(patch(runs, ideal, "output", heads=[head], direction=direction))
    return found


def _head_loss_share(subject: Subject, bounds: Thresholds, judge: Judge, *, anisotropic: bool) -> Measurement:
    """The largest departure of a head's share of the explained loss from the share of its idealised self.

        share_h = E[o_h (2 t - yhat)] / (E t^2 - loss),   sum_h share_h = 1

    The shares themselves always sum to 1, and any split between heads of a sign is as good as another, so what can be
    judged is whether (omega, mu) explain them.
    """
    target = subject.batch.target
    shares, stderrs, deviations, resolved = [], [], [], True
    for outputs in (subject.outputs, subject.ideal_outputs):
        parts = (outputs * (2 * target - outputs.sum(1))[:, None]).sum(2)
        explained = parts.sum(1)
        if float(explained.mean()) <= 0:
            return Measurement.undecided(
                "head_loss_share",
                "the heads explain none of the targets' variance, so there is nothing to share",
                threshold=bounds.head_loss_share,
            )
        resolved &= _is_resolved(explained)
        share = parts.mean(0) / explained.mean()
        deviation = (parts - share * explained[:, None]) / explained.mean()  # delta method
        shares.append(share)
        deviations.append(deviation)
        stderrs.append(deviation.std(0) / sqrt(len(deviation)))
    gap = (shares[0] - shares[1]).abs()
    gap_stderr = (deviations[0] - deviations[1]).std(0) / sqrt(len(target))
    worst = int(gap.argmax())
    per_head = {
        head.name: {"share": float(share), "stderr": float(stderr), "predicted": float(predicted)}
        for head, share, stderr, predicted in zip(subject.heads, shares[0], stderrs[0], shares[1], strict=True)
    }
    measured = judge(
        "head_loss_share",
        float(gap[worst]),
        stderr=float(gap_stderr[worst]),
        threshold=bounds.head_loss_share,
        reference=0.0,
        detail={
            "prompts": len(target),
            "sum": float(shares[0].sum()),
            "worst_head": subject.heads[worst].name,
            "per_head": per_head,
        },
    )
    if not resolved:
        why = "what the heads explain is not told apart from nothing: draw more prompts"
        measured = replace(measured, passed=None, reason=why)
    return replace(measured, passed=None, reason=_ANISOTROPIC) if anisotropic else measured


def _patched(row: Row, receiver: Prompts, donor: Prompts, path: Path, chosen: Chosen) -> Predictions:
    scores, values = row.scores(receiver, receiver), row.values(receiver)
    if path == "output":
        own, other = attend(scores, values), attend(row.scores(donor, donor), row.values(donor))
        return torch.where(chosen[:, :1], other, own).sum(1)
    if path == "value":
        values = torch.where(chosen[..., None], row.values(donor), values)
        return attend(scores, values).sum(1)
    queries = receiver if path == "key" else donor
    keys = receiver if path == "query" else donor
    other = row.scores(queries, keys)
    if path == "pattern":
        pattern = torch.where(chosen, other.softmax(-1), scores.softmax(-1))
        return torch.einsum("bhl,bhlo->bo", pattern, values)
    return attend(torch.where(chosen, other, scores), values).sum(1)


def _eight_runs(row: Row, clean: Prompts, corrupted: Prompts) -> dict[frozenset[Source], Outputs]:
    prompts = (clean, corrupted)
    scores = {(q, k): row.scores(prompts[q], prompts[k]) for q, k in product((0, 1), repeat=2)}
    values = [row.values(z) for z in prompts]
    outputs: dict[frozenset[Source], Outputs] = {}
    for q, k, v in product((0, 1), repeat=3):
        donated: list[Source] = [source for source, given in zip(_SOURCES, (q, k, v), strict=True) if given]
        outputs[frozenset(donated)] = attend(scores[q, k], values[v])
    return outputs


def _nonempty(members: Sequence[Source]) -> list[tuple[Source, ...]]:
    return [subset for size in range(1, len(members) + 1) for subset in combinations(members, size)]


def _mixed(receiver: Prompts, donor: Prompts, sources: Sequence[Source], d: int) -> tuple[Prompts, Prompts]:
    """The receiver with the parts of a prompt that these sources are to gradient descent, and the receiver itself."""
    z = receiver.clone()
    parts = {
        "query": (slice(None), slice(-1, None)),
        "key": (slice(None), slice(None, -1), slice(None, d)),
        "value": (slice(None), slice(None, -1), slice(d, None)),
    }
    for source in sources:
        z[parts[source]] = donor[parts[source]]
    return z, receiver


def _share(effect: Predictions, total: Predictions) -> tuple[float, float]:
    return ratio_error((effect * total).flatten(), total.square().flatten())


def _rms(values: Predictions) -> float:
    return float(values.square().mean().sqrt())


def _is_resolved(values: PerPrompt) -> bool:
    """The mean differs from zero by more than its error."""
    mean, stderr = mean_error(values)
    return abs(mean) > _RESOLVED * stderr


def chosen_at(indices: Sequence[int] | None, count: int) -> Bool[torch.Tensor, " index"]:
    """True at these indices; everywhere by default."""
    chosen = torch.full((count,), indices is None)
    chosen[list(indices or ())] = True
    return chosen


def _undecided(reason: str) -> ProbeResult:
    return ProbeResult("patching", tuple(Measurement.undecided(name, reason) for name in NAMES))


def require_same_shape(clean: Prompts, corrupted: Checked[Prompts]) -> None:
    if clean.shape != corrupted.shape:
        raise ConfigError(
            f"clean and corrupted prompts must have one shape, [batch pos token]; got {tuple(clean.shape)} and "
            f"{tuple(corrupted.shape)}. Activations of another length do not fit.",
            field="corrupted",
        )
