"""Checkpoints: safetensors beside a small JSON that is written last. No valid JSON, no checkpoint.

checkpoints/step-00002000.safetensors   parameters by name [seed ...], optimiser moments, generator bytes
checkpoints/step-00002000.json          schema, step, sha256 of the other file, what the loop needs to go on
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from ..errors import RunError
from .loop import TrainState

SCHEMA_VERSION = 1
_NAME = re.compile(r"^step-([0-9]{8,})\.json$")


class NewerSchema(RunError):
    """Written by a later version: an earlier checkpoint is no way out, for going on from it would lose this one."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        step: finished steps.
        tensors: everything in the safetensors file, by name.
        record: the JSON beside it.
    """

    step: int
    tensors: Mapping[str, torch.Tensor]
    record: Mapping[str, Any]

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """Model parameters by name, `[seed ...]`."""
        return {name.removeprefix("model."): t for name, t in self.tensors.items() if name.startswith("model.")}

    def restore(self, state: TrainState) -> None:
        """Puts a freshly started state where this checkpoint was taken.

        Raises:
            RunError: parameters of other names or shapes than the state's.
        """
        parameters = self.parameters
        expected = {name: (len(state.stack.models), *shape) for name, shape in state.stack.shapes.items()}
        found = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        if expected != found:
            name = next(n for n in expected | found if expected.get(n) != found.get(n))
            raise RunError(
                f"the checkpoint at step {self.step} does not fit the run's config: {name} has shape "
                f"{found.get(name)}, the config asks for {expected.get(name)}. Restore the config that the run was "
                "started with."
            )
        moments = {f"optimizer.{name}": tensor for name, tensor in state.optimizer.state.items()}
        needed = {"generator.states": state.generator_states, "window.loss": state.window_loss, **moments}
        for name, tensor in needed.items():
            stored = self.tensors.get(name)
            if stored is None or (stored.shape, stored.dtype) != (tensor.shape, tensor.dtype):
                raise RunError(
                    f"the checkpoint at step {self.step} lacks what training needs to go on: {name} is "
                    f"{None if stored is None else tuple(stored.shape)}, and {tuple(tensor.shape)} is needed. Delete it to "
                    "resume from an earlier one."
                )
        state.stack.load(parameters)
        state.step = self.step
        state.generator_states = self.tensors["generator.states"].clone()
        state.window_loss = self.tensors["window.loss"].clone()
        state.window_steps = int(self.record["window_steps"])
        for name, tensor in moments.items():
            tensor.copy_(self.tensors[name])


def save_checkpoint(folder: Path, state: TrainState, extra: Mapping[str, Any]) -> Path:
    """Writes a checkpoint; returns the path of its safetensors file.

    Args:
        folder: the `checkpoints/` folder.
        state: what to save.
        extra: plain values for the JSON (config digest, lengths of the history).

    Raises:
        OSError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": tensor for name, tensor in state.stack.named().items()}
    for name, tensor in state.optimizer.state.items():
        tensors[f"optimizer.{name}"] = tensor.clone()
    tensors["generator.states"] = state.generator_states.clone()
    tensors["window.loss"] = state.window_loss.clone()
    content = save_tensors(tensors)
    path = folder / f"step-{state.step:08d}.safetensors"
    write_atomically(path, content)
    record = {
        "schema_version": SCHEMA_VERSION,
        "step": state.step,
        "window_steps": state.window_steps,
        "sha256": hashlib.sha256(content).hexdigest(),
        **extra,
    }
    write_atomically(path.with_suffix(".json"), json.dumps(record, indent=1, allow_nan=False).encode())
    return path


def load_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint, verified against its JSON.

    Args:
        path: of the safetensors file or of the JSON.

    Raises:
        RunError: missing, empty, torn, of a newer schema, or not safetensors.
    """
    weights, sidecar = path.with_suffix(".safetensors"), path.with_suffix(".json")
    if not weights.is_file():
        raise RunError(f"there is no checkpoint {weights}. Name a run folder, or one of its checkpoints.")
    if not sidecar.is_file():
        raise RunError(
            f"{weights} has no {sidecar.name} beside it, so it was not finished or is not a checkpoint of a run. "
            "Use an earlier one."
        )
    record = _read_record(sidecar)
    content = weights.read_bytes()
    if hashlib.sha256(content).hexdigest() != record["sha256"]:
        raise RunError(
            f"{weights} ({len(content)} bytes) is not what {sidecar.name} says it is: it is empty, torn or was changed. "
            "Use an earlier checkpoint."
        )
    try:
        tensors = load_tensors(content)
    except SafetensorError as error:
        raise RunError(f"{weights} is not a safetensors file ({error}). Use an earlier checkpoint.") from error
    return Checkpoint(record["step"], tensors, record)


def _read_record(sidecar: Path) -> dict[str, Any]:
    """The JSON beside the weights, with everything in it that a reader relies on."""
    try:
        record = json.loads(sidecar.read_bytes())
        version = record["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{sidecar} is torn or not a checkpoint's record ({error}). Use an earlier checkpoint."
        ) from error
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise NewerSchema(
            f"{sidecar} has schema version {version!r}; this version reads up to {SCHEMA_VERSION}. Upgrade "
            "icl-mechinterp to read it."
        )
    for name, kind in (("step", int), ("window_steps", int), ("sha256", str)):
        if not isinstance(record.get(name), kind):
            raise RunError(
                f"{sidecar} is not a checkpoint's record: {name} is {record.get(name)!r}. Use an earlier checkpoint."
            )
    if sidecar.name != _file_name(record["step"]):
        raise RunError(
            f"{sidecar} is the record of step {record['step']}: the file was renamed. Call it {_file_name(record['step'])}."
        )
    return record


def step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint's file, or `None` for any other file."""
    match = _NAME.match(path.with_suffix(".json").name) if path.suffix in (".json", ".safetensors") else None
    return int(match[1]) if match else None


def _file_name(step: int) -> str:
    return f"step-{step:08d}.json"


def saved_steps(folder: Path) -> list[int]:
    """Steps that have a record, in order; whether each is whole is for `load_checkpoint` to say."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for entry in folder.iterdir() if (match := _NAME.match(entry.name)) and entry.is_file())


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; `None` where there is none."""
    for step in reversed(saved_steps(folder)):
        try:
            return load_checkpoint(folder / _file_name(step))
        except NewerSchema:
            raise
        except RunError:
            continue
    return None


def remove_leftovers(folder: Path) -> None:
    """Deletes the temporary files of `write_atomically` in a folder, left by a kill while it wrote one."""
    for file in folder.glob(".*.tmp"):
        file.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that a kill leaves the old one or the new one: temporary file, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
