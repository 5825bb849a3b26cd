"""Which weight is meant by a name: the usual spellings of q, k, v and o, whatever module they stand in.

`attn.q_proj.weight`, `W_Q`, `heads.0.query.weight`, `layers.0.self_attn.to_q.weight`, `q.1` are all read; an index belongs
to a layer when a word such as `layers` or `blocks` stands before it, else to a head.
"""

import re
from typing import Literal, NamedTuple, TypeAlias

Spelled: TypeAlias = Literal["q", "k", "v", "o", "qkv"]

_BASES: dict[Spelled, tuple[str, ...]] = {
    "q": ("q", "query", "queries"),
    "k": ("k", "key", "keys"),
    "v": ("v", "value", "values", "val"),
    "o": ("o", "out", "output", "outputs"),
    "qkv": ("qkv", "querykeyvalue"),
}
_WEIGHTS = ("{}", "w{}", "{}w", "{}weight", "{}weights", "weight{}", "{}proj", "{}projection", "proj{}", "to{}")
_LAYERS = ("{}linear", "linear{}", "lin{}", "{}lin", "fc{}", "{}fc", "{}layer", "{}matrix", "{}mat", "{}net", "c{}")
_BIASES = ("b{}", "{}bias", "bias{}")
_ALIASES: dict[str, tuple[Spelled, bool]] = {
    "proj": ("o", False),
    "cproj": ("o", False),
    "dense": ("o", False),
    "readout": ("o", False),
    "cattn": ("qkv", False),
    "inproj": ("qkv", False),
    "inprojweight": ("qkv", False),
    "inprojbias": ("qkv", True),
}
_PATTERNS: dict[str, tuple[Spelled, bool]] = {
    pattern.format(base): (role, patterns is _BIASES)
    for role, bases in _BASES.items()
    for base in bases
    for patterns in (_BIASES, _LAYERS, _WEIGHTS)
    for pattern in patterns
}
_WORDS = {**_PATTERNS, **_ALIASES}
_OF_LAYERS = {"layer", "layers", "block", "blocks", "h", "transformer"}
_OF_HEADS = {"head", "heads"}
_COMPONENT = re.compile(r"([A-Za-z_\-]*?)[_\-]?(\d*)")
TRANSFORMER_LENS = re.compile(r"(?:.*\.)?blocks\.(\d+)\.attn\.([Wb]_[QKVO])")


class ParsedName(NamedTuple):
    """What a name says.

    Attributes:
        role: q, k, v, o, or the three of qkv in one.
        is_bias: whether it is the bias of that map.
        head: the index of a head, where the name has one.
        of_head: the index stands after the word `head` or `heads`.
        layer: the index of a layer, 0 where the name has none.
    """

    role: Spelled
    is_bias: bool
    head: int | None
    of_head: bool
    layer: int


def parse_name(name: str) -> ParsedName | None:
    """What a parameter is by its name, or `None` for a name that is none of the usual ones."""
    pieces = [_split(component) for component in name.split(".")]
    if any(piece is None for piece in pieces):
        return None
    words = [(word, number) for word, number in pieces if word or number is not None]  # pyright: ignore
    ending = words[-1][0] if words else ""
    if ending in ("weight", "bias", "w", "b") and words[-1][1] is None and len(words) > 1:
        words.pop()
    else:
        ending = ""
    named = [word for word, _ in words if word]
    if not named or named[-1] not in _WORDS:
        return None
    role, is_bias = _WORDS[named[-1]]
    layer, heads, owner = 0, [], ""
    for word, number in words:
        owner = word or owner
        if number is not None and owner in _OF_LAYERS:
            layer = number
        elif number is not None:
            heads.append((number, owner in _OF_HEADS))
    if len(heads) > 1:
        return None
    head, of_head = heads[0] if heads else (None, False)
    return ParsedName(role, is_bias or ending in ("bias", "b"), head, of_head, layer)


def _split(component: str) -> tuple[str, int | None] | None:
    """`W_Q` is `wq`; `head_0` is `head` and 0."""
    match = _COMPONENT.fullmatch(component)
    if match is None or not component:
        return None
    word = match[1].lower().replace("_", "").replace("-", "")
    return word, int(match[2]) if match[2] else None
