"""A run folder, finished or still growing, opened for reading. Opening a stranger's run executes nothing.

config.yaml     the whole effective config, versions, git revision
history.zarr/   metrics/ and circuits/, each with its own steps
probes.jsonl    one report per probed step and seed
checkpoints/    step-XXXXXXXX.safetensors and .json
"""

import json
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

import xarray as xr
import yaml
from transformer_lens import HookedTransformer

from .circuits import read_group
from .errors import ConfigError, RunError
from .models import _tl as tl
from .models import attention_only
from .results import ProbeReport
from .tasks import Task, task_from_dict
from .training import Checkpoint, latest_checkpoint, load_checkpoint, resolve_seeds, saved_steps

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Run:
    """A run on disk; what it holds is read when asked for, so a growing run can be read again and again.

    Attributes:
        path: the run folder.
        config: its effective config as plain values.
    """

    path: Path
    config: dict[str, Any]
    _owner: object = field(default=None, repr=False, compare=False)
    """Keeps a temporary folder alive as long as the run that lives in it."""

    @cached_property
    def task(self) -> Task:
        return task_from_dict(self.config["task"])

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(self.config["seeds"])

    @property
    def is_trained_here(self) -> bool:
        """Whether its settings train it again; else it was attached to somebody's loop, or imported."""
        return not ("attached" in self.config or "imported" in self.config)

    @property
    def metrics(self) -> xr.Dataset:
        """loss[seed step], engine_gap, omega[seed step layer head], mu, share and the weight measurements."""
        return read_group(self.path / "history.zarr", "metrics")

    @property
    def circuits(self) -> xr.Dataset:
        """kq[seed step layer head key query], ov[seed step layer head out token], attention of the fixed prompts."""
        return read_group(self.path / "history.zarr", "circuits")

    @property
    def reports(self) -> tuple[ProbeReport, ...]:
        """All reports in the order of writing; a torn last line is left out."""
        return read_reports(self.path / "probes.jsonl")

    @property
    def final_reports(self) -> tuple[ProbeReport, ...]:
        """The newest report of each seed, in the order of the seeds."""
        newest = {report.seed: report for report in self.reports}
        return tuple(newest[seed] for seed in self.seeds if seed in newest)

    @property
    def steps(self) -> list[int]:
        """Steps with a checkpoint."""
        return saved_steps(self.path / "checkpoints")

    def checkpoint(self, step: int | None = None) -> Checkpoint:
        """The checkpoint of a step, or the newest whole one.

        Raises:
            RunError: the step was not saved (the message lists those that were), or there is no checkpoint.
        """
        if "attached" in self.config and not self.steps:
            raise RunError(
                f"{self.path} is a run that was attached to somebody's own loop, and such a run has no checkpoints unless "
                "asked for: icl.attach(..., checkpoint=True). Its circuits, metrics and reports are here."
            )
        folder = self.path / "checkpoints"
        if step is not None and step not in self.steps:
            saved = ", ".join(map(str, self.steps))
            advice = f"saved steps: {saved}. Choose one of these." if saved else "it has no checkpoint yet."
            raise RunError(f"step {step} was not saved in {self.path}; {advice}")
        found = latest_checkpoint(folder) if step is None else load_checkpoint(folder / f"step-{step:08d}.json")
        if found is None:
            raise RunError(
                f"{self.path} has no whole checkpoint: the run stopped before its first one, or they were damaged. Train "
                "it with --resume, or start again with another --out."
            )
        return found

    def model(self, step: int | None = None, *, seed: int | None = None) -> HookedTransformer:
        """The model of one seed as it was at a step.

        Args:
            step: a saved step; the newest by default.
            seed: one of the run's seeds; the first by default.

        Raises:
            RunError: step or seed not in this run, or a checkpoint that does not fit the config.
        """
        seed = self.seeds[0] if seed is None else seed
        if seed not in self.seeds:
            raise RunError(f"{self.path} has no seed {seed}; it has {', '.join(map(str, self.seeds))}.")
        checkpoint = self.checkpoint(step)
        model = build_model(self.task, self.config["model"], seed=seed)
        index = self.seeds.index(seed)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                stored = checkpoint.parameters.get(name)
                if stored is None or stored.shape != (len(self.seeds), *parameter.shape):
                    shape = None if stored is None else tuple(stored.shape)
                    raise RunError(
                        f"the checkpoint at step {checkpoint.step} does not fit {self.path / 'config.yaml'}: {name} has "
                        f"shape {shape}, the config asks for {(len(self.seeds), *parameter.shape)}. Restore the config "
                        "that the run was started with."
                    )
                parameter.data.copy_(stored[index])
        return model


def load_run(path: str | Path) -> Run:
    """A run folder, finished or growing.

    Raises:
        RunError: no such folder, no config in it, or one of a newer schema.
    """
    path = Path(path)
    if not path.exists():
        raise RunError(f"there is no run at {path}. Check the path, or train one with: icl-mechinterp train CONFIG")
    file = path / "config.yaml"
    if not file.is_file():
        what = "is a file, not a run folder" if path.is_file() else "holds no config.yaml, so it is not a run"
        raise RunError(f"{path} {what}. Name a folder that `icl-mechinterp train` wrote.")
    try:
        config = yaml.safe_load(file.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise RunError(
            f"{file} cannot be read: {' '.join(str(error).split())}. Restore it, or name another run."
        ) from error
    version = config.get("schema_version") if isinstance(config, dict) else None
    # before anything else is looked at: a later version may describe its run in other words
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise RunError(
            f"{path} has schema version {version!r}; this version reads up to {SCHEMA_VERSION}. Upgrade icl-mechinterp "
            "to read it."
        )
    _require_whole(config, file)
    return Run(path, config)


def _require_whole(config: Any, file: Path) -> None:
    """Checks what every reader of a run relies on."""
    kinds = {"schema_version": int, "task": dict, "model": dict, "training": dict, "seeds": list}
    for name, kind in kinds.items():
        value = config.get(name) if isinstance(config, dict) else None
        if not isinstance(value, kind):
            raise RunError(
                f"{file} is not the config of a run: {name} is {value!r}. Name a folder that `icl-mechinterp train` wrote."
            )
    try:
        task_from_dict(config["task"])
        resolve_seeds(config["seeds"])
    except ConfigError as error:
        raise RunError(f"{file} is not the config of a run: {error} Restore it, or name another run.") from error


def describe(model: HookedTransformer) -> dict[str, Any]:
    """The `model` section of a config for a model in hand."""
    cfg = model.cfg
    return {
        "n_heads": cfg.n_heads,
        "n_layers": cfg.n_layers,
        "d_head": cfg.d_head,
        "scale": tl.attention_scale(model, 0),
    }


def build_model(task: Task, settings: dict[str, Any], *, seed: int) -> HookedTransformer:
    """A model as the `model` section of a config describes it, freshly initialised.

    Raises:
        ConfigError: a missing or unknown setting, or a value that cannot be used; fields are named `model.n_heads`.
    """
    try:
        signature(attention_only).bind(task, **settings, seed=seed)
    except TypeError as error:
        raise ConfigError(f"model does not describe a model: {error}. Correct the section.", field="model") from error
    try:
        return attention_only(task, **settings, seed=seed)
    except ConfigError as error:
        raise error.within("model") from error


def read_reports(file: Path) -> tuple[ProbeReport, ...]:
    """Reports from a file with one JSON record per line; a torn last line, left by a kill, is left out.

    Raises:
        RunError: a line in the middle that is not a report, or one of a newer schema.
    """
    if not file.is_file():
        return ()
    lines = file.read_bytes().split(b"\n")
    # a whole file ends with a newline: the last piece is torn
    return tuple(_read_report(line, f"{file}, line {number}") for number, line in enumerate(lines[:-1], start=1))


def _read_report(line: bytes, where: str) -> ProbeReport:
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except ValueError as error:
        raise RunError(f"{where}, is not JSON ({error}). The file was changed by hand: restore it.") from error
    if not isinstance(record, dict):
        raise RunError(
            f"{where}, is a {type(record).__name__}, not a report. The file was changed by hand: restore it."
        )
    try:
        return ProbeReport.from_dict(record)
    except RunError as error:
        raise RunError(f"{where}: {error}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")
