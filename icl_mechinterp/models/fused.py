"""The fused engine: predictions and gradients from the collapsed circuits, for the query's row only.

A full forward pass computes attention of every position to every other, O(L^2 d H). The prediction needs one row, and
through KQ and OV (tiny, computed once per step) that row costs O(L d H):

    u_h = KQ_h x_q,   a_h = softmax(Z u_h),   c_h = Z^T a_h,   yhat = sum_h OV_h c_h

The backward pass is written out: the same four batched products with the axes exchanged, then the gradient of the
collapsed matrices is handed back to W_Q, W_K, W_V, W_O in closed form. Autograd computes the same at twice the time.

Axes: `stream` independent prompt streams, either one per seed or one that all seeds share. With a shared stream the
seeds are folded into the head axis, so both cases are the same products on different shapes.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from transformer_lens import HookedTransformer

from .weights import HeadWeights


class Collapsed(NamedTuple):
    """KQ and OV of one layer of every seed, in residual coordinates.

    Attributes:
        kq: logit coefficients, attention scale included: logit = z_key^T kq z_query.
        ov: what the attended token adds to the prediction.
    """

    kq: Float[torch.Tensor, "seed head key query"]
    ov: Float[torch.Tensor, "seed head out token"]


class Forward(NamedTuple):
    """What the backward pass needs of the forward pass; G = heads per stream, seeds folded in."""

    prediction: Float[torch.Tensor, "seed batch out"]
    context: Float[torch.Tensor, "stream_batch key_pos token"]
    query: Float[torch.Tensor, "stream batch covariate"]
    pattern: Float[torch.Tensor, "stream_batch folded_head key_pos"]
    read: Float[torch.Tensor, "seed batch head_token"]


def collapse(weights: HeadWeights, scale: float, read_out: Float[torch.Tensor, "token out"]) -> Collapsed:
    """KQ = scale W_K W_Q^T and OV = (W_V W_O W_U)^T: the papers' orientation, the transpose of TransformerLens' QK."""
    return Collapsed(scale * weights.W_K @ weights.W_Q.mT, (weights.W_V @ (weights.W_O @ read_out)).mT)


def fused_prediction(
    circuits: Collapsed, z: Float[torch.Tensor, "stream batch pos token"]
) -> Float[torch.Tensor, "seed batch out"]:
    """Predictions of every seed; `stream` is 1 (prompts shared by the seeds) or the number of seeds."""
    return _forward(circuits, z).prediction


def loss_and_gradients(
    weights: HeadWeights,
    gradients: HeadWeights,
    z: Float[torch.Tensor, "stream batch pos token"],
    target: Float[torch.Tensor, "stream batch out"],
    *,
    scale: float,
    read_out: Float[torch.Tensor, "token out"],
) -> Float[torch.Tensor, " seed"]:
    """Mean squared error per seed (mean over prompts and outputs); its gradients are written into `gradients`."""
    circuits = collapse(weights, scale, read_out)
    forward = _forward(circuits, z)
    residual = forward.prediction - target
    d_kq, d_ov = _backward(circuits, forward, residual * (2.0 / residual[0].numel()))
    covariates = d_kq.shape[-1]
    torch.mul(d_kq @ weights.W_Q[..., :covariates, :], scale, out=gradients.W_K)
    torch.mul(d_kq.mT @ weights.W_K, scale, out=gradients.W_Q[..., :covariates, :])
    gradients.W_V.copy_(d_ov.mT @ (weights.W_O @ read_out).mT)
    gradients.W_O.copy_(weights.W_V.mT @ d_ov.mT @ read_out.mT)
    return residual.square().mean((1, 2))


def _forward(circuits: Collapsed, z: Float[torch.Tensor, "stream batch pos token"]) -> Forward:
    seeds, heads, n_out, token = circuits.ov.shape
    streams, batch = z.shape[:2]
    covariates = token - n_out
    # Views: the context is all but the last position, and stream and batch are adjacent in memory.
    context, query = z[:, :, :-1].flatten(0, 1), z[:, :, -1, :covariates]
    # The query's label slots are zero, so the label columns of KQ never act.
    into_query = circuits.kq[..., :covariates].reshape(streams, -1, covariates)
    key_vectors = (query @ into_query.mT).view(streams * batch, -1, token)
    pattern = torch.softmax(key_vectors @ context.mT, dim=-1)
    # One stream for all seeds: the seeds lie in the head axis and come out of it again; else a view.
    read = (pattern @ context).view(streams, batch, seeds // streams, heads * token).transpose(1, 2).flatten(0, 1)
    return Forward(read @ _head_token(circuits.ov), context, query, pattern, read)


def _backward(
    circuits: Collapsed, forward: Forward, d_prediction: Float[torch.Tensor, "seed batch out"]
) -> tuple[Float[torch.Tensor, "seed head key covariate"], Float[torch.Tensor, "seed head out token"]]:
    """Gradients of KQ (covariate columns) and OV from the gradient of the prediction."""
    seeds, heads, _, token = circuits.ov.shape
    streams, batch, covariates = forward.query.shape
    d_ov = (d_prediction.mT @ forward.read).unflatten(-1, (heads, token)).transpose(1, 2)
    d_read = (d_prediction @ _head_token(circuits.ov).mT).unflatten(0, (streams, seeds // streams)).transpose(1, 2)
    d_pattern = d_read.reshape(streams * batch, -1, token) @ forward.context.mT
    d_scores = torch.ops.aten._softmax_backward_data(d_pattern, forward.pattern, -1, d_pattern.dtype)
    d_key_vectors = (d_scores @ forward.context).view(streams, batch, -1)
    return (d_key_vectors.mT @ forward.query).view(seeds, heads, token, covariates), d_ov


def _head_token(ov: Float[torch.Tensor, "seed head out token"]) -> Float[torch.Tensor, "seed head_token out"]:
    return ov.transpose(2, 3).flatten(1, 2)


def reason_not_fused(model: HookedTransformer) -> str | None:
    """Why the fused engine cannot express a model, or `None` when it can."""
    cfg = model.cfg
    if cfg.n_layers != 1:
        return f"it has {cfg.n_layers} layers"
    if not cfg.attn_only:
        return "it has MLPs"
    if cfg.normalization_type is not None:
        return f"it normalises the residual stream ({cfg.normalization_type})"
    attention = model.blocks[0].attn
    for bias in (attention.b_Q, attention.b_K, attention.b_V, attention.b_O, model.unembed.b_U):
        if bias.requires_grad or bool(bias.any()):
            return "it has biases"
    return None
