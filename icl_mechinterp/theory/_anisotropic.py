"""Covariates with a covariance: the best preconditioner of one gradient step, and the exact risk of any.

    yhat = (1/L) Σ_l y_l (x_l - x̄)^T A x_q,    x ~ N(0, Σ),  β ~ N(0, I/d),  y = β^T x + N(0, σ²)

The centred Gram matrix is Wishart with n = L-1 degrees of freedom, that of plain gradient descent with n = L, and
E W = n Σ, E W² = n ((n+1) Σ² + tr(Σ) Σ) (for W ~ Wishart(Σ, n)) give

    risk = σ² + (1/d) [tr Σ - 2 (n/L) tr(Σ A Σ) + (n/L²) tr(M ((n+1) Σ² + tr(Σ) Σ))] + σ² (n/L²) tr(M Σ),   M = A Σ A^T

whose minimum over A is (((n+1)/L) Σ + ((tr Σ + d σ²)/L) I)^{-1}. With Σ = I and A = η I these are `debiased_gd_risk`,
`gd_risk` and their optimal steps. System of 2503.12734, section 4.3; the formulas are derived here.
"""

import numpy as np
from jaxtyping import Float64

from ..errors import ConfigError
from ._arguments import Number, NumbersLike, as_array, as_numbers, whole

Matrix = Float64[np.ndarray, "d d"]


def optimal_preconditioner(covariance: NumbersLike, L: Number, noise: Number) -> Matrix:
    """A* of debiased gradient descent: (Σ + ((tr Σ + d σ²)/L) I)^{-1}.

    Args:
        covariance: Σ, `[d d]`, symmetric positive definite.
        L: number of context tokens.
        noise: σ², of labels whose coefficients have variance 1/d.

    Raises:
        ConfigError: not a square matrix, L below 1, or a negative noise.
    """
    return _best(covariance, L, noise, centred=True)


def optimal_gd_preconditioner(covariance: NumbersLike, L: Number, noise: Number) -> Matrix:
    """The same without debiasing, which is what linear attention learns: ((1 + 1/L) Σ + ((tr Σ + d σ²)/L) I)^{-1}.

    Args:
        covariance, L, noise: as `optimal_preconditioner`.

    Raises:
        ConfigError: not a square matrix, L below 1, or a negative noise.
    """
    return _best(covariance, L, noise, centred=False)


def preconditioned_risk(step: NumbersLike, covariance: NumbersLike, L: Number, noise: Number) -> float:
    """Exact risk of `debiased_gd` with the matrix A as its step, label noise included.

    Args:
        step: A, `[d d]`, the covariate on its left and the query on its right.
        covariance, L, noise: as `optimal_preconditioner`.

    Raises:
        ConfigError: matrices of different or of no square shape, L below 1, or a negative noise.
    """
    return _risk(step, covariance, L, noise, centred=True)


def preconditioned_gd_risk(step: NumbersLike, covariance: NumbersLike, L: Number, noise: Number) -> float:
    """Exact risk of `gd` with the matrix A as its step, label noise included.

    Args:
        step, covariance, L, noise: as `preconditioned_risk`.

    Raises:
        ConfigError: matrices of different or of no square shape, L below 1, or a negative noise.
    """
    return _risk(step, covariance, L, noise, centred=False)


def _best(covariance: NumbersLike, L: Number, noise: Number, *, centred: bool) -> Matrix:
    sigma, length, variance = _problem(covariance, L, noise)
    d, degrees = len(sigma), length - 1 if centred else length
    return np.linalg.inv((degrees + 1) / length * sigma + (np.trace(sigma) + d * variance) / length * np.eye(d))


def _risk(step: NumbersLike, covariance: NumbersLike, L: Number, noise: Number, *, centred: bool) -> float:
    sigma, length, variance = _problem(covariance, L, noise)
    matrix, d, n = as_array("step", step), len(sigma), length - 1 if centred else length
    if matrix.shape != sigma.shape:
        raise ConfigError(
            f"step must be a matrix of the covariance's shape {sigma.shape}; got shape {matrix.shape}. For a number η "
            "give η times the identity.",
            field="step",
        )
    moved = matrix @ sigma @ matrix.T
    gram = (n + 1) * sigma @ sigma + np.trace(sigma) * sigma
    signal = np.trace(sigma) - 2 * n / length * np.trace(sigma @ matrix @ sigma)
    signal += n / length**2 * np.trace(moved @ gram)
    return float(variance + signal / d + variance * n / length**2 * np.trace(moved @ sigma))


def _problem(covariance: NumbersLike, L: Number, noise: Number) -> tuple[Matrix, int, float]:
    sigma = as_array("covariance", covariance)
    if sigma.ndim != 2 or sigma.shape[0] != sigma.shape[1] or not np.allclose(sigma, sigma.T):
        raise ConfigError(
            f"covariance must be a symmetric matrix [d d]; got shape {sigma.shape}. Give the covariance of one token.",
            field="covariance",
        )
    return sigma, whole("L", L), float(as_numbers("noise", noise))
