"""What a task is to the rest of the package, and the token layout of a prompt.

A prompt is `z: [batch pos token]`: `pos` runs over the context tokens and ends with the query, `token` over the `d`
covariates and then the label slots. The query's label slots are zero; its labels are the target.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from .._types import Prompts, Targets


class Batch(NamedTuple):
    """Prompts and what the model should answer.

    Attributes:
        z: prompts, `[batch pos token]`.
        target: label of the query, noise included, `[batch out]`.
    """

    z: Prompts
    target: Targets


@runtime_checkable
class Task(Protocol):
    """A distribution over prompts.

    Attributes:
        d: number of covariates.
        context: number of context tokens L.
        n_out: number of label slots.
        noise: variance of the label noise.
    """

    @property
    def d(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def n_out(self) -> int: ...
    @property
    def noise(self) -> float: ...

    def sample(
        self,
        batch: int,
        *,
        generator: torch.Generator,
        context: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Batch:
        """Fresh prompts; `context` overrides the task's own length."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Plain values from which the task can be built again."""
        ...
