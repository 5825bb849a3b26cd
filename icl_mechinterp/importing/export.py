"""A model's weights in the layouts of other people's code: the inverse of `import_weights`, bit for bit."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from transformer_lens import HookedTransformer

from .._types import Checked
from ..errors import ConfigError, nearest
from ..models import _tl as tl
from ..training import write_atomically
from .layouts import LAYOUTS, ROLES, Layout, Role, pack, parts
from .mapping import Entry, Mappable, resolve_mapping
from .mapping import Mapping as NameMapping
from .state import METADATA_KEY, WeightsError

Rows = Literal["tokens", "labels"]

_PARAMETERS: dict[Role, tuple[str, str]] = {
    "q": ("W_Q", "b_Q"),
    "k": ("W_K", "b_K"),
    "v": ("W_V", "b_V"),
    "o": ("W_O", "b_O"),
}


def export_weights(
    model: Checked[HookedTransformer],
    layout: Checked[Layout] = "fused",
    *,
    rows: Checked[Rows] = "tokens",
    mapping: Checked[Mappable | None] = None,
    file: Checked[str | Path | None] = None,
) -> dict[str, torch.Tensor]:
    """The weights of an attention-only model as a state dict in one of `LAYOUTS`; copies.

    `import_weights(export_weights(model, layout), task, layout=layout, n_heads=..., scale=...)` has exactly the same
    tensors. A file says its layout, heads and scale itself, so importing one needs no options.

        trainer.load_state_dict(icl.export_weights(model, "fused", rows="labels"))

    Args:
        model: attention only, without normalisation, read out on its label slots; one layer unless the layout is
            "transformer_lens".
        layout: names are `q.weight`, `k.weight`, `v.weight`, `o.weight`; `heads.0.q.weight` ...; or TransformerLens' own.
        rows: of o: "tokens", all d + N, or "labels", the N that are read out, as in the papers' code. The others act on
            nothing, and "labels" leaves them out.
        mapping: as in `import_weights`: other names, and how they lie where that differs from the layout.
        file: a `.safetensors` file to write as well.

    Returns:
        Tensors by name, in the model's dtype; biases where they are not zero.

    Raises:
        ModelError: not a HookedTransformer.
        WeightsError: a model that the layout cannot hold.
        ConfigError: an option that cannot be used.
        OSError: `file` cannot be written.
    """
    model = tl.require_hooked_transformer(model)
    for name, value, choices in (("layout", layout, tuple(LAYOUTS)), ("rows", rows, ("tokens", "labels"))):
        if value not in choices:
            raise ConfigError(
                f"{name} must be one of {', '.join(choices)}; got {value!r}.{nearest(str(value), choices)}", field=name
            )
    if file is not None and Path(file).suffix.lower() != ".safetensors":
        raise ConfigError(f"file must end in .safetensors; got {str(file)!r}.", field="file")
    scale = _require_exportable(model)
    if layout == "transformer_lens":
        state = _as_transformer_lens(model, rows, mapping)
    else:
        state = _as_papers(model, layout, rows, resolve_mapping(mapping))
    state = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
    if file is not None:
        stated = json.dumps({"layout": layout, "n_heads": model.cfg.n_heads, "scale": scale})
        write_atomically(Path(file), save(state, metadata={METADATA_KEY: stated}))
    return state


def _require_exportable(model: HookedTransformer) -> float:
    """The attention scale of a model that its attention weights determine."""
    cfg = model.cfg
    reason = None
    if not cfg.attn_only:
        reason = "has MLPs"
    elif cfg.normalization_type is not None:
        reason = f"normalises the residual stream ({cfg.normalization_type})"
    elif not _reads_labels(model):
        reason = "has a read-out of its own, not the label slots"
    scales = {tl.attention_scale(model, layer) for layer in range(cfg.n_layers)}
    if reason is None and len(scales) > 1:
        reason = f"has layers with different attention scales ({', '.join(map(str, sorted(scales)))})"
    if reason is not None:
        raise WeightsError(
            f"the model {reason}, which no layout can hold. Save its whole state dict instead: model.state_dict()"
        )
    return scales.pop()


def _reads_labels(model: HookedTransformer) -> bool:
    W_U = model.unembed.W_U.detach()
    wanted = torch.zeros_like(W_U)
    wanted[-W_U.shape[1] :] = torch.eye(W_U.shape[1], dtype=W_U.dtype, device=W_U.device)
    return torch.equal(W_U, wanted)


def _as_transformer_lens(model: HookedTransformer, rows: Rows, mapping: Any) -> dict[str, torch.Tensor]:
    if rows != "tokens" or mapping is not None:
        name = "rows" if rows != "tokens" else "mapping"
        raise ConfigError(
            f"the layout 'transformer_lens' has its own names and all rows; leave {name} out.", field=name
        )
    state: dict[str, torch.Tensor] = {}
    for index, block in enumerate(model.blocks):
        for weight, bias in _PARAMETERS.values():
            state[f"blocks.{index}.attn.{weight}"] = getattr(block.attn, weight)
            if bool(getattr(block.attn, bias).any()):
                state[f"blocks.{index}.attn.{bias}"] = getattr(block.attn, bias)
    if bool(model.unembed.b_U.any()):
        state["unembed.b_U"] = model.unembed.b_U
    return state


def _as_papers(
    model: HookedTransformer, layout: Layout, rows: Rows, mapping: NameMapping | None
) -> dict[str, torch.Tensor]:
    cfg = model.cfg
    if cfg.n_layers != 1:
        raise WeightsError(f"the model has {cfg.n_layers} layers, and '{layout}' holds one. Use 'transformer_lens'.")
    if bool(model.unembed.b_U.any()):
        raise WeightsError(
            f"the model has a bias after its read-out, which '{layout}' has not. Use 'transformer_lens'."
        )
    arrangement, orientation = parts(layout)
    attention, d = model.blocks[0].attn, cfg.d_model - cfg.d_vocab_out
    state: dict[str, torch.Tensor] = {}
    for role in ROLES:
        weight, bias = (getattr(attention, name).detach() for name in _PARAMETERS[role])
        if role == "o" and rows == "labels":
            weight, bias = weight[..., d:], bias[d:]
        entry = _entry(mapping, role, arrangement)
        lies = (entry.orientation(role, 2 if arrangement == "fused" else 3)) or orientation
        packed = pack(weight, role, fused=arrangement == "fused", orientation=lies)
        if arrangement == "heads":
            for head, matrix in enumerate(packed):
                _put(state, entry.name.replace("{head}", str(head)), matrix)
        else:
            _put(state, entry.name, packed if packed.ndim == 2 else packed.movedim(0, entry.head_axis or 0))
        if bool(bias.any()):
            _put(state, _bias_name(mapping, role), bias.flatten())
    return state


def _entry(mapping: NameMapping | None, role: Role, arrangement: str) -> Entry:
    entry = Entry(f"heads.{{head}}.{role}.weight" if arrangement == "heads" else f"{role}.weight")
    if mapping is not None:
        entry = mapping.entries[role]
    if ("{head}" in entry.name) != (arrangement == "heads"):
        raise ConfigError(
            f"mapping.{role} is {entry.name!r}; names have {{head}} in them in the layouts of one matrix per head, "
            f"and only "
            f"there (this one is '{arrangement}').",
            field=f"mapping.{role}",
        )
    return entry


def _bias_name(mapping: NameMapping | None, role: Role) -> str:
    if mapping is None:
        return f"{role}.bias"
    if f"{role}_bias" not in mapping.entries:
        raise ConfigError(
            f"the model has a bias of {role} that is not zero, and the mapping lacks {role}_bias. Give its name.",
            field=f"mapping.{role}_bias",
        )
    return mapping.entries[f"{role}_bias"].name


def _put(state: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    assert name not in state, f"two tensors are called {name}"
    state[name] = tensor
