"""What both callbacks share: finding the model, opening and closing the session."""

from collections.abc import Callable
from typing import Any

import torch
from transformer_lens import HookedTransformer

from ..errors import ModelError, UserError
from ..session import Session, attach
from ..tasks import Task


class SessionCallback:
    """Opens a session when training begins and closes it when training ends.

    Args:
        task: what the model is trained on.
        model: the `HookedTransformer`; by default the only one inside the module that is trained.
        options: of `icl_mechinterp.attach`.

    Attributes:
        session: of the newest training; `None` before the first.
    """

    def __init__(self, task: Task, *, model: HookedTransformer | None = None, **options: Any) -> None:
        self.session: Session | None = None
        self._task, self._model, self._options = task, model, options

    def __getattr__(self, name: str) -> Callable[..., None]:
        """The trainers call many more hooks by name, with new versions new ones; the others do nothing."""
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def close(self, error: BaseException | None = None) -> None:
        """Closes the session, when one is open."""
        if self.session is not None:
            self.session.close(error)

    def _begin(self, trained: torch.nn.Module, *, start: int, steps: int | None) -> None:
        self.close(None if self.session is None else UserError("another training began"))
        model = _the_model(trained) if self._model is None else self._model
        options = {"start": start, **({} if steps is None or steps < 1 else {"steps": steps}), **self._options}
        self.session = attach(model, self._task, **options)
        self.session.open()


def _nothing(*arguments: Any, **keywords: Any) -> None:
    del arguments, keywords


def _the_model(trained: torch.nn.Module) -> HookedTransformer:
    found = [module for module in trained.modules() if isinstance(module, HookedTransformer)]
    if len(found) != 1:
        raise ModelError(
            f"{type(trained).__name__} holds {len(found)} HookedTransformers, and one is needed. Name it: "
            "model=my_module.transformer."
        )
    return found[0]
