"""Planted models: circuits written down by hand, so that their verdict is known before any probe looks.

    omega_h = +-gamma,   mu_h = +-eta / (2 gamma)        the sane pair; eta = eta* unless said otherwise

A pair with gamma sqrt(d) <= 0.3 computes debiased gradient descent to within the probes' bounds (2503.12734, Theorem 1:
the error falls with gamma). Models are written in a random basis inside each head and with huge noise in every entry
that their behaviour does not depend on, because no verdict may depend on either.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from transformer_lens import HookedTransformer

from icl_mechinterp import theory
from icl_mechinterp.models import from_circuits
from icl_mechinterp.tasks import LinearRegression

KQ = Float[torch.Tensor, "head key query"]
OV = Float[torch.Tensor, "head out token"]


@dataclass(frozen=True)
class Heads:
    """Circuits of a one-layer, one-label model: `kq [head key query]`, `ov [head out token]`, float64."""

    kq: KQ
    ov: OV

    def replaced(self, *, kq: KQ | None = None, ov: OV | None = None) -> "Heads":
        return Heads(self.kq if kq is None else kq, self.ov if ov is None else ov)

    def with_head(self, omega: float | Sequence[float], mu: float) -> "Heads":
        """One more head, at the end; omega a number or the whole diagonal."""
        more = heads(self.kq.shape[-1] - 1, [omega], [mu])
        return Heads(torch.cat([self.kq, more.kq]), torch.cat([self.ov, more.ov]))

    def permuted(self, order: Sequence[int]) -> "Heads":
        return Heads(self.kq[list(order)], self.ov[list(order)])


def heads(d: int, omega: Sequence[float | Sequence[float]], mu: Sequence[float]) -> Heads:
    """Diagonal heads: KQ = omega_h I (or diag(omega_h)) on the covariates, OV reads the label with mu_h."""
    kq = torch.zeros(len(omega), d + 1, d + 1, dtype=torch.float64)
    ov = torch.zeros(len(omega), 1, d + 1, dtype=torch.float64)
    for h, (scale, value) in enumerate(zip(omega, mu, strict=True)):
        kq[h].diagonal()[:d] = torch.as_tensor(scale, dtype=torch.float64)
        ov[h, 0, d] = value
    return Heads(kq, ov)


def optimal_step(task: LinearRegression) -> float:
    """eta* for labels of signal variance c^2, of which noise / c^2 is the noise per unit signal."""
    return 1 / (1 + (1 + task.noise / task.coefficient_scale**2) * task.d / task.context)


def sane_scale(task: LinearRegression) -> float:
    """A gamma small enough for a pair to be debiased gradient descent: gamma sqrt(d) = 0.2."""
    return 0.2 / math.sqrt(task.d)


def sane_pair(task: LinearRegression, gamma: float | None = None, step: float = 1.0) -> Heads:
    """The pair (gamma, eta / 2 gamma), (-gamma, -eta / 2 gamma) with eta = step * eta*."""
    gamma = sane_scale(task) if gamma is None else gamma
    mu = step * optimal_step(task) / (2 * gamma)
    return heads(task.d, [gamma, -gamma], [mu, -mu])


def sane_group(task: LinearRegression, shares: Sequence[float], gamma: float | None = None) -> Heads:
    """Heads whose signed shares of the step are given; each sign's shares sum to one half in absolute value."""
    gamma = sane_scale(task) if gamma is None else gamma
    eta = optimal_step(task)
    return heads(task.d, [math.copysign(gamma, share) for share in shares], [share * eta / gamma for share in shares])


def on_manifold(task: LinearRegression, gamma: float) -> Heads:
    """The pair that minimises the approximate loss at this gamma (eq. 3.3)."""
    noise = task.noise / task.coefficient_scale**2
    mu = float(theory.solution_manifold(gamma, task.d, task.context, noise))
    return heads(task.d, [gamma, -gamma], [mu, -mu])


def build(
    planted: Heads,
    task: LinearRegression,
    *,
    seed: int | None = 0,
    scale: float | None = None,
    hidden_noise: float = 1e3,
    dtype: torch.dtype = torch.float32,
) -> HookedTransformer:
    """The model with these circuits, in a random basis inside each head.

    Args:
        planted: the circuits.
        task: gives the width.
        seed: of the basis and of the noise; `None` for neither.
        scale: attention scale; the circuits are the same whatever it is.
        hidden_noise: size of what is planted where the model's behaviour cannot depend on it: the query-label column of
            KQ and the rows of W_O that are not read out.
        dtype: of the parameters.
    """
    model = from_circuits(task, planted.kq, planted.ov, scale=scale, dtype=dtype)
    if seed is None:
        return model
    generator = torch.Generator().manual_seed(seed)
    change_basis(model, generator)
    hide_noise(model, task.d, hidden_noise, generator)
    return model


def change_basis(model: HookedTransformer, generator: torch.Generator) -> None:
    """W_Q M, W_K M^-T and W_V N, N^-1 W_O with random well-conditioned M, N per head: the circuits stay."""
    attention = model.blocks[0].attn
    for left, right in (("W_Q", "W_K"), ("W_V", "W_O")):
        first, second = (getattr(attention, name).data for name in (left, right))
        basis = _random_basis(first.shape[0], first.shape[-1], generator)
        inverse = torch.linalg.inv(basis)
        first.copy_(first.double() @ basis)
        second.copy_(second.double() @ inverse.mT if right == "W_K" else inverse @ second.double())


def hide_noise(model: HookedTransformer, d: int, size: float, generator: torch.Generator) -> None:
    """Huge values in the query-label column of every KQ (the label row of W_Q) and in every row of OV not read out."""
    attention = model.blocks[0].attn
    for weight in (attention.W_Q.data[:, d:, :], attention.W_O.data[:, :, :d]):
        weight.copy_(size * torch.randn(weight.shape, generator=generator, dtype=torch.float64))


def _random_basis(n_heads: int, width: int, generator: torch.Generator) -> Float[torch.Tensor, "head width width"]:
    """Rotations times scales within a factor of two: invertible, and mild on float32."""
    rotation, _ = torch.linalg.qr(torch.randn(n_heads, width, width, generator=generator, dtype=torch.float64))
    stretch = 2 ** (torch.rand(n_heads, 1, width, generator=generator, dtype=torch.float64) - 0.5)
    return rotation * stretch
