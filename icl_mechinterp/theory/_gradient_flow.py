"""Gradient flow on the approximate loss: the training dynamics of the paper, as an initial value problem.

    dω/dt = -∂L~/∂ω,    dμ/dt = -∂L~/∂μ

The published simulations descend L~/2: their time t is our time t/2.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64
from scipy.integrate import solve_ivp

from ..errors import ConfigError
from ._approximate_loss import approximate_loss_gradient
from ._arguments import Number, NumbersLike, as_array, as_numbers, heads


class Flow(NamedTuple):
    """Heads along the flow.

    Attributes:
        omega: scales ω, `[time head]`.
        mu: values μ, `[time head]`.
    """

    omega: Float64[np.ndarray, "time head"]
    mu: Float64[np.ndarray, "time head"]


def gradient_flow(
    omega0: NumbersLike, mu0: NumbersLike, d: Number, L: Number, noise: Number, times: NumbersLike
) -> Flow:
    """ω and μ at the given times, from (ω_0, μ_0) at time 0.

    Relative error about 1e-8. Two heads from (1e-3, -1e-3): arXiv 2503.12734, section 3.2.

    Args:
        omega0: `[head]`.
        mu0: `[head]`.
        d: number of covariates.
        L: number of context tokens.
        noise: σ².
        times: increasing, not negative; time of the flow on L~ itself.

    Raises:
        ConfigError: shapes that do not match, times that do not increase from 0 on, d or L below 1, a negative noise,
            or a start so large that the loss overflows.
    """
    problem = [float(as_numbers(name, value)) for name, value in {"d": d, "L": L, "noise": noise}.items()]
    scales, values = heads(omega0, mu0)
    if scales.ndim != 1:
        raise ConfigError(
            f"omega0 and mu0 must have the one axis [head]; got shape {scales.shape}. Follow one start at a time.",
            field="omega0",
        )
    at = _resolve_times(times)

    def velocity(_: Number, state: np.ndarray) -> np.ndarray:
        omega, mu = np.split(state, 2)
        return -np.concatenate(approximate_loss_gradient(omega, mu, *problem))

    start = np.concatenate([scales, values])
    with np.errstate(over="ignore", invalid="ignore"):
        if not np.isfinite(velocity(0, start)).all():
            raise ConfigError(
                f"omega0 is too large: exp(d omega^2) overflows at omega0 = {omega0!r}. Start nearer to 0.",
                field="omega0",
            )
    # Growth like exp(2t) first, a drift like t^{-1/6} along a stiff valley later: LSODA changes method on the way.
    solution = solve_ivp(velocity, (0, at[-1] or 1), start, method="LSODA", t_eval=at, rtol=1e-10, atol=1e-13)
    assert solution.success, solution.message  # the flow decreases a loss that is bounded below
    omega, mu = np.split(solution.y.T, 2, axis=1)
    return Flow(omega, mu)


def _resolve_times(times: NumbersLike) -> Float64[np.ndarray, " time"]:
    at = as_array("times", times)
    if at.ndim != 1 or not at.size or at[0] < 0 or (np.diff(at) <= 0).any():
        raise ConfigError(
            f"times must be one axis of increasing numbers, none negative; got {times!r}. Sort them and drop repeats.",
            field="times",
        )
    return at
