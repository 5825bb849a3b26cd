"""Predictions of a `HookedTransformer`, by its own forward pass."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from transformer_lens import HookedTransformer

from .._types import Predictions, Prompts

if TYPE_CHECKING:
    from .coordinates import Coordinates


class ForwardPass(NamedTuple):
    """One forward pass of a model with coordinates.

    Attributes:
        prediction: at the query, `[batch out]`.
        embedded: the residual stream before the first block, `[batch pos d_model]`.
        residual: after the last block, `None` where the model read it out itself.
        output: of `unembed`, `[batch pos out]`; `None` without one.
    """

    prediction: Predictions
    embedded: Float[torch.Tensor, "batch pos d_model"]
    residual: Float[torch.Tensor, "batch pos d_model"] | None
    output: Float[torch.Tensor, "batch pos out"] | None


def query_mask(z: Float[torch.Tensor, "batch pos *width"]) -> Int[torch.Tensor, "batch pos"]:
    """TransformerLens' attention mask that hides the query: ones for the context, zero for the last position.

    Models built here hide the query by themselves; other models need the mask.
    """
    mask = torch.ones(z.shape[:2], dtype=torch.long, device=z.device)
    mask[:, -1] = 0
    return mask


def hooked_prediction(model: HookedTransformer, z: Prompts, *, coordinates: Any = None) -> Predictions:
    """The full forward pass with all hooks, read at the query: `[batch out]`.

    Args:
        model: any `HookedTransformer`.
        z: prompts.
        coordinates: of a model with its own embedding; by default the residual stream is the prompt.
    """
    if coordinates is None:
        return model(z, start_at_layer=0, attention_mask=query_mask(z))[:, -1]
    return forward_pass(model, z, coordinates).prediction


def forward_pass(model: HookedTransformer, z: Prompts, coordinates: "Coordinates") -> ForwardPass:
    """A forward pass through `coordinates`, with what a regression needs of it."""
    embedded, mask = coordinates.embedded(z), query_mask(z)
    if coordinates.unembed is None and _is_own(coordinates.read_out, model):
        prediction = model(embedded, start_at_layer=0, attention_mask=mask)[:, -1]
        return ForwardPass(prediction, embedded, None, None)
    residual = model(embedded, start_at_layer=0, stop_at_layer=model.cfg.n_layers, attention_mask=mask)
    if coordinates.unembed is None:
        return ForwardPass(residual[:, -1] @ coordinates.read_out, embedded, residual, None)
    output = coordinates.unembed(residual)
    return ForwardPass(output[:, -1], embedded, residual, output)


def _is_own(read_out: Float[torch.Tensor, "d_model out"], model: HookedTransformer) -> bool:
    """Whether a read-out is the model's unembedding itself, a view of the same memory."""
    W_U = model.unembed.W_U
    return read_out.shape == W_U.shape and read_out.data_ptr() == W_U.data_ptr()
