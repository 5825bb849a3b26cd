"""A task from the plain values of a config file."""

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError, nearest
from ._protocol import Task
from .linear import LinearRegression

KINDS: dict[str, type] = {"linear_regression": LinearRegression}
"""Every task by the name it has in a config file."""


def task_from_dict(record: Mapping[str, Any]) -> Task:
    """The task that `task.to_dict()` describes; `kind` may be left out for linear regression.

    Raises:
        ConfigError: an unknown kind or key, a missing key, or a value that cannot be used; fields are named `task.d`.
    """
    values = dict(record)
    kind = values.pop("kind", "linear_regression")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(
            f"task.kind must be one of {', '.join(KINDS)}; got {kind!r}.{nearest(str(kind), KINDS)}", field="task.kind"
        )
    names = KINDS[kind].__dataclass_fields__
    for key in values:
        if key not in names:
            raise ConfigError(
                f"task.{key} is not a setting of {kind}; it has {', '.join(names)}.{nearest(str(key), names)}",
                field=f"task.{key}",
            )
    for key in ("d", "context", "noise"):
        if key not in values:
            raise ConfigError(f"task.{key} is missing; give it in the config.", field=f"task.{key}")
    try:
        return KINDS[kind](**values)
    except ConfigError as error:
        raise error.within("task") from error
