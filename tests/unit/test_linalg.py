"""Linear algebra helpers by their defining equations."""

import pytest
import torch
from jaxtyping import TypeCheckError
from torch.testing import assert_close

from icl_mechinterp.errors import ConfigError
from icl_mechinterp.linalg import psd_root, relative_distance, ridge_solve


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_root_is_symmetric_and_squares_to_the_matrix(generator, dtype):
    factor = torch.randn(3, 4, 4, generator=generator, dtype=dtype)
    matrix = factor @ factor.mT
    root = psd_root(matrix)
    assert root.dtype == dtype
    assert_close(root, root.mT)
    assert_close(root @ root, matrix, rtol=1e-4, atol=50 * torch.finfo(dtype).eps * float(matrix.abs().max()))


def test_root_of_a_singular_matrix(generator):
    factor = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    root = psd_root(factor @ factor.T)
    assert_close(root @ root, factor @ factor.T)


def test_root_of_an_indefinite_matrix_is_refused():
    with pytest.raises(ConfigError) as caught:
        psd_root(torch.diag(torch.tensor([1.0, -0.5])))
    for part in ("positive semi-definite", "-0.5", "A @ A.T"):
        assert part in str(caught.value)


@pytest.mark.parametrize(("samples", "d"), [(7, 3), (3, 7), (4, 4)])
@pytest.mark.parametrize("penalty", [1e-6, 0.5, 100.0])
def test_ridge_solution_satisfies_the_normal_equations(generator, samples, d, penalty):
    design = torch.randn(2, samples, d, generator=generator, dtype=torch.float64)
    labels = torch.randn(2, samples, 2, generator=generator, dtype=torch.float64)
    solution = ridge_solve(design, labels, penalty)
    gradient = design.mT @ (design @ solution - labels) + penalty * solution
    assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-8)


def test_ridge_without_penalty_has_the_least_norm(generator):
    design = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    labels = torch.randn(3, 1, generator=generator, dtype=torch.float64)
    solution = ridge_solve(design, labels, 0)
    assert_close(design @ solution, labels)
    assert_close(design.T @ torch.linalg.solve(design @ design.T, labels), solution)


def test_negative_penalty_is_refused():
    with pytest.raises(ConfigError) as caught:
        ridge_solve(torch.eye(2), torch.ones(2, 1), -0.1)
    assert caught.value.field == "penalty"
    for part in ("at least 0", "-0.1", "d * noise"):
        assert part in str(caught.value)


def test_relative_distance_of_scaled_matrices():
    matrix = torch.diag(torch.tensor([3.0, 4.0]))
    assert_close(relative_distance(1.2 * matrix, matrix), torch.tensor(0.2))
    assert_close(
        relative_distance(torch.stack([matrix, 2 * matrix]), torch.stack([matrix, matrix])), torch.tensor([0.0, 1.0])
    )


def test_shapes_are_checked_in_tests():
    """A canary: without the import hook a wrong shape would go on to fail somewhere else, or nowhere."""
    with pytest.raises(TypeCheckError, match="labels"):
        ridge_solve(torch.ones(4, 2), torch.ones(3, 1), 0.5)
