"""How weights lie in other people's files, and the one form that all of them are turned into.

A head's maps are, in the papers' notation, q, k, v: token -> d_head and o: d_head -> out, applied as W z. A file differs in
two ways: how heads are arranged (one matrix with the heads one after the other, a stack, one matrix per head) and whether a
matrix is written out x in (as `nn.Linear` does) or in x out. Either way is a permutation of axes, so a round trip keeps
every bit.

`o` has one row per label slot (the papers' code, n_out = 1) or one per token coordinate (the papers' formula); only the
label rows matter, for nothing else is read out.
"""

from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from jaxtyping import Float

Layout: TypeAlias = Literal[
    "fused",
    "fused_transposed",
    "stacked",
    "stacked_transposed",
    "heads",
    "heads_transposed",
    "transformer_lens",
]
Arrangement: TypeAlias = Literal["fused", "stacked", "heads"]
Orientation: TypeAlias = Literal["out_in", "in_out"]
Role: TypeAlias = Literal["q", "k", "v", "o"]

ROLES: tuple[Role, ...] = get_args(Role)

LAYOUTS: dict[Layout, str] = {
    "fused": "q, k, v [head*d_head token], o [out head*d_head]: out x in, as nn.Linear stores them",
    "fused_transposed": "q, k, v [token head*d_head], o [head*d_head out]: in x out",
    "stacked": "q, k, v [head d_head token], o [head out d_head]: out x in",
    "stacked_transposed": "q, k, v [head token d_head], o [head d_head out]: in x out",
    "heads": "one matrix per head, q, k, v [d_head token], o [out d_head]: out x in, as nn.Linear stores them",
    "heads_transposed": "one matrix per head, q, k, v [token d_head], o [d_head out]: in x out",
    "transformer_lens": "blocks.0.attn.W_Q, W_K, W_V [head token d_head], W_O [head d_head token]",
}
"""Every layout with the shapes it has."""


class LayerWeights(NamedTuple):
    """One layer as TransformerLens stores it; a bias that is absent is zero."""

    W_Q: Float[torch.Tensor, "head token d_head"]
    W_K: Float[torch.Tensor, "head token d_head"]
    W_V: Float[torch.Tensor, "head token d_head"]
    W_O: Float[torch.Tensor, "head d_head token"]
    b_Q: Float[torch.Tensor, "head d_head"] | None = None
    b_K: Float[torch.Tensor, "head d_head"] | None = None
    b_V: Float[torch.Tensor, "head d_head"] | None = None
    b_O: Float[torch.Tensor, " token"] | None = None


class ModelWeights(NamedTuple):
    """All layers, and the bias of the read-out where there is one."""

    layers: tuple[LayerWeights, ...]
    b_U: Float[torch.Tensor, " out"] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].W_Q.dtype

    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters by their names in a `HookedTransformer`."""
        named = {
            f"blocks.{index}.attn.{name}": tensor
            for index, layer in enumerate(self.layers)
            for name, tensor in layer._asdict().items()
            if tensor is not None
        }
        return named if self.b_U is None else {**named, "unembed.b_U": self.b_U}

    def biases(self) -> list[str]:
        """Names of the biases that are not zero."""
        return [n for n, t in self.tensors().items() if n.rpartition(".")[2].startswith("b_") and bool(t.any())]


def parts(layout: Layout) -> tuple[Arrangement, Orientation]:
    """Arrangement and orientation of a layout; TransformerLens' is a stack written in x out."""
    arrangement, _, transposed = ("stacked_transposed" if layout == "transformer_lens" else layout).partition("_")
    return arrangement, "in_out" if transposed else "out_in"  # pyright: ignore[reportReturnType]


def layout_of(arrangement: Arrangement, orientation: Orientation) -> Layout:
    """The layout that `parts` takes apart."""
    return f"{arrangement}_transposed" if orientation == "in_out" else arrangement  # pyright: ignore[reportReturnType]


def unpack(
    tensor: torch.Tensor, n_heads: int, role: Role, orientation: Orientation
) -> Float[torch.Tensor, "head d_in d_out"]:
    """A fused `[.., ..]` or stacked `[head .., ..]` tensor as one in x out matrix per head, as TransformerLens has "
    "them."""
    if tensor.ndim == 3:
        return tensor if orientation == "in_out" else tensor.mT
    in_out = tensor if orientation == "in_out" else tensor.mT
    if role == "o":  # the heads lie along the input
        return in_out.unflatten(0, (n_heads, -1))
    return in_out.unflatten(1, (n_heads, -1)).transpose(0, 1)


def pack(
    heads: Float[torch.Tensor, "head d_in d_out"], role: Role, *, fused: bool, orientation: Orientation
) -> torch.Tensor:
    """The inverse of `unpack`."""
    if not fused:
        return heads if orientation == "in_out" else heads.mT
    in_out = heads.flatten(0, 1) if role == "o" else heads.transpose(0, 1).flatten(1, 2)
    return in_out if orientation == "in_out" else in_out.mT
