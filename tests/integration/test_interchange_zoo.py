"""Planted and trained models of every class are named by the right algorithm: 20 of 20, and those of none by none."""

from collections.abc import Callable

import pytest
from transformer_lens import HookedTransformer

import icl_mechinterp as icl
from icl_mechinterp import theory
from icl_mechinterp.circuits import circuits
from icl_mechinterp.probes import classify
from icl_mechinterp.probes.interchange import interchange, low_level, realised_algorithm
from icl_mechinterp.results import ProbeResult
from icl_mechinterp.tasks import LinearRegression
from tests.planted import build, heads, on_manifold, optimal_step, sane_group, sane_pair
from tests.planted_algorithms import linear_attention, overwritten

TASK = LinearRegression(5, 40, 0.1)
SHORT = LinearRegression(3, 15, 0.5, coefficient_scale=1.5)
WIDE = LinearRegression(8, 30, 0.2)
EQUAL_RISK = theory.equal_risk_step(5, 40, 0.1)

Maker = Callable[[], HookedTransformer]


def leaky() -> HookedTransformer:
    """Keys that read labels at a third of omega: far more than in a trained model."""
    planted = sane_pair(TASK)
    kq = planted.kq.clone()
    kq[:, 5, :5] += 0.03
    return build(planted.replaced(kq=kq), TASK)


def dense() -> HookedTransformer:
    planted = sane_pair(TASK)
    kq = planted.kq.clone()
    kq[0, 0, 0] *= -1
    kq[0, 1, 3] += 0.1
    return build(planted.replaced(kq=kq), TASK)


PLANTED: dict[str, tuple[str, LinearRegression, Maker]] = {
    "pair": ("debiased_gd", TASK, lambda: build(sane_pair(TASK), TASK)),
    "pair-at-trained-scale": ("debiased_gd", TASK, lambda: build(on_manifold(TASK, 0.15), TASK)),
    "equal-risk-debiased": (
        "debiased_gd",
        TASK,
        lambda: build(sane_pair(TASK, step=EQUAL_RISK / optimal_step(TASK)), TASK),
    ),
    "four-heads": ("debiased_gd", TASK, lambda: build(sane_group(TASK, [0.3, -0.5, 0.15, 0.05]), TASK)),
    "short": ("debiased_gd", SHORT, lambda: build(sane_pair(SHORT), SHORT)),
    "wide": ("debiased_gd", WIDE, lambda: build(sane_pair(WIDE), WIDE)),
    "label-keys": ("debiased_gd", TASK, leaky),
    "kernel": ("nadaraya_watson", TASK, lambda: build(heads(5, [0.518], [1.494]), TASK)),
    "negative-kernel": ("nadaraya_watson", TASK, lambda: build(heads(5, [-0.45], [-1.63]), TASK)),
    "same-sign-trap": ("nadaraya_watson", TASK, lambda: build(heads(5, [0.53, 0.59], [0.96, 0.5]), TASK)),
    "short-kernel": ("nadaraya_watson", SHORT, lambda: build(heads(3, [0.6], [1.2]), SHORT)),
    "linear-attention": ("gd", TASK, lambda: linear_attention(TASK, 0.2, 4.3)),
    "equal-risk-gd": ("gd", TASK, lambda: overwritten(TASK, lambda z: theory.gd(z, EQUAL_RISK))),
    "short-gd": ("gd", SHORT, lambda: overwritten(SHORT, lambda z: theory.gd(z, 0.7), n_layers=2)),
    "ridge": ("ridge", TASK, lambda: overwritten(TASK, lambda z: theory.ridge(z, 0.5))),
    "short-ridge": ("ridge", SHORT, lambda: overwritten(SHORT, lambda z: theory.ridge(z, 1.5 / 1.5**2), n_layers=2)),
    "flat-head": ("mean_of_labels", TASK, lambda: build(heads(5, [0.0], [1.0]), TASK)),
    "flat-heads": ("mean_of_labels", SHORT, lambda: build(heads(3, [0.0, 0.0], [1.2, -0.5]), SHORT)),
}
"""18; the two trained ones make 20."""

OF_NO_CLASS: dict[str, Maker] = {
    "untrained": lambda: icl.attention_only(TASK, 4, seed=3),
    "biased-pair": lambda: build(sane_pair(TASK).with_head(0.0, 0.7), TASK),
    "dense": dense,
    "preconditioned": lambda: build(
        heads(5, [[0.05, 0.08, 0.1, 0.12, 0.15], [-0.05, -0.08, -0.1, -0.12, -0.15]], [4.4, -4.4]), TASK
    ),
}


def asked(model: HookedTransformer, task: LinearRegression, prompts: int) -> ProbeResult:
    found = circuits(model, task)
    return interchange(low_level(model, found, task), classify(found), task, prompts=prompts)


@pytest.mark.parametrize("name", ["pair", "short-kernel", "short-gd", "short-ridge", "flat-heads"])
def test_one_of_each_class(name: str) -> None:
    algorithm, task, make = PLANTED[name]
    assert realised_algorithm(asked(make(), task, prompts=1_000)) == algorithm


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PLANTED))
def test_planted_models_are_named(name: str) -> None:
    algorithm, task, make = PLANTED[name]
    result = asked(make(), task, prompts=20_000)
    assert realised_algorithm(result) == algorithm
    others = [m for n, m in result.items() if n not in (f"interchange_{algorithm}", "normaliser")]
    winner = result[f"interchange_{algorithm}"]
    assert winner.value is not None
    assert winner.value > 0.98, "the calibration: what realises an algorithm scores well above the bound"
    assert all(winner.value > m.value for m in others if m.value is not None)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OF_NO_CLASS))
def test_models_of_no_class_are_named_by_none(name: str) -> None:
    result = asked(OF_NO_CLASS[name](), TASK, prompts=20_000)
    assert realised_algorithm(result) == "none"
    scores = [m.value for n, m in result.items() if n != "normaliser" and m.value is not None]
    assert max(scores) < 0.92, "the calibration: what realises nothing scores well below the bound"


@pytest.mark.slow
@pytest.mark.parametrize(("config", "algorithm"), [("two_head", "debiased_gd"), ("one_head", "nadaraya_watson")])
def test_trained_models_are_named(config: str, algorithm: str, trained_run: Callable[[str], icl.Run]) -> None:
    run = trained_run(config)
    result = asked(run.model(), TASK, prompts=20_000)
    assert realised_algorithm(result) == algorithm
    normaliser = result["normaliser"].value
    assert normaliser is not None
    assert normaliser > 0.7 if algorithm == "debiased_gd" else normaliser < 0.05
