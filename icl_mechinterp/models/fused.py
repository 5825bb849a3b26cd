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

_SCORES = 2**17  # attention scores at a time, half a MB: they are written and read six times per step


class Collapsed(NamedTuple):
    """KQ and OV of one layer of every seed, in residual coordinates.

    Attributes:
        kq: logit coefficients, attention scale included: logit = z_key^T kq z_query.
        ov: what the attended token adds to the prediction.
    """

    kq: Float[torch.Tensor, "seed head key query"]
    ov: Float[torch.Tensor, "seed head out token"]


class _Maps(NamedTuple):
    """The collapsed circuits as the step multiplies with them; G = heads per stream, seeds folded in.

    Attributes:
        into_key: KQ without the query's label columns, which never act: its label slots are zero.
        into_out: OV, transposed.
    """

    into_key: Float[torch.Tensor, "stream folded_head_token covariate"]
    into_out: Float[torch.Tensor, "seed head_token out"]


class _Forward(NamedTuple):
    """What the backward pass needs of the forward pass."""

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
    n_out, token = circuits.ov.shape[-2:]
    into_key = circuits.kq[..., : token - n_out].reshape(len(z), -1, token - n_out)
    return _forward(_Maps(into_key, circuits.ov.transpose(2, 3).flatten(1, 2)), z).prediction


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
    seeds, _, token, _ = weights.W_Q.shape
    covariates = token - read_out.shape[1]
    W_Q, W_K, W_V, W_O = (weight.flatten(0, 1) for weight in weights)  # views for one seed, small copies for more
    W_Q, read_through = W_Q[:, :covariates], W_O @ read_out
    maps = _Maps(
        torch.bmm(W_K, W_Q.mT).mul_(scale).view(len(z), -1, covariates),
        torch.bmm(W_V, read_through).view(seeds, -1, read_out.shape[1]),
    )
    d_kq, d_ov, loss = _summed(maps, z, target)
    d_kq, d_ov = d_kq.view(-1, token, covariates), d_ov.view(-1, token, read_out.shape[1])
    _write(gradients.W_K, torch.bmm(d_kq, W_Q), scale)
    _write(gradients.W_Q[..., :covariates, :], torch.bmm(d_kq.mT, W_K), scale)
    _write(gradients.W_V, torch.bmm(d_ov, read_through.mT))
    _write(gradients.W_O, torch.bmm(W_V.mT, d_ov) @ read_out.mT)
    return loss


def _summed(
    maps: _Maps, z: Float[torch.Tensor, "stream batch pos token"], target: Float[torch.Tensor, "stream batch out"]
) -> tuple[
    Float[torch.Tensor, "stream folded_head_token covariate"],
    Float[torch.Tensor, "seed head_token out"],
    Float[torch.Tensor, " seed"],
]:
    """Gradients of the maps and the loss, over parts of the batch whose attention scores stay in the cache."""
    streams, batch, pos, token = z.shape
    scores = streams * (maps.into_key.shape[1] // token) * pos  # of one prompt per stream
    size = max(1, min(batch, _SCORES // scores))
    scale, parts = 2.0 / target[0].numel(), []
    for start in range(0, batch, size):
        forward = _forward(maps, z[:, start : start + size])
        residual = forward.prediction - target[:, start : start + size]
        parts.append((*_backward(maps, forward, residual * scale), residual.square().sum((1, 2))))
    d_kq, d_ov, loss = parts[0] if len(parts) == 1 else (torch.stack(p).sum(0) for p in zip(*parts, strict=True))
    return d_kq, d_ov, loss * (scale / 2)


def _write(gradient: torch.Tensor, value: torch.Tensor, scale: float = 1.0) -> None:
    torch.mul(value.view_as(gradient), scale, out=gradient)


def _forward(maps: _Maps, z: Float[torch.Tensor, "stream batch pos token"]) -> _Forward:
    streams, batch, _, token = z.shape
    seeds = len(maps.into_out)
    # Views: the context is all but the last position, and stream and batch are adjacent in memory.
    context, query = z[:, :, :-1].flatten(0, 1), z[:, :, -1, : maps.into_key.shape[-1]]
    key_vectors = torch.bmm(query, maps.into_key.mT).view(streams * batch, -1, token)
    pattern = torch.softmax(torch.bmm(key_vectors, context.mT), dim=-1)
    # One stream for all seeds: the seeds lie in the head axis and come out of it again; else a view.
    read = torch.bmm(pattern, context).view(streams, batch, seeds // streams, -1).transpose(1, 2).flatten(0, 1)
    return _Forward(torch.bmm(read, maps.into_out), context, query, pattern, read)


def _backward(
    maps: _Maps, forward: _Forward, d_prediction: Float[torch.Tensor, "seed batch out"]
) -> tuple[Float[torch.Tensor, "stream folded_head_token covariate"], Float[torch.Tensor, "seed head_token out"]]:
    """Gradients of the maps from the gradient of the prediction."""
    streams, batch, _ = forward.query.shape
    d_into_out = torch.bmm(forward.read.mT, d_prediction)
    d_read = torch.bmm(d_prediction, maps.into_out.mT)
    # As `read`, the other way: seeds that share a stream go back into the head axis.
    d_read = d_read.unflatten(0, (streams, -1)).transpose(1, 2).reshape(streams * batch, -1, forward.context.shape[-1])
    d_pattern = torch.bmm(d_read, forward.context.mT)
    d_scores = torch.ops.aten._softmax_backward_data(d_pattern, forward.pattern, -1, d_pattern.dtype)
    d_key_vectors = torch.bmm(d_scores, forward.context).view(streams, batch, -1)
    return torch.bmm(d_key_vectors.mT, forward.query), d_into_out


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
