"""Attach probes to a training loop that somebody else wrote.

    with icl.attach(model, task, every=500, out="runs/mine") as session:
        for batch in loader:
            ...
            session.step(loss=loss)

The loop stays the user's. A session looks at the model every so many steps, with hooks that live only inside the look,
and one extra forward pass on a few fixed prompts. Mistakes in how it was attached are told at once, before the first
step; whatever fails later is told once and skipped, because a probe is no reason to lose a training run.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformer_lens import HookedTransformer

from .._types import Checked, Predictions, Prompts
from ..circuits import Snapshot
from ..circuits.capture import fixed_prompts
from ..errors import ModelError, RunError, UserError
from ..models import Coordinates
from ..probes import PROBES
from ..probes.fidelity import circuit_gap, reason_more_than_circuits
from ..probes.history import theory_lines
from ..results import ProbeReport, ProbeResult
from ..runs import Run, load_run
from ..tasks import Batch, Task, generator_for
from ..tracking import NullTracker, Progress, Tracker, guarded
from .checks import require_arguments, require_unlabelled, unwrapped
from .evidence import full_report, weight_report
from .folder import Folder, TemporaryFolder, attached_config, require_checkpointable, require_free
from .losses import LossWindow
from .observer import Observer
from .telling import tell

_ATTACHED: "weakref.WeakSet[HookedTransformer]" = weakref.WeakSet()


def attach(
    model: Checked[torch.nn.Module],
    task: Checked[Task],
    *,
    every: Checked[int] = 500,
    out: str | Path | None = None,
    probes: Checked[Sequence[str]] = PROBES,
    coordinates: Checked[Coordinates | Callable[[], Coordinates] | None] = None,
    predict: Checked[Callable[[Prompts], Predictions] | None] = None,
    prompts: Checked[Batch | None] = None,
    final_prompts: Checked[int | None] = None,
    tracker: Checked[Tracker | None] = None,
    steps: Checked[int | None] = None,
    start: Checked[int] = 0,
    seed: Checked[int] = 0,
    checkpoint: Checked[bool] = False,
) -> "Session":
    """Probes for a training loop of your own; use the result as a context manager.

    Nothing is recorded before the block begins, and nothing of the session is left on the model after it.

    Args:
        model: a `HookedTransformer` in the loop's hands (also inside `torch.compile` or DistributedDataParallel). It is
            called as `model(z, start_at_layer=0, attention_mask=...)[:, -1]`, the query hidden from the keys, unless
            `predict` says otherwise.
        task: what it is trained on.
        every: steps between captures; before the first and after the last step there is one as well.
        out: the run folder; by default a temporary one that lives as long as the session and its run.
        probes: which questions are asked at the end of the block; captures ask the structure, from the weights.
        coordinates: of a model with its own embedding. Views of trained weights (`embedding.weight.T`) stay up to date;
            a function is asked anew at every capture.
        predict: prompts `[batch pos token]` to predictions `[batch out]` as the loop makes them, for a model that is
            called in another way; it must run the model's blocks once.
        prompts: fixed prompts for the captures, labels included as the target; by default 32 of the task.
        final_prompts: prompts of the final probe; by default as many as `icl_mechinterp.probe` takes.
        tracker: is told of every capture.
        steps: how many the loop will take, if that is known; for the tracker only.
        start: the number of steps that were taken before, in a loop that goes on.
        seed: the label of this training in the run, and the seed of the captures' prompts.
        checkpoint: also save the weights at every capture, for models as `attention_only` builds them.

    Returns:
        A Session; call `session.step(loss=loss)` after every optimiser step.

    Raises:
        ConfigError: a value that cannot be used; prompts that hold the query's label.
        ModelError: not a `HookedTransformer`, one without the hooks needed or attached already, coordinates of another
            width, a read-in that loses coordinates of the token.
        RunError: the folder is in use.
    """
    model = unwrapped(model)
    require_arguments(task, every, probes, final_prompts, steps, start, seed)
    _require_free_model(model)
    if out is not None:
        require_free(Path(out))
    given = generator_for(seed, "evaluation")
    batch = fixed_prompts(task, model.cfg.n_heads, given) if prompts is None else prompts
    require_unlabelled(batch[0], task)
    observer = Observer(model, task, batch, coordinates, predict)
    observer.rehearse()
    if checkpoint:
        require_checkpointable(model, task, observer.plain)
    return Session(
        observer,
        every=every,
        out=out,
        probes=tuple(probes),
        final_prompts=final_prompts,
        tracker=guarded(tracker or NullTracker()),
        steps=steps,
        start=start,
        seed=seed,
        checkpoint=checkpoint,
    )


class Session:
    """A training loop under observation; made by `attach`.

    Attributes:
        path: the run folder; `None` until the block begins.
        steps_taken: calls of `step`, counted from `start`.
        report: the newest ProbeReport; `None` before the first.
        notes: what failed and was skipped, one line each.
    """

    def __init__(
        self,
        observer: Observer,
        *,
        every: int,
        out: str | Path | None,
        probes: tuple[str, ...],
        final_prompts: int | None,
        tracker: Tracker,
        steps: int | None,
        start: int,
        seed: int,
        checkpoint: bool,
    ) -> None:
        self.path: Path | None = None if out is None else Path(out)
        self.steps_taken, self.report = start, None
        self.notes: list[str] = []
        self._observer, self._every, self._probes = observer, every, probes
        self._final_prompts, self._tracker, self._steps, self._seed = final_prompts, tracker, steps, seed
        self._checkpoint, self._start = checkpoint, start
        self._owner: TemporaryFolder | None = None
        self._folder: Folder | None = None
        self._state = "new"
        self._window = LossWindow(self._tell)
        self._failed: set[str] = set()
        self._told: set[str] = set()
        self._captured: int | None = None
        self._clock = 0.0

    def __enter__(self) -> "Session":
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def open(self) -> None:
        """Begins the block: creates the run folder and takes the first capture.

        Raises:
            UserError: the session was used before.
            ModelError: the model is attached already, or cannot be looked at.
            RunError: the folder is in use, or cannot be written.
        """
        if self._state != "new":
            raise UserError(f"this session is {self._state}; one session is one training. Attach again for another.")
        _require_free_model(self._observer.model)
        snapshot = self._observer.look()
        if self.path is None:
            self._owner = TemporaryFolder()
            self.path = self._owner.path / "run"
        config = self._config(snapshot)
        self._folder = Folder(self.path, config, snapshot)
        _ATTACHED.add(self._observer.model)
        self._state, self._clock = "open", time.monotonic()
        self._tracker.start(config)
        self._guarded("capture", lambda: self._record(snapshot))

    def step(self, loss: Any = None) -> None:
        """Counts one optimiser step; every so many of them the model is captured.

        Args:
            loss: of this step, a number or a tensor of one number; leave it out where there is none.

        Raises:
            UserError: outside the block.
        """
        self._require_open("step")
        self.steps_taken += 1
        if loss is not None:
            self._window.add(loss, self.steps_taken)
        if (self.steps_taken - self._start) % self._every == 0:
            self.capture()

    def observe(self, loss: Any) -> None:
        """Records a loss without counting a step: for the parts of an accumulated gradient.

        Raises:
            UserError: outside the block.
        """
        self._require_open("observe")
        self._window.add(loss, self.steps_taken)

    def capture(self) -> ProbeReport | None:
        """Looks at the model now; a step is captured once.

        Returns:
            The report of the weights; `None` when the model could not be looked at.

        Raises:
            UserError: outside the block.
        """
        self._require_open("capture")
        if self._captured == self.steps_taken:
            return self.report
        return self._guarded("capture", lambda: self._record(self._observer.look()))

    def flush(self) -> None:
        """Writes what waits to the run folder; a failing disk is told once, and training goes on."""
        self._guarded("the run folder", self._writer.flush)

    def check_prompts(self, z: Any) -> None:
        """Checks prompts of your own: their width, and that the query's label is not among them.

        Raises:
            ConfigError: what is wrong with them.
        """
        require_unlabelled(z, self._observer.task)

    def close(self, error: BaseException | None = None) -> None:
        """Ends the block: a last capture, the final probe, the last append. A second call does nothing.

        Args:
            error: what ended the training early; then there is no final probe. It is never hidden.
        """
        if not self.is_open:
            return
        try:
            if error is None:
                self.capture()
                self._guarded("the final probe", self._record_final)
            else:
                self.notes.append(f"ended by {type(error).__name__} after step {self.steps_taken}: no final probe")
        finally:
            self._state = "closed"
            _ATTACHED.discard(self._observer.model)
            self._guarded("the run folder", lambda: self._writer.close(self.notes, self.steps_taken))
            self._tracker.finish()

    @property
    def is_open(self) -> bool:
        """Whether the block has begun and not ended."""
        return self._state == "open"

    @property
    def run(self) -> Run:
        """What is on disk so far.

        Raises:
            RunError: the block has not begun.
        """
        if self._folder is None:
            raise RunError("nothing was recorded yet: the session's block has not begun. Enter it with `with`.")
        self.flush()
        found = load_run(self._folder.path)
        return Run(found.path, found.config, self._owner)

    @property
    def _writer(self) -> Folder:
        assert self._folder is not None
        return self._folder

    def _require_open(self, method: str) -> None:
        if not self.is_open:
            raise UserError(
                f"session.{method}() was called outside the session's block (the session is {self._state}). Put the "
                "loop inside `with icl.attach(...) as session:`."
            )

    def _record(self, snapshot: Snapshot) -> ProbeReport | None:
        """One row of the history, one report."""
        gap = circuit_gap(snapshot.prediction, snapshot.circuits, self._observer.batch.z)
        loss = self._window.take()
        report = self._weights(snapshot, gap)
        self._captured = self.steps_taken
        self._guarded("the run folder", lambda: self._writer.add(self.steps_taken, loss, gap, snapshot, report))
        if self._checkpoint:
            self._guarded(
                "the checkpoint", lambda: self._writer.save_checkpoint(self._observer.model, self.steps_taken)
            )
        if report is not None:
            self.report = report
            self._tracker.update(self._progress(loss, report))
        return report

    def _weights(self, snapshot: Snapshot, gap: float) -> ProbeReport | None:
        """`None` when the weights are no numbers any more."""
        numbers = (snapshot.circuits.kq, snapshot.circuits.ov, snapshot.prediction)
        if not all(bool(values.isfinite().all()) for values in numbers):
            self._tell(
                "finite weights",
                f"the weights or predictions are not finite numbers at step {self.steps_taken}: this training diverged. "
                "Captures go on without probes",
            )
            return None
        reason = reason_more_than_circuits(self._observer.model, snapshot.circuits, gap, snapshot.coordinates)
        return weight_report(snapshot, self._observer.task, reason, self._ask, self.notes)

    def _record_final(self) -> None:
        snapshot = self._observer.look()
        gap = circuit_gap(snapshot.prediction, snapshot.circuits, self._observer.batch.z)
        if self._weights(snapshot, gap) is None:
            return
        report = full_report(
            snapshot,
            self._observer.task,
            reason_more_than_circuits(self._observer.model, snapshot.circuits, gap, snapshot.coordinates),
            self._ask,
            self.notes,
            predict=self._observer.predictions,
            probes=self._probes,
            prompts=self._final_prompts,
        )
        self.report = report.at(step=self.steps_taken, seed=self._seed)
        self._writer.add_report(report, self.steps_taken)

    def _ask(self, name: str, question: Callable[[], ProbeResult]) -> ProbeResult | None:
        """One probe; a failing one is told once by its name and never asked again."""
        if name in self._failed:
            return None
        return self._guarded(name, question, what=f"the probe '{name}'", again=False)

    def _guarded(self, name: str, action: Callable[[], Any], *, what: str | None = None, again: bool = True) -> Any:
        """The action's result; `None` when it failed, which is told once."""
        try:
            return action()
        except Exception as error:
            if not again:
                self._failed.add(name)
            self._tell(
                name,
                f"{what or name} failed at step {self.steps_taken} ({type(error).__name__}: {error}) and is skipped",
            )
            return None

    def _tell(self, name: str, message: str) -> None:
        if name not in self._told:
            self._told.add(name)
            self.notes.append(message)
            tell(f"{message}; the training goes on.")

    def _config(self, snapshot: Snapshot) -> dict[str, Any]:
        observer = self._observer
        facts: dict[str, Any] = {"own_forward": not observer.plain, "checkpoints": self._checkpoint}
        if snapshot.coordinates is not None:
            facts["unexplained"] = [float(share) for share in snapshot.coordinates.unexplained]
        return attached_config(
            observer.model, observer.task, seed=self._seed, every=self._every, probes=self._probes, facts=facts
        )

    def _progress(self, loss: float, report: ProbeReport) -> Progress:
        taken, elapsed = self.steps_taken - self._start, time.monotonic() - self._clock
        lines = theory_lines(self._observer.task)
        return Progress(
            step=self.steps_taken,
            steps=self._steps or self.steps_taken,
            losses=(loss,),
            best_loss=lines.get("best_loss"),
            optimal_step=lines.get("optimal_step"),
            heads=(report.heads,),
            steps_per_second=taken / elapsed if elapsed > 0 else 0.0,
        )


def _require_free_model(model: HookedTransformer) -> None:
    if model in _ATTACHED:
        raise ModelError(
            "this model is attached to a session that is still open. Leave that session's block (or call its close()) "
            "before you attach again."
        )
