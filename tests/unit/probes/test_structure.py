"""Structural measurements against values worked out by hand."""

import math

import pytest
import torch

from icl_mechinterp import theory
from icl_mechinterp.circuits import Circuits
from icl_mechinterp.probes import THRESHOLDS, classify, structure
from icl_mechinterp.probes.structure import NAMES
from icl_mechinterp.results import ProbeResult
from icl_mechinterp.tasks import LinearRegression
from tests.planted import Heads, heads

TASK = LinearRegression(2, 20, 0.1)


def measured(planted: Heads, task: LinearRegression = TASK) -> ProbeResult:
    circuits = Circuits(planted.kq[None], planted.ov[None], planted.kq.shape[-1] - 1, (1.0,))
    return structure(circuits, classify(circuits), task)


def edited(**entries: float) -> Heads:
    """Two heads of masses .75 and .25: omega 1, -1, mu 3, -1; entries of the first like `kq_01` are replaced."""
    planted = heads(2, [1.0, -1.0], [3.0, -1.0])
    for name, value in entries.items():
        which, index = name.split("_")
        if which == "kq":
            planted.kq[0, int(index[0]), int(index[1])] = value
        else:
            planted.ov[0, 0, int(index)] = value
    return planted


@pytest.mark.parametrize(
    ("name", "entries", "value", "worst"),
    [
        ("off_diagonal_energy", {"kq_01": 1.0}, 0.75 / 3, 1 / 3),
        ("within_head_spread", {"kq_00": 1.5, "kq_11": 0.5}, 0.75 * 0.5, 0.5),
        ("label_key_leakage", {"kq_20": 0.1, "kq_21": -0.2}, 0.75 * 0.2, 0.2),
        ("ov_last_entry", {"ov_0": 4.0}, 0.75 * 3 / 5 + 0.25, 3 / 5),
        ("sign_matching", {"ov_2": -3.0}, 0.25, 0.0),
    ],
)
def test_per_head_measurements_are_weighted_by_mass(name, entries, value, worst):
    found = measured(edited(**entries))[name]
    assert found.value == pytest.approx(value)
    assert found.detail["worst"] == pytest.approx(worst)
    assert found.detail["worst_head"] == "H0"
    assert found.detail["worst_share"] == pytest.approx(0.75)
    assert found.stderr is None
    assert found.passed is False


def test_spread_across_heads():
    found = measured(heads(2, [0.3, -0.1], [1.0, -3.0]))["across_head_spread"]  # equal masses: gamma .2, deviation .1
    assert found.value == pytest.approx(0.5)
    assert found.detail["gamma"] == pytest.approx(0.2)


def test_sums():
    found = measured(heads(2, [0.1, -0.1, 0.0], [3.0, -2.0, 1.0]))
    assert found["zero_sum"].value == pytest.approx(2 / 6)  # the flat head counts
    assert found["effective_step"].value == pytest.approx(0.5)
    assert found["effective_step"].status == "reported"
    optimal = 1 / (1 + 1.1 * 2 / 20)
    assert found["effective_step"].reference == pytest.approx(optimal)
    assert found["effective_step_gap"].value == pytest.approx(abs(0.5 / optimal - 1))


def test_manifold_gap_is_the_larger_of_both_sides():
    gamma = 0.1
    mu = (gamma / 2) / (gamma**2 + 1.1 / 20 * math.sinh(2 * gamma**2))
    found = measured(heads(2, [gamma, -gamma], [1.02 * mu, -0.9 * mu]))["manifold_gap"]
    assert found.value == pytest.approx(0.1)
    assert found.detail["mu_gamma"] == pytest.approx(mu)
    assert theory.solution_manifold(gamma, 2, 20, 0.1) == pytest.approx(mu)


def test_theory_is_asked_with_noise_per_unit_of_signal():
    planted = heads(2, [0.1, -0.1], [4.0, -4.0])
    scaled = LinearRegression(2, 20, 0.4, coefficient_scale=2.0)
    for name in ("effective_step_gap", "manifold_gap"):
        assert measured(planted, scaled)[name].value == pytest.approx(measured(planted)[name].value)


def test_a_mean_of_zero_counts_its_spread_all_the_same():
    """The weighted spread is sum |mu| std / sum |mu omega|, and has a limit when one omega goes to zero."""
    almost, exactly = (
        measured(heads(2, [1.0, [1.0 + mean, -1.0 + mean]], [1.0, 0.5]))["within_head_spread"] for mean in (1e-9, 0.0)
    )
    assert exactly.value == pytest.approx(0.5)
    assert almost.value == pytest.approx(0.5)
    assert math.isfinite(exactly.detail["worst"])
    assert exactly.passed is False


def test_means_of_zero_in_every_head():
    found = measured(heads(2, [[1.0, -1.0], [-1.0, 1.0]], [1.0, -1.0]))
    assert found["within_head_spread"].passed is False
    assert found["across_head_spread"].status == "undecided"
    assert found["manifold_gap"].status == "undecided"
    assert all(math.isfinite(m.value) for m in found.values() if m.value is not None)


@pytest.mark.parametrize(
    ("planted", "name", "reason"),
    [
        (heads(2, [0.0], [0.0]), "off_diagonal_energy", "no head carries mass"),
        (heads(2, [0.0], [0.0]), "zero_sum", "not a finite number"),
        (heads(2, [0.1], [3.0]), "across_head_spread", "needs two"),
        (heads(2, [0.1, 0.1], [3.0, 1.0]), "manifold_gap", "both signs"),
    ],
    ids=["no-mass", "no-values", "one-head", "one-sign"],
)
def test_what_cannot_be_asked_is_undecided_with_its_reason(planted, name, reason):
    found = measured(planted)[name]
    assert found.status == "undecided"
    assert found.threshold == getattr(THRESHOLDS, name)
    assert reason in found.reason


def test_heads_that_cannot_be_classified_leave_everything_undecided():
    circuits = Circuits(torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 1, 4), 3, (1.0, 1.0))
    found = structure(circuits, (), LinearRegression(3, 20, 0.1))
    assert tuple(found) == NAMES
    assert all(m.status == "undecided" and "2 layers" in m.reason for m in found.values())


def test_unidentifiable_entries_are_left_out():
    planted = heads(2, [0.1, -0.1], [4.0, -4.0])
    kq = planted.kq.clone()
    kq[..., 2] = 1e6
    assert measured(planted.replaced(kq=kq)) == measured(planted)
