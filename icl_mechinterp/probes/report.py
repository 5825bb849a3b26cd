"""Asks a model every question and puts the answers into one report."""

from collections.abc import Callable, Sequence

import torch
from transformer_lens import HookedTransformer

from .._types import Checked, Predictions, Prompts
from ..circuits import Circuits, circuits
from ..errors import ConfigError, ModelError, nearest
from ..models import Coordinates
from ..models import _tl as tl
from ..results import HeadVerdict, ProbeReport, ProbeResult
from ..tasks import Task, generator_for
from .ablation import ablation
from .equivalence import Predictor, equivalence
from .fidelity import circuit_gap, deciding_nothing, reason_more_than_circuits
from .interchange import LowLevel, interchange, low_level
from .patching import patching
from .row import Row, forward_prediction, row_or_reason
from .statistics import asked_again
from .structure import structure
from .taxonomy import classify
from .thresholds import THRESHOLDS, Thresholds
from .verdict import conclude

CAUSAL_PROBES = ("ablation", "patching", "interchange")
"""Interventions: what the model does with its weights."""

PROBES = ("structure", "equivalence", *CAUSAL_PROBES)
"""The default probes, all there are; the taxonomy of heads comes with every report."""

CHECKPOINT_PROBES = ("structure", "equivalence")
"""Those of them that are cheap enough to be asked while a model trains."""

_NUMBERS = 2**26  # in the prompts of an intervention at most, half a GB; interchange draws them in parts
_FEWEST = 100  # prompts at a first look
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
            to 100,000, and from 5,000 to 20,000 for models that need their full forward pass. Interventions draw their
            own: 2,000 to 8,000, and 20,000 to 80,000 for interchange (2,500 to 10,000 by forward passes); fewer where
            prompts are very long or wide.
        probes: which questions to ask, of `PROBES`.
        thresholds: bounds that decide; the defaults are calibrated on planted models.
        coordinates: where the task's coordinates are in the residual stream of a model with its own embedding.

    Returns:
        ProbeReport; `report.passed` says whether the model is debiased gradient descent, `report.verdict` what it is.

    Raises:
        ModelError: not a `HookedTransformer`, of another width than the task's tokens, with weights or predictions that
            are not finite, or with a forward pass that fails.
        ConfigError: no probe or an unknown one, or fewer than 2 prompts.
    """
    model = tl.require_hooked_transformer(model)
    if not probes:
        raise ConfigError(f"probes is empty; choose from {', '.join(PROBES)}.", field="probes")
    for name in probes:
        if name not in PROBES:
            raise ConfigError(
                f"there is no probe '{name}'; choose from {', '.join(PROBES)}.{nearest(name, PROBES)}", field="probes"
            )
    found = _finite(circuits(model, task, coordinates=coordinates))
    if prompts is not None and (isinstance(prompts, bool) or not isinstance(prompts, int) or prompts < 2):
        raise ConfigError(f"prompts must be a whole number of at least 2; got {prompts!r}.", field="prompts")
    heads = classify(found, thresholds)
    few = task.sample(_COMPARED, generator=generator_for(0, "fit"), dtype=torch.float64).z
    gap = circuit_gap(_own_prediction(model, few, coordinates), found, few)
    reason = reason_more_than_circuits(model, found, gap, coordinates, thresholds)

    low = low_level(model, found, task, coordinates)
    asked = questions(
        found,
        heads,
        task,
        model=low.row or (lambda z: forward_prediction(model, z, coordinates)),
        low=low,
        row=row_or_reason(model, found, heads, few, coordinates),
        reason=reason,
        prompts=prompts,
        seed=seed,
        thresholds=thresholds,
    )
    results = [ask() for name, ask in asked.items() if name in probes]
    return _report(found, heads, results, task, seed, thresholds)


def _own_prediction(model: HookedTransformer, z: Prompts, coordinates: Coordinates | None) -> Predictions:
    """Of the model's forward; one that fails or gives no numbers is refused, for nothing could be said of the model."""
    try:
        prediction = forward_prediction(model, z, coordinates)
    except Exception as error:
        raise ModelError(
            f"the model's own forward pass fails on prompts {tuple(z.shape)} ({type(error).__name__}: {error}). Call it "
            "as model(z, start_at_layer=0) to see where, and mend it or its hooks."
        ) from error
    if not bool(prediction.isfinite().all()):
        raise ModelError(
            "the model's own forward pass predicts a NaN or an infinity though its weights are finite: a hook of it does "
            "that. Remove that hook."
        )
    return prediction


def questions(
    found: Circuits,
    heads: Sequence[HeadVerdict],
    task: Task,
    *,
    model: Row | Predictor,
    low: LowLevel,
    row: Row | str,
    reason: str | None,
    prompts: int | None,
    seed: int,
    thresholds: Thresholds = THRESHOLDS,
) -> dict[str, Callable[[], ProbeResult]]:
    """Every probe by name, ready to be asked.

    Args:
        found: the model's circuits.
        heads: its taxonomy.
        task: draws the prompts.
        model: what predicts.
        low: what parts are exchanged in.
        row: what is intervened on, or why that says nothing.
        reason: why the circuits decide nothing about this model, if so.
        prompts, seed, thresholds: as in `probe`.
    """
    options = {"seed": seed, "thresholds": thresholds}

    def ask_structure() -> ProbeResult:
        result = structure(found, heads, task, thresholds)
        return result if reason is None or not heads else deciding_nothing(result, reason)

    def growing(probe: Callable[..., ProbeResult], first: int, numbers: int = _NUMBERS) -> Callable[[], ProbeResult]:
        prompts = first_look(task, first, numbers)
        return lambda: asked_again(lambda n, confidence: probe(prompts=n, confidence=confidence), prompts=prompts)

    # a step that is read off matrices which are not the model would be somebody else's step
    own = () if reason else heads
    return {
        "structure": ask_structure,
        "equivalence": lambda: equivalence(model, own, task, prompts=prompts, **options),
        "ablation": growing(lambda **sample: ablation(row, heads, task, **sample, **options), 2_000),
        "patching": growing(lambda **sample: patching(row, heads, task, **sample, **options), 2_000),
        "interchange": growing(
            lambda **sample: interchange(low, own, task, **sample, **options),
            20_000 if low.row else 2_500,
            4 * _NUMBERS,
        ),
    }


def first_look(task: Task, prompts: int, numbers: int) -> int:
    """So many prompts, or fewer where four times as many, the third look, would be more than so many numbers."""
    size = (task.context + 1) * (task.d + task.n_out)
    return min(prompts, max(_FEWEST, numbers // (4 * size)))


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
    found: Circuits,
    heads: tuple[HeadVerdict, ...],
    results: Sequence[ProbeResult],
    task: Task,
    seed: int,
    thresholds: Thresholds,
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
