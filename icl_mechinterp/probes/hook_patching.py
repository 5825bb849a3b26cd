"""Activation patching through a model's own forward pass, for models of any depth and width.

The same as `patching` on the query's row, and slower, for any hook point that has a position axis. Prompts are float
tokens, `[batch pos token]`, so positions are counted on axis -2; TransformerLens' own sweeps count them on axis -1, which
here is the width of a token, and are silently wrong. Heads are counted on the activation itself.

Hooks are ours: one handle per forward pass, removed whatever happens. A user's hooks stay and run before ours.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from transformer_lens import HookedTransformer

from .._types import Checked, Predictions, Prompts, Targets
from ..errors import ConfigError, ModelError, nearest
from ..models import hooked_prediction
from .patching import Direction, chosen_at, require_same_shape

Axis: TypeAlias = Literal["position", "head"]
"""What a sweep runs over."""

_AXES: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("hook_attn_scores", "hook_pattern"), (3, 1)),  # [batch head query key]
    **dict.fromkeys(("hook_q", "hook_k", "hook_v", "hook_z", "hook_result"), (1, 2)),  # [batch pos head width]
    **dict.fromkeys(
        ("hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_out"), (1, None)
    ),
}


@dataclass(frozen=True)
class HookSweep:
    """A hook point patched at one place after the other.

    Attributes:
        hook_name: where.
        direction: which prompt received.
        over: axes of the sweep, in the order of the leading axes of `predictions`.
        predictions: patched, `[*swept batch out]`.
        clean, corrupted: predictions without a patch.
    """

    hook_name: str
    direction: Direction
    over: tuple[Axis, ...]
    predictions: Float[torch.Tensor, "*swept batch out"]
    clean: Predictions
    corrupted: Predictions

    @property
    def change(self) -> Float[torch.Tensor, "*swept"]:
        """E(yhat_patched - yhat_receiver)^2 / Var(yhat) at every place."""
        receiver = self.clean if self.direction == "noising" else self.corrupted
        variance = (self.clean - self.clean.mean(0)).square().mean()
        return (self.predictions - receiver).square().mean((-2, -1)) / variance

    def restored(self, target: Targets) -> Float[torch.Tensor, "*swept"]:
        """(loss_corrupted - loss_patched) / (loss_corrupted - loss_clean) at every place, against the clean target."""
        patched, clean, corrupted = (
            (target - yhat).square().mean((-2, -1)) for yhat in (self.predictions, self.clean, self.corrupted)
        )
        return (corrupted - patched) / (corrupted - clean)


def patch_hook(
    model: HookedTransformer,
    clean: Prompts,
    corrupted: Checked[Prompts],
    hook_name: str,
    *,
    direction: Direction = "noising",
    heads: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
) -> Predictions:
    """The prediction with the activation at one hook point from the other prompt, through the model's own forward.

    Args:
        model: of any depth and width; its hooks are left alone, ours are gone afterwards, also after an exception.
        clean, corrupted: prompts of equal shape.
        hook_name: full name, `blocks.1.attn.hook_z`.
        direction: "noising" patches the clean run, "denoising" the corrupted one.
        heads: which heads of the activation; all by default.
        positions: which tokens of the prompt; for scores and patterns, which keys. All by default.

    Raises:
        ModelError: no such hook point, one that never fires, or one whose edits change nothing.
        ConfigError: prompts of different shapes, heads of an activation that has none, or an index beyond its end.
    """
    activation = _donor_activation(model, clean, corrupted, hook_name, direction)
    receiver = clean if direction == "noising" else corrupted
    return _run_patched(model, receiver, hook_name, activation, heads, positions)


def patch_sweep(
    model: HookedTransformer,
    clean: Prompts,
    corrupted: Checked[Prompts],
    hook_name: str,
    *,
    over: Sequence[Axis] = ("position",),
    direction: Direction = "noising",
) -> HookSweep:
    """`patch_hook` at every position, every head, or every head and position.

    The positions are counted on the prompts' axis -2, the heads on the activation itself. TransformerLens' own sweeps
    count positions on axis -1, which for prompts of float tokens is the width of a token.

    Args:
        model, clean, corrupted, hook_name, direction: as in `patch_hook`.
        over: the axes to sweep.

    Raises:
        ModelError, ConfigError: as in `patch_hook`.
    """
    activation = _donor_activation(model, clean, corrupted, hook_name, direction)
    receiver = clean if direction == "noising" else corrupted
    _, head_axis = _axes(hook_name)
    if "head" in over and head_axis is None:
        raise ConfigError(f"'{hook_name}' has no head axis; sweep over ('position',).", field="over")
    counts = {"position": clean.shape[-2], "head": 1 if head_axis is None else activation.shape[head_axis]}
    places = product(*(range(counts[axis]) for axis in over))
    predictions = []
    for place in places:
        at = {axis: [index] for axis, index in zip(over, place, strict=True)}
        predictions.append(_run_patched(model, receiver, hook_name, activation, at.get("head"), at.get("position")))
    swept = torch.stack(predictions).unflatten(0, tuple(counts[axis] for axis in over))
    return HookSweep(hook_name, direction, tuple(over), swept, _forward(model, clean), _forward(model, corrupted))


def _axes(hook_name: str) -> tuple[int, int | None]:
    """Which axes of the activation are position and head."""
    point = hook_name.rsplit(".", 1)[-1]
    if point not in _AXES:
        raise ConfigError(
            f"the axes of '{hook_name}' are not known; choose a hook point that ends in one of {', '.join(_AXES)}."
            f"{nearest(point, _AXES)}",
            field="hook_name",
        )
    return _AXES[point]


def _forward(model: HookedTransformer, z: Prompts) -> Predictions:
    with torch.no_grad():
        return hooked_prediction(model, z.to(next(model.parameters()).dtype))


def _run_patched(
    model: HookedTransformer,
    receiver: Prompts,
    hook_name: str,
    activation: torch.Tensor,
    heads: Sequence[int] | None,
    positions: Sequence[int] | None,
) -> Predictions:
    chosen = torch.ones((1,) * activation.ndim, dtype=torch.bool)
    for axis, indices, what in zip(_axes(hook_name), (positions, heads), ("positions", "heads"), strict=True):
        if indices is None:
            continue
        count = 0 if axis is None else activation.shape[axis]
        if axis is None or not all(0 <= index < count for index in indices):
            raise ConfigError(f"'{hook_name}' has {count} {what}; got {list(indices)}.", field=what)
        shape = [1] * activation.ndim
        shape[axis] = count
        chosen = chosen & chosen_at(indices, count).view(shape)
    with _edited(model, hook_name, lambda output: torch.where(chosen.to(output.device), activation, output)):
        return _forward(model, receiver)


def _donor_activation(
    model: HookedTransformer, clean: Prompts, corrupted: Checked[Prompts], hook_name: str, direction: Direction
) -> torch.Tensor:
    """The activation that will be patched in, after a test that patching there does something."""
    _axes(hook_name)
    require_same_shape(clean, corrupted)
    _require_live(model, clean, hook_name)
    seen: list[torch.Tensor] = []
    with _edited(model, hook_name, lambda output: seen.append(output.detach().clone())):
        _forward(model, corrupted if direction == "noising" else clean)
    assert len(seen) == 1, f"{hook_name} fired {len(seen)} times in one forward pass"
    return seen[0]


def _require_live(model: HookedTransformer, z: Prompts, hook_name: str) -> None:
    """Noise at the hook point must change the prediction, else a patch there would silently say nothing."""
    generator = torch.Generator().manual_seed(0)

    def disturb(output: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(output.shape, generator=generator, dtype=output.dtype)
        return output + noise.to(output.device)

    with _edited(model, hook_name, disturb):
        disturbed = _forward(model, z)
    if z.shape[1] > 2 and torch.equal(disturbed, _forward(model, z)):  # one context token: attention cannot move
        raise ModelError(
            f"editing '{hook_name}' does not change the prediction: the hook point is never reached with this model's "
            "settings (hook_result needs use_attn_result), or nothing after it depends on it. Choose another."
        )


@contextmanager
def _edited(
    model: HookedTransformer, hook_name: str, edit: Callable[[torch.Tensor], torch.Tensor | None]
) -> Iterator[None]:
    """One hook of ours for the forward passes inside; it alone is removed, whatever happens."""
    points: dict[str, torch.nn.Module] = dict(model.named_modules())
    if hook_name not in points:
        raise ModelError(f"the model has no hook point '{hook_name}'.{nearest(hook_name, points)}")
    handle = points[hook_name].register_forward_hook(_as_hook(edit))
    try:
        yield
    finally:
        handle.remove()


def _as_hook(edit: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
    return lambda module, inputs, output: edit(output)
