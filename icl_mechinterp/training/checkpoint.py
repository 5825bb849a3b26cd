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
_NAME = re.compile(r"^step-(\d{8,})\.json$")


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
        state.stack.load(parameters)
        state.step = self.step
        state.generator_states = self.tensors["generator.states"].clone()
        state.window_loss = self.tensors["window.loss"].clone()
        state.window_steps = int(self.record["window_steps"])
        moments = {
            n.removeprefix("optimizer."): t.clone() for n, t in self.tensors.items() if n.startswith("optimizer.")
        }
        if moments:
            state.optimizer.state[state.stack.flat].update(moments)


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
    for name, tensor in state.optimizer.state.get(state.stack.flat, {}).items():
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
            "Use an earlier one; for weights trained elsewhere see `icl-mechinterp import`."
        )
    try:
        record = json.loads(sidecar.read_bytes())
        version, step, digest = record["schema_version"], record["step"], record["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{sidecar} is torn or not a checkpoint's record ({error}). Use an earlier checkpoint."
        ) from error
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise RunError(
            f"{sidecar} has schema version {version!r}; this version reads up to {SCHEMA_VERSION}. Upgrade "
            "icl-mechinterp to read it."
        )
    content = weights.read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise RunError(
            f"{weights} ({len(content)} bytes) is not what {sidecar.name} says it is: it is empty, torn or was changed. "
            "Use an earlier checkpoint."
        )
    try:
        tensors = load_tensors(content)
    except SafetensorError as error:
        raise RunError(f"{weights} is not a safetensors file ({error}). Use an earlier checkpoint.") from error
    return Checkpoint(step, tensors, record)


def saved_steps(folder: Path) -> list[int]:
    """Steps that have a record, in order; whether each is whole is for `load_checkpoint` to say."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for entry in folder.iterdir() if (match := _NAME.match(entry.name)))


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; `None` where there is none."""
    for step in reversed(saved_steps(folder)):
        try:
            return load_checkpoint(folder / f"step-{step:08d}.json")
        except RunError as error:
            if "schema version" in str(error):
                raise
    return None


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that a kill leaves the old one or the new one: temporary file, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
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
