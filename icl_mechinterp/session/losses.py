"""The mean of a user's loss between two captures, whatever kind of number the loop hands over."""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch


class LossWindow:
    """A running mean that waits for no accelerator and keeps no graph.

    Args:
        tell: is called with a name and a message when a loss cannot be used.
    """

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        self._tell = tell
        self._sum: Any = 0.0
        self._count = 0
        self._told = False
        self._last = 0

    def add(self, loss: Any, step: int) -> None:
        """One loss; what is no number is told once and counts as NaN."""
        self._last = step
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and not loss.is_complex():
            loss = loss.detach()
            # reading a number back from an accelerator would make the loop wait for it at every step
            value = float(loss) if loss.device.type == "cpu" else loss.float().reshape(())
        elif isinstance(loss, Real):  # NumPy's scalars too
            value = float(loss)
        else:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)[:80]
            self._complain(f"the loss is not a number at step {step}: it is {got}, so it is recorded as NaN")
            value = math.nan
        if isinstance(value, float) and not math.isfinite(value):
            self._complain(f"the loss is not a number at step {step}: it is {value}; it is recorded as such")
        self._sum, self._count = self._sum + value, self._count + 1

    def take(self) -> float:
        """The mean since the last call; NaN without a loss."""
        mean = float(self._sum) / self._count if self._count else math.nan
        if self._count and not math.isfinite(mean):
            self._complain(f"the loss is not a number before step {self._last}; it is recorded as such")
        self._sum, self._count = 0.0, 0
        return mean

    def _complain(self, message: str) -> None:
        if not self._told:
            self._told = True
            self._tell("the loss", message)
