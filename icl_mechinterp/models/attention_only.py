"""The papers' model as a `HookedTransformer`: attention only, no normalisation, no positions, no trained biases.

    yhat = sum_h OV_h . Z softmax(Z^T KQ_h z_query),   keys and values: the L context tokens      (2503.12734, sec. 1.3)

The residual stream *is* the prompt: a token's d covariates and N label slots are its d + N coordinates, so read-in is
the identity (`start_at_layer=0`) and read-out a frozen `W_U` on the label slots. The query's label slot is zero, so the
residual adds nothing there. The query is hidden from the keys by a hook that belongs to the model.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from transformer_lens import HookedTransformer

from .._types import Checked, HeadKQ, HeadOV
from ..errors import ConfigError
from ..tasks import Task
from . import _tl


def attention_only(
    task: Task,
    n_heads: Checked[int],
    *,
    n_layers: Checked[int] = 1,
    d_head: Checked[int | None] = None,
    scale: Checked[float | None] = None,
    init: Checked[Literal["uniform", "normal"]] = "uniform",
    init_scale: float = 1.0,
    seed: int = 0,
) -> HookedTransformer:
    """An attention-only model for a task, ready to train: `model(z, start_at_layer=0)[:, -1]` is the prediction.

    Args:
        task: gives the width d + N and the context length.
        n_heads: heads per layer.
        n_layers: with more than one, context tokens attend to the whole context, never to the query.
        d_head: width of a head; the papers' full width d + N by default.
        scale: factor on the attention logits; 1/sqrt(d_head) by default (the reference code), 1 is the paper's formula.
        init: "uniform", the reference code's U(-1/sqrt(fan_in), 1/sqrt(fan_in)) on W_Q, W_K, W_V, W_O; "normal", a
            Gaussian of the same variance.
        init_scale: multiplies the initial weights; small values start near the saddle at zero.
        seed: of the initial weights; the global random state is neither read nor changed.

    Returns:
        A `transformer_lens.HookedTransformer`; trainable are W_Q, W_K, W_V, W_O, everything else is frozen.

    Raises:
        ConfigError: a value that cannot be used; `error.field` names it.
    """
    for name, value in (("n_heads", n_heads), ("n_layers", n_layers), ("d_head", 1 if d_head is None else d_head)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1; got {value!r}.", field=name)
    if init not in ("uniform", "normal"):
        raise ConfigError(f"init must be 'uniform' or 'normal'; got {init!r}.", field="init")
    if isinstance(init_scale, bool) or not isinstance(init_scale, int | float) or not 0 <= init_scale < math.inf:
        raise ConfigError(f"init_scale must be a finite number of at least 0; got {init_scale!r}.", field="init_scale")
    width = task.d + task.n_out
    d_head = width if d_head is None else d_head
    model = _frozen(task, n_heads, n_layers, d_head, 1 / math.sqrt(d_head) if scale is None else scale)
    generator = torch.Generator().manual_seed(seed)
    for block in model.blocks:
        attention = block.attn
        # fan_in of the reference code's linear layers: the token for q, k, v; all heads together for o
        for weight, fan_in in (
            (attention.W_Q, width),
            (attention.W_K, width),
            (attention.W_V, width),
            (attention.W_O, n_heads * d_head),
        ):
            bound = init_scale / math.sqrt(fan_in)
            if init == "uniform":
                weight.data.uniform_(-bound, bound, generator=generator)
            else:
                weight.data.normal_(0.0, bound / math.sqrt(3), generator=generator)
            weight.requires_grad_(True)
    return model


def from_circuits(
    task: Task,
    kq: HeadKQ | Float[torch.Tensor, "head key query"],
    ov: HeadOV | Float[torch.Tensor, "head out token"],
    *,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> HookedTransformer:
    """The one-layer model with exactly these circuits: for published matrices, and for models planted in tests.

    The circuits fix a model up to a change of basis inside each head; this one has W_Q = W_V = identity.

    Args:
        task: gives the width d + N.
        kq: logit coefficients `[head key query]`, attention scale included (a leading layer axis of 1 is accepted).
        ov: map from the attended token to the prediction `[head out token]`.
        scale: as in `attention_only`; the circuits are the same whatever it is.
        dtype: of the parameters.

    Raises:
        ConfigError: shapes that do not fit the task.
    """
    kq, ov = kq.reshape(-1, *kq.shape[-2:]), ov.reshape(-1, *ov.shape[-2:])
    width, n_heads = task.d + task.n_out, kq.shape[0]
    if kq.shape != (n_heads, width, width) or ov.shape != (n_heads, task.n_out, width):
        raise ConfigError(
            f"circuits of {n_heads} heads for this task have shapes ({n_heads}, {width}, {width}) and ({n_heads}, "
            f"{task.n_out}, {width}); got {tuple(kq.shape)} and {tuple(ov.shape)}.",
            field="kq",
        )
    scale = 1 / math.sqrt(width) if scale is None else scale
    model = _frozen(task, n_heads, 1, width, scale).to(dtype, print_details=False)
    attention = model.blocks[0].attn
    identity = torch.eye(width, dtype=dtype).expand(n_heads, width, width)
    attention.W_Q.data.copy_(identity)
    attention.W_K.data.copy_(kq / scale)
    attention.W_V.data.copy_(identity)
    attention.W_O.data[..., task.d :] = ov.mT.to(dtype)
    for weight in (attention.W_Q, attention.W_K, attention.W_V, attention.W_O):
        weight.requires_grad_(True)
    return model


def _frozen(task: Task, n_heads: int, n_layers: int, d_head: int, scale: Checked[float]) -> HookedTransformer:
    """All weights zero but the read-out, which is fixed on the label slots."""
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not (math.isfinite(scale) and scale > 0):
        raise ConfigError(
            f"scale must be a positive number, the factor on the attention logits; got {scale!r}.", field="scale"
        )
    model = _tl.build(
        n_layers=n_layers,
        n_heads=n_heads,
        d_model=task.d + task.n_out,
        d_head=d_head,
        d_out=task.n_out,
        n_ctx=task.context + 1,
        attention_scale=float(scale),
    )
    model.unembed.W_U.data[task.d :] = torch.eye(task.n_out)
    for layer in range(n_layers):
        _tl.add_permanent_hook(model, f"blocks.{layer}.attn.hook_attn_scores", hide_query)
    return model


def hide_query(
    scores: Float[torch.Tensor, "batch head query_pos key_pos"], hook: object = None
) -> Float[torch.Tensor, "batch head query_pos key_pos"]:
    """Attention scores with the last key, the query token itself, masked out."""
    del hook
    last = torch.arange(scores.shape[-1], device=scores.device) == scores.shape[-1] - 1
    return scores.masked_fill(last, -torch.inf)
