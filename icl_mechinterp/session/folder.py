"""The run folder of an attached session: `icl_mechinterp.load_run` opens it like any other.

There are no checkpoints to hang the appends on, so captures are buffered and written in blocks: one append costs about
as much as ten captures.
"""

import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save as save_tensors
from transformer_lens import HookedTransformer

from ..circuits import Snapshot
from ..errors import ConfigError, RunError
from ..models import _tl as tl
from ..probes.history import circuits_row, metrics_row, open_histories
from ..results import ProbeReport
from ..runs import SCHEMA_VERSION, build_model, describe
from ..tasks import Task
from ..training import checkpoint as checkpoints
from ..training import remove_leftovers, write_atomically

_BLOCK = 16  # captures per append
_SECONDS = 60.0  # a slow loop writes more often: a kill then loses a minute


class Folder:
    """Writes one run folder.

    Args:
        path: a folder that is new or empty.
        config: of the run, as plain values.
        snapshot: gives the shapes of the circuits.

    Raises:
        RunError: the folder is in use, or cannot be created.
    """

    def __init__(self, path: Path, config: dict[str, Any], snapshot: Snapshot) -> None:
        self.path, self.config = path, config
        require_free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            remove_leftovers(path)
            self._write_config()
        except OSError as error:
            raise RunError(
                f"the run folder {path} cannot be created ({error.strerror or error}). Choose another out."
            ) from error
        self.metrics, self.circuits = open_histories(
            path / "history.zarr", snapshot, config["seeds"], scalars=("loss", "circuit_gap")
        )
        self._reports: list[ProbeReport] = []
        self._waiting, self._last = 0, -float("inf")

    def add(self, step: int, loss: float, gap: float, snapshot: Snapshot, report: ProbeReport | None) -> None:
        """One capture; written with the next block."""
        scalars = {"loss": np.array([loss]), "circuit_gap": np.array([gap])}
        self.metrics.add(step, metrics_row([snapshot], [report], **scalars))
        self.circuits.add(step, circuits_row([snapshot]))
        if report is not None:
            self.add_report(report, step)
        self._waiting += 1
        if self._waiting >= _BLOCK or time.monotonic() - self._last > _SECONDS:
            self.flush()

    def add_report(self, report: ProbeReport, step: int) -> None:
        self._reports.append(report.at(step=step, seed=self.config["seeds"][0]))

    def flush(self) -> None:
        """Appends everything that waits."""
        self.metrics.flush()
        self.circuits.flush()
        with open(self.path / "probes.jsonl", "ab") as file:
            file.write(b"".join(report.to_json().encode() + b"\n" for report in self._reports))
            file.flush()
            os.fsync(file.fileno())
        self._reports.clear()
        self._waiting, self._last = 0, time.monotonic()

    def close(self, notes: Sequence[str], steps: int) -> None:
        """The last append, synced; the config then says how many steps there were and what went wrong."""
        self.flush()
        for history in (self.metrics, self.circuits):
            history.sync()
        self.config["training"]["steps"] = steps
        self.config["notes"] = list(notes)
        self._write_config()

    def save_checkpoint(self, model: HookedTransformer, step: int) -> None:
        """The trained weights, where `run.model(step)` finds them."""
        tensors = {f"model.{name}": value.detach().cpu()[None].contiguous() for name, value in _heads_of(model).items()}
        content = save_tensors(tensors)
        folder = self.path / "checkpoints"
        folder.mkdir(exist_ok=True)
        write_atomically(folder / f"step-{step:08d}.safetensors", content)
        record = {
            "schema_version": checkpoints.SCHEMA_VERSION,
            "step": step,
            "window_steps": 0,
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        write_atomically(folder / f"step-{step:08d}.json", json.dumps(record, indent=1).encode())

    def _write_config(self) -> None:
        write_atomically(self.path / "config.yaml", yaml.safe_dump(self.config, sort_keys=False).encode())


class TemporaryFolder:
    """A folder that is deleted with the last reference to this object, silently (tempfile's own would warn)."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="icl-run-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def require_free(path: Path) -> None:
    """Checks that a run can be recorded in a folder.

    Raises:
        RunError: a file, a folder that holds a run (finished or being recorded), or one with something else in it.
    """
    if path.is_file():
        raise RunError(f"{path} is a file; a run needs a folder. Choose another out.")
    if (path / "config.yaml").exists():
        raise RunError(f"{path} is in use: it holds a run, finished or being recorded. Choose another out.")
    if path.is_dir() and any(not entry.name.endswith(".tmp") for entry in path.iterdir()):
        raise RunError(f"{path} is not empty and holds no run. Choose another out.")


def attached_config(
    model: HookedTransformer, task: Task, *, seed: int, every: int, probes: Sequence[str], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The config of an attached run; `attached` holds what the `model` section has no words for."""
    cfg = model.cfg
    attached = {
        "d_model": cfg.d_model,
        "attn_only": bool(cfg.attn_only),
        "normalization": cfg.normalization_type,
        "attention_direction": cfg.attention_dir,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        **facts,
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "task": task.to_dict(),
        "model": describe(model),
        "training": {"every": every},
        "seeds": [seed],
        "probes": list(probes),
        "attached": attached,
        "notes": [],
        "versions": {
            "icl_mechinterp": version("icl-mechinterp"),
            "transformer_lens": tl.tl_version(),
            "torch": version("torch"),
            "python": platform.python_version(),
        },
    }


def require_checkpointable(model: HookedTransformer, task: Task, plain: bool) -> None:
    """Checks that `run.model(step)` could give this model back.

    Raises:
        ConfigError: the model is more than `attention_only` builds.
    """
    reason = "it has an embedding or a forward pass of its own" if not plain else _difference(model, task)
    if reason is not None:
        raise ConfigError(
            f"checkpoint=True is for models as icl_mechinterp.attention_only builds them; {reason}. Leave it out, and "
            "save the model yourself with its state_dict.",
            field="checkpoint",
        )


def _difference(model: HookedTransformer, task: Task) -> str | None:
    twin = build_model(task, describe(model), seed=0)
    ours, theirs = twin.state_dict(), model.state_dict()
    trained = _heads_of(twin).keys()
    if twin.cfg.attention_dir != model.cfg.attention_dir:
        return f"its attention is {model.cfg.attention_dir}"
    names = dict(twin.named_parameters()).keys() | dict(model.named_parameters()).keys()
    for name in sorted(names - {"embed.W_E", "pos_embed.W_pos"}):
        if name not in ours or name not in theirs or ours[name].shape != theirs[name].shape:
            return f"its parameter {name} has no counterpart there"
        if name not in trained and not torch.equal(ours[name], theirs[name].cpu().to(ours[name].dtype)):
            return f"its {name} is not the fixed one there"
    return None


def _heads_of(model: HookedTransformer) -> dict[str, torch.Tensor]:
    wanted = (".W_Q", ".W_K", ".W_V", ".W_O")
    return {name: value for name, value in model.named_parameters() if name.endswith(wanted)}
