"""An endless supply of training batches, drawn ahead on a second thread.

Drawing 256 prompts costs about as much as the optimiser step that uses them, so a second core is worth using. The
numbers are the same with the thread and without, because every batch comes from the same generators in the same order;
and because the thread runs ahead, each batch carries the states that the generators had right after it, which is what
a checkpoint must store.
"""

import os
import queue
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

import torch
from jaxtyping import Float, UInt8

from ._protocol import Task

_AHEAD = 8  # batches in the queue at most: enough to ride out a capture
_AHEAD_BYTES = 64 * 2**20  # and no more than this, for ensembles with many streams


class Draw(NamedTuple):
    """One training batch for every generator.

    Attributes:
        z: prompts, `[stream batch pos token]`; one stream per generator.
        target: `[stream batch out]`.
        states: generator states after this draw, `[stream byte]`.
    """

    z: Float[torch.Tensor, "stream batch pos token"]
    target: Float[torch.Tensor, "stream batch out"]
    states: UInt8[torch.Tensor, "stream byte"]


class PromptStream:
    """Batches from one generator per stream; a context manager, because it may own a thread.

    Args:
        task: who draws.
        batch: prompts per stream and step.
        generators: one per stream; they belong to the stream from now on.
        ahead: draw on a second thread; by default where there is a second core.
    """

    def __init__(
        self, task: Task, batch: int, generators: Sequence[torch.Generator], *, ahead: bool | None = None
    ) -> None:
        self._task, self._batch, self._generators = task, batch, tuple(generators)
        self._closed = threading.Event()
        self._queue: queue.Queue[Draw | BaseException] | None = None
        if (os.cpu_count() or 1) > 1 if ahead is None else ahead:
            one = 4 * len(self._generators) * batch * (task.context + 1) * (task.d + task.n_out)
            self._queue = queue.Queue(max(1, min(_AHEAD, _AHEAD_BYTES // one)))
            self._thread = threading.Thread(target=self._fill, name="icl-prompts", daemon=True)
            self._thread.start()

    def next(self) -> Draw:
        """The next batch; an error of the drawing thread is raised here."""
        if self._queue is None:
            return self._draw()
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Stops the thread; safe to call twice."""
        self._closed.set()
        if self._queue is not None:
            while self._thread.is_alive():
                try:
                    self._queue.get_nowait()  # makes room for a `put` that is waiting
                except queue.Empty:
                    self._thread.join(0.01)

    def __enter__(self) -> "PromptStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _draw(self) -> Draw:
        batches = [self._task.sample(self._batch, generator=generator) for generator in self._generators]
        states = torch.stack([generator.get_state() for generator in self._generators])
        if len(batches) == 1:  # no copy in the ordinary case
            return Draw(batches[0].z[None], batches[0].target[None], states)
        return Draw(torch.stack([b.z for b in batches]), torch.stack([b.target for b in batches]), states)

    def _fill(self) -> None:
        assert self._queue is not None
        while not self._closed.is_set():
            try:
                item: Draw | BaseException = self._draw()
            except BaseException as error:
                item = error
            self._queue.put(item)
            if isinstance(item, BaseException):
                return
