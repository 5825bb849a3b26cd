"""Asks a model every question and puts the answers into one report."""

from collections.abc import Sequence
from typing import Any

import torch
from transformer_lens import HookedTransformer

from .._types import Checked
from ..circuits import Circuits, circuits
from ..errors import ConfigError, ModelError, nearest
from ..models import Coordinates
from ..models import _tl as tl
from ..results import ProbeReport, ProbeResult
from ..tasks import Task, generator_for
from .ablation import ablation
from .equivalence import equivalence
from .fidelity import circuit_gap, deciding_nothing, reason_more_than_circuits
from .interchange import interchange, low_level
from .patching import patching
from .row import forward_prediction, row_or_reason
from .structure import structure
from .taxonomy import classify
from .thresholds import THRESHOLDS, Thresholds
from .verdict import conclude

PROBES = ("structure", "equivalence")
"""The default probes; the taxonomy of heads comes with every report."""

CAUSAL_PROBES = ("ablation", "patching", "interchange")
"""Interventions, asked on request: what the model does with its weights. They join the verdict of a report they are in."""

_ALL = (*PROBES, *CAUSAL_PROBES)

_COMPARED = 32  # prompts on which model and circuits are held against each other


def probe(
    model: Checked[HookedTransformer],
    task: Task,
    *,
    seed: int = 0,
    prompts: int | None = None,
    probes: Sequence[str] = PROBES,
    thresholds: Thresholds = THRESHOLDS,
    coordinates: Coordinates | None = None,
) -> ProbeReport:
    """Which algorithm did this model learn? All default probes, one report.

    Args:
        model: a `HookedTransformer`; its parameters, hooks and the global random state are left alone.
        task: what it was trained on.
        seed: of the prompts on which it is evaluated; the same seed gives the same report.
        prompts: how many for `equivalence`; by default the sample grows until every measurement is decided, from 25,000
            to 100,000, and from 5,000 to 20,000 for models that need their full forward pass.
        probes: which questions to ask, of `PROBES` and `CAUSAL_PROBES`; the latter draw prompts of their own number.
        thresholds: bounds that decide; the defaults are calibrated on planted models.
        coordinates: where the task's coordinates are in the residual stream of a model with its own embedding.

    Returns:
        ProbeReport; `report.passed` says whether the model is debiased gradient descent, `report.verdict` what it is.

    Raises:
        ModelError: not a `HookedTransformer`, of another width than the task's tokens, or with weights that are not
            finite.
        ConfigError: an unknown probe, or fewer than 2 prompts.
    """
    model = tl.require_hooked_transformer(model)
    for name in probes:
        if name not in _ALL:
            raise ConfigError(
                f"there is no probe '{name}'; choose from {', '.join(_ALL)}.{nearest(name, _ALL)}", field="probes"
            )
    found = _finite(circuits(model, task, coordinates=coordinates))
    if prompts is not None and (isinstance(prompts, bool) or not isinstance(prompts, int) or prompts < 2):
        raise ConfigError(f"prompts must be a whole number of at least 2; got {prompts!r}.", field="prompts")
    heads = classify(found, thresholds)
    low = low_level(model, found, task, coordinates)
    few = task.sample(_COMPARED, generator=generator_for(0, "fit"), dtype=torch.float64).z
    gap = circuit_gap(forward_prediction(model, few, coordinates), found, few)
    reason = reason_more_than_circuits(model, found, gap, coordinates)

    def ask(name: str) -> ProbeResult:
        if name == "structure":
            result = structure(found, heads, task, thresholds)
            return result if reason is None or not heads else deciding_nothing(result, reason)
        if name == "equivalence":
            asked = low.row or (lambda z: forward_prediction(model, z, coordinates))
            # a step that is read off matrices which are not the model would be somebody else's step
            own = () if reason else heads
            return equivalence(asked, own, task, prompts=prompts, seed=seed, thresholds=thresholds)
        if name == "interchange":
            return interchange(low, heads, task, seed=seed)
        causal = {"ablation": ablation, "patching": patching}[name]
        return causal(row_or_reason(model, found, heads, few, coordinates), heads, task, seed=seed)

    results = [ask(name) for name in _ALL if name in probes]
    return _report(found, heads, results, task, seed, thresholds)


def probe_circuits(found: Circuits, task: Task, *, seed: int = 0, thresholds: Thresholds = THRESHOLDS) -> ProbeReport:
    """The probes that need the weights only; what a training run asks at every capture."""
    heads = classify(_finite(found), thresholds)
    return _report(found, heads, [structure(found, heads, task, thresholds)], task, seed, thresholds)


def _finite(found: Circuits) -> Circuits:
    """The same circuits; a model that diverged is refused, for no measurement of it means anything."""
    numbers = {"KQ": found.kq[found.identifiable.unsqueeze(1).expand_as(found.kq)], "OV": found.ov}
    for name, values in numbers.items():
        if not bool(values.isfinite().all()):
            raise ModelError(
                f"{name} of this model holds a NaN or an infinity, so its training diverged; probe an earlier step, or "
                "train with a smaller lr."
            )
    return found


def _report(
    found: Circuits, heads: Any, results: Sequence[ProbeResult], task: Task, seed: int, thresholds: Thresholds
) -> ProbeReport:
    verdict = conclude(heads, results, thresholds)
    return ProbeReport(
        heads=heads,
        results=tuple(results),
        verdict=verdict.sentence,
        algorithm=verdict.algorithm,
        task=task.to_dict(),
        model={"n_layers": found.n_layers, "n_heads": found.n_heads, "attention_scale": list(found.scale)},
        probe_seed=seed,
        notes=verdict.notes,
    )
