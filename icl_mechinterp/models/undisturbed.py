"""Looking at somebody's model without leaving a trace."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def undisturbed(device: torch.device, *modules: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode, no graph, full precision, no compiled code; everything is put back, also after an exception.

    Modes go back module by module, because a user may keep one part in evaluation mode. Global generators (Python,
    NumPy, torch) go back too: a dropout behind an embedding must not shift the user's random numbers. Compiled code is
    left aside because it does not run hooks that were added after its compilation.
    """
    modes = [(module, module.training) for root in modules for module in root.modules()]
    with ExitStack() as stack:
        stack.enter_context(_global_generators_kept(device))  # the first to come, so the last to go
        stack.enter_context(torch.no_grad())
        for kind in {"cpu", device.type}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        if "torch._dynamo.eval_frame" in sys.modules:  # else nothing was compiled, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, mode in modes:
                module.training = mode


@contextmanager
def _global_generators_kept(device: torch.device) -> Iterator[None]:
    states = random.getstate(), np.random.get_state()  # noqa: NPY002  # the user's own global generator
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def modules_behind(function: Callable[..., Any] | None) -> list[torch.nn.Module]:
    """The modules that a user's function will run: itself, its owner, what it closes over, globals that it names."""
    if function is None:
        return []
    if isinstance(function, torch.nn.Module):
        return [function]
    seen = [getattr(function, "__self__", None)]
    function = getattr(function, "__func__", function)  # of a method
    names, scope = getattr(getattr(function, "__code__", None), "co_names", ()), getattr(function, "__globals__", {})
    for cell in getattr(function, "__closure__", None) or ():
        try:
            seen.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    seen += [scope.get(name) for name in names]
    return [value for value in seen if isinstance(value, torch.nn.Module)]
