"""Asks a model every question and puts the answers into one report."""

from collections.abc import Sequence
from typing import Any

from transformer_lens import HookedTransformer

from .._types import Checked
from ..circuits import Circuits, circuits
from ..errors import ConfigError, ModelError, nearest
from ..models import Coordinates, reason_not_fused
from ..models import _tl as tl
from ..results import ProbeReport, ProbeResult
from ..tasks import Task
from .ablation import ablation
from .equivalence import equivalence, model_predictor
from .interchange import interchange, low_level
from .patching import patching
from .structure import structure
from .taxonomy import classify
from .thresholds import THRESHOLDS, Thresholds
from .verdict import conclude

PROBES = ("structure", "equivalence")
"""The default probes; the taxonomy of heads comes with every report."""

CAUSAL_PROBES = ("ablation", "patching", "interchange")
"""Interventions, asked on request: what the model does with its weights. They join the verdict of a report they are in."""

_ALL = (*PROBES, *CAUSAL_PROBES)

_PROMPTS = 100_000
_PROMPTS_HOOKED = 5_000  # a full forward pass costs 100 times the query's row


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
        prompts: how many; 100,000 by default, 5,000 for models that need their full forward pass.
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
    fused = reason_not_fused(model) is None
    if prompts is None:
        prompts = _PROMPTS if fused else _PROMPTS_HOOKED
    if isinstance(prompts, bool) or not isinstance(prompts, int) or prompts < 2:
        raise ConfigError(f"prompts must be a whole number of at least 2; got {prompts!r}.", field="prompts")
    heads = classify(found, thresholds)
    results = []
    if "structure" in probes:
        results.append(structure(found, heads, task, thresholds))
    if "equivalence" in probes:
        predict = model_predictor(model, found)
        results.append(equivalence(predict, heads, task, prompts=prompts, seed=seed, thresholds=thresholds))
    if "ablation" in probes:
        results.append(ablation(model, found, heads, task, seed=seed))
    if "patching" in probes:
        results.append(patching(model, found, heads, task, seed=seed))
    if "interchange" in probes:
        results.append(interchange(low_level(model, found, task), heads, task, seed=seed))
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
