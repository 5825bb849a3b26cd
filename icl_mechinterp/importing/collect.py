"""From tensors by name to tensors by role: one per role, the heads of a list stacked.

Every tensor must be accounted for. One that is neither a weight of attention nor a mask would change the prediction in a
way that the imported model does not have, so it is refused rather than dropped.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from . import names as spelled
from .layouts import ROLES, Arrangement, LayerWeights, ModelWeights, Orientation
from .mapping import Entry
from .mapping import Mapping as NameMapping
from .state import State, WeightsError

_BUFFERS = {"mask", "causal_mask", "attn_mask", "tril", "triu", "IGNORE"}
_UNUSED_BY_TL = ("embed.", "pos_embed.")  # prompts enter after the embedding
_SPLIT_ADVICE = "Say which tensor is which in a mapping file (q: NAME, k: NAME, v: NAME, o: NAME)."


@dataclass(frozen=True)
class Found:
    """The weights of one attention layer by role, as they lie in the file.

    Attributes:
        weights: a matrix, a stack `[head . .]`, or for `o` also a vector.
        biases: where the file has them.
        orientation: of the roles for which a mapping or a fused qkv says it.
        names: what the file calls each role, for messages.
        arrangement: of q; a list of matrices was stacked.
        linear: all names end in `.weight`, as those of `nn.Linear` do.
    """

    weights: Mapping[str, torch.Tensor]
    names: Mapping[str, str]
    arrangement: Arrangement
    linear: bool
    biases: Mapping[str, torch.Tensor] = field(default_factory=dict)
    orientation: Mapping[str, Orientation] = field(default_factory=dict)

    def shapes(self) -> str:
        """`q.weight (12, 6), ...` for messages."""
        return ", ".join(f"{self.names[role]} {tuple(self.weights[role].shape)}" for role in ROLES)


def collect(state: State, mapping: NameMapping | None) -> Found | ModelWeights:
    """The weights by role; whole layers where the names are TransformerLens' own.

    Raises:
        WeightsError: a role that is missing or doubled, several layers, a tensor that is accounted for by nothing, or
            values that are not finite.
    """
    if mapping is not None:
        found = _by_mapping(state, mapping)
    elif any(spelled.TRANSFORMER_LENS.fullmatch(name) for name in state.tensors):
        return _transformer_lens(state)
    else:
        found = _by_names(state)
    return found


def _by_mapping(state: State, mapping: NameMapping) -> Found:
    weights, names, biases, used = {}, {}, {}, set(mapping.ignore)
    listed = "{head}" in mapping.entries["q"].name
    for key, entry in mapping.entries.items():
        tensor, taken = _entry_tensor(state, key, entry)
        used.update(taken)
        role, _, bias = key.partition("_")
        if bias:
            biases[role] = tensor
        else:
            weights[role], names[role] = tensor, entry.name
    orientation: dict[str, Orientation] = {
        role: said
        for role in ROLES
        if (said := mapping.entries[role].orientation(role, weights[role].ndim)) is not None
    }
    _require_all_used(state, used)
    return _checked(
        Found(weights, names, _arrangement(weights["q"], listed), _linear(names.values()), biases, orientation)
    )


def _entry_tensor(state: State, key: str, entry: Entry) -> tuple[torch.Tensor, list[str]]:
    """A role's tensor with the heads first where it is a stack, and the names that it took."""
    if "{head}" in entry.name:
        taken = []
        while (name := entry.name.replace("{head}", str(len(taken)))) in state.tensors:
            taken.append(name)
        if taken:
            return _stack(key, [state.tensors[name] for name in taken]), taken
    if entry.name not in state.tensors:
        raise WeightsError(
            f"the mapping says that {key} is {entry.name!r}, and {state.origin} has no such tensor; it has "
            f"{_list(state.tensors)}. Correct the name."
        )
    tensor = state.tensors[entry.name]
    axis = entry.head_axis or 0
    if axis >= max(tensor.ndim, 1):
        raise WeightsError(
            f"the mapping says that the heads of {key} lie along axis {axis}, and {entry.name} has shape "
            f"{tuple(tensor.shape)}. Correct head_axis."
        )
    return (tensor.movedim(axis, 0) if tensor.ndim == 3 else tensor), [entry.name]


def _by_names(state: State) -> Found:
    groups: dict[tuple[str, bool], dict[int | None, str]] = {}
    parsed = {name: found for name in state.tensors if (found := spelled.parse_name(name)) is not None}
    lone_index = len({p.head for p in parsed.values()}) == 1 and not any(p.of_head for p in parsed.values())
    for name, found in parsed.items():
        if found.layer > 0:
            raise WeightsError(
                f"{state.origin} has several layers ({name}); outside TransformerLens' own layout only one-layer "
                f"models are "
                "read. Save a HookedTransformer's state dict, or name one layer's tensors in a mapping file and "
                "ignore the "
                "others."
            )
        head = None if lone_index else found.head  # the place in an nn.Sequential, not a head
        group = groups.setdefault((found.role, found.is_bias), {})
        if head in group:
            what = f"the {'bias' if found.is_bias else 'weight'} of {found.role}" + (
                "" if head is None else f", head {head}"
            )
            raise WeightsError(f"{state.origin} has {what} twice: {group[head]} and {name}. {_SPLIT_ADVICE}")
        group[head] = name
    used = [name for group in groups.values() for name in group.values()]
    tensors = {key: _listed(state, key[0], group) for key, group in groups.items()}
    names = {role: next(iter(group.values())) for (role, is_bias), group in groups.items() if not is_bias}
    orientation = _split_qkv(tensors, names)
    missing = [role for role in ROLES if (role, False) not in tensors]
    if missing:
        raise WeightsError(
            f"{state.origin} has no tensor with a usual name for {', '.join(missing)}; it has {_list(state.tensors)}. "
            f"{_SPLIT_ADVICE}"
        )
    _require_all_used(state, used)
    listed = None not in groups.get(("q", False), {None: ""})
    weights = {role: tensors[role, False] for role in ROLES}
    biases = {role: tensors[role, True] for role in ROLES if (role, True) in tensors}
    return _checked(
        Found(weights, names, _arrangement(weights["q"], listed), _linear(names.values()), biases, orientation)
    )


def _listed(state: State, role: str, group: Mapping[int | None, str]) -> torch.Tensor:
    """A role's tensor; a list of one per head is stacked."""
    if None in group and len(group) > 1:
        raise WeightsError(
            f"{state.origin} has {role} both for all heads and per head: {_list(group.values())}. {_SPLIT_ADVICE}"
        )
    if None in group:
        return state.tensors[group[None]]
    indices = sorted(index for index in group if index is not None)
    if indices != list(range(len(indices))):
        raise WeightsError(
            f"{state.origin} has {role} for the heads {', '.join(map(str, indices))}, not for 0 to {indices[-1]}. "
            f"Save all "
            "heads, or name their tensors in a mapping file."
        )
    return _stack(role, [state.tensors[group[index]] for index in indices])


def _stack(role: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    shapes = sorted({tuple(tensor.shape) for tensor in tensors})
    if len(shapes) > 1:
        raise WeightsError(
            f"the heads' {role} have different shapes: {', '.join(map(str, shapes))}. TransformerLens' heads are "
            f"equally "
            "wide; pad the narrower ones with zeros."
        )
    return torch.stack(tensors)


def _split_qkv(tensors: dict[tuple[str, bool], torch.Tensor], names: dict[str, str]) -> dict[str, Orientation]:
    """Takes a matrix of q, k and v one after the other apart, in place; says how the three then lie.

    Its longer side is the output, three times as long as the heads are wide together.
    """
    fused = tensors.pop(("qkv", False), None)
    bias = tensors.pop(("qkv", True), None)
    if fused is None:
        return {}
    name = names.pop("qkv")
    rows, columns = fused.shape if fused.ndim == 2 else (0, 0)
    if rows == columns or max(rows, columns) % 3:
        raise WeightsError(
            f"{name} {tuple(fused.shape)} cannot be taken apart into q, k and v: one side must be three times the "
            f"width of "
            "all heads. Save the three one by one."
        )
    axis = 0 if rows > columns else 1
    thirds = zip(("q", "k", "v"), fused.chunk(3, axis), strict=True)
    for role, third in thirds:
        if (role, False) in tensors:
            raise WeightsError(f"{role} is there twice: {names[role]} and in {name}. {_SPLIT_ADVICE}")
        tensors[role, False], names[role] = third, f"{role} in {name}"
    if bias is not None:
        tensors.update({(r, True): third for r, third in zip(("q", "k", "v"), bias.chunk(3), strict=True)})
    said: Orientation = "out_in" if axis == 0 else "in_out"
    return dict.fromkeys(("q", "k", "v"), said)


def _transformer_lens(state: State) -> ModelWeights:
    layers: dict[int, dict[str, torch.Tensor]] = {}
    used, taken = [], {}
    for name, tensor in state.tensors.items():
        match = spelled.TRANSFORMER_LENS.fullmatch(name)
        if match is not None:
            index, part = int(match[1]), match[2]
            if (index, part) in taken:
                raise WeightsError(
                    f"{state.origin} has {part} of layer {index} twice: {taken[index, part]} and {name}. Save one "
                    f"model."
                )
            layers.setdefault(index, {})[part] = tensor
            taken[index, part] = name
            used.append(name)
    unembed = {name.rpartition("unembed.")[2]: name for name in state.tensors if "unembed." in name}
    used += unembed.values()
    used += [name for name in state.tensors if any(part in name for part in _UNUSED_BY_TL) and "unembed." not in name]
    for index in range(max(layers) + 1):
        missing = [part for part in ("W_Q", "W_K", "W_V", "W_O") if part not in layers.get(index, {})]
        if missing:
            raise WeightsError(
                f"{state.origin} has no {', '.join(missing)} for layer {index} in TransformerLens' layout; it has "
                f"{_list(state.tensors)}. Save the whole state dict."
            )
    _require_all_used(state, used)
    for name in used:
        _require_finite(name, state.tensors[name])
    dtype = _common_dtype([tensor for parts in layers.values() for tensor in parts.values()])
    b_U = state.tensors[unembed["b_U"]].to(dtype) if "b_U" in unembed else None
    _require_label_read_out(state, unembed.get("W_U"))
    whole = tuple(LayerWeights(**{part: t.to(dtype) for part, t in layers[i].items()}) for i in sorted(layers))
    return ModelWeights(whole, b_U)


def _require_label_read_out(state: State, name: str | None) -> None:
    """The read-out must copy the label slots, the last coordinates, as ours does."""
    if name is None:
        return
    W_U = state.tensors[name]
    wanted = torch.zeros_like(W_U)
    if W_U.ndim == 2 and W_U.shape[0] > W_U.shape[1]:
        wanted[-W_U.shape[1] :] = torch.eye(W_U.shape[1], dtype=W_U.dtype)
    if W_U.ndim != 2 or not torch.equal(W_U, wanted):
        raise WeightsError(
            f"{name} {tuple(W_U.shape)} is a read-out of its own, not the label slots of the residual stream, so these "
            "weights alone do not say what the model predicts in task coordinates. Probe the HookedTransformer "
            "itself, with "
            "coordinates=."
        )


def _require_all_used(state: State, used: Iterable[str]) -> None:
    known = set(used)
    left = [
        name
        for name, tensor in state.tensors.items()
        if name not in known
        and tensor.is_floating_point()
        and name.rpartition(".")[2] not in _BUFFERS
        and bool((tensor != 0).any())
    ]
    if left:
        raise WeightsError(
            f"{state.origin} also holds {_list(left)}, which an attention-only model does not have: without it the "
            f"import "
            "might predict something else. If it takes no part in the prediction, leave it out of the file, or list "
            "it under "
            "ignore in a mapping file."
        )


def _checked(found: Found) -> Found:
    """The same in one dtype, of at least single precision."""
    for role in ROLES:
        weight = found.weights[role]
        if not weight.is_floating_point() or weight.numel() == 0:
            raise WeightsError(
                f"{found.names[role]} is {weight.dtype} with shape {tuple(weight.shape)}; weights are floating "
                f"point. Save "
                "them as float32."
            )
        _require_finite(found.names[role], weight)
    for role, bias in found.biases.items():
        _require_finite(f"the bias of {role}", bias)
    dtype = _common_dtype([*found.weights.values(), *found.biases.values()])
    return Found(
        {role: weight.to(dtype) for role, weight in found.weights.items()},
        found.names,
        found.arrangement,
        found.linear,
        {role: bias.to(dtype) for role, bias in found.biases.items()},
        found.orientation,
    )


def _require_finite(name: str, tensor: torch.Tensor) -> None:
    bad = int((~tensor.isfinite()).sum())
    if bad:
        raise WeightsError(
            f"{name} {tuple(tensor.shape)} holds {bad} value(s) that are NaN or infinite: its training diverged, or "
            f"the file "
            "is damaged. Import an earlier checkpoint."
        )


def _common_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """Half precision is widened, which is exact."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _arrangement(q: torch.Tensor, listed: bool) -> Arrangement:
    return "heads" if listed else ("stacked" if q.ndim == 3 else "fused")


def _linear(names: Iterable[str]) -> bool:
    return all(name.endswith(".weight") for name in names)


def _list(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
