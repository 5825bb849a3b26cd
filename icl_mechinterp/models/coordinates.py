"""From the residual stream to task coordinates and back.

A model of ours carries the prompt itself in its residual stream, so both maps are trivial. A model with an own embedding
does not: `read_in` takes a token's coordinates into the residual stream, `read_out` takes the residual stream at the
query to the prediction. Circuits are always reported in task coordinates.

Where the embedding is code rather than a matrix, `fit_coordinates` learns both maps by regression and says how much of
the variance they leave unexplained; a probe may then say less, but it says why.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from transformer_lens import HookedTransformer

from .._types import Checked, Prompts
from ..errors import ConfigError, ModelError
from ..tasks import Task, generator_for
from . import _tl
from .predict import query_mask
from .undisturbed import modules_behind, undisturbed

Residual = Float[torch.Tensor, "batch pos d_model"]

_RANK_TOLERANCE = 1e-4  # of the largest singular value: above the noise of a regression in float32


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Read-in and read-out; unpacks into those two.

    Attributes:
        read_in: `[token d_model]`; a token z enters the residual stream as z @ read_in.
        read_out: `[d_model out]`; the prediction is residual @ read_out. The model's own `W_U` stands for the model's
            own read-out, final normalisation and bias included.
        embed: what really takes prompts `[batch pos token]` into the residual stream `[batch pos d_model]`, where that
            is more than `read_in` (a bias, positions, a non-linear map).
        unembed: what really takes the residual stream after the last block to predictions `[batch pos out]`.
        unexplained: the share of the variance of `embed` and of `unembed` that the two matrices leave unexplained.

    Raises:
        ModelError: not two matrices, or of different widths.
    """

    read_in: Checked[Float[torch.Tensor, "token d_model"]]
    read_out: Checked[Float[torch.Tensor, "d_model out"]]
    embed: Checked[Callable[[Any], Any] | None] = None
    unembed: Checked[Callable[[Any], Any] | None] = None
    unexplained: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        for name in ("read_in", "read_out"):
            value = getattr(self, name)
            if not isinstance(value, torch.Tensor) or value.ndim != 2 or not value.is_floating_point():
                got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise ModelError(f"{name} must be a matrix of floats (a torch.Tensor); got {got}.")
        if self.read_in.shape[1] != self.read_out.shape[0]:
            raise ModelError(
                f"read_in is [token d_model] and read_out is [d_model out], so they share d_model; got "
                f"{tuple(self.read_in.shape)} and {tuple(self.read_out.shape)}. An nn.Linear's weight is the transpose: "
                "pass embedding.weight.T and head.weight.T."
            )

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield self.read_in
        yield self.read_out

    def to(self, like: torch.Tensor) -> "Coordinates":
        """The same maps, detached, with the device and dtype of a tensor."""
        read_in, read_out = (matrix.detach().to(like.device, like.dtype) for matrix in self)
        return Coordinates(read_in, read_out, self.embed, self.unembed, self.unexplained)

    def embedded(self, z: Prompts) -> Residual:
        """Prompts in the residual stream, `[batch pos d_model]`."""
        return z @ self.read_in if self.embed is None else self.embed(z)


def resolve_coordinates(model: HookedTransformer, task: Task) -> Coordinates:
    """The maps of a model whose residual stream is the prompt: identity, and its own W_U.

    Raises:
        ModelError: the width of the model is not the width of a token.
    """
    width = task.d + task.n_out
    if model.cfg.d_model != width or model.cfg.d_vocab_out != task.n_out:
        raise ModelError(
            f"a prompt of this task has d + N = {task.d} + {task.n_out} = {width} coordinates per token and {task.n_out} "
            f"output(s); the model has d_model = {model.cfg.d_model} and {model.cfg.d_vocab_out} output(s). Probe it "
            "with the task that it was trained on; if it has an embedding of its own, say where the task's coordinates "
            "are: coordinates=icl.Coordinates(read_in=..., read_out=...)."
        )
    W_U = model.unembed.W_U.detach()
    return Coordinates(torch.eye(width, dtype=W_U.dtype, device=W_U.device), W_U)


def require_fitting(coordinates: Coordinates, model: HookedTransformer, task: Task) -> None:
    """Checks that coordinates belong to a model and a task.

    Raises:
        ModelError: another width than the model's or the task's, or a read-in that is not injective.
    """
    width, d_model = task.d + task.n_out, model.cfg.d_model
    for name, expected, axes in (
        ("read_in", (width, d_model), "token d_model"),
        ("read_out", (d_model, task.n_out), ""),
    ):
        shape = tuple(getattr(coordinates, name).shape)
        if shape != expected:
            raise ModelError(
                f"{name} must be [{axes or 'd_model out'}] = {expected} for this model and task (d + N = {task.d} + "
                f"{task.n_out}, d_model = {d_model}); got {shape}. An nn.Linear's weight is the transpose of it."
            )
    rank = int(torch.linalg.matrix_rank(coordinates.read_in.detach().double(), rtol=_RANK_TOLERANCE))
    if rank < width:
        raise ModelError(
            f"read_in is not injective: its rank is {rank}, and a token has d + N = {width} coordinates, so different "
            "tokens look the same to the model and its circuits cannot be told in task coordinates. Give the read-in "
            "of all covariates and label slots."
        )


def fit_coordinates(
    model: Checked[HookedTransformer],
    task: Task,
    *,
    embed: Callable[[Any], Any],
    unembed: Callable[[Any], Any] | None = None,
    prompts: Checked[int] = 256,
    seed: int = 0,
) -> Coordinates:
    """Coordinates of a model whose embedding is code: both maps by least squares on prompts of the task.

    Each position has an intercept of its own, so biases and positional embeddings are taken out.

    Args:
        model: the blocks between the two maps.
        task: draws the prompts.
        embed: prompts `[batch pos token]` to the residual stream `[batch pos d_model]`.
        unembed: the residual stream after the last block, `[batch pos d_model]`, to predictions `[batch pos out]`; by
            default the model's own final normalisation and unembedding.
        prompts: how many are drawn.
        seed: of the prompts; the global random state, modes and gradients are left alone.

    Returns:
        Coordinates with `read_in: [token d_model]`, `read_out: [d_model out]` and the unexplained shares of variance.

    Raises:
        ConfigError: fewer than 2 prompts.
        ModelError: a map of another width, or one that loses coordinates of the token.
    """
    model = _tl.require_hooked_transformer(model)
    if isinstance(prompts, bool) or not isinstance(prompts, int) or prompts < 2:
        raise ConfigError(f"prompts must be a whole number of at least 2; got {prompts!r}.", field="prompts")
    like = next(model.parameters())
    z = task.sample(prompts, generator=generator_for(seed, "fit")).z.to(like.device, like.dtype)
    with undisturbed(like.device, model, *modules_behind(embed), *modules_behind(unembed)):
        embedded = embed(z)
        require_embedded(embedded, z, model.cfg.d_model)
        residual, output = None, None
        if unembed is not None:
            residual = model(embedded, start_at_layer=0, stop_at_layer=model.cfg.n_layers, attention_mask=query_mask(z))
            output = unembed(residual)
    coordinates = fitted(z, embedded, residual, output, embed=embed, unembed=unembed, own=model.unembed.W_U)
    require_fitting(coordinates, model, task)
    return coordinates


def fitted(
    z: Prompts,
    embedded: Residual,
    residual: Residual | None,
    output: Float[torch.Tensor, "batch pos out"] | None,
    *,
    embed: Callable[[Any], Any] | None,
    unembed: Callable[[Any], Any] | None,
    own: Float[torch.Tensor, "d_model out"],
) -> Coordinates:
    """Coordinates from what was seen of both maps in one forward pass; `own` is the read-out without an `unembed`."""
    read_in, lost_in = _regression(z, embedded)
    read_out, lost_out = own.detach(), 0.0
    if residual is not None and output is not None:
        read_out, lost_out = _regression(residual, output)
    return Coordinates(read_in, read_out, embed, unembed, (lost_in, lost_out))


def require_embedded(embedded: Any, z: Prompts, d_model: int) -> None:
    """Checks what an `embed` returned.

    Raises:
        ModelError: not a tensor `[batch pos d_model]`.
    """
    expected = (*z.shape[:2], d_model)
    if not isinstance(embedded, torch.Tensor) or tuple(embedded.shape) != expected:
        got = tuple(embedded.shape) if isinstance(embedded, torch.Tensor) else type(embedded).__name__
        raise ModelError(f"embed must turn prompts {tuple(z.shape)} into [batch pos d_model] = {expected}; got {got}.")


def _regression(
    inputs: Float[torch.Tensor, "batch pos in"], outputs: Float[torch.Tensor, "batch pos out"]
) -> tuple[Float[torch.Tensor, "in out"], float]:
    """The linear map with an intercept per position, and the share of the variance that it leaves unexplained.

    float64 on the CPU, least norm: directions that the data never take (a residual stream rarely fills its space) count
    as zero.
    """
    x, y = (_centred(values).cpu().double() for values in (inputs, outputs))
    # the residual stream comes in the model's precision: singular values below it are rounding
    rcond = float(torch.finfo(inputs.dtype).eps) * max(x.shape)
    solution = torch.linalg.lstsq(x, y, rcond=rcond, driver="gelsd").solution
    total = float(y.square().sum())
    unexplained = float((y - x @ solution).square().sum()) / total if total > 0 else 0.0
    return solution.to(outputs.device, outputs.dtype), unexplained


def _centred(values: Float[torch.Tensor, "batch pos width"]) -> Float[torch.Tensor, "sample width"]:
    values = values.detach().double() if values.device.type != "mps" else values.detach().cpu().double()
    return (values - values.mean(0)).flatten(0, 1)
