"""Weights trained elsewhere become a `HookedTransformer`, and a run if one is wanted."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_lens import HookedTransformer

from .._types import Checked
from ..errors import ConfigError, RunError, nearest
from ..tasks import Task
from .agreement import Original, choose, resolve_reference
from .build import build_imported
from .collect import collect
from .layouts import LAYOUTS, Layout, ModelWeights
from .mapping import Mappable, resolve_mapping
from .readings import readings
from .run_folder import require_free, write_run
from .state import Stated, WeightsError, read_state


@dataclass(frozen=True)
class Imported:
    """Imported weights, and how they were read.

    Attributes:
        weights: as TransformerLens stores them.
        task: what they are said to be trained on.
        layout: how they lay in the file.
        scale: factor on the attention logits.
        difference: largest difference to the original's predictions, relative to their size; `None` if none were given.
        file, sha256: where they are from; `None` for a state dict.
    """

    weights: ModelWeights
    task: Task
    layout: Layout
    scale: float
    difference: float | None
    file: str | None
    sha256: str | None

    def model(self) -> HookedTransformer:
        """A model of its own with these weights."""
        return build_imported(self.weights, self.task, self.scale)

    def to_dict(self) -> dict[str, Any]:
        """How the weights were read, as plain values; what a run's config records."""
        names = ("file", "sha256", "layout", "scale", "difference")
        return {name: getattr(self, name) for name in names}


def import_weights(
    file_or_state_dict: Checked[str | Path | Mapping[str, Any]],
    task: Task,
    *,
    mapping: Checked[Mappable | None] = None,
    scale: Checked[float | None] = None,
    layout: Checked[Layout | None] = None,
    n_heads: Checked[int | None] = None,
    predictions: Checked[Original | None] = None,
    out: Checked[str | Path | None] = None,
    prompts: Checked[int | None] = None,
) -> HookedTransformer:
    """The `HookedTransformer` with weights that were trained elsewhere; with `out`, a run folder as well.

    Reads safetensors, and `.pt` files through `torch.load(weights_only=True)` only. Names are recognised in their usual
    spellings; shapes say how the matrices lie, and where they leave several readings, an error lists them.

        model = icl.import_weights("weights.pt", task, scale=1 / math.sqrt(6))
        icl.probe(model, task).verdict

    Args:
        file_or_state_dict: a `.safetensors`, `.pt` or `.pth` file, or tensors by name.
        task: what the model was trained on; its tokens are the model's width.
        mapping: role -> name, or {name, transpose, head_axis}, for names that are not recognised: plain values or a YAML
            file. It has the last word on how a tensor lies.
        scale: factor on the attention logits, where the file does not state it and no predictions are given.
        layout: one of `LAYOUTS`, where shapes leave several readings; with it, heads are as wide as a token unless
            `n_heads` says otherwise.
        n_heads: heads per layer, where shapes leave it open.
        predictions: what the original predicts, `(z [batch pos token], yhat [batch out])` or a function of z. They decide
            between readings and scales, and the import must reproduce them.
        out: a run folder to write: it opens with `load_run`, and `icl-mechinterp probe` and `report` read it.
        prompts: on which the run's report is made; as `probe`.

    Returns:
        The model, float64 where the weights are, else float32; biases are carried, frozen.

    Raises:
        WeightsError: a file that is missing, torn, refused or of another kind; tensors that are missing, doubled, not
            finite, left over, or do not fit the task; several readings; predictions that are not reproduced.
        ConfigError: an option that cannot be used, or an unknown scale; `error.field` names it.
        RunError: `out` is taken or cannot be written.
    """
    imported = read_weights(
        file_or_state_dict, task, mapping=mapping, scale=scale, layout=layout, n_heads=n_heads, predictions=predictions
    )
    if out is not None:
        save_run(imported, out, prompts=prompts)
    return imported.model()


def read_weights(
    file_or_state_dict: Checked[str | Path | Mapping[str, Any]],
    task: Task,
    *,
    mapping: Checked[Mappable | None] = None,
    scale: Checked[float | None] = None,
    layout: Checked[Layout | None] = None,
    n_heads: Checked[int | None] = None,
    predictions: Checked[Original | None] = None,
) -> Imported:
    """As `import_weights`, with how the weights were read; writes nothing."""
    _require_options(scale, layout, n_heads)
    resolved = resolve_mapping(mapping)
    state = read_state(file_or_state_dict)
    if state.stated is not None:
        scale, layout, n_heads = _with_stated(state.stated, scale, layout, n_heads, state.origin)
    found = collect(state, resolved)
    admitted = readings(found, task, layout=layout, n_heads=n_heads, thorough=predictions is not None)
    stored = [tensor.dtype for tensor in state.tensors.values() if tensor.is_floating_point()]
    reference = resolve_reference(predictions, task, admitted[0].weights.dtype, stored)
    fit = choose(admitted, scale, reference, task, state.origin)
    chosen = fit.reading
    return Imported(chosen.weights, task, chosen.layout, fit.scale, fit.difference, state.file, state.sha256)


def save_run(imported: Imported, out: str | Path, *, prompts: int | None = None) -> Path:
    """Writes a run folder with one checkpoint, one row of circuits and one report, at step 0.

    Raises:
        WeightsError: biases, which the model of a run does not have.
        RunError: the folder is taken or cannot be written.
    """
    path = Path(out)
    require_free(path)
    biases = imported.weights.biases()
    if biases:
        raise WeightsError(
            f"the weights have biases that are not zero ({', '.join(biases)}), and the model of a run has none, so a "
            f"run would "
            "predict something else. Import without out= (--out), and probe the model with icl_mechinterp.probe."
        )
    try:
        return write_run(path, imported.weights, imported.task, imported.scale, imported.to_dict(), prompts=prompts)
    except OSError as error:
        raise RunError(
            f"the run folder {path} cannot be written ({error.strerror or error}). Choose another --out."
        ) from error


def _require_options(scale: Any, layout: Any, n_heads: Any) -> None:
    if scale is not None and (
        isinstance(scale, bool) or not isinstance(scale, int | float) or not (math.isfinite(scale) and scale > 0)
    ):
        raise ConfigError(
            f"scale must be a positive number, the factor on the attention logits; got {scale!r}.", field="scale"
        )
    if layout is not None and layout not in LAYOUTS:
        raise ConfigError(
            f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}.{nearest(str(layout), LAYOUTS)}",
            field="layout",
        )
    if n_heads is not None and (isinstance(n_heads, bool) or not isinstance(n_heads, int) or n_heads < 1):
        raise ConfigError(f"n_heads must be a whole number of at least 1; got {n_heads!r}.", field="n_heads")


def _with_stated(
    stated: Stated, scale: float | None, layout: Layout | None, n_heads: int | None, origin: str
) -> tuple[float, Layout, int]:
    """The options, completed by what the file says of itself; contradictions are refused."""
    given = {"scale": scale, "layout": layout, "n_heads": n_heads}
    for name, value in given.items():
        said = getattr(stated, name)
        same = value is None or value == said or (name == "scale" and math.isclose(value, said, rel_tol=1e-6))
        if not same:
            raise ConfigError(
                f"{name} is {value!r}, and {origin} says of itself {said!r}. Leave {name} out.", field=name
            )
    return stated.scale, stated.layout, stated.n_heads
