"""Predictors against their formulas written as loops, and in the limits where one becomes another."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from icl_mechinterp import theory
from icl_mechinterp.errors import ConfigError

PREDICTORS = {
    "debiased_gd": lambda z, **options: theory.debiased_gd(z, 0.8, **options),
    "gd": lambda z, **options: theory.gd(z, 0.8, **options),
    "ridge": lambda z, **options: theory.ridge(z, 0.5, **options),
    "nadaraya_watson": lambda z, **options: theory.nadaraya_watson(z, [0.3, -0.2], [1.5, -2.0], **options),
}
STEP = torch.tensor([[0.9, 0.2, 0.0], [-0.3, 0.7, 0.1], [0.0, 0.4, 1.1]], dtype=torch.float64)


@pytest.fixture
def z(sample_prompts) -> torch.Tensor:
    """Four prompts, d = 3, L = 6."""
    return sample_prompts(4, 3, 6, 0.2)[0]


def each_prompt(z: torch.Tensor):
    for prompt in z:
        yield prompt[:-1, :-1], prompt[:-1, -1], prompt[-1, :-1]


def test_debiased_gd_is_its_formula(z):
    expected = []
    for x, y, query in each_prompt(z):
        mean = sum(x) / len(x)
        expected.append(sum(y[k] * ((x[k] - mean) @ STEP @ query) for k in range(len(x))) / len(x))
    assert_close(theory.debiased_gd(z, STEP)[:, 0], torch.stack(expected))


def test_gd_is_its_formula(z):
    expected = [sum(y[k] * (x[k] @ STEP @ query) for k in range(len(x))) / len(x) for x, y, query in each_prompt(z)]
    assert_close(theory.gd(z, STEP)[:, 0], torch.stack(expected))


def test_ridge_is_its_formula(z):
    expected = [
        y @ x @ torch.linalg.inv(x.T @ x + 0.5 * torch.eye(3, dtype=z.dtype)) @ query for x, y, query in each_prompt(z)
    ]
    assert_close(theory.ridge(z, 0.5)[:, 0], torch.stack(expected))


def test_nadaraya_watson_is_its_formula(z):
    omega, mu = [0.3, -0.2, 0.0], [1.5, -2.0, 0.7]
    expected = []
    for x, y, query in each_prompt(z):
        answer = torch.zeros((), dtype=z.dtype)
        for scale, value in zip(omega, mu, strict=True):
            kernel = torch.tensor([math.exp(scale * float(x[k] @ query)) for k in range(len(x))], dtype=z.dtype)
            answer = answer + value * (kernel @ y) / kernel.sum()
        expected.append(answer)
    assert_close(theory.nadaraya_watson(z, omega, mu)[:, 0], torch.stack(expected))


@pytest.mark.parametrize("name", PREDICTORS)
def test_answers_come_in_the_kind_of_the_prompts(name, z):
    predict = PREDICTORS[name]
    from_tensor, from_array = predict(z), predict(z.numpy())
    assert from_tensor.shape == (4, 1)
    assert from_tensor.dtype == torch.float64
    assert isinstance(from_array, np.ndarray)
    assert from_array.dtype == np.float64
    np.testing.assert_array_equal(from_array, from_tensor.numpy())
    assert predict(z.float()).dtype == torch.float64
    assert predict(z.numpy()[::-1]).shape == (4, 1)  # negative strides


@pytest.mark.parametrize("name", PREDICTORS)
def test_every_label_slot_is_predicted_on_its_own(name, z):
    predict = PREDICTORS[name]
    second = torch.cat([z[..., :-1], z[..., -1:].roll(1, 0)], -1)
    both = torch.cat([z, second[..., -1:]], -1)
    assert_close(predict(both, n_out=2), torch.cat([predict(z), predict(second)], 1))


@pytest.mark.parametrize("name", PREDICTORS)
def test_the_label_slot_of_the_query_is_not_read(name, z):
    changed = z.clone()
    changed[:, -1, -1] = 1e6
    assert_close(PREDICTORS[name](changed), PREDICTORS[name](z), rtol=0, atol=0)


@pytest.mark.parametrize("name", PREDICTORS)
def test_answers_are_differentiable_in_the_prompts(name, z):
    assert torch.autograd.gradcheck(PREDICTORS[name], z[:2].clone().requires_grad_())


def test_a_number_is_a_multiple_of_the_identity(z):
    for predict in (theory.debiased_gd, theory.gd):
        assert_close(predict(z, 0.7), predict(z, 0.7 * np.eye(3)))
        assert_close(predict(z, 2), predict(z, torch.tensor(2.0)))


def test_ridge_with_a_large_penalty_is_one_gd_step(z):
    """(X^T X + p I)^{-1} -> I/p, so that p/L times ridge is gradient descent with step 1."""
    penalty, context = 1e9, z.shape[1] - 1
    assert_close(theory.ridge(z, penalty) * penalty / context, theory.gd(z, 1.0), rtol=1e-6, atol=1e-7)


def test_ridge_without_penalty_recovers_noiseless_coefficients(sample_prompts):
    z, target = sample_prompts(10, 3, 5, 0.0)
    assert_close(theory.ridge(z, 0)[:, 0], target, rtol=1e-8, atol=1e-8)


def test_ridge_without_penalty_is_the_limit_for_short_contexts(sample_prompts):
    z, _ = sample_prompts(10, 6, 3, 0.1)
    assert_close(theory.ridge(z, 0), theory.ridge(z, 1e-9), rtol=1e-5, atol=1e-6)


def test_kernels_without_scale_average_the_labels(z):
    assert_close(theory.nadaraya_watson(z, 0.0, 1.7), 1.7 * z[:, :-1, -1:].mean(1))
    assert_close(theory.nadaraya_watson(z, 1e-9, 1.7), 1.7 * z[:, :-1, -1:].mean(1), rtol=1e-6, atol=1e-7)


def test_a_sharp_kernel_picks_the_label_of_the_nearest_direction(z):
    similarity = torch.einsum("bld,bd->bl", z[:, :-1, :-1], z[:, -1, :-1])
    nearest = z[torch.arange(len(z)), similarity.argmax(1), -1]
    assert_close(theory.nadaraya_watson(z, 1e4, 1.0)[:, 0], nearest)


def test_a_pair_of_kernels_approaches_debiased_gd_quadratically(sample_prompts):
    """Theorem 1.1 asks for order 1 in gamma; odd terms cancel in a pair, so the order is 2. 20,000 prompts."""
    eta, gammas = theory.optimal_step(5, 40, 0.1), np.geomspace(0.01, 0.1, 6)
    z, _ = sample_prompts(20_000, 5, 40, 0.1)
    target = theory.debiased_gd(z, eta)
    distances = []
    for gamma in gammas:
        value = eta / (2 * gamma)
        answer = theory.nadaraya_watson(z, [gamma, -gamma], [value, -value])
        distances.append((answer - target).square().mean().sqrt().item())
    slope = np.polyfit(np.log(gammas), np.log(distances), 1)[0]
    assert slope == pytest.approx(2.0, abs=0.1)


def test_a_trained_pair_is_near_debiased_and_far_from_vanilla_gd(sample_prompts):
    """At gamma .13: rms distance .0194 to debiased GD and .0635 to GD, 40,000 prompts."""
    z, _ = sample_prompts(40_000, 5, 40, 0.1)
    eta, gamma = theory.optimal_step(5, 40, 0.1), 0.13
    value = eta / (2 * gamma)
    answer = theory.nadaraya_watson(z, [gamma, -gamma], [value, -value])
    debiased = (answer - theory.debiased_gd(z, eta)).square().mean().sqrt().item()
    vanilla = (answer - theory.gd(z, eta)).square().mean().sqrt().item()
    assert debiased == pytest.approx(0.0194, rel=0.05)
    assert vanilla == pytest.approx(0.0635, rel=0.05)


def test_two_kernels_sum(z):
    pair = theory.nadaraya_watson(z, [0.3, -0.1], [1.0, -2.0])
    assert_close(pair, theory.nadaraya_watson(z, 0.3, 1.0) + theory.nadaraya_watson(z, -0.1, -2.0))


@pytest.mark.parametrize(
    ("call", "field", "parts"),
    [
        (lambda z: theory.gd(z[:, -1:], 1.0), "z", ["at least one context token", "got 1 position"]),
        (lambda z: theory.gd(z, 1.0, n_out=4), "n_out", ["at least one covariate", "among 4", "got 4"]),
        (lambda z: theory.gd(z, 1.0, n_out=0), "n_out", ["n_out", "got 0"]),
        (lambda z: theory.debiased_gd(z, np.eye(4)), "eta", ["3 x 3", "(4, 4)", "3 covariates"]),
        (lambda z: theory.debiased_gd(z, [0.1, 0.2, 0.3]), "eta", ["a number or a 3 x 3 matrix", "(3,)"]),
        (lambda z: theory.ridge(z, -1.0), "penalty", ["penalty must be", "got -1.0", "d * noise"]),
        (lambda z: theory.nadaraya_watson(z, [0.1, 0.2], [1.0] * 3), "mu", ["one entry per head", "(2,)", "(3,)"]),
        (lambda z: theory.nadaraya_watson(z, np.zeros((2, 2)), 1.0), "omega", ["[head]", "(2, 2)"]),
        (lambda z: theory.nadaraya_watson(z, math.inf, 1.0), "omega", ["omega must be finite"]),
    ],
)
def test_mistakes_are_explained(call, field, parts, z):
    with pytest.raises(ConfigError) as caught:
        call(z)
    assert caught.value.field == field
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_a_missing_batch_axis_is_refused(kind, z):
    prompt = z[0] if kind == "tensor" else z[0].numpy()
    with pytest.raises(ConfigError) as caught:
        theory.gd(prompt, 1.0)
    assert caught.value.field == "z"
    for part in ("[batch pos token]", "(7, 4)", "z[None]"):
        assert part in str(caught.value)
