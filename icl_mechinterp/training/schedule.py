"""Learning rates by step.

Adam's noise at a constant rate hides the structure of KQ and OV; a rate that decays at the end shows it (measured in
reports/LOG.md), which is why there is a choice.
"""

from typing import Literal, TypeAlias, get_args

Schedule: TypeAlias = Literal["constant", "decay"]
"""`constant`: the papers' recipe. `decay`: constant, then linear to zero over the last 30 % of the steps."""

SCHEDULES: tuple[str, ...] = get_args(Schedule)
_DECAY_FROM = 0.7


def learning_rate(step: int, *, steps: int, lr: float, schedule: Schedule) -> float:
    """The rate of the update that follows `step` finished ones, of `steps` in all."""
    if schedule == "constant":
        return lr
    remaining = (steps - step) / (steps * (1 - _DECAY_FROM))
    return lr * min(1.0, remaining)
