"""`train` for models in hand, `run` for a config: both end in a run folder that `load_run` opens."""

import os
import platform
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import yaml
from transformer_lens import HookedTransformer

from ..errors import ConfigError, RunError
from ..models import _tl as tl
from ..models import resolve_coordinates
from ..probes import PROBES
from ..runs import SCHEMA_VERSION, Run, describe, load_run
from ..tasks import Task
from ..tracking import ConsoleTracker, NullTracker, Tracker, guarded
from ..training import (
    Every,
    Interrupted,
    NonFiniteLoss,
    Settings,
    latest_checkpoint,
    remove_leftovers,
    resolve_seeds,
    run_loop,
    saved_steps,
    start_state,
    write_atomically,
)
from ..training.schedule import Schedule
from .config import ExperimentConfig, load_config
from .recorder import Recorder, config_digest

_SMALL = 2  # models; more are worth more than one thread


def train(
    model_or_models: HookedTransformer | Sequence[HookedTransformer],
    task: Task,
    *,
    steps: int,
    optimizer: Literal["adam", "sgd"] = "adam",
    lr: float = 1e-3,
    schedule: Schedule = "constant",
    clip: float | None = None,
    batch: int = 256,
    engine: Literal["fused", "hooked"] = "fused",
    shared_prompts: bool = False,
    threads: int | None = None,
    every: int = 500,
    checkpoint_every: int = 5_000,
    evaluate: int = 0,
    gradients: bool = False,
    seeds: int | Sequence[int] | None = None,
    probes: Sequence[str] = PROBES,
    out: str | Path | None = None,
    resume: bool = False,
    tracker: Tracker | None = None,
    progress: bool = True,
) -> Run:
    """Trains models in place on fresh prompts, capturing their circuits and probing them on the way.

    Args:
        model_or_models: one model, or equally shaped ones that train together as an ensemble.
        task: draws the prompts.
        steps: optimiser steps.
        optimizer, lr, schedule, clip, batch, engine, shared_prompts, threads: see `training.Settings`.
        every: steps between captures of circuits, attention and weight probes.
        checkpoint_every: steps between checkpoints, with a function check on 2,000 prompts.
        evaluate: number of fixed prompts on which a loss is evaluated at every capture; 0 for none.
        gradients: also record the gradients of KQ and OV on the fixed prompts.
        seeds: of the prompt streams, one per model; 0, 1, 2, ... by default.
        probes: which probes are asked at the end; the cheap ones of them also at checkpoints.
        out: the run folder; by default a temporary one that lives as long as the returned Run.
        resume: go on from the newest checkpoint in `out`; the models' present weights are replaced.
        tracker: is told of every capture; a failing one is switched off and never stops training.
        progress: show progress on stderr, where no tracker is given.

    Returns:
        The run: `run.metrics`, `run.circuits`, `run.reports`.

    Raises:
        ConfigError: a value that cannot be used.
        RunError: `out` cannot be used as asked, or the disk is full; what was saved before stays.
        TrainingError: the loss is not a number, or the two engines disagree.
        KeyboardInterrupt: after a checkpoint, when interrupted; the message says what is kept.
    """
    models = [model_or_models] if isinstance(model_or_models, HookedTransformer) else list(model_or_models)
    models = [tl.require_hooked_transformer(model) for model in models]
    resolved = resolve_seeds(len(models) if seeds is None else ([seeds] if isinstance(seeds, int) else seeds))
    if len(resolved) != len(models):
        raise ConfigError(
            f"{len(models)} models need as many seeds for their prompts; got {len(resolved)}.", field="seeds"
        )
    config = ExperimentConfig.from_dict(
        {
            "task": task.to_dict(),
            "model": describe(models[0]),
            "training": {
                "steps": steps,
                "optimizer": optimizer,
                "lr": lr,
                "schedule": schedule,
                "clip": clip,
                "batch": batch,
                "engine": engine,
                "shared_prompts": shared_prompts,
                "threads": threads,
                "every": every,
                "checkpoint_every": checkpoint_every,
                "evaluate": evaluate,
                "gradients": gradients,
            },
            "seeds": list(resolved),
            "probes": list(probes),
        }
    )
    return _train(models, task, config, out, resume=resume, tracker=tracker, progress=progress)


def run(
    config: ExperimentConfig | Mapping[str, Any] | str | Path,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    tracker: Tracker | None = None,
    progress: bool = True,
) -> Run:
    """Trains what a config describes.

    Args:
        config: an ExperimentConfig, the same as plain values, a file, or the name of a shipped config.
        out, resume, tracker, progress: as in `train`.

    Raises:
        As `train`.
    """
    if isinstance(config, str | Path):
        config = load_config(config)
    elif not isinstance(config, ExperimentConfig):
        config = ExperimentConfig.from_dict(config)
    return _train(
        config.make_models(), config.make_task(), config, out, resume=resume, tracker=tracker, progress=progress
    )


def _train(
    models: list[HookedTransformer],
    task: Task,
    config: ExperimentConfig,
    out: str | Path | None,
    *,
    resume: bool,
    tracker: Tracker | None,
    progress: bool,
) -> Run:
    seeds = resolve_seeds(config.seeds)
    for model in models:
        resolve_coordinates(model, task)
        config.require_trainable(model)
    owner = _TemporaryFolder() if out is None else None
    path = owner.path / "run" if owner is not None else Path(str(out))
    reporter = guarded(tracker or (ConsoleTracker() if progress else NullTracker()))
    before = _run_to_resume(path) if resume else None
    settings = config.settings(_threads(models, before))
    effective = _effective(config, settings, seeds)
    if before is None:
        _create_folder(path, effective)
    else:
        _require_same_config(before, effective)
    try:
        recorder = Recorder(
            path,
            task,
            settings,
            seeds,
            models,
            probes=config.probes,
            tracker=reporter,
            digest=config_digest(effective),
            evaluate=config.training.evaluate,
            gradients=config.training.gradients,
        )
        _run(models, task, config, settings, seeds, recorder, reporter, effective)
    except OSError as error:
        raise RunError(
            f"{error.filename or path} could not be read or written ({error.strerror or error}). What was saved before "
            f"stays in {path}; mend that or make room, then go on with --resume."
        ) from error
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(_what_is_kept(path, owner is None)) from interrupt
    finished = load_run(path)
    return Run(finished.path, finished.config, owner)


def _run(
    models: list[HookedTransformer],
    task: Task,
    config: ExperimentConfig,
    settings: Settings,
    seeds: Sequence[int],
    recorder: Recorder,
    reporter: Tracker,
    effective: Mapping[str, Any],
) -> None:
    state = start_state(models, settings, seeds)
    try:
        checkpoint = latest_checkpoint(recorder.path / "checkpoints")
        if checkpoint is not None:
            checkpoint.restore(state)
        recorder.cut_back(checkpoint)
        reporter.start(effective)
        if checkpoint is None:
            recorder.on_capture(state)
            recorder.save(state)
        callbacks = [
            Every(config.training.every, recorder.on_capture),
            Every(config.training.checkpoint_every, recorder.on_checkpoint),
        ]
        try:
            run_loop(state, task, settings, callbacks)
        except Interrupted:  # only then is the state whole; after a harder interrupt the newest checkpoint stands
            recorder.save(state)
            raise
    except NonFiniteLoss as error:
        recorder.flush()  # the way into divergence, for whoever wants to look at it; a resume would cut it off
        steps = saved_steps(recorder.path / "checkpoints")
        kept = f"The checkpoint of step {steps[-1]} is kept in {recorder.path}." if steps else error.kept
        raise NonFiniteLoss(error.step, error.seeds, error.lr, kept=kept) from error
    finally:
        reporter.finish()
        state.stack.release()


class _TemporaryFolder:
    """A folder that is deleted with this object; tempfile's own class warns its user of that, who never saw it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="icl-run-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def _run_to_resume(path: Path) -> Run:
    """The run to go on with, cleared of what a kill may have left half written.

    Raises:
        RunError: there is none.
    """
    if not (path / "config.yaml").exists() and not path.is_file():
        raise RunError(f"there is no run at {path} to resume. Check --out, or leave out --resume to start one.")
    run = load_run(path)
    for folder in (path, path / "checkpoints"):
        remove_leftovers(folder)
    return run


def _create_folder(path: Path, effective: Mapping[str, Any]) -> None:
    """Creates a new run folder with its config.

    Raises:
        RunError: a file, a folder with something in it, or one that cannot be written.
    """
    try:
        if path.is_file():
            raise RunError(f"{path} is a file; a run needs a folder. Choose another --out.")
        if (path / "config.yaml").exists():
            raise RunError(f"{path} holds a run already. Go on with it by --resume, or choose another --out.")
        path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)  # of a run that was killed while it wrote its config
        if any(path.iterdir()):
            raise RunError(f"{path} is not empty and holds no run. Choose another --out.")
        write_atomically(path / "config.yaml", yaml.safe_dump(dict(effective), sort_keys=False).encode())
    except OSError as error:
        raise RunError(
            f"the run folder {path} cannot be created ({error.strerror or error}). Choose another --out."
        ) from error


def _threads(models: Sequence[HookedTransformer], before: Run | None) -> int:
    """Of a run whose config leaves them open; a resumed run keeps those it had, for others change the last bits."""
    if before is not None and isinstance(before.config["training"].get("threads"), int):
        return before.config["training"]["threads"]
    return 1 if len(models) <= _SMALL else os.cpu_count() or 1


def _what_is_kept(path: Path, lasting: bool) -> str:
    """What a person who pressed Ctrl-C wants to know."""
    if not lasting:
        return "interrupted. The run was in a temporary folder and is gone; give `out` to keep the next one."
    steps = saved_steps(path / "checkpoints")
    return f"interrupted; {path} holds the run up to step {steps[-1] if steps else 0}. Go on with --resume."


def _require_same_config(run: Run, effective: Mapping[str, Any]) -> None:
    if config_digest(run.config) == config_digest(effective):
        return
    before, now = _flattened(run.config), _flattened(effective)
    keys = [k for k in sorted(before | now) if before.get(k) != now.get(k)]
    changes = [
        f"{k} is {before.get(k)} there and {now.get(k)} here"
        for k in keys
        if k.partition(".")[0] in ExperimentConfig.model_fields
    ]
    raise RunError(
        f"{run.path} was started with another config: {'; '.join(changes)}. Resume with the config it was started with "
        f"({run.path / 'config.yaml'}), or choose another --out."
    )


def _flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _effective(config: ExperimentConfig, settings: Settings, seeds: Sequence[int]) -> dict[str, Any]:
    """The whole effective config as plain values, with what else one needs to repeat the run."""
    values = config.model_dump()
    values["task"] = config.make_task().to_dict()
    values["training"]["threads"] = settings.threads
    return {
        "schema_version": SCHEMA_VERSION,
        **values,
        "seeds": list(seeds),
        "versions": {
            "icl_mechinterp": version("icl-mechinterp"),
            "transformer_lens": tl.tl_version(),
            "torch": version("torch"),
            "python": platform.python_version(),
        },
        "git_revision": _git_revision(),
    }


def _git_revision() -> str | None:
    """Of the working directory, if it is in a repository."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
