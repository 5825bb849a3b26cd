"""Gradient flow against an integrator written here, its conservation of what must not rise, and the published times."""

import numpy as np
import pytest

from icl_mechinterp import theory
from icl_mechinterp.errors import ConfigError

D, L, NOISE = 5, 40, 0.1
START = np.array([1e-3, -1e-3])


def runge_kutta(omega: np.ndarray, mu: np.ndarray, noise: float, end: float, steps: int) -> tuple[np.ndarray, ...]:
    """Fourth-order Runge-Kutta on the two-stage update rule of the paper, its series cut at k = 30."""
    k = np.arange(2, 30)[:, None]
    log_factorial = np.cumsum(np.log(np.arange(1, 30)))[k - 1]
    weight = np.exp(k * np.log(D) - log_factorial)

    def velocity(state: np.ndarray) -> np.ndarray:
        omega, mu = np.split(state, 2)
        first = (1 - (1 + (1 + noise) * D / L) * (mu @ omega)) * np.stack([mu, omega])
        moments = (omega**k) @ mu
        along_omega = (k * weight * moments[:, None] * omega ** (k - 1)).sum(0) * mu
        along_mu = mu.sum() + (weight * moments[:, None] * omega**k).sum(0)
        return 2 * (first - (1 + noise) / L * np.stack([along_omega, along_mu])).ravel()

    state, h = np.concatenate([omega, mu]), end / steps
    for _ in range(steps):
        a = velocity(state)
        b = velocity(state + h / 2 * a)
        c = velocity(state + h / 2 * b)
        e = velocity(state + h * c)
        state = state + h / 6 * (a + 2 * b + 2 * c + e)
    return tuple(np.split(state, 2))


@pytest.mark.parametrize(
    ("omega0", "mu0", "noise"),
    [
        (START, START, 0.1),
        (np.array([0.05, -0.12, 0.11, -0.02]), np.array([0.02, 0.1, 0.15, -0.07]), 0.01),
    ],
    ids=["two_heads", "four_heads"],
)
def test_flow_agrees_with_runge_kutta(omega0, mu0, noise):
    omega, mu = theory.gradient_flow(omega0, mu0, D, L, noise, [8.0])
    expected_omega, expected_mu = runge_kutta(omega0, mu0, noise, end=8.0, steps=2_000)
    np.testing.assert_allclose(omega[0], expected_omega, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(mu[0], expected_mu, rtol=1e-7, atol=1e-9)


def test_loss_falls_along_the_flow():
    rng = np.random.default_rng(0)
    omega, mu = theory.gradient_flow(rng.normal(0, 0.3, 3), rng.normal(0, 0.3, 3), D, L, NOISE, np.geomspace(0.1, 100))
    losses = theory.approximate_loss(omega, mu, D, L, NOISE)
    assert (np.diff(losses) < 1e-12).all()


def test_published_two_head_simulation():
    """Times t of the figures belong to the flow on L~/2: ours are t/2.

    The reference values are those of an Euler integration with step .01, so that 1 % is asked from t = 7.5 on; during
    the fast rise before it the exact flow is ahead of them.
    """
    figure_times = np.array([5.5, 6.5, 7.5, 8, 12, 30, 100, 1_000, 2_000, 10_000])
    omega, mu = theory.gradient_flow(START, START, D, L, NOISE, figure_times / 2)
    np.testing.assert_allclose(omega[:, 0], -omega[:, 1], rtol=1e-6)
    np.testing.assert_allclose(mu[:, 0], -mu[:, 1], rtol=1e-6)
    at = {time: (scale, value) for time, scale, value in zip(figure_times, omega[:, 0], mu[:, 0], strict=True)}
    loss = dict(zip(figure_times, np.asarray(theory.approximate_loss(omega, mu, D, L, NOISE)) / 2, strict=True))
    assert at[5.5] == pytest.approx((0.2295, 0.2295), abs=1e-4)
    assert at[6.5] == pytest.approx((0.466, 0.468), abs=5e-4)
    assert at[7.5] == pytest.approx((0.575, 0.615), rel=0.01)
    assert at[12] == pytest.approx((0.505, 0.796), rel=0.01)
    assert at[30] == pytest.approx((0.398, 1.065), rel=0.01)
    assert at[100] == pytest.approx((0.311, 1.396), rel=0.01)
    assert at[1_000] == pytest.approx((0.206, 2.130), rel=0.01)
    assert at[10_000] == pytest.approx((0.14, 3.15), rel=0.01)
    assert loss[7.5] == pytest.approx(0.1452, rel=0.01)
    assert loss[12] == pytest.approx(0.1267, rel=0.01)
    assert max(omega[:, 0]) == pytest.approx(0.576, rel=0.01)


def test_late_scale_falls_like_the_sixth_root_of_time():
    figure_times = np.geomspace(1_000, 10_000, 8)
    omega, mu = theory.gradient_flow(START, START, D, L, NOISE, figure_times / 2)
    slope = np.polyfit(np.log(figure_times), np.log(omega[:, 0]), 1)[0]
    assert slope == pytest.approx(-1 / 6, abs=0.01)
    eta = theory.optimal_step(D, L, NOISE)
    law = (eta**6 * (1 + NOISE) * D**3 * figure_times / (16 * L)) ** (1 / 6)
    np.testing.assert_allclose(mu[:, 0], law, rtol=0.015)


def test_growth_starts_exponentially():
    """While heads are tiny, the common mode of omega and mu grows like exp(2t) on L~."""
    times = np.array([0.5, 1.0])
    omega, mu = theory.gradient_flow(START / 1e3, START / 1e3, D, L, NOISE, times)
    np.testing.assert_allclose(omega[:, 0], 1e-6 * np.exp(2 * times), rtol=1e-5)
    np.testing.assert_allclose(mu[:, 0], 1e-6 * np.exp(2 * times), rtol=1e-5)


@pytest.mark.parametrize("seed", range(2))
def test_four_heads_reach_the_solution_manifold(seed):
    """Random start N(0, .1^2), noise .01: |omega| equal within 4 % at figure time 600, sum of mu zero, +-.125 at 1e4."""
    omega0, mu0 = np.random.default_rng(seed).normal(0, 0.1, (2, 4))
    omega, mu = theory.gradient_flow(omega0, mu0, D, L, 0.01, [300, 5_000])
    scales = np.abs(omega)
    assert scales[0].max() / scales[0].min() < 1.04
    np.testing.assert_allclose(mu.sum(1), 0, atol=1e-4)
    np.testing.assert_allclose(scales[1], 0.125, rtol=0.02)
    assert (np.sign(omega[1]) == np.sign(mu[1])).all()
    gamma = float(scales[1].mean())
    assert mu[1][mu[1] > 0].sum() == pytest.approx(theory.solution_manifold(gamma, D, L, 0.01), rel=1e-3)


def test_time_zero_is_the_start_and_shapes_are_time_head():
    flow = theory.gradient_flow(START, 2 * START, D, L, NOISE, [0.0, 1.0, 2.0])
    assert flow.omega.shape == flow.mu.shape == (3, 2)
    np.testing.assert_array_equal(flow.omega[0], START)
    np.testing.assert_array_equal(flow.mu[0], 2 * START)
    alone = theory.gradient_flow(START, START, D, L, NOISE, [0.0])
    np.testing.assert_array_equal(alone.omega, START[None])
    assert theory.gradient_flow(0.1, 0.1, D, L, NOISE, [1.0]).omega.shape == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "field", "parts"),
    [
        ((START, START, D, L, NOISE, [1.0, 1.0]), "times", ["increasing", "[1.0, 1.0]", "drop repeats"]),
        ((START, START, D, L, NOISE, [-1.0, 1.0]), "times", ["none negative"]),
        ((START, START, D, L, NOISE, []), "times", ["increasing"]),
        ((START, START, D, L, NOISE, 1.0), "times", ["one axis"]),
        ((START, [0.1, 0.2, 0.3], D, L, NOISE, [1.0]), "mu", ["one entry per head", "(2,)", "(3,)"]),
        (([START, START], START, D, L, NOISE, [1.0]), "omega0", ["[head]", "(2, 2)", "one start"]),
        ((START, START, D, L, -1, [1.0]), "noise", ["noise must be at least 0", "got -1"]),
        (([30.0, 30.0], [1, 1], D, L, NOISE, [1.0]), "omega0", ["too large", "overflows", "nearer to 0"]),
    ],
)
def test_mistakes_are_explained(arguments, field, parts):
    with pytest.raises(ConfigError) as caught:
        theory.gradient_flow(*arguments)
    assert caught.value.field == field
    for part in parts:
        assert part in str(caught.value)
