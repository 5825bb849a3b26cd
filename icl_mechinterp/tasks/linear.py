"""In-context linear regression with one label: the main task of arXiv 2503.12734, section 1.1.

    x_l ~ N(0, Sigma),  beta ~ N(0, (c^2/d) I),  y_l = beta^T x_l + eps_l,  eps_l ~ N(0, sigma^2)

c is `coefficient_scale`; with Sigma = I the signal has variance c^2. The target is the query's label with its noise.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float

from .._types import Checked
from ..errors import ConfigError
from ..linalg import psd_root
from ._protocol import Batch
from .covariance import Rows, as_matrix, resolve_covariance


@dataclass(frozen=True)
class LinearRegression:
    """In-context linear regression, isotropic unless a covariance is given.

    Attributes:
        d: number of covariates.
        context: number of context tokens L; the query comes after them.
        noise: variance sigma^2 of the label noise.
        covariance: Sigma, d x d, symmetric positive definite; `None` is the identity.
        coefficient_scale: c; the coefficients have variance c^2/d each.

    Raises:
        ConfigError: a value that cannot be used; `error.field` names it.
    """

    d: int
    context: int
    noise: float
    covariance: Rows | None = field(default=None)
    coefficient_scale: float = 1.0

    def __init__(
        self,
        d: Checked[int],
        context: Checked[int],
        noise: Checked[float],
        covariance: Any = None,
        coefficient_scale: Checked[float] = 1.0,
    ) -> None:
        _require_count("d", d, "the number of covariates")
        _require_count("context", context, "the number of context tokens")
        _require_number("noise", noise, "a variance", lower=0.0)
        _require_number("coefficient_scale", coefficient_scale, "the scale of the coefficients", lower=0.0)
        if coefficient_scale == 0:
            raise ConfigError(
                "coefficient_scale must be positive; got 0, which leaves nothing to learn. Use 1 for the papers' "
                "setting.",
                field="coefficient_scale",
            )
        rows = None if covariance is None else resolve_covariance(covariance, d)
        values = {"d": d, "context": context, "noise": float(noise), "covariance": rows}
        for name, value in {**values, "coefficient_scale": float(coefficient_scale)}.items():
            object.__setattr__(self, name, value)

    @property
    def n_out(self) -> int:
        return 1

    @cached_property
    def covariance_root(self) -> Float[torch.Tensor, "d d"] | None:
        """Symmetric root of the covariance, float64; `None` for the identity."""
        return None if self.covariance is None else psd_root(as_matrix(self.covariance))

    def sample(
        self,
        batch: Checked[int],
        *,
        generator: torch.Generator,
        context: Checked[int | None] = None,
        dtype: torch.dtype = torch.float32,
    ) -> Batch:
        """Fresh prompts, each with its own covariates, coefficients and noise.

        Args:
            batch: number of prompts.
            generator: the only source of randomness.
            context: number of context tokens, where it is not the task's own.
            dtype: of the prompts; the numbers of float32 and float64 are different draws.

        Returns:
            Batch with `z: [batch context+1 d+1]` and `target: [batch 1]`.
        """
        _require_count("batch", batch, "the number of prompts")
        length = self.context if context is None else context
        _require_count("context", length, "the number of context tokens")
        # One draw fills covariates and label noise; a second the coefficients. Two calls of randn cost a third of the
        # four that the formula would suggest.
        z = torch.randn(batch, length + 1, self.d + 1, generator=generator, dtype=dtype)
        beta = torch.randn(batch, self.d, 1, generator=generator, dtype=dtype)
        beta *= self.coefficient_scale / math.sqrt(self.d)
        covariates, labels = z[..., : self.d], z[..., self.d :]
        if self.covariance_root is not None:
            covariates.copy_(covariates @ self.covariance_root.to(dtype))
        labels.baddbmm_(covariates, beta, beta=math.sqrt(self.noise))
        target = labels[:, -1].clone()
        labels[:, -1] = 0
        return Batch(z, target)

    def to_dict(self) -> dict[str, Any]:
        covariance = None if self.covariance is None else [list(row) for row in self.covariance]
        return {
            "kind": "linear_regression",
            "d": self.d,
            "context": self.context,
            "noise": self.noise,
            "covariance": covariance,
            "coefficient_scale": self.coefficient_scale,
        }


def _require_count(name: str, value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1 ({what}); got {value!r}.", field=name)


def _require_number(name: str, value: object, what: str, *, lower: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < lower:
        raise ConfigError(f"{name} must be a number of at least {lower:g} ({what}); got {value!r}.", field=name)
