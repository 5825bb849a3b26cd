"""The exact eigenvalue density against known moments and against simulated matrices."""

import math

import numpy as np
import pytest

from icl_mechinterp.theory._wishart import _quadrature, eigenvalue_density, expected_shrinkage

SIZES = [(1, 1), (1, 2), (2, 2), (3, 3), (2, 5), (5, 40), (6, 9), (30, 30), (31, 400), (400, 450)]


@pytest.mark.parametrize(("size", "dof"), SIZES)
def test_density_has_the_moments_of_the_wishart_distribution(size, dof):
    """E tr W^0 = N,  E tr W = N n,  E tr W^2 = N n (n + N + 1)."""
    x, weights = _quadrature(size, dof, 1.0)
    density = weights * eigenvalue_density(x, size, dof)
    moments = np.array([density.sum(), density @ x, density @ x**2])
    np.testing.assert_allclose(moments, [size, size * dof, size * dof * (dof + size + 1)], rtol=1e-10)


@pytest.mark.parametrize("shift", [1e-4, 0.5, 20.0])
@pytest.mark.parametrize(("d", "L"), [(2, 2), (3, 3), (5, 7), (6, 20), (7, 4)])
def test_shrinkage_is_the_mean_over_matrices(d, L, shift):
    """20,000 matrices, compared in standard errors."""
    design = np.random.default_rng(0).standard_normal((20_000, L, d))
    singular = np.linalg.svd(design, compute_uv=False)
    traces = (shift / (singular**2 + shift)).sum(1)
    expected = expected_shrinkage(d, L, shift) - (d - min(d, L))
    assert abs(traces.mean() - expected) < 4 * traces.std() / math.sqrt(len(traces))


def test_wide_and_tall_matrices_share_their_nonzero_eigenvalues():
    assert expected_shrinkage(9, 4, 0.3) - 5 == pytest.approx(expected_shrinkage(4, 9, 0.3), rel=1e-12)
