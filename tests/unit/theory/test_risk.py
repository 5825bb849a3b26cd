"""Risk formulas against Monte Carlo, their defining properties, and the numbers published for them."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from scipy.stats import chi2

from icl_mechinterp import theory
from icl_mechinterp.errors import ConfigError

PROBLEMS = [(5, 40, 0.1), (3, 10, 0.5), (8, 4, 0.0), (4, 1, 0.2)]
STANDARD_ERRORS = 4


def assert_is_mean(draws: torch.Tensor, expected: float) -> None:
    """The expected value lies within four standard errors of the sample mean."""
    stderr = draws.std().item() / math.sqrt(draws.numel())
    assert abs(draws.mean().item() - expected) < STANDARD_ERRORS * stderr


def test_values_of_the_published_setting():
    assert theory.optimal_step(5, 40, 0.1) == pytest.approx(0.8791, abs=5e-5)
    assert theory.optimal_gd_step(5, 40, 0.1) == pytest.approx(0.8602, abs=5e-5)
    assert theory.debiased_gd_risk(theory.optimal_step(5, 40, 0.1), 5, 40, 0.1) == pytest.approx(0.24286, abs=5e-6)
    assert theory.gd_risk(theory.optimal_gd_step(5, 40, 0.1), 5, 40, 0.1) == pytest.approx(0.23978, abs=5e-6)
    assert theory.equal_risk_step(5, 40, 0.1) == pytest.approx(0.936, abs=5e-4)


@pytest.mark.parametrize(("d", "L", "noise"), PROBLEMS)
def test_risks_are_the_mean_squared_errors_of_the_predictors(d, L, noise, sample_prompts):
    z, target = sample_prompts(20_000, d, L, noise)
    for eta in (0.5, 0.897):
        assert_is_mean((theory.debiased_gd(z, eta)[:, 0] - target) ** 2, theory.debiased_gd_risk(eta, d, L, noise))
        assert_is_mean((theory.gd(z, eta)[:, 0] - target) ** 2, theory.gd_risk(eta, d, L, noise))
    assert_is_mean((theory.ridge(z, d * noise)[:, 0] - target) ** 2, theory.bayes_risk(d, L, noise))


@pytest.mark.parametrize(("d", "L", "noise"), [(5, 40, 0.1), (10, 20, 3.0), (7, 3, 0.0)])
def test_optimal_steps_minimise_the_exact_risks(d, L, noise):
    debiased = minimize_scalar(lambda eta: theory.debiased_gd_risk(eta, d, L, noise), tol=1e-12)
    vanilla = minimize_scalar(lambda eta: theory.gd_risk(eta, d, L, noise), tol=1e-12)
    assert debiased.x == pytest.approx(theory.optimal_step(d, L, noise), abs=1e-7)
    assert vanilla.x == pytest.approx(theory.optimal_gd_step(d, L, noise), abs=1e-7)
    assert debiased.fun == pytest.approx(1 + noise - (L - 1) / L * theory.optimal_step(d, L, noise), rel=1e-12)


@pytest.mark.parametrize(("d", "L", "noise"), [(5, 40, 0.1), (10, 20, 3.0), (7, 3, 0.0)])
def test_equal_risk_step_is_where_the_order_changes(d, L, noise):
    eta = theory.equal_risk_step(d, L, noise)
    assert theory.debiased_gd_risk(eta, d, L, noise) == pytest.approx(theory.gd_risk(eta, d, L, noise), rel=1e-12)
    assert theory.debiased_gd_risk(0.99 * eta, d, L, noise) > theory.gd_risk(0.99 * eta, d, L, noise)
    assert theory.debiased_gd_risk(1.01 * eta, d, L, noise) < theory.gd_risk(1.01 * eta, d, L, noise)


@pytest.mark.parametrize("L", [1, 2, 30])
def test_bayes_risk_of_one_covariate_is_a_chi_square_integral(L):
    noise = 0.3
    # In u = log x, so that the density of one degree of freedom has no singularity.
    trace, _ = quad(lambda u: math.exp(u) * chi2.pdf(math.exp(u), L) / (math.exp(u) + noise), -60, 8, limit=400)
    assert theory.bayes_risk(1, L, noise) == pytest.approx(noise * (1 + trace), rel=1e-7)


def test_bayes_risk_at_small_noise_is_ordinary_least_squares():
    """E tr (X^T X)^{-1} = d/(L - d - 1), the mean of the inverse Wishart distribution."""
    noise = 1e-11
    assert theory.bayes_risk(5, 40, noise) / noise == pytest.approx(1 + 5 / 34, rel=1e-9)
    assert theory.bayes_risk(20, 40, noise) / noise == pytest.approx(1 + 20 / 19, rel=1e-9)


@pytest.mark.parametrize(("d", "L", "expected"), [(5, 40, 0.0), (5, 5, 0.0), (5, 3, 0.4), (5, 1, 0.8)])
def test_bayes_risk_without_noise_is_what_the_context_leaves_out(d, L, expected):
    assert theory.bayes_risk(d, L, 0) == pytest.approx(expected, abs=1e-15)
    assert theory.bayes_risk(d, L, 1e-13) == pytest.approx(expected, abs=1e-6)


def test_bayes_risk_with_large_noise_is_the_prior_variance_and_the_noise():
    assert theory.bayes_risk(5, 40, 1e7) == pytest.approx(1 + 1e7, rel=1e-12)


def test_risks_approach_their_limits_like_one_over_size():
    noise, xi = 0.1, 0.125
    sizes = np.array([25, 50, 100])
    bayes_gap = theory.bayes_risk(sizes, sizes / xi, noise) - theory.bayes_risk_limit(xi, noise)
    step = theory.optimal_step(sizes, sizes / xi, noise)
    step_gap = theory.debiased_gd_risk(step, sizes, sizes / xi, noise) - theory.debiased_gd_risk_limit(xi, noise)
    np.testing.assert_allclose(bayes_gap[:-1] / bayes_gap[1:], 2, rtol=0.02)
    np.testing.assert_allclose(step_gap[:-1] / step_gap[1:], 2, rtol=0.02)


def test_limits_of_the_published_example():
    """xi = .2, noise = 3, L = 100, d = 20: theory 3.4444 and 3.4051, ratio 1.0115 with bound 1.0231."""
    debiased, bayes = theory.debiased_gd_risk_limit(0.2, 3), theory.bayes_risk_limit(0.2, 3)
    assert debiased == pytest.approx(3.4444, abs=5e-5)
    assert bayes == pytest.approx(3.4051, abs=5e-5)
    assert debiased / bayes == pytest.approx(1.0115, abs=1e-4)
    assert theory.bayes_ratio_bound(0.2, 3) == pytest.approx(1.0231, abs=5e-5)
    # Within the tolerance of the published simulation, 3.442-3.452 and 3.404-3.414.
    assert theory.debiased_gd_risk(theory.optimal_step(20, 100, 3), 20, 100, 3) == pytest.approx(3.444, abs=0.03)
    assert theory.bayes_risk(20, 100, 3) == pytest.approx(3.405, abs=0.03)


def test_ratio_bound_holds_on_a_grid():
    """Theorem 1.3: no violation on 60 x 60 points of xi and noise in [.01, 20]."""
    grid = np.geomspace(0.01, 20, 60)
    xi, noise = np.meshgrid(grid, grid)
    ratio = theory.debiased_gd_risk_limit(xi, noise) / theory.bayes_risk_limit(xi, noise)
    violations = ratio > theory.bayes_ratio_bound(xi, noise) * (1 + 1e-12)
    assert violations.shape == (60, 60)
    assert violations.sum() == 0
    assert (ratio >= 1 - 1e-12).all()


def test_bayes_limit_keeps_its_digits_for_long_contexts():
    xi, noise = 1e-9, 0.1
    assert theory.bayes_risk_limit(xi, noise) - noise == pytest.approx(noise * xi, rel=1e-6)
    assert theory.bayes_ratio_bound(0.2, 0) == math.inf


def test_ridge_is_far_below_one_step():
    """Ridge .1144 at L = 40; the best model in the pattern has 2.1 times the Bayes risk."""
    bayes = theory.bayes_risk(5, 40, 0.1)
    assert bayes == pytest.approx(0.1144, abs=2e-3)
    ratio = theory.debiased_gd_risk(theory.optimal_step(5, 40, 0.1), 5, 40, 0.1) / bayes
    assert ratio == pytest.approx(2.1, abs=0.05)


@pytest.mark.parametrize(
    ("risk", "published", "deviation"),
    [
        (lambda L: theory.gd_risk(0.897, 5, L, 0.1), [0.6350, 0.3729, 0.2413, 0.1951, 0.1757, 0.1625], 1.7),
        (lambda L: theory.debiased_gd_risk(0.897, 5, L, 0.1), [0.6093, 0.3708, 0.2432, 0.1969, 0.1772, 0.1639], 1.7),
        (lambda L: theory.bayes_risk(5, L, 0.1), [0.1955, 0.1331, 0.1144, 0.1096, 0.1075, 0.1053], 1.4),
    ],
    ids=["gd", "debiased_gd", "ridge"],
)
def test_published_curves_of_the_estimators(risk, published, deviation):
    """The paper's estimator comparison at step .897, 50,000 test prompts a point, within three standard errors.

    `deviation` is the standard deviation of a squared error over its mean, measured at L = 40.
    """
    exact = risk(np.array([10, 20, 40, 60, 80, 100]))
    np.testing.assert_allclose(published, exact, rtol=3 * deviation / math.sqrt(50_000))


def test_linear_attention_with_a_fixed_scale_fails_at_other_lengths():
    """Trained at L = 40 it divides by 40 for ever: gradient descent with step .852 L/40, worse again beyond L = 45."""
    L = np.array([10, 20, 30, 40, 45, 50, 60, 70, 80, 90, 100])
    published = [0.753, 0.488, 0.318, 0.239, 0.233, 0.251, 0.355, 0.549, 0.824, 1.19, 1.67]
    risk = theory.gd_risk(0.852 * L / 40, 5, L, 0.1)
    np.testing.assert_allclose(risk, published, rtol=0.02)
    assert L[risk.argmin()] == 45


@pytest.mark.parametrize(("d", "L", "published"), [(10, 20, 0.052), (20, 40, 0.031), (10, 100, 0.011)])
def test_the_summary_table_lies_below_the_floor(d, L, published):
    """A popular summary gives multi-head errors that no noise level allows, label noise left out or not."""
    noise = np.concatenate([[0], np.geomspace(1e-6, 1e3, 200)])
    floor = theory.debiased_gd_risk(theory.optimal_step(d, L, noise), d, L, noise) - noise
    vanilla_floor = theory.gd_risk(theory.optimal_gd_step(d, L, noise), d, L, noise) - noise
    assert floor.min() == floor[0]
    assert floor.min() > 6 * published
    assert vanilla_floor.min() > 6 * published


@pytest.mark.parametrize(
    ("d", "L", "noise", "debiased", "vanilla", "bayes"),
    [
        (10, 20, 0, 0.367, 0.355, 0),
        (10, 20, 0.1, 0.387, 0.375, 0.090),
        (10, 20, 1, 0.525, 0.512, 0.421),
        (10, 20, 3, 0.683, 0.672, 0.650),
        (20, 40, 0, 0.350, 0.344, 0),
        (20, 40, 0.1, 0.371, 0.365, 0.087),
        (20, 40, 1, 0.513, 0.506, 0.418),
        (10, 100, 0, 0.100, 0.099, 0),
        (10, 100, 0.1, 0.108, 0.107, 0.011),
        (10, 100, 1, 0.175, 0.174, 0.100),
    ],
)
def test_risks_beside_the_summary_table(d, L, noise, debiased, vanilla, bayes):
    """Label noise left out; the reference values have three decimals, the Bayes column from Monte Carlo."""
    assert theory.debiased_gd_risk(theory.optimal_step(d, L, noise), d, L, noise) - noise == pytest.approx(
        debiased, abs=6e-4
    )
    assert theory.gd_risk(theory.optimal_gd_step(d, L, noise), d, L, noise) - noise == pytest.approx(vanilla, abs=6e-4)
    assert theory.bayes_risk(d, L, noise) - noise == pytest.approx(bayes, abs=1e-3)


def test_numbers_give_a_float_and_arrays_broadcast():
    for value in (
        theory.optimal_step(5, 40, 0.1),
        theory.debiased_gd_risk(0.5, 5, 40, 0),
        theory.bayes_risk(5, 40, 1),
        theory.bayes_risk_limit(1, 1),
        theory.bayes_ratio_bound(1, 1),
    ):
        assert type(value) is float
    noise = np.array([[0.1], [1.0]])
    risks = theory.bayes_risk(5, [10, 20, 40], noise)
    assert isinstance(risks, np.ndarray)
    assert risks.shape == (2, 3)
    assert risks.dtype == np.float64
    assert risks[1, 2] == theory.bayes_risk(5, 40, 1.0)
    assert theory.debiased_gd_risk(torch.tensor([0.1, 0.2]), 5, 40, 0.1).shape == (2,)


@pytest.mark.parametrize(
    ("call", "field", "parts"),
    [
        (lambda: theory.optimal_step(0, 40, 0.1), "d", ["d must be at least 1", "got 0", "number of covariates"]),
        (lambda: theory.gd_risk(1, 5, -3, 0.1), "L", ["L must be at least 1", "got -3", "context tokens"]),
        (lambda: theory.bayes_risk(5, 40, -0.1), "noise", ["noise must be at least 0", "got -0.1", "variance"]),
        (lambda: theory.optimal_step(5, 40, math.nan), "noise", ["noise must be finite", "nan"]),
        (lambda: theory.bayes_risk(5, 40.5, 0.1), "L", ["L must be a whole number", "40.5", "round"]),
        (lambda: theory.bayes_risk_limit(0, 0.1), "xi", ["xi must be above 0", "got 0", "d/L"]),
        (lambda: theory.optimal_step(5, [40, -1, -2], 0.1), "L", ["L must be at least 1", "got -2"]),
        (lambda: theory.optimal_step(5, "many", 0.1), "L", ["L must be numbers", "many"]),
        (lambda: theory.optimal_step(5, [1, 2], [0.1] * 3), None, ["must broadcast", "L (2,)", "noise (3,)"]),
    ],
)
def test_mistakes_are_explained(call, field, parts):
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.field == field
    for part in parts:
        assert part in str(caught.value)
