"""All ways in which weights of given shapes can be meant.

Shapes often leave one reading: a matrix of H*D x D can only be out x in. Square matrices leave several: [6, 6] is one head
of width 6 either way round, or two of width 3. Readings that give the same tensors (a symmetric matrix) are one reading.
One convention is assumed for q, k and v, and for o as well unless its own shape says otherwise.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch

from ..errors import ConfigError
from ..tasks import Task
from .collect import Found
from .layouts import (
    LAYOUTS,
    ROLES,
    Arrangement,
    LayerWeights,
    Layout,
    ModelWeights,
    Orientation,
    Role,
    layout_of,
    parts,
    unpack,
)
from .state import WeightsError

_ORIENTATIONS: tuple[Orientation, ...] = ("out_in", "in_out")


@dataclass(frozen=True)
class Reading:
    """One way to read the weights.

    Attributes:
        weights: what the model would be.
        layout: how the file lies in this reading.
        n_heads: heads per layer in this reading.
    """

    weights: ModelWeights
    layout: Layout
    n_heads: int

    @property
    def text(self) -> str:
        """The options that choose it, and what they mean."""
        d_head = self.weights.layers[0].W_Q.shape[-1]
        return f"layout={self.layout!r}, n_heads={self.n_heads} ({LAYOUTS[self.layout]}; d_head {d_head})"


def readings(
    found: Found | ModelWeights, task: Task, *, layout: Layout | None, n_heads: int | None, thorough: bool
) -> list[Reading]:
    """Every reading that the shapes, the task's width and the options admit, the papers' own first.

    Args:
        found: weights by role, or whole layers in TransformerLens' layout.
        task: its tokens have d + N coordinates.
        layout, n_heads: what the caller knows.
        thorough: also consider unlikely widths of a head, because predictions will decide.

    Raises:
        WeightsError: no reading fits.
        ConfigError: `layout` or `n_heads` is not what the file has.
    """
    if isinstance(found, ModelWeights):
        return [_whole(found, task, layout, n_heads)]
    if layout is not None:
        arrangement = parts(layout)[0]
        if arrangement != found.arrangement:
            raise ConfigError(
                f"layout is {layout!r} ({LAYOUTS[layout]}), and the weights are {found.arrangement}: "
                f"{found.shapes()}. Use "
                f"'{found.arrangement}' or '{found.arrangement}_transposed', or leave layout out.",
                field="layout",
            )
    admitted = [
        reading
        for orientation in (_ORIENTATIONS if layout is None else (parts(layout)[1],))
        for heads in _head_counts(found, task, orientation, n_heads, full_width=layout is not None, thorough=thorough)
        for reading in _read(found, task, orientation, heads)
    ]
    if not admitted:
        raise WeightsError(_no_reading(found, task, layout, n_heads))
    if layout is None and found.linear and not thorough:
        admitted = _as_linear(admitted, found)
    return _distinct(admitted)


def _whole(weights: ModelWeights, task: Task, layout: Layout | None, n_heads: int | None) -> Reading:
    if layout not in (None, "transformer_lens"):
        raise ConfigError(
            f"layout is {layout!r}, and the weights have TransformerLens' own names. Use 'transformer_lens', or "
            f"leave layout "
            "out.",
            field="layout",
        )
    width = task.d + task.n_out
    first = weights.layers[0].W_Q
    heads, d_head = (first.shape[0], first.shape[-1]) if first.ndim == 3 else (0, 0)
    forward, back = (heads, width, d_head), (heads, d_head, width)
    narrow = (heads, d_head)
    wanted = {"W_Q": forward, "W_K": forward, "W_V": forward, "W_O": back}
    wanted |= {"b_Q": narrow, "b_K": narrow, "b_V": narrow, "b_O": (width,)}
    for name, tensor in weights.tensors().items():
        shape = (task.n_out,) if name == "unembed.b_U" else wanted[name.rpartition(".")[2]]
        if tuple(tensor.shape) != shape:
            raise WeightsError(
                f"{name} has shape {tuple(tensor.shape)}; in TransformerLens' layout, with tokens of d + N = "
                f"{task.d} + "
                f"{task.n_out} = {width} coordinates, it would be {shape if heads else '[head token d_head]'}. "
                f"Import with the "
                "task that the model was trained on."
            )
    if n_heads not in (None, heads):
        raise ConfigError(f"n_heads is {n_heads}, and the weights have {heads} heads. Leave it out.", field="n_heads")
    return Reading(weights, "transformer_lens", heads)


def _head_counts(
    found: Found, task: Task, orientation: Orientation, n_heads: int | None, *, full_width: bool, thorough: bool
) -> list[int]:
    """Numbers of heads that the shapes admit, full width (the papers' d_head = D) first."""
    stacks = {found.weights[role].shape[0] for role in ROLES if found.weights[role].ndim == 3}
    if stacks:
        if len(stacks) > 1 or n_heads not in (None, *stacks):
            raise ConfigError(
                f"the weights are stacks of {' and '.join(map(str, sorted(stacks)))} heads ({found.shapes()})"
                + (f", and n_heads is {n_heads}. Leave it out." if len(stacks) == 1 else ". Save all heads of each."),
                field="n_heads",
            )
        return list(stacks)
    q, width = found.weights["q"], task.d + task.n_out
    if q.ndim != 2:
        return []
    lies = found.orientation.get("q", orientation)
    total = q.shape[0 if lies == "out_in" else 1]
    if n_heads is not None:
        return [n_heads] if total % n_heads == 0 else []
    divisors = [heads for heads in range(1, total + 1) if total % heads == 0]
    if total % width == 0:
        full = total // width
        if full_width or (full > 1 and not thorough):
            return [full]
        divisors = [full, *(heads for heads in divisors if heads != full)]
    # heads one number wide are not what anybody trains; only predictions can prove them
    return [heads for heads in divisors if thorough or heads == 1 or total // heads > 1]


def _read(found: Found, task: Task, orientation: Orientation, n_heads: int) -> Iterator[Reading]:
    width = task.d + task.n_out
    said = found.orientation
    maps = [_unpacked(found.weights[role], n_heads, role, said.get(role, orientation)) for role in ("q", "k", "v")]
    if any(m is None or m.shape[:2] != (n_heads, width) for m in maps):
        return
    W_Q, W_K, W_V = (cast(torch.Tensor, m) for m in maps)
    if not W_Q.shape == W_K.shape == W_V.shape:
        return
    d_head = W_Q.shape[-1]
    biases = _biases(found, task, n_heads, d_head)
    layout = layout_of(found.arrangement, said.get("q", orientation))
    for W_O in _outputs(found, task, orientation, n_heads, d_head):
        layer = LayerWeights(W_Q, W_K, W_V, W_O, *biases)
        yield Reading(ModelWeights((layer,)), layout, n_heads)


def _unpacked(tensor: torch.Tensor, n_heads: int, role: Role, orientation: Orientation) -> torch.Tensor | None:
    """In x out per head, or `None` when the shape has no such reading."""
    if tensor.ndim == 3:
        return unpack(tensor, n_heads, role, orientation) if tensor.shape[0] == n_heads else None
    if tensor.ndim != 2:
        return None
    heads_axis = 0 if (orientation == "out_in") != (role == "o") else 1
    return unpack(tensor, n_heads, role, orientation) if tensor.shape[heads_axis] % n_heads == 0 else None


def _outputs(found: Found, task: Task, orientation: Orientation, n_heads: int, d_head: int) -> Iterator[torch.Tensor]:
    """W_O `[head d_head token]` in every way that o can be meant, given how q, k and v are."""
    o, width = found.weights["o"], task.d + task.n_out
    if "o" in found.orientation:
        choices: tuple[Orientation, ...] = (found.orientation["o"],)
    else:
        other: Orientation = "in_out" if orientation == "out_in" else "out_in"
        choices = (orientation, other)
    for choice in choices:
        heads = _unpacked(o, n_heads, "o", choice)
        if heads is not None and heads.shape[:2] == (n_heads, d_head) and heads.shape[2] in (task.n_out, width):
            yield _on_tokens(heads, task)
            return  # o lies as q, k and v do where it can
    # one label: the row may be left out as an axis, [head*d_head] or [head d_head]
    if task.n_out == 1 and o.numel() == n_heads * d_head and o.ndim <= 2 and o.shape[0] in (n_heads, o.numel()):
        yield _on_tokens(o.reshape(n_heads, d_head, 1), task)


def _on_tokens(heads: torch.Tensor, task: Task) -> torch.Tensor:
    """W_O onto all token coordinates; one onto the label slots only leaves the others zero."""
    if heads.shape[-1] == task.d + task.n_out:
        return heads
    return torch.cat([heads.new_zeros(*heads.shape[:2], task.d), heads], dim=-1)


def _biases(found: Found, task: Task, n_heads: int, d_head: int) -> list[torch.Tensor | None]:
    biases: list[torch.Tensor | None] = []
    for role in ("q", "k", "v"):
        bias = found.biases.get(role)
        if bias is not None and bias.numel() != n_heads * d_head:
            raise WeightsError(_bad_bias(role, bias, f"({n_heads * d_head},)"))
        biases.append(None if bias is None else bias.reshape(n_heads, d_head))
    o, width = found.biases.get("o"), task.d + task.n_out
    if o is not None and o.ndim == 2 and o.shape[0] == n_heads:
        o = o.sum(0)  # one per head: they add up
    if o is not None and tuple(o.shape) not in ((task.n_out,), (width,)):
        raise WeightsError(_bad_bias("o", o, f"({task.n_out},) or ({width},)"))
    return [*biases, None if o is None else _on_tokens(o.reshape(1, 1, -1), task).reshape(-1)]


def _bad_bias(role: str, bias: torch.Tensor, wanted: str) -> str:
    return f"the bias of {role} has shape {tuple(bias.shape)}; here it would be {wanted}. Save the whole model."


def _as_linear(admitted: list[Reading], found: Found) -> list[Reading]:
    """`nn.Linear` stores out x in: an o that by its shape does, under such names, settles it for square q, k and v."""
    o = found.weights["o"]
    rows, columns = o.shape[-2:] if o.ndim >= 2 else (0, 0)
    if rows >= columns:
        return admitted
    straight = [reading for reading in admitted if parts(reading.layout)[1] == "out_in"]
    return straight or admitted


def _distinct(admitted: list[Reading]) -> list[Reading]:
    kept: list[Reading] = []
    for reading in admitted:
        tensors = reading.weights.tensors()
        same = (
            all(n in t and torch.equal(t[n], v) for n, v in tensors.items())
            for t in (other.weights.tensors() for other in kept)
        )
        if not any(same):
            kept.append(reading)
    return kept


def _no_reading(found: Found, task: Task, layout: Layout | None, n_heads: int | None) -> str:
    width = task.d + task.n_out
    asked = [f"layout={layout!r}" if layout else "", f"n_heads={n_heads}" if n_heads else ""]
    options = f" with {' and '.join(filter(None, asked))}" if any(asked) else ""
    arrangement: Arrangement = found.arrangement
    return (
        f"the weights do not fit the task{options}: its tokens have d + N = {task.d} + {task.n_out} = {width} "
        f"coordinates, and "
        f"they are {found.shapes()}. As '{arrangement}' they would be {LAYOUTS[arrangement]}, with token = {width} "
        f"and out = "
        f"{task.n_out} or {width}. Import with the task that the model was trained on, or say how the tensors lie: "
        f"--layout, "
        "--n-heads, or a mapping file."
    )
