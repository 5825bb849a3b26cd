"""One look at somebody's model, as their loop calls it."""

from collections.abc import Callable
from typing import Any

import torch
from transformer_lens import HookedTransformer

from .._types import Predictions, Prompts
from ..circuits import Capture, Snapshot
from ..errors import ModelError
from ..models import Coordinates, hooked_prediction, require_fitting, resolve_coordinates
from ..models.undisturbed import modules_behind, undisturbed
from ..tasks import Batch, Task


class Observer:
    """Looks at a model and leaves it as it was.

    Args:
        model, task, batch, coordinates, predict: as in `attach`; `batch` are the fixed prompts.
    """

    def __init__(
        self,
        model: HookedTransformer,
        task: Task,
        batch: Batch,
        coordinates: Coordinates | Callable[[], Coordinates] | None,
        predict: Callable[[Prompts], Predictions] | None,
    ) -> None:
        self.model, self.task, self.batch = model, task, batch
        self._coordinates, self._predict = coordinates, predict
        self._capture = Capture(task, batch, predict=None if predict is None else self._users_prediction)

    @property
    def plain(self) -> bool:
        """The prompts are the residual stream, and the model is called as ours are."""
        return self._coordinates is None and self._predict is None

    def rehearse(self) -> None:
        """One look before anything is recorded, so that mistakes are told now.

        Raises:
            ModelError: whatever makes it impossible to look at this model.
        """
        coordinates = self._resolved()
        if coordinates is None:
            resolve_coordinates(self.model, self.task)
        else:
            require_fitting(coordinates, self.model, self.task)
        try:
            self.look()
        except AssertionError as error:
            if self._predict is None:
                raise
            raise ModelError(
                f"predict must run the blocks of the attached model exactly once; {error}. Pass the function that your "
                "loop uses, of this very model."
            ) from error

    def look(self) -> Snapshot:
        """A snapshot of the model as it is now."""
        with self._undisturbed():
            return self._capture(self.model, coordinates=self._resolved())

    def predictions(self, z: Prompts) -> Predictions:
        """The model's own predictions, float64 on the CPU."""
        like = next(self.model.parameters())
        z = z.to(like.device, like.dtype)
        with self._undisturbed():
            if self._predict is not None:
                return self._users_prediction(z).cpu().double()
            coordinates = self._resolved()
            coordinates = None if coordinates is None else coordinates.to(like)
            return hooked_prediction(self.model, z, coordinates=coordinates).cpu().double()

    def _undisturbed(self):
        behind = [self._predict, *self._maps()]
        modules = (module for function in behind for module in modules_behind(function))
        return undisturbed(next(self.model.parameters()).device, self.model, *modules)

    def _maps(self) -> list[Callable[..., Any] | None]:
        given = self._coordinates
        if isinstance(given, Coordinates):
            return [given.embed, given.unembed]
        return [given]

    def _resolved(self) -> Coordinates | None:
        found = self._coordinates() if callable(self._coordinates) else self._coordinates
        if found is not None and not isinstance(found, Coordinates):
            raise ModelError(
                f"coordinates must be icl.Coordinates(read_in=..., read_out=...), or a function that returns them; got "
                f"a {type(found).__name__}."
            )
        return found

    def _users_prediction(self, z: Prompts) -> Predictions:
        assert self._predict is not None
        prediction = self._predict(z)
        expected = (z.shape[0], self.task.n_out)
        if not isinstance(prediction, torch.Tensor) or tuple(prediction.shape) != expected:
            got = tuple(prediction.shape) if isinstance(prediction, torch.Tensor) else type(prediction).__name__
            raise ModelError(
                f"predict must turn prompts {tuple(z.shape)} into predictions [batch out] = {expected}; got {got}. Read "
                "the model's output at the last position."
            )
        return prediction
