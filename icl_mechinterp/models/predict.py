"""Predictions of a `HookedTransformer`, by its own forward pass."""

import torch
from jaxtyping import Float, Int
from transformer_lens import HookedTransformer

from .._types import Predictions, Prompts


def query_mask(z: Float[torch.Tensor, "batch pos *width"]) -> Int[torch.Tensor, "batch pos"]:
    """TransformerLens' attention mask that hides the query: ones for the context, zero for the last position.

    Models built here hide the query by themselves; other models need the mask.
    """
    mask = torch.ones(z.shape[:2], dtype=torch.long, device=z.device)
    mask[:, -1] = 0
    return mask


def hooked_prediction(model: HookedTransformer, z: Prompts) -> Predictions:
    """The full forward pass with all hooks, read at the query: `[batch out]`."""
    return model(z, start_at_layer=0, attention_mask=query_mask(z))[:, -1]
