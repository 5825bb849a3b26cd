"""KQ and OV of every head, in task coordinates and in the papers' orientation.

    kq[key, query]   logit = z_key^T kq z_query, attention scale included (TransformerLens' QK is the transpose, unscaled)
    ov[out, token]   what an attended token adds to the prediction

Two kinds of entries mean nothing and are marked as such: the query-label columns of a first layer's kq, which multiply
the zero in the query's label slot and never get a gradient, and (left out here altogether) rows of OV that are not
read out.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from transformer_lens import HookedTransformer

from .._types import Checked, HeadKQ, HeadOV
from ..models import Coordinates, HeadWeights, collapse, resolve_coordinates
from ..models import _tl as tl
from ..tasks import Task


@dataclass(frozen=True)
class Circuits:
    """The circuits of a model; detached copies that share nothing with it.

    Attributes:
        kq: logit coefficients `[layer head key query]`.
        ov: map from token to prediction `[layer head out token]`.
        d: number of covariates; coordinates from d on are label slots.
        scale: attention scale of each layer, already contained in `kq`.
    """

    kq: HeadKQ
    ov: HeadOV
    d: int
    scale: tuple[float, ...]

    @property
    def n_layers(self) -> int:
        return self.kq.shape[0]

    @property
    def n_heads(self) -> int:
        return self.kq.shape[1]

    @property
    def token_names(self) -> tuple[str, ...]:
        """x1 ... xd, then y (or y1, y2, ... with several label slots)."""
        n_labels = self.kq.shape[-1] - self.d
        labels = ("y",) if n_labels == 1 else tuple(f"y{n + 1}" for n in range(n_labels))
        return (*(f"x{i + 1}" for i in range(self.d)), *labels)

    @property
    def identifiable(self) -> Bool[torch.Tensor, "layer key query"]:
        """Entries of kq that the model's behaviour depends on: all but the query-label columns of the first layer."""
        mask = torch.ones(self.n_layers, *self.kq.shape[-2:], dtype=torch.bool)
        mask[0, :, self.d :] = False
        return mask


def circuits(model: Checked[HookedTransformer], task: Task, *, coordinates: Coordinates | None = None) -> Circuits:
    """The KQ and OV circuits of every head.

    Args:
        model: any `HookedTransformer` whose tokens are the task's, or with `coordinates` that say where they are.
        task: gives d and the label slots.
        coordinates: read-in and read-out; by default the residual stream is the prompt.

    Returns:
        Circuits with `kq: [layer head key query]` and `ov: [layer head out token]`, in the model's dtype, on the CPU.

    Raises:
        ModelError: not a HookedTransformer, or of another width than the task's tokens.
    """
    model = tl.require_hooked_transformer(model)
    read_in, read_out = coordinates or resolve_coordinates(model, task)
    scales = tuple(tl.attention_scale(model, layer) for layer in range(model.cfg.n_layers))
    layers = []
    for block, scale in zip(model.blocks, scales, strict=True):
        attention = block.attn
        W_Q, W_K, W_V = (read_in @ getattr(attention, name).detach()[None] for name in ("W_Q", "W_K", "W_V"))
        weights = HeadWeights(W_Q, W_K, W_V, attention.W_O.detach()[None])
        layers.append(collapse(weights, scale, read_out))
    # `collapse` returns fresh tensors, so nothing here keeps the model's storage or a graph alive
    kq, ov = (torch.cat([getattr(layer, name) for layer in layers]).cpu() for name in ("kq", "ov"))
    return Circuits(kq, ov, task.d, scales)
