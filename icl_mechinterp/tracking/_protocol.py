"""What a tracker is told, and the promise that a failing one never stops training."""

import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ..results import HeadVerdict

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """A training run at one capture.

    Attributes:
        step, steps: finished, and in all.
        losses: mean training loss since the last capture, per seed.
        best_loss: what the best debiased GD reaches on this task; `None` when theory does not say.
        optimal_step: the step that theory asks for; `None` likewise.
        heads: taxonomy per seed.
        steps_per_second: of the whole ensemble, since training started or resumed.
    """

    step: int
    steps: int
    losses: tuple[float, ...]
    best_loss: float | None
    optimal_step: float | None
    heads: tuple[tuple[HeadVerdict, ...], ...]
    steps_per_second: float

    @property
    def seconds_left(self) -> float:
        return (self.steps - self.step) / self.steps_per_second if self.steps_per_second > 0 else float("inf")


@runtime_checkable
class Tracker(Protocol):
    """Receives a run as it goes."""

    def start(self, config: Mapping[str, Any]) -> None:
        """Before the first step, with the effective config."""
        ...

    def update(self, progress: Progress) -> None:
        """At every capture."""
        ...

    def finish(self) -> None:
        """After the last step, and when training stops early."""
        ...


class NullTracker:
    """Tells nobody."""

    def start(self, config: Mapping[str, Any]) -> None:
        del config

    def update(self, progress: Progress) -> None:
        del progress

    def finish(self) -> None:
        return


class guarded:
    """A tracker whose failures are told once, by name, and then ignored: training goes on."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker, self._broken = tracker, False

    def start(self, config: Mapping[str, Any]) -> None:
        self._attempt(self._tracker.start, config)

    def update(self, progress: Progress) -> None:
        self._attempt(self._tracker.update, progress)

    def finish(self) -> None:
        self._attempt(self._tracker.finish)

    def _attempt(self, method: Callable[..., None], *arguments: Any) -> None:
        if self._broken:
            return
        try:
            method(*arguments)
        except Exception as error:
            self._broken = True
            with suppress(Exception):  # a live display that is not stopped would keep the terminal
                self._tracker.finish()
            self._tell(
                f"the tracker {type(self._tracker).__name__} failed in {method.__name__} ({type(error).__name__}: "
                f"{error}) and is switched off; training goes on, and the run folder is complete without it."
            )

    def _tell(self, message: str) -> None:
        try:
            warnings.warn(message, RuntimeWarning, stacklevel=4)
        except RuntimeWarning:  # warnings made errors must not stop training either
            _log.warning(message)
