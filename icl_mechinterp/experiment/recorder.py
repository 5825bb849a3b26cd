"""Writes a run folder while a run trains: captures, probes, checkpoints, in an order that a kill cannot spoil.

At a checkpoint the history is flushed and synced first, then the reports, then the checkpoint whose JSON says how long
both were. A resume cuts them back to those lengths, so whatever was written after it never happened.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..circuits import Capture, Snapshot
from ..circuits.capture import fixed_prompts
from ..errors import RunError, TrainingError
from ..models import _tl as tl
from ..models import collapse, fused_prediction, hooked_prediction
from ..probes import CHECKPOINT_PROBES, probe, probe_circuits
from ..probes.history import circuits_row, metrics_row, open_histories, theory_lines
from ..results import ProbeReport
from ..tasks import Task, generator_for
from ..tracking import Progress, Tracker
from ..training import Checkpoint, NonFiniteLoss, Settings, TrainState, save_checkpoint
from .config import ExperimentConfig

CHECKPOINT_PROMPTS = 500  # as good as 7,000 plain ones: labels are averaged over, queries asked at two lengths
FINAL_PROMPTS = 25_000  # of an ensemble together; a single seed's sample grows by itself
_GAP_TOLERANCE = 1e4 * torch.finfo(torch.float32).eps  # relative to the size of the predictions


class Recorder:
    """Records one run.

    Args:
        path: the run folder.
        task, settings, seeds: what is being trained.
        probes: names of the probes asked at checkpoints.
        tracker: is told of every capture.
        digest: of the config, written into every checkpoint.
        evaluate: number of fixed prompts on which a loss is evaluated at captures; 0 for none.
        gradients: record the gradients of KQ and OV as well.
    """

    def __init__(
        self,
        path: Path,
        task: Task,
        settings: Settings,
        seeds: Sequence[int],
        models: Sequence[Any],
        *,
        probes: Sequence[str],
        tracker: Tracker,
        digest: str,
        evaluate: int = 0,
        gradients: bool = False,
    ) -> None:
        self.path, self.task, self.settings, self.seeds = path, task, settings, tuple(seeds)
        self.probes, self.tracker, self.digest = tuple(probes), tracker, digest
        generator = generator_for(seeds[0], "evaluation")
        self.capture = Capture(task, fixed_prompts(task, models[0].cfg.n_heads, generator), gradients=gradients)
        self.evaluation = task.sample(evaluate, generator=generator) if evaluate else None
        scalars = ("loss", "engine_gap", *(("evaluation_loss",) if evaluate else ()))
        self.metrics, self.circuits = open_histories(
            path / "history.zarr", self.capture(models[0]), self.seeds, scalars=scalars
        )
        self._reports: list[ProbeReport] = []
        self._theory = theory_lines(task)
        self._captured: int | None = None
        self._clock = (time.monotonic(), 0)

    def on_capture(self, state: TrainState) -> None:
        """Circuits, attention and weight probes of every seed; one row of the history.

        Raises:
            NonFiniteLoss: circuits or predictions are no numbers any more, so the next loss cannot be one.
            TrainingError: the fused engine and the hooked model disagree.
        """
        snapshots = self._finite_snapshots(state)
        reports = [probe_circuits(snapshot.circuits, self.task) for snapshot in snapshots]
        losses = state.take_window().numpy()
        metrics = {"loss": losses, "engine_gap": self._engine_gap(state, snapshots)}
        if self.evaluation is not None:
            metrics["evaluation_loss"] = self._evaluation_loss(state)
        self.metrics.add(state.step, metrics_row(snapshots, reports, **metrics))
        self.circuits.add(state.step, circuits_row(snapshots))
        self._report_progress(state, losses, reports)

    def on_checkpoint(self, state: TrainState) -> None:
        """Probes of every seed with a small function check, then a checkpoint.

        Raises:
            NonFiniteLoss: as `on_capture`; no checkpoint is written, so the newest one stays good.
        """
        if self._captured != state.step:
            self._finite_snapshots(state)
        last = state.step == self.settings.steps
        prompts: int | None = CHECKPOINT_PROMPTS
        probes = tuple(name for name in self.probes if last or name in CHECKPOINT_PROBES)
        if last:
            prompts = max(CHECKPOINT_PROMPTS, FINAL_PROMPTS // len(self.seeds)) if len(self.seeds) > 1 else None
        for seed, model in zip(self.seeds, state.stack.models, strict=True):
            report = probe(model, self.task, seed=0, prompts=prompts, probes=probes)
            self._reports.append(report.at(step=state.step, seed=seed))
        self.save(state)

    def save(self, state: TrainState) -> None:
        """Flushes and syncs everything recorded so far, then writes the checkpoint that vouches for it."""
        length = self.flush()
        lengths = {"metrics": len(self.metrics), "circuits": len(self.circuits), "reports": length}
        extra = {
            "config_digest": self.digest,
            "lengths": lengths,
            "engine": self.settings.engine,
            "threads": self.settings.threads,
        }
        save_checkpoint(self.path / "checkpoints", state, extra)

    def flush(self) -> int:
        """Writes and syncs everything recorded so far; returns the length of the reports' file."""
        for history in (self.metrics, self.circuits):
            history.flush()
            history.sync()
        with open(self._reports_file, "ab") as file:
            for report in self._reports:
                file.write(report.to_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            length = file.tell()
        self._reports.clear()
        return length

    def cut_back(self, checkpoint: Checkpoint | None) -> None:
        """Drops everything that was recorded after a checkpoint; everything at all where there is none.

        Raises:
            RunError: less is there than was recorded before the checkpoint.
        """
        names = ("metrics", "circuits", "reports")
        lengths = dict.fromkeys(names, 0) if checkpoint is None else checkpoint.record.get("lengths")
        if not isinstance(lengths, Mapping) or not all(isinstance(lengths.get(name), int) for name in names):
            raise RunError(
                f"the record of the newest checkpoint in {self.path} does not say how long the history was: "
                f"{lengths!r}. Restore it, or start again with another --out."
            )
        size = self._reports_file.stat().st_size if self._reports_file.exists() else 0
        if size < lengths["reports"]:
            raise RunError(
                f"{self._reports_file} has {size} bytes, and {lengths['reports']} were written before the checkpoint: "
                "reports were deleted. Restore the file, or start again with another --out."
            )
        self.metrics.cut(lengths["metrics"])
        self.circuits.cut(lengths["circuits"])
        if size > lengths["reports"]:
            os.truncate(self._reports_file, lengths["reports"])
        self._clock = (time.monotonic(), 0 if checkpoint is None else checkpoint.step)

    @property
    def _reports_file(self) -> Path:
        return self.path / "probes.jsonl"

    def _finite_snapshots(self, state: TrainState) -> list[Snapshot]:
        """One snapshot per seed, all of them numbers."""
        snapshots = [self.capture(model) for model in state.stack.models]
        seen = [(s.circuits.kq, s.circuits.ov, s.prediction) for s in snapshots]
        bad = [seed for seed, arrays in enumerate(seen) if not all(bool(a.isfinite().all()) for a in arrays)]
        if bad:
            raise NonFiniteLoss(state.step + 1, bad, self.settings.lr)
        self._captured = state.step
        return snapshots

    def _engine_gap(self, state: TrainState, snapshots: Sequence[Snapshot]) -> np.ndarray:
        """Largest difference between fused and hooked predictions, relative to their size; NaN for hooked training."""
        if self.settings.engine == "hooked":
            return np.full(len(self.seeds), np.nan, dtype=np.float32)
        model = state.stack.models[0]
        weights = state.stack.heads(state.stack.flat.detach())
        circuits = collapse(weights, tl.attention_scale(model, 0), model.unembed.W_U.detach())
        fused = fused_prediction(circuits, self.capture.prompts.z[None])
        hooked = torch.stack([snapshot.prediction for snapshot in snapshots])
        size = hooked.square().mean((1, 2)).sqrt() + torch.finfo(torch.float32).tiny
        gap = (fused - hooked).abs().amax((1, 2)) / size
        if bool((gap > _GAP_TOLERANCE).any()):
            raise TrainingError(
                f"at step {state.step} the fused engine and the HookedTransformer differ by {float(gap.max()):.2g} of "
                f"the predictions' size (allowed {_GAP_TOLERANCE:.1g}): a hook changes this model's forward pass. Train "
                "it with engine='hooked'."
            )
        return gap.numpy()

    def _evaluation_loss(self, state: TrainState) -> np.ndarray:
        assert self.evaluation is not None
        z, target = self.evaluation
        with torch.no_grad():
            losses = [(hooked_prediction(model, z) - target).square().mean() for model in state.stack.models]
        return torch.stack(losses).numpy()

    def _report_progress(self, state: TrainState, losses: np.ndarray, reports: Sequence[ProbeReport]) -> None:
        started, first = self._clock
        elapsed = time.monotonic() - started
        self.tracker.update(
            Progress(
                step=state.step,
                steps=self.settings.steps,
                losses=tuple(float(loss) for loss in losses),
                best_loss=self._theory.get("best_loss"),
                optimal_step=self._theory.get("optimal_step"),
                heads=tuple(report.heads for report in reports),
                steps_per_second=(state.step - first) / elapsed if elapsed > 0 else 0.0,
            )
        )


def config_digest(config: Mapping[str, Any]) -> str:
    """Of what determines a run; versions and paths are left out."""
    return hashlib.sha256(
        json.dumps({k: config[k] for k in ExperimentConfig.model_fields}, sort_keys=True).encode()
    ).hexdigest()
