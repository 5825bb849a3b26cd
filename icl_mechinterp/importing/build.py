"""A `HookedTransformer` with given weights."""

import torch
from transformer_lens import HookedTransformer

from ..models import attention_only
from ..tasks import Task
from .layouts import ModelWeights


def model_settings(weights: ModelWeights, scale: float) -> dict[str, int | float]:
    """The `model` section of a config for these weights."""
    heads, _, d_head = weights.layers[0].W_Q.shape
    return {"n_heads": heads, "n_layers": len(weights.layers), "d_head": d_head, "scale": scale}


def build_imported(weights: ModelWeights, task: Task, scale: float) -> HookedTransformer:
    """The model, in the dtype of the weights; biases are carried and stay frozen.

    Raises:
        ConfigError: a scale that is not a positive number.
    """
    heads, _, d_head = weights.layers[0].W_Q.shape
    model = attention_only(task, heads, n_layers=len(weights.layers), d_head=d_head, scale=scale, init_scale=0.0)
    if weights.dtype != torch.float32:
        model = model.to(weights.dtype, print_details=False)
    parameters = dict(model.named_parameters())
    for name, tensor in weights.tensors().items():
        parameters[name].data.copy_(tensor)
    return model


def set_scale(model: HookedTransformer, scale: float) -> None:
    """Gives every layer another factor on its logits; TransformerLens keeps the inverse, a divisor."""
    for block in model.blocks:
        block.attn.attn_scale = 1.0 / scale
