"""Models that compute a named algorithm other than softmax attention's: planted by hooks that belong to the model."""

from collections.abc import Callable

import torch
from transformer_lens import HookedTransformer

import icl_mechinterp as icl
from icl_mechinterp.tasks import Task
from tests.planted import build, heads


def overwritten(task: Task, predict: Callable[[torch.Tensor], torch.Tensor], *, n_layers: int = 1) -> HookedTransformer:
    """A model whose output is replaced by `predict(prompts)`; its circuits say nothing about it."""
    model = icl.attention_only(task, 2, n_layers=n_layers, seed=0)
    seen: list[torch.Tensor] = []

    def remember(value: torch.Tensor, hook: object) -> None:
        seen[:] = [value]

    def replace(value: torch.Tensor, hook: object) -> torch.Tensor:
        value = value.clone()
        value[:, -1, task.d :] = predict(seen[0].double()).to(value.dtype)
        return value

    model.add_perma_hook("blocks.0.hook_resid_pre", remember)
    model.add_perma_hook(f"blocks.{n_layers - 1}.hook_resid_post", replace)
    return model


def linear_attention(task: Task, omega: float, mu: float) -> HookedTransformer:
    """One head without softmax, pattern = scores / L: one step of vanilla GD with eta = mu omega (section 4.2)."""
    model = build(heads(task.d, [omega], [mu]), task)
    seen: list[torch.Tensor] = []

    def remember(value: torch.Tensor, hook: object) -> None:
        seen[:] = [value]

    def replace(value: torch.Tensor, hook: object) -> torch.Tensor:
        return seen[0].masked_fill(seen[0].isinf(), 0.0) / task.context

    model.add_perma_hook("blocks.0.attn.hook_attn_scores", remember)
    model.add_perma_hook("blocks.0.attn.hook_pattern", replace)
    return model
