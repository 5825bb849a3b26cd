"""Names of array axes, one word each, and the aliases built from them.

`seed` independent model of an ensemble, `step` optimiser step, `layer`, `head`, `batch` prompt, `pos` position in the
prompt (context tokens, then the query), `key`/`query` token coordinate on the two sides of the attention logit,
`token` coordinate of the attended token, `out` label slot read out.
"""

from typing import TypeAlias

import torch
from jaxtyping import Float

Tensor: TypeAlias = torch.Tensor

Prompts: TypeAlias = Float[torch.Tensor, "batch pos token"]
Targets: TypeAlias = Float[torch.Tensor, "batch out"]
Predictions: TypeAlias = Float[torch.Tensor, "batch out"]
HeadKQ: TypeAlias = Float[torch.Tensor, "layer head key query"]
HeadOV: TypeAlias = Float[torch.Tensor, "layer head out token"]
