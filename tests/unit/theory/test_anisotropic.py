"""Preconditioned gradient descent: against Monte Carlo, autograd, the isotropic formulas and the published figure."""

import numpy as np
import pytest
import torch

from icl_mechinterp import theory
from icl_mechinterp.errors import ConfigError
from icl_mechinterp.linalg import relative_distance
from icl_mechinterp.tasks import LinearRegression
from tests.helpers import within_stderr

RHO = np.array([[0.5 ** abs(i - j) for j in range(5)] for i in range(5)])


def random_covariance(d: int, seed: int) -> np.ndarray:
    root = np.random.default_rng(seed).normal(size=(d, d))
    return root @ root.T / d + 0.2 * np.eye(d)


@pytest.mark.parametrize(("d", "L", "noise"), [(1, 5, 0.0), (3, 12, 0.4), (7, 60, 1.3)])
@pytest.mark.parametrize("eta", [0.3, 0.9])
def test_without_a_covariance_they_are_the_isotropic_formulas(d, L, noise, eta):
    identity = np.eye(d)
    assert theory.preconditioned_risk(eta * identity, identity, L, noise) == pytest.approx(
        theory.debiased_gd_risk(eta, d, L, noise)
    )
    assert theory.preconditioned_gd_risk(eta * identity, identity, L, noise) == pytest.approx(
        theory.gd_risk(eta, d, L, noise)
    )
    assert theory.optimal_preconditioner(identity, L, noise) == pytest.approx(
        theory.optimal_step(d, L, noise) * identity
    )
    assert theory.optimal_gd_preconditioner(identity, L, noise) == pytest.approx(
        theory.optimal_gd_step(d, L, noise) * identity
    )


@pytest.mark.parametrize(("d", "L", "noise"), [(2, 9, 0.3), (5, 40, 0.1), (4, 15, 1.0)])
def test_risks_are_those_of_drawn_prompts(d, L, noise, generator):
    """A step that is no optimum and not symmetric, so that its orientation counts."""
    sigma = random_covariance(d, seed=d)
    step = theory.optimal_preconditioner(sigma, L, noise) + 0.2 * np.random.default_rng(L).normal(size=(d, d))
    task = LinearRegression(d, L, noise, covariance=sigma)
    batch = task.sample(40_000, generator=generator, dtype=torch.float64)
    for predict, risk in (
        (theory.debiased_gd, theory.preconditioned_risk),
        (theory.gd, theory.preconditioned_gd_risk),
    ):
        errors = (batch.target - predict(batch.z, step)).square().numpy()
        within_stderr(float(errors.mean()), risk(step, sigma, L, noise), float(errors.std() / len(errors) ** 0.5))


@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_is_one(seed):
    """No direction in the space of matrices lowers the risk, and every one raises it."""
    d, L, noise = 3 + seed, 10 + 9 * seed, 0.2 * seed
    sigma, rng = random_covariance(d, seed), np.random.default_rng(seed)
    for best, risk in (
        (theory.optimal_preconditioner(sigma, L, noise), theory.preconditioned_risk),
        (theory.optimal_gd_preconditioner(sigma, L, noise), theory.preconditioned_gd_risk),
    ):
        least = risk(best, sigma, L, noise)
        for _ in range(20):
            direction = rng.normal(size=(d, d))
            ahead, behind = (risk(best + h * direction, sigma, L, noise) for h in (1e-4, -1e-4))
            assert min(ahead, behind) > least
            assert (ahead - behind) / 2e-4 == pytest.approx(0, abs=1e-9)


def test_the_published_matrix_is_the_optimum_and_not_the_inverse():
    """2 mu KQ of the figure (d = 5, Sigma_ij = .5^|i-j|, mu 4.80): 1.4 % from A*, 23 % from the inverse of Sigma."""
    diagonal, off = [0.114, 0.137, 0.137, 0.136, 0.114], {1: -0.048, 2: -0.004}
    kq = np.diag(diagonal) + sum(np.diag([v] * (5 - k), k) + np.diag([v] * (5 - k), -k) for k, v in off.items())
    published = torch.from_numpy(2 * 4.80 * kq)
    best = torch.from_numpy(theory.optimal_preconditioner(RHO, 40, 0.1))
    assert float(relative_distance(published, best)) < 0.03
    assert float(relative_distance(published, torch.from_numpy(np.linalg.inv(RHO)))) > 0.15


@pytest.mark.parametrize(
    ("arguments", "field", "parts"),
    [
        ((np.ones((2, 3)), 5, 0.1), "covariance", ("symmetric matrix", "(2, 3)")),
        (([[1.0, 0.5], [0.1, 1.0]], 5, 0.1), "covariance", ("symmetric",)),
        ((np.eye(2), 0, 0.1), "L", ("at least 1",)),
        ((np.eye(2), 5, -1.0), "noise", ("at least 0",)),
    ],
)
def test_mistakes_are_explained(arguments, field, parts):
    with pytest.raises(ConfigError) as caught:
        theory.optimal_preconditioner(*arguments)
    assert caught.value.field == field
    for part in parts:
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match=r"η times the identity"):
        theory.preconditioned_risk(0.9, np.eye(2), 5, 0.1)
