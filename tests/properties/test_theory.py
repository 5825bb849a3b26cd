"""Properties of the theory that hold for every problem: equivariances of predictors, order of risks, shape of losses."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from icl_mechinterp import theory

forty_examples = settings(deadline=None, max_examples=40, derandomize=True)

PREDICTORS = {
    "debiased_gd": lambda z: theory.debiased_gd(z, 0.8),
    "gd": lambda z: theory.gd(z, 0.8),
    "ridge": lambda z: theory.ridge(z, 0.5),
    "nadaraya_watson": lambda z: theory.nadaraya_watson(z, [0.3, -0.2], [1.5, -2.0]),
}
predictors = st.sampled_from(sorted(PREDICTORS)).map(PREDICTORS.__getitem__)
covariates, contexts = st.integers(1, 12), st.integers(1, 60)
noises = st.floats(0, 5)
seeds = st.integers(0, 2**32 - 1)
small = st.floats(-0.6, 0.6)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Generator]:
    """Gaussian prompts `[batch pos token]`, and a generator for whatever is done to them."""
    d, L = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(seeds))
    return torch.randn(3, L + 1, d + 1, generator=generator, dtype=torch.float64), generator


@forty_examples
@given(predictors, prompts())
def test_rotating_all_covariates_changes_nothing(predict, drawn):
    z, generator = drawn
    d = z.shape[-1] - 1
    rotation, _ = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=z.dtype))
    rotated = torch.cat([z[..., :d] @ rotation, z[..., d:]], -1)
    assert_close(predict(rotated), predict(z), rtol=1e-9, atol=1e-9)


@forty_examples
@given(predictors, prompts())
def test_the_order_of_the_context_does_not_matter(predict, drawn):
    z, generator = drawn
    order = torch.randperm(z.shape[1] - 1, generator=generator)
    permuted = torch.cat([z[:, order], z[:, -1:]], 1)
    assert_close(predict(permuted), predict(z), rtol=1e-9, atol=1e-9)


@forty_examples
@given(predictors, prompts(), st.floats(-3, 3))
def test_predictions_are_linear_in_the_labels(predict, drawn, factor):
    z, generator = drawn
    other, mixed = z.clone(), z.clone()
    other[..., -1] = torch.randn(z.shape[:2], generator=generator, dtype=z.dtype)
    mixed[..., -1] = z[..., -1] + factor * other[..., -1]
    assert_close(predict(mixed), predict(z) + factor * predict(other), rtol=1e-9, atol=1e-9)


@forty_examples
@given(prompts(), st.floats(-5, 5))
def test_debiased_gd_ignores_shifts_of_covariates_and_of_labels(drawn, shift):
    z, _ = drawn
    covariates_moved, labels_moved = z.clone(), z.clone()
    covariates_moved[:, :-1, :-1] += shift
    labels_moved[:, :-1, -1] += shift
    answer = theory.debiased_gd(z, 0.8)
    assert_close(theory.debiased_gd(covariates_moved, 0.8), answer, rtol=1e-9, atol=1e-9)
    assert_close(theory.debiased_gd(labels_moved, 0.8), answer, rtol=1e-9, atol=1e-9)


@forty_examples
@given(prompts(), st.floats(-5, 5), small)
def test_kernels_ignore_shifts_of_covariates_and_zero_sum_kernels_those_of_labels(drawn, shift, omega):
    z, _ = drawn
    covariates_moved, labels_moved = z.clone(), z.clone()
    covariates_moved[:, :-1, :-1] += shift
    labels_moved[:, :-1, -1] += shift
    answer = theory.nadaraya_watson(z, [omega, -omega], [2.0, -2.0])
    assert_close(theory.nadaraya_watson(covariates_moved, [omega, -omega], [2.0, -2.0]), answer, rtol=1e-8, atol=1e-8)
    assert_close(theory.nadaraya_watson(labels_moved, [omega, -omega], [2.0, -2.0]), answer, rtol=1e-8, atol=1e-8)


@forty_examples
@given(prompts(), small, st.floats(-3, 3))
def test_a_kernel_with_value_one_reproduces_constant_labels(drawn, omega, level):
    z, _ = drawn
    z[:, :-1, -1] = level
    assert_close(theory.nadaraya_watson(z, omega, 1.0), torch.full((3, 1), level, dtype=z.dtype))


@forty_examples
@given(covariates, contexts, noises, st.floats(-1, 3))
def test_no_step_beats_the_optimal_one_and_none_beats_bayes(d, L, noise, eta):
    debiased = theory.debiased_gd_risk(theory.optimal_step(d, L, noise), d, L, noise)
    vanilla = theory.gd_risk(theory.optimal_gd_step(d, L, noise), d, L, noise)
    slack = 1e-9 * (1 + noise)
    assert theory.debiased_gd_risk(eta, d, L, noise) >= debiased - slack
    assert theory.gd_risk(eta, d, L, noise) >= vanilla - slack
    assert noise <= theory.bayes_risk(d, L, noise) + slack
    assert theory.bayes_risk(d, L, noise) <= min(debiased, vanilla) + slack


@forty_examples
@given(covariates, contexts, noises)
def test_bayes_risk_falls_with_context_and_rises_with_noise_and_dimension(d, L, noise):
    risk, slack = theory.bayes_risk(d, L, noise), 1e-9 * (1 + noise)
    assert theory.bayes_risk(d, L + 1, noise) <= risk + slack
    assert theory.bayes_risk(d, L, noise + 0.1) >= risk - slack
    assert theory.bayes_risk(d + 1, L, noise) >= risk - slack


@forty_examples
@given(covariates, contexts, noises)
def test_steps_are_ordered(d, L, noise):
    vanilla, debiased = theory.optimal_gd_step(d, L, noise), theory.optimal_step(d, L, noise)
    assert 0 < vanilla < debiased < theory.equal_risk_step(d, L, noise) < 1


@forty_examples
@given(st.floats(0.01, 20), st.floats(0.01, 20))
def test_limit_of_the_risk_ratio_is_between_one_and_its_bound(xi, noise):
    ratio = theory.debiased_gd_risk_limit(xi, noise) / theory.bayes_risk_limit(xi, noise)
    assert 1 - 1e-9 <= ratio <= theory.bayes_ratio_bound(xi, noise) + 1e-9


@forty_examples
@given(st.integers(1, 5), seeds, covariates, contexts, noises)
def test_approximate_loss_ignores_the_order_and_the_common_sign_of_heads(heads, seed, d, L, noise):
    rng = np.random.default_rng(seed)
    omega, mu, order = rng.normal(0, 0.3, heads), rng.normal(0, 2, heads), rng.permutation(heads)
    loss = theory.approximate_loss(omega, mu, d, L, noise)
    np.testing.assert_allclose(theory.approximate_loss(omega[order], mu[order], d, L, noise), loss, rtol=1e-9)
    np.testing.assert_allclose(theory.approximate_loss(-omega, -mu, d, L, noise), loss, rtol=1e-9)
    assert loss >= noise


@forty_examples
@given(st.floats(0.01, 1), covariates, contexts, noises, st.floats(-2, 2), st.floats(-2, 2))
def test_nothing_on_a_pair_of_scales_beats_the_manifold(gamma, d, L, noise, first, second):
    value = theory.solution_manifold(gamma, d, L, noise)
    floor = theory.manifold_loss(gamma, d, L, noise)
    at = theory.approximate_loss([gamma, -gamma], [value, -value], d, L, noise)
    np.testing.assert_allclose(at, floor, rtol=1e-9)
    moved = theory.approximate_loss([gamma, -gamma], [value + first, -value + second], d, L, noise)
    assert moved >= floor - 1e-9 * (1 + noise)


@forty_examples
@given(st.floats(0.01, 1), covariates, contexts, noises)
def test_manifold_step_stays_below_the_optimal_step(gamma, d, L, noise):
    step = 2 * gamma * theory.solution_manifold(gamma, d, L, noise)
    assert 0 < step <= theory.optimal_step(d, L, noise) * (1 + 1e-9)
