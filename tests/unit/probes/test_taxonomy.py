"""Labels, shares and margins of heads whose numbers are worked out by hand."""

import pytest
import torch

from icl_mechinterp.circuits import Circuits
from icl_mechinterp.probes import THRESHOLDS, classify
from tests.planted import Heads, heads


def circuits(planted: Heads) -> Circuits:
    return Circuits(planted.kq[None], planted.ov[None], planted.kq.shape[-1] - 1, (1.0,))


@pytest.mark.parametrize(
    ("omega", "mu", "label"),
    [(0.1, 3.0, "positive"), (-0.1, -3.0, "negative"), (0.1, -3.0, "mixed"), (-0.1, 3.0, "mixed"), (0.0, 3.0, "dummy")],
)
def test_the_signs_of_omega_and_mu_give_the_label(omega, mu, label):
    assert classify(circuits(heads(3, [omega], [mu])))[0].label == label


def test_shares_are_parts_of_the_mass():
    found = classify(circuits(heads(2, [0.1, -0.2, 0.5], [3.0, -2.0, 0.6])))  # masses .3, .4, .3
    assert [h.share for h in found] == pytest.approx([0.3, 0.4, 0.3])
    assert [(h.layer, h.head) for h in found] == [(0, 0), (0, 1), (0, 2)]
    assert [h.omega for h in found] == pytest.approx([0.1, -0.2, 0.5])
    assert [h.mu for h in found] == pytest.approx([3.0, -2.0, 0.6])


@pytest.mark.parametrize(("factor", "label"), [(0.99, "dummy"), (1.01, "positive")])
def test_the_share_margin_is_where_a_dummy_begins(factor, label):
    share = factor * THRESHOLDS.dummy_share
    head = classify(circuits(heads(2, [1.0, 1.0], [1 - share, share])))[1]
    assert head.label == label
    assert head.margin == pytest.approx(abs(share - THRESHOLDS.dummy_share))


@pytest.mark.parametrize(("ratio", "label"), [(0.5, "positive"), (2.0, "mixed")])
def test_a_diagonal_has_both_signs_from_a_ratio_on(ratio, label):
    other = -ratio * THRESHOLDS.opposite_diagonal
    assert classify(circuits(heads(3, [[1.0, 1.0, other]], [1.0])))[0].label == label


def test_a_mean_of_zero_hides_no_head():
    planted = heads(2, [[1.0, 1.0], [1.0, -1.0]], [1.0, 0.2])
    head = classify(circuits(planted))[1]
    assert head.share == 0
    assert head.label == "mixed"
    # its strength, |mu| mean |diagonal|, is 1/6 of the whole; a hidden head becomes a dummy at hidden_share
    assert head.margin == pytest.approx(min(THRESHOLDS.dummy_share, 1 / 6 - THRESHOLDS.hidden_share))


def test_noise_on_a_flat_diagonal_is_not_a_mixed_head():
    planted = heads(4, [0.13, -0.13, [0.003, -0.004, 0.002, -0.001]], [3.4, -3.4, 0.5])
    assert classify(circuits(planted))[2].label == "dummy"


def test_only_entries_that_behaviour_depends_on_are_read():
    planted = heads(3, [0.1, -0.1], [3.0, -3.0])
    kq = planted.kq.clone()
    kq[..., 3] = 1e6
    assert classify(circuits(planted.replaced(kq=kq))) == classify(circuits(planted))


def test_structural_departures_leave_the_label():
    planted = heads(3, [0.1, -0.1], [3.0, -3.0])
    kq, ov = planted.kq.clone(), planted.ov.clone()
    kq[0, 0, 1], kq[0, 3, 0], ov[0, 0, 1] = 5.0, 5.0, 5.0
    assert classify(circuits(Heads(kq, ov))) == classify(circuits(planted))


def test_models_whose_heads_may_read_each_other_have_no_taxonomy():
    planted = heads(3, [0.1], [3.0])
    two_layers = Circuits(planted.kq[None].repeat(2, 1, 1, 1), planted.ov[None].repeat(2, 1, 1, 1), 3, (1.0, 1.0))
    assert classify(two_layers) == ()
    two_labels = Circuits(torch.zeros(1, 1, 5, 5), torch.zeros(1, 1, 2, 5), 3, (1.0,))
    assert classify(two_labels) == ()
