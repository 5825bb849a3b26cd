"""A mapping for weights that no rule recognises: role -> name, and how that tensor lies.

    q: {name: attn.first.weight, transpose: false}
    k: attn.second.weight
    v: {name: "parts.{head}.third", transpose: true}     # one tensor per head
    o: {name: last, head_axis: 1}
    o_bias: last_bias
    ignore: [step_counter]

A bare name leaves open how the tensor lies; `transpose: false` is out x in (W z), `true` is in x out (z W). `head_axis` is
the axis of the heads in the file: of a stack, or of the matrix along which heads lie one after the other.
"""

from collections.abc import Mapping as MappingABC
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from ..errors import ConfigError, nearest
from .layouts import ROLES, Orientation

Mappable: TypeAlias = MappingABC[str, Any] | str | Path
"""A mapping as given: plain values, or the YAML file that holds them."""

_BIASES = tuple(f"{role}_bias" for role in ROLES)
_KEYS = (*ROLES, *_BIASES, "ignore")
_ENTRY = ("name", "transpose", "head_axis")


@dataclass(frozen=True)
class Entry:
    """Where one role lies.

    Attributes:
        name: of the tensor; with `{head}` in it, of one tensor per head.
        transpose: `False` out x in, `True` in x out, `None` not said.
        head_axis: axis of the heads in the file; `None` for the usual one.
    """

    name: str
    transpose: bool | None = None
    head_axis: int | None = None

    def orientation(self, role: str, ndim: int) -> Orientation | None:
        """How a matrix of this role lies, as far as the entry says.

        Raises:
            ConfigError: `transpose` and `head_axis` contradict each other.
        """
        said = None if self.transpose is None else ("in_out" if self.transpose else "out_in")
        if self.head_axis is None or ndim != 2:
            return said
        # heads lie along the output of q, k, v and along the input of o
        by_axis = "out_in" if (self.head_axis == 0) != (role == "o") else "in_out"
        if said is not None and said != by_axis:
            raise ConfigError(
                f"mapping.{role} contradicts itself: with head_axis {self.head_axis} the matrix lies "
                f"{by_axis.replace('_', ' x ')}, with transpose {str(self.transpose).lower()} "
                f"{said.replace('_', ' x ')}. "
                "Leave one out.",
                field=f"mapping.{role}",
            )
        return by_axis


@dataclass(frozen=True)
class Mapping:
    """Entries by role (`q`, `k`, `v`, `o`, `q_bias` ...), and names that do not act on the prediction."""

    entries: MappingABC[str, Entry]
    ignore: tuple[str, ...] = field(default=())


def resolve_mapping(given: Any) -> Mapping | None:
    """A mapping from plain values or a YAML file; `None` stays `None`.

    Raises:
        ConfigError: not a mapping, an unknown key, a role that is missing, or a name that is given twice.
    """
    if given is None or isinstance(given, Mapping):
        return given
    values = _read_yaml(Path(given)) if isinstance(given, str | Path) else given
    if not isinstance(values, MappingABC):
        raise ConfigError(
            f"a mapping has the keys {', '.join(_KEYS)}; got a {type(values).__name__}. Write for instance q: "
            f"attn.first.weight",
            field="mapping",
        )
    for key in values:
        if key not in _KEYS:
            raise ConfigError(
                f"mapping.{key} is not a role; roles are {', '.join(_KEYS)}.{nearest(str(key), _KEYS)}",
                field=f"mapping.{key}",
            )
    missing = [role for role in ROLES if role not in values]
    if missing:
        raise ConfigError(
            f"the mapping lacks {', '.join(missing)}; it has {', '.join(map(str, values)) or 'nothing'}. Give the "
            f"name of "
            "each of q, k, v and o.",
            field=f"mapping.{missing[0]}",
        )
    entries = {key: _entry(key, value) for key, value in values.items() if key != "ignore"}
    _require_once(entries)
    return Mapping(entries, _ignored(values.get("ignore", [])))


def _entry(key: str, value: Any) -> Entry:
    if isinstance(value, str):
        return Entry(value)
    if not isinstance(value, MappingABC) or not isinstance(value.get("name"), str):
        raise ConfigError(
            f"mapping.{key} is a name, or has the keys {', '.join(_ENTRY)}; got {value!r}. Write for instance "
            f"{key}: {{name: attn.first.weight, transpose: false}}",
            field=f"mapping.{key}",
        )
    for name in value:
        if name not in _ENTRY:
            raise ConfigError(
                f"mapping.{key}.{name} is not a setting; known are {', '.join(_ENTRY)}.{nearest(str(name), _ENTRY)}",
                field=f"mapping.{key}.{name}",
            )
    transpose, axis = value.get("transpose"), value.get("head_axis")
    if transpose is not None and not isinstance(transpose, bool):
        raise ConfigError(
            f"mapping.{key}.transpose must be true or false; got {transpose!r}.", field=f"mapping.{key}.transpose"
        )
    if axis is not None and (isinstance(axis, bool) or axis not in (0, 1, 2)):
        raise ConfigError(f"mapping.{key}.head_axis must be 0, 1 or 2; got {axis!r}.", field=f"mapping.{key}.head_axis")
    return Entry(value["name"], transpose, axis)


def _require_once(entries: MappingABC[str, Entry]) -> None:
    seen: dict[str, str] = {}
    for key, entry in entries.items():
        if entry.name in seen:
            raise ConfigError(
                f"the mapping gives {entry.name!r} twice, as {seen[entry.name]} and as {key}. Give each role a "
                f"tensor of "
                "its own.",
                field=f"mapping.{key}",
            )
        seen[entry.name] = key


def _ignored(names: Any) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
        raise ConfigError(f"mapping.ignore is a list of names; got {names!r}.", field="mapping.ignore")
    return tuple(names)


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not YAML: {' '.join(str(error).split())}. Correct the file.", field="mapping"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"the mapping {path} cannot be read ({error.strerror or error}). Name another file.", field="mapping"
        ) from error
