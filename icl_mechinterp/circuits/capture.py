"""What is recorded of a model while it trains, with hooks that exist only inside a capture.

A snapshot holds KQ and OV, the attention of the query to the context on a few fixed prompts, the model's own
predictions on them (the check of the fused engine), and on request the gradient of the loss on those prompts with
respect to KQ and OV. Hooks are plain PyTorch handles on TransformerLens' hook points: we remove our own handles and
nothing else, also when a hook raises, so a user's hooks survive and the clean forward stays bit-identical.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from transformer_lens import HookedTransformer

from .._types import HeadKQ, HeadOV, Predictions, Prompts
from ..errors import ModelError
from ..models import Coordinates, hooked_prediction
from ..models import _tl as tl
from ..models.coordinates import fitted
from ..models.predict import forward_pass
from ..tasks import Batch, Task
from .extract import Circuits, circuits

_PROMPTS, _BYTES = 32, 64 * 2**20


@dataclass(frozen=True)
class Snapshot:
    """A model at one moment; detached copies only.

    Attributes:
        circuits: KQ and OV.
        attention: the query's attention to the context tokens, `[layer head prompt pos]`.
        prediction: of the hooked model on the fixed prompts, `[batch out]`.
        kq_gradient, ov_gradient: gradient of the mean squared error on the fixed prompts; `None` unless asked for.
        coordinates: where the task's coordinates were found; `None` where the residual stream is the prompt.
    """

    circuits: Circuits
    attention: Float[torch.Tensor, "layer head prompt pos"]
    prediction: Predictions
    kq_gradient: HeadKQ | None = None
    ov_gradient: HeadOV | None = None
    coordinates: Coordinates | None = None


def fixed_prompts(task: Task, n_heads: int, generator: torch.Generator) -> Batch:
    """32 prompts of full length; fewer, or shorter ones, where the scores of a full forward would fill 64 MB."""
    context = task.context
    while 4 * n_heads * (context + 1) ** 2 * 8 > _BYTES:
        context //= 2
    count = _BYTES // (4 * n_heads * (context + 1) ** 2 * 4)
    return task.sample(int(min(_PROMPTS, max(2, count))), generator=generator, context=context)


class Capture:
    """Takes snapshots of models on fixed prompts.

    Args:
        task: what the models are trained on.
        prompts: the fixed evaluation batch.
        gradients: also record the gradients of KQ and OV (one-layer models whose residual stream is the prompt).
        attention_prompts: attention is kept for this many prompts, the first ones.
        predict: how prompts become predictions, for a model that is called in another way than ours; it must run the
            model's blocks once.
    """

    def __init__(
        self,
        task: Task,
        prompts: Batch,
        *,
        gradients: bool = False,
        attention_prompts: int = 8,
        predict: Callable[[Prompts], Predictions] | None = None,
    ) -> None:
        self.task, self.prompts, self.gradients = task, prompts, gradients
        self.attention_prompts, self.predict = attention_prompts, predict
        self._tested: set[int] = set()

    def __call__(self, model: HookedTransformer, *, coordinates: Coordinates | None = None) -> Snapshot:
        """One snapshot; exactly one extra forward pass.

        Coordinates that were fitted (they carry an `embed` or `unembed`) are fitted anew to what this pass shows.

        Raises:
            ModelError: a hook point is missing or has no effect, or gradients are asked of a model that is not a
                one-layer model on bare prompts.
        """
        model = tl.require_hooked_transformer(model)
        if self.gradients and (model.cfg.n_layers > 1 or coordinates is not None or self.predict is not None):
            raise ModelError(
                f"gradients of KQ and OV are recorded for one-layer models on bare prompts; this one has "
                f"{model.cfg.n_layers} layers. Leave `gradients` off."
            )
        like = next(model.parameters())
        batch = Batch(*(tensor.to(like.device, like.dtype) for tensor in self.prompts))
        coordinates = None if coordinates is None else coordinates.to(like)
        with torch.set_grad_enabled(self.gradients):
            self._test_hooks(model, batch.z[:2], coordinates)
            with recorded(model, "attn_scores", "pattern") as activations:
                prediction, coordinates = self._forward(model, batch.z, coordinates)
        patterns = torch.stack([pattern.detach() for pattern in activations["pattern"]])
        kq_gradient, ov_gradient = None, None
        if self.gradients:
            kq_gradient, ov_gradient = _gradients(batch, prediction, activations["attn_scores"][0], patterns[0])
        return Snapshot(
            circuits(model, self.task, coordinates=coordinates),
            patterns[:, : self.attention_prompts, :, -1, :-1].transpose(1, 2).clone().cpu(),
            prediction.detach().clone().cpu(),
            kq_gradient,
            ov_gradient,
            coordinates,
        )

    def _test_hooks(self, model: HookedTransformer, z: Prompts, coordinates: Coordinates | None) -> None:
        """Once per model."""
        if id(model) not in self._tested:
            require_live_hooks(model, z if coordinates is None else coordinates.embedded(z))
            self._tested.add(id(model))

    def _forward(
        self, model: HookedTransformer, z: Prompts, coordinates: Coordinates | None
    ) -> tuple[Predictions, Coordinates | None]:
        """Predictions, and the coordinates as this pass shows them."""
        if self.predict is not None:
            prediction = self.predict(z)
            if coordinates is not None and coordinates.embed is not None:
                maps = {"embed": coordinates.embed, "unembed": coordinates.unembed, "own": coordinates.read_out}
                coordinates = fitted(z, coordinates.embedded(z), None, None, **maps)
            return prediction, coordinates
        if coordinates is None:
            return hooked_prediction(model, z), None
        seen = forward_pass(model, z, coordinates)
        if coordinates.embed is None and coordinates.unembed is None:
            return seen.prediction, coordinates
        maps = {"embed": coordinates.embed, "unembed": coordinates.unembed, "own": coordinates.read_out}
        return seen.prediction, fitted(z, seen.embedded, seen.residual, seen.output, **maps)


def _gradients(
    batch: Batch,
    prediction: Predictions,
    scores: Float[torch.Tensor, "batch head query_pos key_pos"],
    pattern: Float[torch.Tensor, "batch head query_pos key_pos"],
) -> tuple[HeadKQ, HeadOV]:
    """Gradients of the collapsed circuits; the parameters' own `.grad` is left alone.

    logit = z_key^T kq z_query and yhat = sum_h ov_h . (pattern @ z), so both follow from what the hooks saw.
    """
    z, target = batch
    loss = (prediction - target).square().mean()
    d_prediction, d_scores = torch.autograd.grad(loss, [prediction, scores])
    context, query = z[:, :-1], z[:, -1]
    kq = torch.einsum("bhl,blk,bq->hkq", d_scores[:, :, -1, :-1], context, query)
    ov = torch.einsum("bo,bhl,blt->hot", d_prediction, pattern[:, :, -1, :-1], context)
    return kq[None].cpu(), ov[None].cpu()


@contextmanager
def recorded(model: HookedTransformer, *names: str) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Records activations of the named attention hook points, one per layer, for the forward pass inside.

    Raises:
        AssertionError: a hook point was called more or less than once per layer.
    """
    activations: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    handles = []
    try:
        for name in names:
            for layer in range(model.cfg.n_layers):
                point = tl.hook_point(model, layer, name)
                handles.append(point.register_forward_hook(_appender(activations[name])))
        yield activations
        for name, seen in activations.items():
            assert len(seen) == model.cfg.n_layers, (
                f"hook_{name} fired {len(seen)} times in {model.cfg.n_layers} layers"
            )
    finally:
        for handle in handles:
            handle.remove()


def _appender(activations: list[torch.Tensor]):
    def record(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        activations.append(output)

    return record


def require_live_hooks(model: HookedTransformer, z: Float[torch.Tensor, "batch pos d_model"]) -> None:
    """Checks that what we record is what the model uses: replacing a pattern must change the prediction.

    `z` is what enters the first block.

    Some versions and wrappers of TransformerLens have hook points whose edits are silently ignored; reading them would
    then say nothing about the model. The test moves all attention of the query to the first context token. A model
    whose prediction cannot depend on attention (all OV zero) passes.

    Raises:
        ModelError: the hook point is dead.
    """
    for layer in range(model.cfg.n_layers):
        outputs = []
        for name in ("pattern", "attn_scores"):
            handle = tl.hook_point(model, layer, name).register_forward_hook(_first_key_only(name))
            try:
                with torch.no_grad():
                    outputs.append(model(z, start_at_layer=0, stop_at_layer=layer + 1)[:, -1])
            finally:
                handle.remove()
        with torch.no_grad():
            clean = model(z, start_at_layer=0, stop_at_layer=layer + 1)[:, -1]
        value_is_dead = not bool((model.blocks[layer].attn.W_V @ model.blocks[layer].attn.W_O).any())
        for name, output in zip(("pattern", "attn_scores"), outputs, strict=True):
            if z.shape[1] > 2 and not value_is_dead and torch.equal(output, clean):
                raise ModelError(
                    f"editing blocks.{layer}.attn.hook_{name} does not change the output, so what it shows is not what "
                    f"the model uses (transformer-lens {tl.tl_version()}). Use a HookedTransformer of 3.9 or later 3.x."
                )


def _first_key_only(name: str):
    def edit(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        first = torch.zeros_like(output)
        first[..., 0] = 1.0
        return first if name == "pattern" else torch.where(first == 1, 0.0, -torch.inf)

    return edit
