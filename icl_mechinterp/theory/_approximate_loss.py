"""The approximate loss of a softmax model in the learned pattern (Proposition 1), and where it is least.

A model in the pattern has per head a scale ω_h (its key-query diagonal) and a value μ_h (its output-value entry):

    yhat = Σ_h μ_h Σ_l softmax_l(ω_h x_l·x_q) y_l
    L~(ω, μ) = 1 + σ² - 2 μ·ω + μ^T [ω ω^T + (1 + σ²)/L exp(d ω ω^T)] μ        (exp entry by entry)

L~ is about 0.02 below the true loss at d = 5, L = 40: it explains structure. For loss values there is
`kernel_regressor_loss`.
"""

import math

import numpy as np

from ._arguments import Array, Number, Numbers, NumbersLike, as_numbers, heads, of_scale


def approximate_loss(omega: NumbersLike, mu: NumbersLike, d: Number, L: Number, noise: Number) -> Numbers:
    """L~ of heads with scales ω and values μ: arXiv 2503.12734, Proposition 1 (formula above).

    Args:
        omega: `[... head]`, or a number for one head.
        mu: `[... head]`; leading axes broadcast against those of omega.
        d: number of covariates.
        L: number of context tokens.
        noise: σ².

    Returns:
        A float, or an array over the leading axes.

    Raises:
        ConfigError: shapes that do not match, d or L below 1, or a negative noise.
    """
    d, sigma2, ratio = _problem(d, L, noise)
    scales, values = heads(omega, mu)
    step = (values * scales).sum(-1)
    variance = np.einsum("...h,...hk,...k->...", values, _overlap(scales, d), values)
    loss = sigma2 + (1 - step) ** 2 + ratio * variance
    return loss if loss.ndim else float(loss)


def approximate_loss_gradient(omega: Array, mu: Array, d: Number, L: Number, noise: Number) -> tuple[Array, Array]:
    """Gradient of L~ with respect to ω and μ, in closed form; `[head]` each.

    The two-stage reading of the paper expands exp(d ω ω^T) in powers; the sum of that series is used here.
    """
    ratio = (1 + noise) / L
    overlap, residual = _overlap(omega, d), 1 - mu @ omega
    along_omega = -2 * residual * mu + 2 * ratio * d * mu * (overlap @ (mu * omega))
    along_mu = -2 * residual * omega + 2 * ratio * (overlap @ mu)
    return along_omega, along_mu


@of_scale
def solution_manifold(gamma: Numbers, d: Numbers, L: Numbers, noise: Numbers) -> Numbers:
    """μ_γ, the sum of the values of all positive heads when every head has |ω| = γ and the values sum to zero.

        μ_γ = (γ/2) / (γ² + (1 + σ²)/L sinh(d γ²))

    With ω = (γ, -γ) and μ = (μ_γ, -μ_γ) the effective step is η = 2 γ μ_γ (section 3.3).

    Raises:
        ConfigError: γ not positive, d or L below 1, or a negative noise.
    """
    return 1 / (2 * gamma * (1 + (1 + noise) * _mean_overlap(gamma, d) / L))


@of_scale
def manifold_loss(gamma: Numbers, d: Numbers, L: Numbers, noise: Numbers) -> Numbers:
    """L~ on the solution manifold at |ω| = γ; increasing in γ, with its infimum at γ -> 0.

        1 + σ² - 1 / (1 + (1 + σ²) sinh(d γ²)/(L γ²))

    Raises:
        ConfigError: γ not positive, d or L below 1, or a negative noise.
    """
    return 1 + noise - 1 / (1 + (1 + noise) * _mean_overlap(gamma, d) / L)


def single_head_optimum(d: Number, L: Number, noise: Number) -> tuple[float, float]:
    """(ω, μ) of the one head that minimises L~ (section 4.1); (-ω, -μ) does as well.

        ω = 1/√d,    μ = √d / (1 + e (1 + σ²) d/L)

    The optimum of the true loss has a larger scale: (.518, 1.494) where this says (.447, 1.628), at d = 5, L = 40,
    σ² = 0.1.

    Raises:
        ConfigError: d or L below 1, or a negative noise.
    """
    d, _, ratio = _problem(d, L, noise)
    return 1 / math.sqrt(d), math.sqrt(d) / (1 + math.e * ratio * d)


def _mean_overlap(gamma: Numbers, d: Numbers) -> Numbers:
    """sinh(d γ²)/γ², which tends to d as γ -> 0 and may be infinite."""
    with np.errstate(over="ignore"):
        return np.sinh(d * gamma**2) / gamma**2


def _problem(d: Number, L: Number, noise: Number) -> tuple[float, float, float]:
    """d, σ² and (1 + σ²)/L, checked."""
    covariates, context, sigma2 = (float(as_numbers(n, v)) for n, v in {"d": d, "L": L, "noise": noise}.items())
    return covariates, sigma2, (1 + sigma2) / context


def _overlap(omega: Array, d: Number) -> Array:
    """exp(d ω ω^T): L times the mean overlap E a_h·a_k of the attention of two heads."""
    return np.exp(d * omega[..., :, None] * omega[..., None, :])
