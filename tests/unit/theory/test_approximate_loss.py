"""The approximate loss: its series, its gradient, where it is least, and how far it is from the true loss."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from icl_mechinterp import theory
from icl_mechinterp.errors import ConfigError
from icl_mechinterp.theory._approximate_loss import approximate_loss_gradient

D, L, NOISE = 5, 40, 0.1


def series(omega: np.ndarray, mu: np.ndarray, d: float, L: float, noise: float) -> float:
    """Taylor form: s2 + (1 - mu.omega)^2 + (1 + s2)/L [(sum mu)^2 + sum_k d^k/k! (sum mu omega^k)^2]."""
    powers = sum(d**k / math.factorial(k) * (mu @ omega**k) ** 2 for k in range(60))
    return noise + (1 - mu @ omega) ** 2 + (1 + noise) / L * powers


def random_heads(heads: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(0, 0.3, heads), rng.normal(0, 2, heads)


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_closed_form_is_the_sum_of_its_taylor_series(heads):
    omega, mu = random_heads(heads, seed=heads)
    assert theory.approximate_loss(omega, mu, D, L, NOISE) == pytest.approx(series(omega, mu, D, L, NOISE), rel=1e-12)


def test_gradient_is_that_of_autograd():
    omega, mu = random_heads(4, seed=0)
    scales, values = (torch.tensor(v, requires_grad=True) for v in (omega, mu))
    overlap = torch.exp(D * torch.outer(scales, scales))
    second = torch.outer(scales, scales) + (1 + NOISE) / L * overlap
    (1 + NOISE - 2 * values @ scales + values @ second @ values).backward()
    along_omega, along_mu = approximate_loss_gradient(omega, mu, D, L, NOISE)
    np.testing.assert_allclose(along_omega, scales.grad, rtol=1e-12)
    np.testing.assert_allclose(along_mu, values.grad, rtol=1e-12)


def test_values_of_the_published_setting():
    assert theory.approximate_loss([0.13, -0.13], [3.45, -3.45], D, L, NOISE) == pytest.approx(0.2214, abs=5e-5)
    assert theory.solution_manifold(0.1261, D, L, NOISE) == pytest.approx(3.48, abs=0.01)
    assert theory.solution_manifold(0.129, D, L, NOISE) == pytest.approx(3.41, abs=0.01)


@pytest.mark.parametrize("gamma", [0.01, 0.13, 0.4])
def test_manifold_is_the_best_choice_of_values(gamma):
    """No values of a +-gamma pair do better, sum-zero or not; the minimum is manifold_loss."""
    value = theory.solution_manifold(gamma, D, L, NOISE)
    omega = np.array([gamma, -gamma])
    best = minimize(
        lambda mu: theory.approximate_loss(omega, mu, D, L, NOISE),
        x0=[1.1 * value, -0.8 * value],
        jac=lambda mu: approximate_loss_gradient(omega, mu, D, L, NOISE)[1],
        tol=1e-12,
    )
    np.testing.assert_allclose(best.x, [value, -value], rtol=1e-6)
    assert theory.manifold_loss(gamma, D, L, NOISE) == pytest.approx(best.fun, rel=1e-10)


def test_manifold_does_not_care_how_heads_share_a_value():
    gamma = 0.2
    value = theory.solution_manifold(gamma, D, L, NOISE)
    omega, mu = [gamma, gamma, -gamma, -gamma, 0], [0.3 * value, 0.7 * value, -0.9 * value, -0.1 * value, 0]
    assert theory.approximate_loss(omega, mu, D, L, NOISE) == pytest.approx(
        theory.manifold_loss(gamma, D, L, NOISE), rel=1e-12
    )


def test_manifold_loss_rises_from_the_risk_of_the_optimal_step():
    losses = theory.manifold_loss(np.geomspace(1e-3, 1, 50), D, L, NOISE)
    assert (np.diff(losses) > 0).all()
    assert losses[0] == pytest.approx(1 + NOISE - theory.optimal_step(D, L, NOISE), rel=1e-9)
    step = 2 * 1e-3 * theory.solution_manifold(1e-3, D, L, NOISE)
    assert step == pytest.approx(theory.optimal_step(D, L, NOISE), rel=1e-9)


def test_manifold_at_huge_scales_predicts_nothing():
    assert theory.solution_manifold(20, D, L, NOISE) == 0
    assert theory.manifold_loss(20, D, L, NOISE) == 1 + NOISE


def test_single_head_optimum_minimises_the_approximate_loss():
    omega, mu = theory.single_head_optimum(D, L, NOISE)
    best = minimize(lambda head: theory.approximate_loss(head[0], head[1], D, L, NOISE), x0=[0.3, 1.0], tol=1e-14)
    np.testing.assert_allclose(best.x, [omega, mu], rtol=1e-5)
    assert (omega, mu) == pytest.approx((0.4472, 1.628), abs=5e-4)
    assert theory.approximate_loss(omega, mu, D, L, NOISE) == pytest.approx(0.3721, abs=5e-5)


def test_true_loss_lies_slightly_above_where_models_live_and_below_in_the_corner():
    """Published: L - L~ in (.01, .033) for the most part, down to about -.1 at omega = .2, mu = 6. 20,000 prompts."""
    for gamma, value in [(0.05, 3.0), (0.13, 3.45), (0.2, 2.0)]:
        loss, stderr = theory.kernel_regressor_loss([gamma, -gamma], [value, -value], D, L, NOISE)
        gap = loss - theory.approximate_loss([gamma, -gamma], [value, -value], D, L, NOISE)
        assert 0.01 - 4 * stderr < gap < 0.033 + 4 * stderr
    loss, stderr = theory.kernel_regressor_loss([0.2, -0.2], [6, -6], D, L, NOISE)
    assert loss - theory.approximate_loss([0.2, -0.2], [6, -6], D, L, NOISE) == pytest.approx(-0.11, abs=0.02)


def test_leading_axes_broadcast_and_numbers_are_one_head():
    omega, mu = np.linspace(0, 0.2, 3)[:, None, None], np.linspace(0, 6, 4)[:, None]
    signs = np.array([1.0, -1.0])
    landscape = theory.approximate_loss(omega * signs, mu * signs, D, L, NOISE)
    assert landscape.shape == (3, 4)
    assert landscape[2, 3] == theory.approximate_loss([0.2, -0.2], [6, -6], D, L, NOISE)
    assert type(theory.approximate_loss(0.4, 1.6, D, L, NOISE)) is float
    assert theory.approximate_loss(0.4, 1.6, D, L, NOISE) == theory.approximate_loss([0.4], [1.6], D, L, NOISE)


@pytest.mark.parametrize(
    ("call", "field", "parts"),
    [
        (
            lambda: theory.approximate_loss([0.1, 0.2], [1, 2, 3], D, L, NOISE),
            "mu",
            ["one entry per head", "(2,)", "(3,)", "last axis"],
        ),
        (lambda: theory.approximate_loss(0.1, 1, 0, L, NOISE), "d", ["d must be at least 1", "got 0"]),
        (lambda: theory.solution_manifold(0, D, L, NOISE), "gamma", ["gamma must be above 0", "got 0"]),
        (lambda: theory.manifold_loss(-0.1, D, L, NOISE), "gamma", ["gamma must be above 0", "got -0.1"]),
        (lambda: theory.single_head_optimum(D, 0, NOISE), "L", ["L must be at least 1", "context tokens"]),
        (lambda: theory.approximate_loss([[0.1], [0.1, 0.2]], 1, D, L, NOISE), "omega", ["omega must be numbers"]),
    ],
)
def test_mistakes_are_explained(call, field, parts):
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.field == field
    for part in parts:
        assert part in str(caught.value)
