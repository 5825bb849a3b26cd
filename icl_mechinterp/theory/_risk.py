"""Exact risks of the predictors that a model is compared with: debiased gradient descent, gradient descent, Bayes.

Risks are finite-sample and contain the label noise σ² (`noise`) of the query. The best debiased step is that of the
approximate loss (Theorem 1 of arXiv 2503.12734); the finite-(d, L) risks follow from Gaussian moments.
"""

from functools import lru_cache

import numpy as np

from ._arguments import Numbers, of_limit, of_problem, of_step, whole
from ._wishart import expected_shrinkage

_NEGLIGIBLE_NOISE = 1e-200  # adds at most its root to the Bayes risk; smaller ones would overflow in the density


@of_problem
def optimal_step(d: Numbers, L: Numbers, noise: Numbers) -> Numbers:
    """Step of debiased gradient descent with the least risk.

        η* = 1 / (1 + (1 + σ²) d/L)

    The same value minimises the exact risk and the approximate loss (Theorem 1.2).

    Raises:
        ConfigError: d or L below 1, or a negative noise.
    """
    return 1 / (1 + (1 + noise) * d / L)


@of_problem
def optimal_gd_step(d: Numbers, L: Numbers, noise: Numbers) -> Numbers:
    """Step of gradient descent without debiasing that has the least risk: 1 / (1 + (d + 1 + d σ²)/L).

    Raises:
        ConfigError: d or L below 1, or a negative noise.
    """
    return 1 / (1 + (d + 1 + d * noise) / L)


@of_step
def debiased_gd_risk(eta: Numbers, d: Numbers, L: Numbers, noise: Numbers) -> Numbers:
    """Risk of `debiased_gd` with step η.

        1 + σ² - 2 η (L-1)/L + η² (L-1)(L + d + d σ²)/L²

    The centred Gram matrix has L-1 degrees of freedom, hence the factor L-1.

    Raises:
        ConfigError: d or L below 1, or a negative noise.
    """
    return 1 + noise - 2 * eta * (L - 1) / L + eta**2 * (L - 1) * (L + d + d * noise) / L**2


@of_step
def gd_risk(eta: Numbers, d: Numbers, L: Numbers, noise: Numbers) -> Numbers:
    """Risk of `gd` with step η: 1 + σ² - 2 η + η² (1 + (d + 1 + d σ²)/L).

    Raises:
        ConfigError: d or L below 1, or a negative noise.
    """
    return 1 + noise - 2 * eta + eta**2 * (1 + (d + 1 + d * noise) / L)


@of_problem
def equal_risk_step(d: Numbers, L: Numbers, noise: Numbers) -> Numbers:
    """The step η > 0 at which gradient descent with and without debiasing have the same risk.

        η = 1 / (1 + (1 + σ²) d/(2L))

    Below it gradient descent without debiasing has the lower risk, so that a loss alone cannot tell the two apart.

    Raises:
        ConfigError: d or L below 1, or a negative noise.
    """
    return 1 / (1 + (1 + noise) * d / (2 * L))


@of_problem
def bayes_risk(d: Numbers, L: Numbers, noise: Numbers) -> Numbers:
    """Risk of the Bayes predictor, `ridge` with penalty d σ².

        σ² (1 + E tr (X^T X + d σ² I)^{-1}),    X: L x d standard normal

    The expectation is an integral over the exact eigenvalue density, accurate to about 1e-10 relative. Without noise
    the risk is that of the directions which the context leaves out, max(0, 1 - L/d).

    Raises:
        ConfigError: d or L below 1 or not whole, or a negative noise.
    """
    risk = np.vectorize(_bayes_risk, otypes=[np.float64])(d, L, noise)
    return risk if risk.ndim else float(risk)


@lru_cache(maxsize=4096)
def _bayes_risk(d: float, L: float, noise: float) -> float:
    covariates, context = whole("d", d), whole("L", L)
    if noise < _NEGLIGIBLE_NOISE:
        return max(0.0, 1 - context / covariates)
    return noise + expected_shrinkage(covariates, context, covariates * noise) / covariates


@of_limit
def debiased_gd_risk_limit(xi: Numbers, noise: Numbers) -> Numbers:
    """Risk of debiased gradient descent with its best step as L -> inf, d/L -> ξ.

        σ² + ξ (1 + σ²) / (1 + ξ (1 + σ²))

    Raises:
        ConfigError: ξ not positive, or a negative noise.
    """
    return noise + xi * (1 + noise) / (1 + xi * (1 + noise))


@of_limit
def bayes_risk_limit(xi: Numbers, noise: Numbers) -> Numbers:
    """Risk of the Bayes predictor as L -> inf, d/L -> ξ (Theorem 1.3).

        ½ [σ² + 1 - 1/ξ + sqrt((σ² + 1/ξ - 1)² + 4 σ²)]

    Raises:
        ConfigError: ξ not positive, or a negative noise.
    """
    # a = σ² + 1 - 1/ξ is negative for long contexts, where a + sqrt(a² + 4 σ²/ξ) would cancel.
    a, root = noise + 1 - 1 / xi, np.sqrt((noise + 1 / xi - 1) ** 2 + 4 * noise)
    return np.where(a < 0, 2 * noise / xi / np.maximum(root - a, np.finfo(np.float64).tiny), (a + root) / 2)


@of_limit
def bayes_ratio_bound(xi: Numbers, noise: Numbers) -> Numbers:
    """Upper bound on the ratio of the two limits, debiased gradient descent over Bayes (Theorem 1.3).

        1 + 1 / (σ² (1 + ξ σ²)(1 + σ² + 1/ξ))

    Stated for σ² + 1/ξ > 1; infinite without noise.

    Raises:
        ConfigError: ξ not positive, or a negative noise.
    """
    with np.errstate(divide="ignore"):
        return 1 + np.divide(1, noise * (1 + xi * noise) * (1 + noise + 1 / xi))
