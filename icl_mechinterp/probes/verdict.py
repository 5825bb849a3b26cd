"""From measurements to one sentence: what the model is, or what it fails.

Kinds of evidence are put side by side, never averaged: a model whose function passes while its matrices fail is said to
do just that.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..results import HeadVerdict, Measurement, ProbeResult
from .thresholds import Thresholds

KINDS = {
    "structure": ("structure",),
    "function": ("equivalence",),
    "cause": ("ablation", "patching", "interchange"),
}
"""Kinds of evidence, and the probes that give them."""


class Verdict(NamedTuple):
    """The conclusion of a report.

    Attributes:
        algorithm: "debiased gradient descent", "kernel regressor", "none" or "undecided".
        sentence: the same with its evidence.
        notes: what decides nothing but should be known.
    """

    algorithm: str
    sentence: str
    notes: tuple[str, ...]


def conclude(heads: Sequence[HeadVerdict], results: Sequence[ProbeResult], thresholds: Thresholds) -> Verdict:
    """The verdict over every measurement that was taken."""
    measured = {m.name: m for result in results for m in result.measurements}
    required = [m for m in measured.values() if m.required]
    failed = [m for m in required if m.passed is False]
    undecided = [m for m in required if m.status == "undecided"]
    algorithm, sentence = _conclusion(heads, results, measured, failed, undecided, thresholds)
    return Verdict(algorithm, sentence, _notes(measured.values()))


def _conclusion(
    heads: Sequence[HeadVerdict],
    results: Sequence[ProbeResult],
    measured: dict[str, Measurement],
    failed: list[Measurement],
    undecided: list[Measurement],
    thresholds: Thresholds,
) -> tuple[str, str]:
    evidence = _evidence(heads, measured)
    holds = {kind: _kind_status(results, probes) for kind, probes in KINDS.items()}
    if "distance_debiased_gd" not in measured:  # between two full probes of a training run, or on request
        asked = [kind for kind, status in holds.items() if status != "not asked"]
        names = {
            "structure": "has the structure of debiased gradient descent",
            "cause": "reacts to interventions like it",
        }
        good = " and ".join(names[kind] for kind in asked)
        state = good if not failed and not undecided else _failures(failed, undecided)
        where = "By its weights alone" if asked == ["structure"] else "Undecided, for its function was not asked:"
        return "undecided", f"{where} this model {state}{evidence}."
    if not failed and not undecided:
        return "debiased gradient descent", f"This model is debiased gradient descent{evidence}."
    if _is_kernel(measured, thresholds):
        signs = {h.label for h in heads if h.label != "dummy"}
        one_sign = f", {_heads_of_one_sign(heads)}" if len(signs) == 1 and signs < {"positive", "negative"} else ""
        kernel = measured["distance_nadaraya_watson"].detail
        return "kernel regressor", (
            f"This model is a kernel regressor{one_sign} (omega {kernel['kernel_omega']:+.3f}, mu "
            f"{kernel['kernel_mu']:+.3f}), not debiased gradient descent{evidence}."
        )
    if not failed:
        return "undecided", f"Undecided: this model {_failures(failed, undecided)}{evidence}."
    rest = f"it {_failures(failed, undecided)}{evidence}."
    if holds["function"] == "passed":
        doubts = {"structure": "not with the structure of the theory", "cause": "interventions contradict it"}
        but = " and ".join(text for kind, text in doubts.items() if holds[kind] == "failed")
        return "debiased gradient descent", f"This model computes debiased gradient descent, but {but}: {rest}"
    right = {"structure": "has the structure of debiased gradient descent", "cause": "reacts to interventions like it"}
    yet = " and ".join(text for kind, text in right.items() if holds[kind] == "passed")
    lead = (
        f"{yet}, but does not compute it"
        if yet and holds["function"] == "failed"
        else "is not debiased gradient descent"
    )
    return "none", f"This model {lead}: {rest}"


def _kind_status(results: Sequence[ProbeResult], probes: Sequence[str]) -> str:
    """The worst status of what a kind of evidence requires; "not asked" where there is none."""
    found = {m.status for result in results if result.probe in probes for m in result.measurements if m.required}
    return next((status for status in ("failed", "undecided", "passed") if status in found), "not asked")


def _is_kernel(measured: dict[str, Measurement], thresholds: Thresholds) -> bool:
    """A single kernel is nearer than debiased GD and near enough to be what the model computes."""
    kernel = measured["distance_nadaraya_watson"]
    return kernel.passed is False and kernel.value is not None and kernel.value < thresholds.kernel_distance


def _heads_of_one_sign(heads: Sequence[HeadVerdict]) -> str:
    active = [h for h in heads if h.label != "dummy"]
    return "a single head" if len(active) == 1 else "heads of one sign"


def _evidence(heads: Sequence[HeadVerdict], measured: dict[str, Measurement]) -> str:
    """` (2 heads: 1 positive, 1 negative; effective step 0.884; prediction distance 0.0010)`."""
    parts = []
    if heads:
        labels = [h.label for h in heads]
        counts = [
            f"{labels.count(label)} {label}" for label in ("positive", "negative", "mixed", "dummy") if label in labels
        ]
        parts.append(f"{len(heads)} head{'s' * (len(heads) > 1)}: {', '.join(counts)}")
    step = measured.get("effective_step")
    if step is not None and step.value is not None and step.reference is not None:
        parts.append(f"effective step {step.value:.3f}, theory {step.reference:.3f}")
    for name, text in (("distance_debiased_gd", "distance to debiased GD"), ("loss", "loss")):
        if name in measured and measured[name].value is not None:
            parts.append(f"{text} {measured[name].text}")
    return f" ({'; '.join(parts)})" if parts else ""


def _failures(failed: list[Measurement], undecided: list[Measurement]) -> str:
    parts = []
    if failed:
        parts.append("fails " + ", ".join(f"{m.name} ({m.text}, needs {m.rule} {m.threshold:.3g})" for m in failed))
    if undecided:
        first = undecided[0]
        more = f" and {len(undecided) - 1} more" if len(undecided) > 1 else ""
        parts.append(f"leaves {first.name}{more} undecided ({first.reason})")
    return " and ".join(parts)


def _notes(measured: Iterable[Measurement]) -> tuple[str, ...]:
    """Heads too small to decide that depart from the structure all the same."""
    notes = []
    for m in measured:
        worst, threshold = m.detail.get("worst"), m.threshold
        if m.passed and worst is not None and threshold is not None:
            departs = worst > threshold if m.rule == "<" else worst < threshold
            if departs:
                share = m.detail["worst_share"]
                notes.append(
                    f"{m.detail['worst_head']} has {m.name} {worst:.3g}, past the bound of {threshold:.3g}, with "
                    f"{share:.1%} of the mass: it does not decide."
                )
    return tuple(notes)
