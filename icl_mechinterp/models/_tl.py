"""The only file that knows which TransformerLens is installed.

The rest of the package sees a `HookedTransformer` and the few facts below: how to build one without touching the global
random state, the names of its hook points, and how to give it a hook that `reset_hooks` leaves in place.
TransformerLens 4 removed `HookedTransformer`; until this file learns its successor, a 4.x install is refused by name.
"""

import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from ..errors import ModelError

try:
    from transformer_lens import HookedTransformer, HookedTransformerConfig
except ImportError as error:  # removed names raise ImportError in 4.x
    raise ModelError(
        f"transformer-lens {version('transformer-lens')} has no HookedTransformer; icl_mechinterp needs 3.9 or a later "
        "3.x. Install it with: pip install 'transformer-lens>=3.9,<4'"
    ) from error


def tl_version() -> str:
    """The installed version of TransformerLens."""
    return version("transformer-lens")


def build(
    *, n_layers: int, n_heads: int, d_model: int, d_head: int, d_out: int, n_ctx: int, attention_scale: float
) -> HookedTransformer:
    """An attention-only model without normalisation, all parameters zero and frozen; the random state is untouched.

    Args:
        attention_scale: the factor on the logits (TransformerLens' `attn_scale` is its inverse, a divisor).
    """
    config = HookedTransformerConfig(
        n_layers=n_layers,
        n_heads=n_heads,
        d_model=d_model,
        d_head=d_head,
        n_ctx=n_ctx,
        d_vocab=1,
        d_vocab_out=d_out,
        attn_only=True,
        normalization_type=None,
        # One layer: "causal" honours the `[batch, pos]` attention mask of the caller; "bidirectional" ignores it
        # silently. With several layers the context must attend to all of itself.
        attention_dir="causal" if n_layers == 1 else "bidirectional",
        use_attn_scale=True,
        attn_scale=1.0 / attention_scale,
        init_weights=False,  # its initialisation draws from the global generator; ours does not
        device="cpu",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # "HookedTransformer is removed in 4.0": see above
        model = HookedTransformer(config)
    for parameter in model.parameters():
        parameter.data.zero_()
        parameter.requires_grad_(False)
    return model


def add_permanent_hook(model: HookedTransformer, name: str, hook: Callable[..., torch.Tensor]) -> None:
    """Makes `hook` part of the model: it survives `reset_hooks` and `deepcopy`."""
    model.add_perma_hook(name, hook)


def hook_point(model: HookedTransformer, layer: int, name: str) -> torch.nn.Module:
    """The hook point `name` (`"pattern"`, `"attn_scores"`, `"z"`, ...) of a layer's attention.

    Raises:
        ModelError: the model has no such hook point.
    """
    full_name = f"blocks.{layer}.attn.hook_{name}"
    try:
        return model.hook_dict[full_name]
    except (AttributeError, KeyError) as error:
        raise ModelError(
            f"the model has no hook point '{full_name}'; got a {type(model).__name__}. Probes need a "
            "transformer_lens.HookedTransformer."
        ) from error


def attention_scale(model: HookedTransformer, layer: int) -> float:
    """The factor on the logits of a layer."""
    return 1.0 / float(model.blocks[layer].attn.attn_scale)


def require_hooked_transformer(model: Any) -> HookedTransformer:
    """The model itself, when it is one that can be probed.

    Raises:
        ModelError: it is something else.
    """
    if not isinstance(model, HookedTransformer):
        raise ModelError(
            f"a transformer_lens.HookedTransformer is needed; got a {type(model).__name__}. Build one with "
            "icl_mechinterp.attention_only(task, n_heads=2)."
        )
    return model
