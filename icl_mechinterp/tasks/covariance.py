"""Turns what a user gives as a covariance into a checked matrix."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float

from .._types import Checked
from ..errors import ConfigError

Rows: TypeAlias = tuple[tuple[float, ...], ...]
"""A matrix as nested tuples: frozen, hashable, and plain in a config file."""


def resolve_covariance(covariance: Checked[Sequence[Sequence[float]] | torch.Tensor | np.ndarray], d: int) -> Rows:
    """The covariance of the covariates as rows, checked: d x d, symmetric, positive definite.

    Raises:
        ConfigError: the message says which of the conditions fails, with the offending number.
    """
    try:
        matrix = np.asarray(covariance, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"covariance must be a {d} x {d} matrix of numbers; got {covariance!r}. Give its rows, or leave it out for "
            "the identity.",
            field="covariance",
        ) from error
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ConfigError(
            f"covariance must be square; got shape {matrix.shape}. Give d rows of d numbers.", field="covariance"
        )
    if matrix.shape != (d, d):
        raise ConfigError(
            f"covariance must be {d} x {d}, because d is {d}; got {matrix.shape[0]} x {matrix.shape[1]}. Change d or "
            "the matrix.",
            field="covariance",
        )
    if not np.isfinite(matrix).all():
        raise ConfigError("covariance must be finite; it holds a NaN or an infinity.", field="covariance")
    asymmetry = float(np.abs(matrix - matrix.T).max())
    if asymmetry > 1e-9 * float(np.abs(matrix).max()):
        raise ConfigError(
            f"covariance must be symmetric; entries differ from their mirror by up to {asymmetry:.3g}. Symmetrise it "
            "as (C + C.T) / 2 if that is what you mean.",
            field="covariance",
        )
    smallest = float(np.linalg.eigvalsh(matrix).min())
    if smallest <= 1e-12 * float(np.abs(matrix).max()):
        raise ConfigError(
            f"covariance must be positive definite; its smallest eigenvalue is {smallest:.3g}. Drop directions without "
            "variance from the task.",
            field="covariance",
        )
    return tuple(tuple(float(entry) for entry in row) for row in matrix)


def as_matrix(rows: Rows) -> Float[torch.Tensor, "d d"]:
    """Rows as a float64 tensor."""
    return torch.tensor(rows, dtype=torch.float64)
