"""Names of array axes, one word each, and the aliases built from them.

`seed` independent model of an ensemble, `step` optimiser step, `layer`, `head`, `batch` prompt, `pos` position in the
prompt (context tokens, then the query), `key`/`query` token coordinate on the two sides of the attention logit,
`token` coordinate of the attended token, `out` label slot read out.
"""

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import torch
from jaxtyping import Float

Tensor: TypeAlias = torch.Tensor

Prompts: TypeAlias = Float[torch.Tensor, "batch pos token"]
Targets: TypeAlias = Float[torch.Tensor, "batch out"]
Predictions: TypeAlias = Float[torch.Tensor, "batch out"]
HeadKQ: TypeAlias = Float[torch.Tensor, "layer head key query"]
HeadOV: TypeAlias = Float[torch.Tensor, "layer head out token"]

_T = TypeVar("_T")

if TYPE_CHECKING:
    Checked: TypeAlias = Annotated[_T, "checked by hand"]
else:

    class Checked:
        """`Checked[int]` reads as int, and a run-time type checker lets everything pass.

        For arguments of the public edge, which are validated by hand: a mistake must end in our message (what, given,
        do), not in a type checker's.
        """

        def __class_getitem__(cls, item: Any) -> Any:
            return Any
