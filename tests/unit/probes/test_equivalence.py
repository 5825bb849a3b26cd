"""Functional measurements of predictors that are no model at all, and of the search for the nearest kernel."""

import pytest
import torch

from icl_mechinterp import theory
from icl_mechinterp.probes.equivalence import equivalence, fit_kernel
from icl_mechinterp.results import ProbeResult
from icl_mechinterp.tasks import LinearRegression

TASK = LinearRegression(3, 20, 0.1)


def measured(predict) -> ProbeResult:
    return equivalence(predict, (), TASK, prompts=4000, seed=0)


@pytest.mark.parametrize("value", [0.0, 0.7, -1e6], ids=["zero", "constant", "large"])
def test_a_constant_has_no_distances(value):
    found = measured(lambda z: torch.full((len(z), 1), value, dtype=z.dtype))
    for name in found:
        if name != "loss":
            assert found[name].status == "undecided"
            assert found[name].reason == "the model predicts a constant: its variance is zero"
    expected = 1.1 + value**2
    assert abs(found["loss"].value - expected) <= 5 * found["loss"].stderr + 1e-9 * expected


def test_debiased_gd_itself_passes_everything_with_its_own_step_found():
    step = theory.optimal_step(3, 20, 0.1)
    found = measured(lambda z: theory.debiased_gd(z, step))
    assert all(m.passed for m in found.values())
    assert found["distance_debiased_gd"].value == pytest.approx(0, abs=1e-20)
    assert found["loss"].value == pytest.approx(theory.debiased_gd_risk(step, 3, 20, 0.1), abs=1e-9)
    assert found["loss"].detail["step"] == pytest.approx(step)


@pytest.mark.parametrize(
    ("name", "predict"),
    [
        ("distance_gd", lambda z: theory.gd(z, 0.8)),
        ("distance_ridge", lambda z: theory.ridge(z, 0.3)),
        ("distance_nadaraya_watson", lambda z: theory.nadaraya_watson(z, 0.5, 1.4)),
    ],
    ids=["gd", "ridge", "nadaraya_watson"],
)
def test_each_alternative_is_nearest_to_itself(name, predict):
    found = measured(predict)
    assert found[name].passed is False
    assert found["distance_debiased_gd"].passed is False
    distances = {m.name: m.value for m in found.values() if m.name.startswith("distance")}
    assert min(distances, key=lambda key: distances[key]) == name


@pytest.mark.parametrize(("omega", "mu"), [(0.5, 1.4), (-0.5, -1.4), (0.02, 3.0), (0.9, 0.4)])
def test_the_kernel_that_made_the_predictions_is_found(omega, mu, generator):
    batch = TASK.sample(2000, generator=generator, dtype=torch.float64)
    found = fit_kernel(lambda z: theory.nadaraya_watson(z, omega, mu), batch, TASK)
    assert found == pytest.approx((omega, mu), rel=1e-2)


def test_vanilla_gd_moves_with_the_labels_and_covariates():
    found = measured(lambda z: theory.gd(z, 0.8))
    for name in ("shift_covariates", "shift_labels"):
        assert found[name].passed is False
        assert found[name].value == pytest.approx(found[name].detail["vanilla_gd"], rel=0.2)  # its fitted step differs


def test_two_prompts_are_enough_for_an_answer_and_too_few_for_a_verdict():
    found = equivalence(lambda z: theory.debiased_gd(z, 0.5), (), TASK, prompts=2, seed=0)
    assert found["loss"].stderr is not None
