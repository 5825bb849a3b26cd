"""The few pieces of linear algebra that several layers share; each keeps the dtype and device of its input."""

import torch
from jaxtyping import Float

from ._types import Tensor
from .errors import ConfigError


def psd_root(matrix: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """Symmetric root S of a positive semi-definite matrix, S S = matrix.

    Eigenvalues that rounding made negative count as zero.

    Raises:
        ConfigError: an eigenvalue is negative beyond rounding.
    """
    values, vectors = torch.linalg.eigh(matrix)
    # eigh is accurate to a few eps times the largest eigenvalue, growing with n.
    slack = 10 * matrix.shape[-1] * torch.finfo(matrix.dtype).eps * values.abs().amax(-1, keepdim=True)
    if (values < -slack).any():
        raise ConfigError(
            f"matrix must be positive semi-definite; its smallest eigenvalue is {values.min().item():.3g}. "
            "Give a covariance, such as A @ A.T.",
            field="matrix",
        )
    return (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)) @ vectors.mT


def ridge_solve(
    design: Float[Tensor, "*batch sample d"], labels: Float[Tensor, "*batch sample out"], penalty: float | int
) -> Float[Tensor, "*batch d out"]:
    """Coefficients W of ridge regression, argmin ||design W - labels||^2 + penalty ||W||^2.

    At penalty 0 the limit: least squares, with the least norm where several fit.

    Raises:
        ConfigError: a negative penalty.
    """
    if not penalty >= 0:
        raise ConfigError(
            f"penalty must be a number of at least 0; got {penalty!r}. The Bayes predictor has d * noise.",
            field="penalty",
        )
    if penalty == 0:
        return torch.linalg.pinv(design) @ labels
    samples, d = design.shape[-2:]
    if samples < d:  # the dual form factors the smaller matrix, and keeps its conditioning when penalty is small
        dual = _shifted(design @ design.mT, penalty)
        return design.mT @ torch.cholesky_solve(labels, torch.linalg.cholesky(dual))
    primal = _shifted(design.mT @ design, penalty)
    return torch.cholesky_solve(design.mT @ labels, torch.linalg.cholesky(primal))


def relative_distance(
    matrix: Float[Tensor, "*batch rows columns"], reference: Float[Tensor, "*batch rows columns"]
) -> Float[Tensor, "*batch"]:
    """||matrix - reference||_F / ||reference||_F; infinite or NaN for a reference of zeros."""
    return torch.linalg.matrix_norm(matrix - reference) / torch.linalg.matrix_norm(reference)


def _shifted(gram: Float[Tensor, "*batch n n"], shift: float) -> Float[Tensor, "*batch n n"]:
    return gram + shift * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
