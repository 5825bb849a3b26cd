"""The seeds of an ensemble."""

from collections.abc import Sequence

from .._types import Checked
from ..errors import ConfigError

_SEEDS = 2**63


def resolve_seeds(seeds: Checked[int | Sequence[int]]) -> tuple[int, ...]:
    """`8` is the seeds 0 to 7; a list is itself.

    Raises:
        ConfigError: none, negative, or doubled seeds.
    """
    countable = isinstance(seeds, Sequence) and not isinstance(seeds, str)
    if isinstance(seeds, bool) or not (countable or isinstance(seeds, int)) or (isinstance(seeds, int) and seeds < 1):
        raise ConfigError(f"seeds must be a number of seeds or a list of them; got {seeds!r}.", field="seeds")
    resolved = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not resolved or any(isinstance(s, bool) or not isinstance(s, int) or s < 0 for s in resolved):
        raise ConfigError(f"seeds must be whole numbers from 0 on, at least one; got {seeds!r}.", field="seeds")
    if max(resolved) >= _SEEDS:
        raise ConfigError(f"seeds must be below 2^63, which torch's generators take; got {seeds!r}.", field="seeds")
    if len(set(resolved)) < len(resolved):
        raise ConfigError(f"seeds must differ, or runs would be counted twice; got {seeds!r}.", field="seeds")
    return resolved
