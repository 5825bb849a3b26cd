"""Exact expectations over the eigenvalues of X^T X, X standard normal: the finite-size Bayes risk needs one.

The eigenvalue density of a real Wishart matrix is known at every size (Adler, Forrester, Nagao and van Moerbeke,
J. Stat. Phys. 99 (2000) 141, solv-int/9907001), so that no Monte Carlo is needed. With N = min(d, L), a = |d - L| and
h_k(x) = sqrt(k!/Γ(k+a+1)) x^{(a-1)/2} e^{-x/2} L_k^a(x), L_k^a a Laguerre polynomial,

    ρ(x) = Σ_{k<N-1} x h_k(x)² - ½ sqrt((N-1)(N-1+a)) h_{N-1}(x) I_{N-2}(x) + [N odd] h_{N-1}(x) / ∫h_{N-1}
    I_k(x) = ½ ∫ sgn(x - t) h_k(t) dt

The work grows with N².
"""

import math

import numpy as np
from jaxtyping import Float64
from scipy.special import gammaln, gdtr

Points = Float64[np.ndarray, " point"]

_GAUSS_NODES, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(16)


def expected_shrinkage(d: int, L: int, shift: float) -> float:
    """E tr shift (X^T X + shift I)^{-1} for X: L x d standard normal, shift > 0; between 0 and d."""
    size, dof = min(d, L), max(d, L)
    trace = float(d - size)  # eigenvalues that are zero because L < d
    points, weights = _quadrature(size, dof, shift)
    blocks = math.ceil(size * points.size / 4_000_000)  # the density holds size x points numbers
    for x, weight in zip(np.array_split(points, blocks), np.array_split(weights, blocks), strict=True):
        trace += float(weight @ (eigenvalue_density(x, size, dof) * shift / (x + shift)))
    return trace


def eigenvalue_density(x: Points, size: int, dof: int) -> Points:
    """ρ(x), mean number of eigenvalues per unit length, of a size x size Wishart matrix with dof >= size, at x > 0."""
    a, last = dof - size, size - 1
    h = _laguerre_functions(x, size, a)
    density = x * (h[:last] ** 2).sum(0)
    if last:
        density -= 0.5 * math.sqrt(last * (last + a)) * h[last] * _sign_integral(x, h, last - 1, a)
    if size % 2:
        density += h[last] * math.exp(-_log_mass(last, a))
    return density


def _laguerre_functions(x: Points, count: int, a: int) -> Float64[np.ndarray, "degree point"]:
    """h_0 ... h_{count-1} by their three-term recurrence."""
    # The recurrence runs on h_k / exp(log_scale): at large x the common factor e^{-x/2} underflows while h_k does not.
    log_scale = 0.5 * ((a - 1) * np.log(x) - x - gammaln(a + 1))
    before, now = np.zeros_like(x), np.ones_like(x)
    h = np.empty((count, x.size))
    for k in range(count):
        h[k] = now * np.exp(log_scale)
        after = (2 * k + 1 + a - x) * now - math.sqrt(k * (k + a)) * before
        before, now = now, after / math.sqrt((k + 1) * (k + 1 + a))
        size = np.maximum(1.0, np.abs(now))
        before, now, log_scale = before / size, now / size, log_scale + np.log(size)
    return h


def _sign_integral(x: Points, h: Float64[np.ndarray, "degree point"], k: int, a: int) -> Points:
    """I_k, from (k+1) ∫h_{k+1} = (k+a) ∫h_{k-1} + 2 x h_k for the functions without their normalisation."""
    if k % 2:
        integral = 2 * x * h[0] / math.sqrt(a + 1)  # degree 1
    else:
        integral = math.exp(_log_mass(0, a)) * (gdtr(0.5, (a + 1) / 2, x) - 0.5)  # degree 0
    for j in range(1 + k % 2, k, 2):  # from degree j - 1 to j + 1
        norm = math.sqrt((j + 1) * (j + 1 + a))
        integral = math.sqrt(j * (j + a)) / norm * integral + 2 * x * h[j] / norm
    return integral


def _log_mass(k: int, a: int) -> float:
    """log of ∫h_k over (0, inf), k even; for odd k the integral is zero."""
    half, b = k // 2, (a + 1) / 2
    return float(b * math.log(2) + gammaln(half + b) - gammaln(half + 1) + 0.5 * (gammaln(k + 1) - gammaln(k + a + 1)))


def _quadrature(size: int, dof: int, shift: float) -> tuple[Points, Points]:
    """Points and weights of composite Gauss-Legendre in t = sqrt(x): ρ oscillates about `size` times there.

    Panels shrink towards t = 0 as far as 1/(t² + shift) requires.
    """
    end = math.sqrt(dof) + math.sqrt(size) + 10  # beyond it the density is below e^{-50}
    even = np.linspace(0, end, 2 * size + math.ceil(end))
    graded = np.geomspace(min(math.sqrt(shift), end / 2) / 10, end, 60)
    edges = np.unique(np.concatenate([even, graded]))
    half, middle = np.diff(edges) / 2, (edges[1:] + edges[:-1]) / 2
    t = (middle[:, None] + half[:, None] * _GAUSS_NODES).ravel()
    return t**2, 2 * t * (half[:, None] * _GAUSS_WEIGHTS).ravel()
