"""What happens without a head, or without the parts of a head that theory has no use for?

Every intervention is done twice on the same prompts: to the model, and to the idealised heads of its taxonomy,

    yhat_ideal = sum_h mu_h sum_l softmax_l(omega_h x_l.x_q) y_l                        (2503.12734, section 1.3)

so that each effect stands beside the effect that (omega, mu) alone predict. A model can look right on paper and still
compute with something else; then the two part. Heads are ablated by their outputs o_h, whose sum is the prediction:

    zero      o_h -> 0
    mean      o_h -> its mean over the prompts
    resample  o_h -> that of another prompt (the batch shifted cyclically; several heads take theirs from the same one)
    theory    o_h -> mu_h sum_l softmax_l(omega_h x_l.x_q) y_l, dummies with their own mu and omega

Weights are changed by surgery, which gives another `Row`. Distances are E(yhat' - yhat)^2 / Var(yhat), yhat the clean
prediction of the model, for the predicted ones too, so that both have one unit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Float

from .._types import Predictions
from ..results import HeadLabel, HeadVerdict, Measurement, ProbeResult
from ..tasks import Batch, Task, generator_for
from .row import Outputs, Row
from .statistics import CONFIDENCE, Estimate, Judge, judge_at, mean, ratio_of_means
from .structure import reason_without_theory, target_variance
from .thresholds import THRESHOLDS, Thresholds

Kind: TypeAlias = Literal["zero", "mean", "resample", "theory"]
"""What an ablated head is replaced with; see the module's formulas."""

Operation: TypeAlias = Literal[
    "keep_structure",  # only KQ's diagonal and OV's label entry stay
    "remove_diagonal",  # KQ's diagonal on the covariates is zero, the rest stays
    "remove_label_entry",  # OV's label entry is zero, the rest stays
    "zero_sum",  # mu_h less |mu_h| sum mu / sum |mu|, so that the sum over heads is zero
    "mean_diagonal",  # every diagonal entry of a KQ is its mean
    "drop_dummies",  # the OV of dummy heads is zero
    "swap_signs",  # KQ and OV of every head change sign
]

NAMES = ("keep_structure", "remove_diagonal_loss", "drop_dummies", "head_effect_gap")

_EFFECT_KINDS: tuple[Kind, ...] = ("zero", "mean", "resample")


@dataclass(frozen=True)
class Effect:
    """What an intervention did, beside what the idealised heads say it does.

    Attributes:
        loss, stderr: E(t - yhat')^2, target noise included.
        distance, distance_stderr: E(yhat' - yhat)^2 / Var(yhat).
        predicted_loss: the loss of the idealised heads after the same intervention, on the same prompts.
        predicted_distance: their E(yhat' - yhat)^2, over the model's Var(yhat).
        loss_gap, loss_gap_stderr: |loss / predicted_loss - 1|, its error from paired prompts.
        agrees: loss and distance are what the idealised heads say, within the default `head_effect_gap` (of
            the predicted loss; of Var(yhat), or of the predicted distance when that is larger).
    """

    loss: float
    stderr: float
    distance: float
    distance_stderr: float
    predicted_loss: float
    predicted_distance: float
    loss_gap: float
    loss_gap_stderr: float
    agrees: bool


@dataclass(frozen=True)
class Ablation:
    """The outputs of some heads replaced."""

    heads: tuple[int, ...]
    kind: Kind
    effect: Effect

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"heads": list(self.heads), "kind": self.kind, **vars(self.effect)}


@dataclass(frozen=True)
class Surgery:
    """The weights of some heads changed; `heads` are those whose KQ or OV is another one afterwards."""

    heads: tuple[int, ...]
    kind: Operation
    effect: Effect

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"heads": list(self.heads), "kind": self.kind, **vars(self.effect)}


@dataclass(frozen=True)
class Subject:
    """A model on the table: its row, the idealised heads, and the prompts on which both are compared.

    Attributes:
        row: the model.
        heads: its taxonomy.
        batch: prompts and targets, float64.
    """

    row: Row
    heads: tuple[HeadVerdict, ...]
    batch: Batch

    @cached_property
    def ideal(self) -> Row:
        return Row.ideal(self.heads, self.row.d)

    @cached_property
    def outputs(self) -> Outputs:
        """Each head's contribution to the clean prediction."""
        return self.row.outputs(self.batch.z)

    @cached_property
    def ideal_outputs(self) -> Outputs:
        return self.ideal.outputs(self.batch.z)

    @property
    def is_constant(self) -> bool:
        """The spread of the prediction is what rounding leaves of its size."""
        clean = self.outputs.sum(1)
        return float(clean.std()) <= 100 * torch.finfo(clean.dtype).eps * float(clean.abs().max())

    def effect(self, prediction: Predictions, ideal_prediction: Predictions) -> Effect:
        """Of an intervention after which the model and the idealised heads predict this."""
        clean, ideal_clean = self.outputs.sum(1), self.ideal_outputs.sum(1)
        spread = _flat((clean - clean.mean()).square())
        errors, ideal_errors = (_flat((self.batch.target - yhat).square()) for yhat in (prediction, ideal_prediction))
        loss, stderr = mean_error(errors)
        distance, distance_stderr = ratio_error(_flat((prediction - clean).square()), spread)
        predicted, _ = ratio_error(_flat((ideal_prediction - ideal_clean).square()), spread)
        relative, gap_stderr = ratio_error(errors, ideal_errors)
        gap = abs(relative - 1)
        agrees = gap < THRESHOLDS.head_effect_gap and is_near(distance, predicted, THRESHOLDS.head_effect_gap)
        predicted_loss = float(ideal_errors.mean())
        return Effect(loss, stderr, distance, distance_stderr, predicted_loss, predicted, gap, gap_stderr, agrees)


def subject_or_reason(row: Row | str, heads: Sequence[HeadVerdict], batch: Batch) -> Subject | str:
    """The model on these prompts, or why interventions on it say nothing."""
    if isinstance(row, str):
        return row
    subject = Subject(row, tuple(heads), batch)
    return "the model predicts a constant: its variance is zero" if subject.is_constant else subject


def ablation(
    row: Row | str,
    heads: Sequence[HeadVerdict],
    task: Task,
    *,
    prompts: int = 2000,
    seed: int = 0,
    thresholds: Thresholds = THRESHOLDS,
    confidence: float = CONFIDENCE,
) -> ProbeResult:
    """The measurements of ablation and weight surgery.

    Args:
        row: from `row_or_reason`; a reason leaves everything undecided.
        heads: taxonomy of the model.
        task: draws the prompts.
        prompts: how many.
        seed: of the prompts.
        thresholds: bounds that decide.
        confidence: of the intervals that decide.
    """
    judge = judge_at(confidence)
    batch = task.sample(prompts, generator=generator_for(seed, "probe"), dtype=torch.float64)
    subject = subject_or_reason(row, heads, batch)
    if isinstance(subject, str):
        return _undecided(subject)
    surgeries = {name: operate(subject, name) for name in get_args(Operation)}
    measured = [
        _keep_structure(surgeries, prompts, thresholds, judge),
        _remove_diagonal_loss(subject, surgeries["remove_diagonal"], task, thresholds, judge),
        _drop_dummies(subject, surgeries["drop_dummies"], thresholds, judge),
        _head_effect_gap(subject, prompts, thresholds, judge),
    ]
    reason = reason_without_theory(task)
    if reason is not None:
        measured = [m if m.name == "drop_dummies" else replace(m, passed=None, reason=reason) for m in measured]
    return ProbeResult("ablation", tuple(measured))


def ablate(subject: Subject, heads: Sequence[int], kind: Kind) -> Ablation:
    """Some heads ablated together; none gives the clean loss exactly, all of them zeroed the predictor zero."""
    predictions = (
        ablated(outputs, heads, kind, theory=subject.ideal_outputs).sum(1)
        for outputs in (subject.outputs, subject.ideal_outputs)
    )
    return Ablation(tuple(heads), kind, subject.effect(*predictions))


def ablated(outputs: Outputs, heads: Sequence[int], kind: Kind, *, theory: Outputs, shift: int = 1) -> Outputs:
    """The outputs of all heads with those of `heads` replaced.

    Args:
        outputs: clean ones.
        heads: which to replace.
        kind: with what.
        theory: what the taxonomy says the outputs are.
        shift: prompts by which "resample" moves the batch.
    """
    replacement = {
        "zero": lambda: torch.zeros_like(outputs),
        "mean": lambda: outputs.mean(0, keepdim=True).expand_as(outputs),
        "resample": lambda: outputs.roll(shift, 0),
        "theory": lambda: theory,
    }[kind]()
    changed = outputs.clone()
    changed[:, list(heads)] = replacement[:, list(heads)]
    return changed


def operate(subject: Subject, kind: Operation) -> Surgery:
    """The model, and the idealised heads, after surgery on their weights."""
    changed = operated(subject.row, kind, subject.heads)
    ideal = operated(subject.ideal, kind, subject.heads)
    z = subject.batch.z
    acting = slice(None), slice(None), slice(None, changed.d)  # the query-label column of KQ multiplies zero
    touched = (changed.kq[acting] != subject.row.kq[acting]).any(2).any(1) | (changed.ov != subject.row.ov).any(2).any(
        1
    )
    return Surgery(
        tuple(touched.nonzero().flatten().tolist()), kind, subject.effect(changed.predict(z), ideal.predict(z))
    )


def operated(row: Row, kind: Operation, heads: Sequence[HeadVerdict]) -> Row:
    """The row with other weights."""
    kq, ov, d = row.kq.clone(), row.ov.clone(), row.d
    diagonal, mu = kq.diagonal(dim1=1, dim2=2)[:, :d], ov[:, 0, d]  # views: what is written here is written to kq, ov
    match kind:
        case "keep_structure":
            kept = diagonal.clone(), mu.clone()
            kq.zero_()
            ov.zero_()
            diagonal.copy_(kept[0])
            mu.copy_(kept[1])
        case "remove_diagonal":
            diagonal.zero_()
        case "remove_label_entry":
            mu.zero_()
        case "zero_sum":
            mu.sub_(mu.abs() * mu.sum() / mu.abs().sum().clamp_min(torch.finfo(mu.dtype).tiny))
        case "mean_diagonal":
            diagonal.copy_(diagonal.mean(1, keepdim=True).expand_as(diagonal))
        case "drop_dummies":
            ov[[h.head for h in heads if h.label == "dummy"]] = 0.0
        case "swap_signs":
            kq.neg_()
            ov.neg_()
    return Row(kq, ov, d)


def mean_error(values: Float[torch.Tensor, " prompt"]) -> Estimate:
    """`statistics.mean` of a tensor."""
    return mean(values.numpy())


def ratio_error(numerator: Float[torch.Tensor, " prompt"], denominator: Float[torch.Tensor, " prompt"]) -> Estimate:
    """`statistics.ratio_of_means` of tensors."""
    return ratio_of_means(numerator.numpy(), denominator.numpy())


def is_near(value: float, predicted: float, bound: float) -> bool:
    """Within the bound, in units of Var(yhat) or of the prediction, whichever is larger."""
    return abs(value - predicted) < bound * max(1.0, abs(predicted))


def _keep_structure(surgeries: dict[Operation, Surgery], prompts: int, bounds: Thresholds, judge: Judge) -> Measurement:
    effect = surgeries["keep_structure"].effect
    return judge(
        "keep_structure",
        effect.distance,
        stderr=effect.distance_stderr,
        threshold=bounds.keep_structure,
        reference=0.0,
        unit="Var(yhat)",
        detail={"prompts": prompts, "surgeries": [surgery.to_dict() for surgery in surgeries.values()]},
    )


def _remove_diagonal_loss(
    subject: Subject, surgery: Surgery, task: Task, bounds: Thresholds, judge: Judge
) -> Measurement:
    """Loss without KQ's diagonal; what it explains is estimated, E t^2 is known.

    E (t - yhat)^2 = E t^2 + E (yhat^2 - 2 t yhat), and yhat is nearly zero, so is the error; plain prompts would leave
    one of 4 % at 2,000 prompts.
    """
    z, target = subject.batch
    yhat = operated(subject.row, surgery.kind, subject.heads).predict(z)
    change, stderr = mean_error(_flat(yhat.square() - 2 * target * yhat))
    nothing = target_variance(task)
    return judge(
        "remove_diagonal_loss",
        nothing + change,
        stderr=stderr,
        threshold=bounds.remove_diagonal * nothing,
        rule=">",
        reference=nothing,
        unit="y^2",
        detail={"same_prompts": surgery.effect.loss, "predicted_same_prompts": surgery.effect.predicted_loss},
    )


def _drop_dummies(subject: Subject, surgery: Surgery, bounds: Thresholds, judge: Judge) -> Measurement:
    """Zero, and passed, for a model without dummies."""
    return judge(
        "drop_dummies",
        surgery.effect.distance,
        stderr=surgery.effect.distance_stderr,
        threshold=bounds.drop_dummies,
        reference=0.0,
        unit="Var(yhat)",
        detail={"dummies": [h.name for h in subject.heads if h.label == "dummy"]},
    )


def _head_effect_gap(subject: Subject, prompts: int, bounds: Thresholds, judge: Judge) -> Measurement:
    """The worst relative gap of the loss over single heads and kinds; every ablation stands in the detail."""
    table = [ablate(subject, group, kind) for group, kind in product(_groups(subject.heads), get_args(Kind))]
    single = [a for a in table if len(a.heads) == 1 and a.kind in _EFFECT_KINDS]
    worst = max(single, key=lambda a: a.effect.loss_gap)
    return judge(
        "head_effect_gap",
        worst.effect.loss_gap,
        stderr=worst.effect.loss_gap_stderr,
        threshold=bounds.head_effect_gap,
        reference=0.0,
        detail={
            "prompts": prompts,
            "worst_head": subject.heads[worst.heads[0]].name,
            "worst_kind": worst.kind,
            "table": [a.to_dict() for a in table],
        },
    )


def _groups(heads: Sequence[HeadVerdict]) -> Iterator[tuple[int, ...]]:
    """Every head, the heads of each label, all heads; each set once."""
    by_label = [tuple(h.head for h in heads if h.label == label) for label in get_args(HeadLabel)]
    singles = [(h.head,) for h in heads]
    return (group for group in dict.fromkeys([*singles, *by_label, tuple(h.head for h in heads)]) if group)


def _undecided(reason: str) -> ProbeResult:
    return ProbeResult("ablation", tuple(Measurement.undecided(name, reason) for name in NAMES))


def _flat(values: Predictions) -> Float[torch.Tensor, " prompt"]:
    return values.flatten()
