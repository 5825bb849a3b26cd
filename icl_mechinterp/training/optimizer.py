"""Optimisers over the one flat tensor that all seeds share.

`torch.optim` walks through parameter groups, profiler hooks and device lists before it computes; on a tensor of a few
hundred numbers that is three times the arithmetic, and an eighth of a training step. These call the same kernels.
"""

from typing import Literal, TypeAlias

import torch
from jaxtyping import Float

Flat: TypeAlias = Float[torch.Tensor, "seed parameter"]
Name: TypeAlias = Literal["adam", "sgd"]

_BETAS, _EPS = (0.9, 0.999), 1e-8


class Adam:
    """As published (Kingma and Ba 2015): betas .9 and .999, eps 1e-8, no weight decay; bit for bit torch's fused one.

    Attributes:
        state: tensors that the next step depends on, by name; changed in place.
    """

    def __init__(self, parameters: Flat, gradient: Flat) -> None:
        self.state = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(parameters),
            "exp_avg_sq": torch.zeros_like(parameters),
        }
        self._parameters, self._gradient = parameters, gradient

    def step(self, lr: float) -> None:
        """One update at a learning rate."""
        count, first, second = self.state.values()
        count += 1
        torch._fused_adam_(
            [self._parameters],
            [self._gradient],
            [first],
            [second],
            [],
            [count],
            lr=lr,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            weight_decay=0.0,
            eps=_EPS,
            amsgrad=False,
            maximize=False,
        )


class SGD:
    """Plain gradient descent, without momentum; `state` is empty."""

    def __init__(self, parameters: Flat, gradient: Flat) -> None:
        self.state: dict[str, torch.Tensor] = {}
        self._parameters, self._gradient = parameters, gradient

    def step(self, lr: float) -> None:
        """One update at a learning rate."""
        self._parameters.sub_(self._gradient, alpha=lr)


Optimizer: TypeAlias = Adam | SGD


def make_optimizer(name: Name, parameters: Flat, gradient: Flat) -> Optimizer:
    """The optimiser of that name."""
    return {"adam": Adam, "sgd": SGD}[name](parameters, gradient)
