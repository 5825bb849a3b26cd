"""The trainable weights of an ensemble in one flat tensor, of which the models' parameters are views.

The `HookedTransformer` owns its parameters; while it trains they live side by side with those of the other seeds, so
that one optimiser call updates all of them and both engines write their gradients into the same place. M = 1 is the
ordinary case, not a second code path.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from transformer_lens import HookedTransformer

from ..errors import ConfigError


class HeadWeights(NamedTuple):
    """One layer's weights with a leading seed axis, in TransformerLens' layout."""

    W_Q: Float[torch.Tensor, "seed head token d_head"]
    W_K: Float[torch.Tensor, "seed head token d_head"]
    W_V: Float[torch.Tensor, "seed head token d_head"]
    W_O: Float[torch.Tensor, "seed head d_head token"]


class ParameterStack:
    """The trainable parameters of equally shaped models, stacked.

    Attributes:
        models: in the order of the seed axis.
        flat: `[seed parameter]`, the leaf tensor that the optimiser sees.
        grad: `[seed parameter]`, its gradient.
    """

    def __init__(self, models: Sequence[HookedTransformer]) -> None:
        shapes = [[(n, tuple(p.shape)) for n, p in m.named_parameters() if p.requires_grad] for m in models]
        if not shapes or any(shape != shapes[0] for shape in shapes):
            raise ConfigError(
                f"models that train together need equal shapes; got {len(models)} models with "
                f"{len({str(shape) for shape in shapes})} different shapes. Train them one by one.",
                field="models",
            )
        if len({id(model) for model in models}) < len(models):
            raise ConfigError("the same model is listed twice; give each seed its own.", field="models")
        self.models = tuple(models)
        self.shapes = dict(shapes[0])
        rows = [torch.cat([p.detach().reshape(-1) for p in self._trainable(model)]) for model in models]
        self.flat = torch.nn.Parameter(torch.stack(rows))
        self.flat.grad = torch.zeros_like(self.flat)
        for seed, model in enumerate(models):
            for name, parameter in zip(self.shapes, self._trainable(model), strict=True):
                parameter.data = self.view(self.flat.data, name)[seed]

    @property
    def grad(self) -> Float[torch.Tensor, "seed parameter"]:
        assert self.flat.grad is not None
        return self.flat.grad

    def view(self, flat: Float[torch.Tensor, "seed parameter"], name: str) -> Float[torch.Tensor, "seed ..."]:
        """The part of a flat tensor that belongs to one named parameter."""
        start = 0
        for other, shape in self.shapes.items():
            size = torch.Size(shape).numel()
            if other == name:
                return flat[:, start : start + size].unflatten(1, shape)
            start += size
        raise KeyError(name)

    def heads(self, flat: Float[torch.Tensor, "seed parameter"], layer: int = 0) -> HeadWeights:
        """One layer's weights (or their gradients) as views of a flat tensor."""
        return HeadWeights(*(self.view(flat, f"blocks.{layer}.attn.{name}") for name in HeadWeights._fields))

    def named(self) -> dict[str, torch.Tensor]:
        """Copies of the parameters by name, `[seed ...]`, as a checkpoint stores them."""
        return {name: self.view(self.flat.detach(), name).clone() for name in self.shapes}

    def load(self, named: dict[str, torch.Tensor]) -> None:
        """Writes parameters by name into the models."""
        for name in self.shapes:
            self.view(self.flat.data, name).copy_(named[name])

    def release(self) -> None:
        """Gives each model parameters of its own again, with the values they have now."""
        for model in self.models:
            for parameter in self._trainable(model):
                parameter.data = parameter.data.clone()

    def _trainable(self, model: HookedTransformer) -> list[torch.nn.Parameter]:
        return [p for p in model.parameters() if p.requires_grad]
