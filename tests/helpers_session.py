"""Models of other people: `HookedTransformer`s that were not built by us."""

import warnings
from typing import Any

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig

from icl_mechinterp.tasks import LinearRegression

WIDTH = 8


def foreign(task: LinearRegression, **settings: Any) -> HookedTransformer:
    """A small model with an embedding of its own to come; TransformerLens' defaults: biases, all parameters trained."""
    defaults: dict[str, Any] = {
        "n_layers": 1,
        "n_heads": 2,
        "d_model": WIDTH,
        "d_head": 4,
        "n_ctx": task.context + 1,
        "d_vocab": 1,
        "d_vocab_out": task.n_out,
        "attn_only": True,
        "normalization_type": None,
        "act_fn": "relu",
        "init_weights": False,
        "device": "cpu",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = HookedTransformer(HookedTransformerConfig(**(defaults | settings)))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "b_" in name:
            parameter.data.zero_()
        elif name.endswith(".w"):  # of a layer norm
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.3, generator=generator)
    return model


def hook_count(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._backward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
