"""What `attach` was given, checked before anything is recorded."""

from typing import Any

import torch
from transformer_lens import HookedTransformer

from ..errors import ConfigError, nearest
from ..models import _tl as tl
from ..probes import PROBES
from ..tasks import Task


def require_unlabelled(z: Any, task: Task) -> None:
    """Checks prompts for the task's width and for a leak of the query's label.

    Raises:
        ConfigError: not `[batch pos token]`, not finite, or with the query's label filled in.
    """
    width = task.d + task.n_out
    if not isinstance(z, torch.Tensor) or z.ndim != 3 or z.shape[-1] != width or z.shape[1] < 2:
        got = tuple(z.shape) if isinstance(z, torch.Tensor) else type(z).__name__
        raise ConfigError(
            f"prompts must be a tensor [batch pos token] with d + N = {task.d} + {task.n_out} = {width} coordinates per "
            f"token, the query last; got {got}.",
            field="prompts",
        )
    if not bool(z.isfinite().all()):
        raise ConfigError("prompts must be finite; they hold a NaN or an infinity. Draw them again.", field="prompts")
    labelled = int(z[:, -1, task.d :].any(-1).sum())
    if labelled:
        raise ConfigError(
            f"the query's label is filled in in {labelled} of {len(z)} prompts: the answer leaks into the question, and "
            f"the model can copy it. Set z[:, -1, {task.d}:] to zero and keep the label as the target.",
            field="prompts",
        )


def unwrapped(model: Any) -> HookedTransformer:
    """The HookedTransformer inside what `torch.compile` or a parallel wrapper made of it."""
    seen = model
    while not isinstance(seen, HookedTransformer):
        inner = next((getattr(seen, name, None) for name in ("_orig_mod", "module") if hasattr(seen, name)), None)
        if not isinstance(inner, torch.nn.Module):
            return tl.require_hooked_transformer(model)
        seen = inner
    return seen


def require_arguments(
    task: Any, every: Any, probes: Any, final_prompts: Any, steps: Any, start: Any, seed: Any
) -> None:
    if not isinstance(task, Task):
        raise ConfigError(
            f"task must be a task such as icl.LinearRegression; got a {type(task).__name__}.", field="task"
        )
    counts = {"every": (every, 1), "start": (start, 0), "seed": (seed, 0)}
    counts |= {} if final_prompts is None else {"final_prompts": (final_prompts, 2)}
    counts |= {} if steps is None else {"steps": (steps, 1)}
    for name, (value, least) in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} must be a whole number of at least {least}; got {value!r}.", field=name)
    if isinstance(probes, str):
        raise ConfigError(f"probes must be a list of names, such as ['{probes}']; got {probes!r}.", field="probes")
    for name in probes:
        if name not in PROBES:
            raise ConfigError(
                f"there is no probe '{name}'; choose from {', '.join(PROBES)}.{nearest(str(name), PROBES)}",
                field="probes",
            )
