"""Checks the arguments of the theory and lets its formulas take numbers or arrays.

The formulas are written once, on float64 values. The decorators `of_...` convert and check what comes in, by the name
of the parameter, and turn a result without axes back into a `float`; the protocols tell a type checker the same.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, Protocol, TypeAlias, cast, overload, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float64

from .._types import Tensor
from ..errors import ConfigError

Array: TypeAlias = Float64[np.ndarray, "..."]
Numbers: TypeAlias = float | Array
"""What a formula computes with: a number, or a float64 array."""
Number: TypeAlias = float | int
NumbersLike: TypeAlias = Number | np.number | np.ndarray | Tensor | Sequence[Any]
"""What callers may give: a number, an array, a tensor, or nested sequences of numbers."""


class _Range(NamedTuple):
    lower: float
    closed: bool
    meaning: str


_RANGES = {
    "d": _Range(1, True, "the number of covariates"),
    "L": _Range(1, True, "the number of context tokens"),
    "noise": _Range(0, True, "the variance of the label noise"),
    "xi": _Range(0, False, "the ratio d/L"),
    "gamma": _Range(0, False, "the common |omega| of the heads"),
    "eta": _Range(-np.inf, False, "the step of gradient descent"),
}


@runtime_checkable
class OfLimit(Protocol):
    """A function of the proportional limit L, d -> inf with d/L -> xi."""

    @overload
    def __call__(self, xi: float, noise: float) -> float: ...
    @overload
    def __call__(self, xi: NumbersLike, noise: NumbersLike) -> Array: ...


@runtime_checkable
class OfProblem(Protocol):
    """A function of the regression problem alone."""

    @overload
    def __call__(self, d: float, L: float, noise: float) -> float: ...
    @overload
    def __call__(self, d: NumbersLike, L: NumbersLike, noise: NumbersLike) -> Array: ...


@runtime_checkable
class OfStep(Protocol):
    """A function of a gradient descent step and the regression problem."""

    @overload
    def __call__(self, eta: float, d: float, L: float, noise: float) -> float: ...
    @overload
    def __call__(self, eta: NumbersLike, d: NumbersLike, L: NumbersLike, noise: NumbersLike) -> Array: ...


@runtime_checkable
class OfScale(Protocol):
    """A function of the common |omega| and the regression problem."""

    @overload
    def __call__(self, gamma: float, d: float, L: float, noise: float) -> float: ...
    @overload
    def __call__(self, gamma: NumbersLike, d: NumbersLike, L: NumbersLike, noise: NumbersLike) -> Array: ...


def of_limit(formula: Callable[..., Numbers]) -> OfLimit:
    return cast(OfLimit, _elementwise(formula))


def of_problem(formula: Callable[..., Numbers]) -> OfProblem:
    return cast(OfProblem, _elementwise(formula))


def of_step(formula: Callable[..., Numbers]) -> OfStep:
    return cast(OfStep, _elementwise(formula))


def of_scale(formula: Callable[..., Numbers]) -> OfScale:
    return cast(OfScale, _elementwise(formula))


def _elementwise(formula: Callable[..., Numbers]) -> Callable[..., Numbers]:
    signature = inspect.signature(formula)

    @wraps(formula)
    def checked(*args: Any, **kwargs: Any) -> Numbers:
        given = signature.bind(*args, **kwargs).arguments
        values = {name: as_numbers(name, value) for name, value in given.items()}
        _require_broadcast(values)
        result = formula(**values)
        return result if np.ndim(result) else float(result)

    return checked


def _require_broadcast(values: dict[str, Numbers]) -> None:
    shapes = {name: np.shape(value) for name, value in values.items()}
    try:
        np.broadcast_shapes(*shapes.values())
    except ValueError as error:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ConfigError(f"arrays must broadcast; got shapes {listed}. Give them axes that match.") from error


def as_numbers(name: str, value: NumbersLike) -> Numbers:
    """The argument as a float or a float64 array, inside the range that belongs to its name.

    Raises:
        ConfigError: not numbers, not finite, or outside the range.
    """
    array = as_array(name, value)
    allowed = _RANGES[name]
    inside = array >= allowed.lower if allowed.closed else array > allowed.lower
    if not inside.all():
        bound = f"{'at least' if allowed.closed else 'above'} {allowed.lower:g}"
        worst = float(array[~inside].min())
        raise ConfigError(
            f"{name} must be {bound}; got {worst:g}. It is {allowed.meaning}: give a number in that range.", field=name
        )
    return array if array.ndim else float(array)


def as_array(name: str, value: NumbersLike) -> Array:
    """The argument as a float64 array of finite numbers.

    Raises:
        ConfigError: not numbers, ragged, or not finite.
    """
    try:
        plain = value.detach().cpu() if isinstance(value, torch.Tensor) else value
        array = np.asarray(plain, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} must be numbers; got {value!r}. Give a number or an array.", field=name) from error
    if not np.isfinite(array).all():
        raise ConfigError(f"{name} must be finite; got {value!r}. Replace the NaN or infinity.", field=name)
    return array


def whole(name: str, value: Number) -> int:
    """The argument as a whole number of at least 1.

    Raises:
        ConfigError: a fraction, or less than 1.
    """
    number = as_numbers(name, value)
    if not isinstance(number, float) or not number.is_integer():
        raise ConfigError(
            f"{name} must be a whole number; got {value!r}. It is {_RANGES[name].meaning}: round it.", field=name
        )
    return int(number)


def heads(omega: NumbersLike, mu: NumbersLike) -> tuple[Array, Array]:
    """Scales and values of the heads with one shape, heads on the last axis; numbers are one head.

    Raises:
        ConfigError: shapes that do not broadcast.
    """
    scales, values = np.atleast_1d(as_array("omega", omega)), np.atleast_1d(as_array("mu", mu))
    try:
        scales, values = np.broadcast_arrays(scales, values)
    except ValueError as error:
        raise ConfigError(
            f"omega and mu must have one entry per head; got shapes {scales.shape} and {values.shape}. Put the heads "
            "on the last axis of both.",
            field="mu",
        ) from error
    return scales, values
