"""The candidate algorithms, as predictors on prompts `z: [batch pos token]` (context tokens, then the query).

Each computes in float64 and answers `[batch out]` in the kind it was given, torch or numpy; a torch result stays on the
device of z and differentiable in it. `n_out` label slots end every token; the query's are never read.

All of them are linear in the labels of the context, and written as the weights that these get: `gd.weights(z, eta)` is
`[batch context]`.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, cast, overload, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float64

from .._types import Tensor
from ..errors import ConfigError
from ..linalg import ridge_solve
from ._arguments import Number, NumbersLike, as_array, heads

P = ParamSpec("P")


class _Prompt(NamedTuple):
    covariates: Float64[Tensor, "batch context d"]
    query: Float64[Tensor, "batch d"]


@runtime_checkable
class Predictor(Protocol[P]):
    """A predictor whose answer is of the same kind as its prompts."""

    @overload
    def __call__(self, z: Tensor, *args: P.args, **kwargs: P.kwargs) -> Tensor: ...
    @overload
    def __call__(self, z: np.ndarray, *args: P.args, **kwargs: P.kwargs) -> np.ndarray: ...

    def weights(self, z: Tensor, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        """What each context label is multiplied with, `[batch context]`; the prediction is their sum."""
        ...


def _predictor(weigh: Callable[Concatenate[Tensor, P], Tensor]) -> Predictor[P]:
    """A predictor from the weights that it gives to the labels of float64 prompts."""

    def weights(z: Any, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        if np.ndim(z) != 3:
            raise ConfigError(
                f"z must be [batch pos token]; got shape {tuple(np.shape(z))}. Add a batch axis with z[None].",
                field="z",
            )
        return weigh(z.double(), *args, **kwargs)

    @wraps(weigh)
    def predict(z: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        if not isinstance(z, torch.Tensor):
            return predict(torch.from_numpy(np.array(z, dtype=np.float64, order="C")), *args, **kwargs).numpy()
        weighed, n_out = weights(z, *args, **kwargs), int(cast(Any, kwargs.get("n_out", 1)))
        return torch.einsum("bl,blo->bo", weighed, z[:, :-1, z.shape[-1] - n_out :].double())

    cast(Any, predict).weights = weights
    return cast(Predictor[P], predict)


@_predictor
def debiased_gd(
    z: Float64[Tensor, "batch pos token"], eta: NumbersLike, *, n_out: int = 1
) -> Float64[Tensor, "batch context"]:
    """One step of gradient descent from zero, on mean-centred covariates (arXiv 2503.12734, section 3.4).

        yhat = (1/L) Σ_l y_l (x_l - x̄)^T A x_q,    x̄ the mean of the context covariates

    Args:
        z: prompts.
        eta: the step, a number η for A = η I, or A itself, `[d d]` (the covariate on its left, the query on its right).
        n_out: number of label slots.

    Raises:
        ConfigError: a shape that does not fit.
    """
    prompt = _split(z, n_out)
    centred = prompt.covariates - prompt.covariates.mean(1, keepdim=True)
    return _one_step(centred, prompt.query, eta)


@_predictor
def gd(z: Float64[Tensor, "batch pos token"], eta: NumbersLike, *, n_out: int = 1) -> Float64[Tensor, "batch context"]:
    """One step of gradient descent from zero: `debiased_gd` without the centring.

        yhat = (1/L) Σ_l y_l x_l^T A x_q

    Args:
        z: prompts.
        eta: the step, a number η for A = η I, or A itself, `[d d]`.
        n_out: number of label slots.

    Raises:
        ConfigError: a shape that does not fit.
    """
    prompt = _split(z, n_out)
    return _one_step(prompt.covariates, prompt.query, eta)


@_predictor
def ridge(
    z: Float64[Tensor, "batch pos token"], penalty: Number, *, n_out: int = 1
) -> Float64[Tensor, "batch context"]:
    """Ridge regression; with penalty d σ² the Bayes predictor of the isotropic task.

        yhat = y^T X (X^T X + penalty I)^{-1} x_q

    Args:
        z: prompts.
        penalty: not negative; 0 is least squares, of least norm where the context is shorter than d.
        n_out: number of label slots.

    Raises:
        ConfigError: a shape that does not fit, or a negative penalty.
    """
    prompt = _split(z, n_out)
    # X (X^T X + penalty I)^{-1} x_q = (X X^T + penalty I)^{-1} X x_q: the regression of x_q on the covariates
    return ridge_solve(prompt.covariates.mT, prompt.query.unsqueeze(-1), float(penalty)).squeeze(-1)


@_predictor
def nadaraya_watson(
    z: Float64[Tensor, "batch pos token"], omega: NumbersLike, mu: NumbersLike, *, n_out: int = 1
) -> Float64[Tensor, "batch context"]:
    """A sum of softmax kernel regressors: what an attention model in the learned pattern computes (section 1.3).

        yhat = Σ_h μ_h Σ_l softmax_l(ω_h x_l·x_q) y_l

    Args:
        z: prompts.
        omega: kernel scale ω, a number or `[head]`.
        mu: value μ, a number or `[head]`.
        n_out: number of label slots.

    Raises:
        ConfigError: a shape that does not fit.
    """
    prompt = _split(z, n_out)
    scales, values = _per_head(omega, mu)
    similarity = torch.einsum("bld,bd->bl", prompt.covariates, prompt.query)
    weights = torch.zeros_like(similarity)
    for scale, value in zip(scales, values, strict=True):  # a head axis would multiply the memory by the heads
        weights = weights + value * torch.softmax(scale * similarity, -1)
    return weights


def _one_step(
    covariates: Float64[Tensor, "batch context d"], query: Float64[Tensor, "batch d"], eta: NumbersLike
) -> Float64[Tensor, "batch context"]:
    return torch.einsum("bld,bd->bl", covariates, _stepped(query, eta)) / covariates.shape[1]


def _stepped(query: Float64[Tensor, "batch d"], eta: NumbersLike) -> Float64[Tensor, "batch d"]:
    """A x_q."""
    step = torch.as_tensor(as_array("eta", eta), device=query.device)
    d = query.shape[-1]
    if step.shape == (d, d):
        return query @ step.mT
    if step.ndim == 0:
        return query * step
    raise ConfigError(
        f"eta must be a number or a {d} x {d} matrix; got shape {tuple(step.shape)}. The prompts have {d} covariates.",
        field="eta",
    )


def _per_head(omega: NumbersLike, mu: NumbersLike) -> tuple[list[float], list[float]]:
    scales, values = heads(omega, mu)
    if scales.ndim != 1:
        raise ConfigError(
            f"omega and mu must be numbers or have the one axis [head]; got shape {scales.shape}. Predict with one set "
            "of heads at a time.",
            field="omega",
        )
    return scales.tolist(), values.tolist()


def _split(z: Float64[Tensor, "batch pos token"], n_out: int) -> _Prompt:
    """Covariates of the context and of the query."""
    _, pos, token = z.shape
    if pos < 2:
        raise ConfigError(
            f"z must hold at least one context token before the query; got {pos} position(s). Give a longer prompt.",
            field="z",
        )
    if not 1 <= n_out < token:
        raise ConfigError(
            f"n_out must leave at least one covariate among {token} token entries; got {n_out}. Give the number of "
            "label slots.",
            field="n_out",
        )
    d = token - n_out
    return _Prompt(z[:, :-1, :d], z[:, -1, :d])
