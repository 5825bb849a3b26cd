"""The low-variance loss of kernel heads against plain test prompts, exact limits, and its own error bars."""

import math

import numpy as np
import pytest
import torch

from icl_mechinterp import theory
from icl_mechinterp.errors import ConfigError

D, L, NOISE = 5, 40, 0.1
PAIR = np.array([1.0, -1.0])


@pytest.mark.parametrize(
    ("omega", "mu"),
    [([0.13, -0.13], [3.45, -3.45]), ([0.518], [1.494]), ([0.2, -0.1, 0.0], [1.5, -2.0, 0.4])],
    ids=["pair", "single", "three"],
)
def test_loss_is_that_of_plain_prompts(omega, mu, sample_prompts):
    """40,000 plain prompts; the difference in joint standard errors."""
    z, target = sample_prompts(40_000, D, L, NOISE)
    errors = (theory.nadaraya_watson(z, omega, mu)[:, 0] - target) ** 2
    loss, stderr = theory.kernel_regressor_loss(omega, mu, D, L, NOISE)
    plain = errors.std().item() / math.sqrt(len(errors))
    assert abs(loss - errors.mean().item()) < 4 * math.hypot(stderr, plain)
    assert stderr < plain


def test_a_flat_pair_has_the_exact_risk_of_debiased_gd():
    gamma, eta = 1e-3, 0.7
    loss, stderr = theory.kernel_regressor_loss(gamma * PAIR, eta / (2 * gamma) * PAIR, D, L, NOISE, prompts=2_000)
    assert loss == pytest.approx(theory.debiased_gd_risk(eta, D, L, NOISE), abs=1e-6)
    assert stderr < 1e-6


def test_flat_heads_average_the_labels():
    """omega = 0: yhat = mu * mean(y), with loss 1 + s2 + mu^2 (1 + s2)/L."""
    loss, stderr = theory.kernel_regressor_loss(0.0, 2.0, D, L, NOISE)
    assert abs(loss - (1 + NOISE + 4 * (1 + NOISE) / L)) < 4 * stderr


def test_one_context_token_is_copied():
    """L = 1: yhat = mu y_1 whatever omega, with loss 1 + s2 + mu^2 (1 + s2)."""
    loss, stderr = theory.kernel_regressor_loss(0.7, 0.5, 3, 1, 0.2)
    assert abs(loss - (1.2 + 0.25 * 1.2)) < 4 * stderr


def test_standard_error_is_the_spread_over_seeds():
    """60 seeds of 1,000 prompts: the spread has a relative error of 9 %."""
    results = np.array(
        [theory.kernel_regressor_loss(0.3, 1.5, D, L, NOISE, prompts=1_000, seed=seed) for seed in range(60)]
    )
    assert results[:, 0].std(ddof=1) == pytest.approx(results[:, 1].mean(), rel=0.35)


def test_loss_of_the_published_weights():
    """H = 1 trained weights (.518, 1.494) near .405 and better than the optimum of the approximate loss."""
    trained, stderr = theory.kernel_regressor_loss(0.518, 1.494, D, L, NOISE, prompts=40_000)
    predicted, _ = theory.kernel_regressor_loss(*theory.single_head_optimum(D, L, NOISE), D, L, NOISE, prompts=40_000)
    assert trained == pytest.approx(0.405, abs=0.007)
    assert 0 < predicted - trained < 0.008
    pair, _ = theory.kernel_regressor_loss(0.13 * PAIR, 3.45 * PAIR, D, L, NOISE)
    assert pair == pytest.approx(0.243, abs=1e-3)
    assert stderr < 2e-3


def test_the_loss_is_flat_in_the_common_scale():
    """min over mu of the loss of a pair, relative to its value at gamma .01: 20,000 shared prompts."""
    reference = {0.05: -0.00002, 0.1: 0.00002, 0.13: 0.00017, 0.2: 0.0013, 0.3: 0.0056, 0.4: 0.0130}
    profile = {gamma: best_loss(gamma) for gamma in (0.01, *reference)}
    assert profile[0.01] == pytest.approx(
        theory.debiased_gd_risk(theory.optimal_step(D, L, NOISE), D, L, NOISE), abs=1e-4
    )
    for gamma, above in reference.items():
        assert profile[gamma] - profile[0.01] == pytest.approx(above, abs=4e-4 + 0.1 * abs(above))


def best_loss(gamma: float) -> float:
    moments = theory.head_moments(gamma * PAIR, D, L, NOISE, generator=torch.Generator().manual_seed(0))
    return theory.kernel_loss(np.linalg.solve(moments.G, moments.b), *moments, NOISE)


def test_moments_give_the_loss_of_every_choice_of_values():
    omega, seed = [0.2, -0.15], 3
    b, G = theory.head_moments(omega, D, L, NOISE, prompts=3_000, generator=torch.Generator().manual_seed(seed))
    assert b.shape == (2,)
    assert G.shape == (2, 2)
    np.testing.assert_allclose(G, G.T, rtol=1e-10)
    for mu in ([1.0, -2.0], [3.0, 0.0]):
        loss, _ = theory.kernel_regressor_loss(omega, mu, D, L, NOISE, prompts=3_000, seed=seed)
        assert theory.kernel_loss(mu, b, G, NOISE) == pytest.approx(loss, rel=1e-12)
    best = np.linalg.solve(G, b)
    for change in np.eye(2) * 0.01:
        assert theory.kernel_loss(best + change, b, G, NOISE) > theory.kernel_loss(best, b, G, NOISE)


@pytest.mark.slow
@pytest.mark.parametrize(("d", "L"), [(5, 40), (10, 20), (10, 100)])
def test_many_heads_hardly_improve_on_debiased_gd(d, L):
    """12 heads on a grid of scales, values fitted on 40,000 prompts, judged on others: less than .003 gained."""
    omega = np.linspace(-0.4, 0.4, 12)
    moments = theory.head_moments(omega, d, L, NOISE, prompts=40_000, generator=torch.Generator().manual_seed(1))
    mu = np.linalg.lstsq(moments.G, moments.b, rcond=1e-9)[0]
    loss, stderr = theory.kernel_regressor_loss(omega, mu, d, L, NOISE, prompts=40_000, seed=5)
    floor = theory.debiased_gd_risk(theory.optimal_step(d, L, NOISE), d, L, NOISE)
    assert floor - 0.003 < loss < floor + 4 * stderr


@pytest.mark.parametrize(
    ("call", "field", "parts"),
    [
        (lambda: theory.kernel_regressor_loss(0.1, 1, D, L, NOISE, prompts=5), "prompts", ["at least 100", "got 5"]),
        (lambda: theory.kernel_regressor_loss(0.1, 1, 2.5, L, NOISE), "d", ["whole number", "2.5"]),
        (lambda: theory.kernel_regressor_loss(0.1, 1, D, 0, NOISE), "L", ["L must be at least 1", "got 0"]),
        (lambda: theory.kernel_regressor_loss([0.1, 0.2], [1] * 3, D, L, NOISE), "mu", ["one entry per head"]),
        (
            lambda: theory.head_moments(np.zeros((2, 2)), D, L, NOISE, generator=torch.Generator()),
            "omega",
            ["[head]", "(2, 2)"],
        ),
        (lambda: theory.kernel_loss([1, 2], [1, 2], np.eye(3), NOISE), "mu", ["[head head]", "(3, 3)", "head_moments"]),
        (lambda: theory.kernel_loss(1, 1, 1, -1), "noise", ["noise must be at least 0", "got -1"]),
    ],
)
def test_mistakes_are_explained(call, field, parts):
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.field == field
    for part in parts:
        assert part in str(caught.value)
