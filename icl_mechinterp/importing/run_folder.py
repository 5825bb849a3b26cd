"""The run folder of an imported model: what a training run would have left, had it stopped at step 0 with these weights.

It is built beside its place and moved there in one step, so there is never half a run.
"""

import os
import platform
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from ..circuits import Capture
from ..errors import RunError
from ..models import _tl as tl
from ..probes import PROBES, probe, probe_circuits
from ..probes.history import circuits_row, metrics_row, open_histories
from ..runs import SCHEMA_VERSION
from ..tasks import Task, generator_for
from ..training import Settings, save_checkpoint, start_state, write_atomically
from .build import build_imported, model_settings
from .layouts import LayerWeights, ModelWeights

_SEED = 0
_CAPTURE_PROMPTS = 8  # the attention of as many is kept


def require_free(path: Path) -> None:
    """Checks that a run can be put there.

    Raises:
        RunError: it holds something already.
    """
    if path.is_file():
        raise RunError(f"{path} is a file; a run needs a folder. Choose another --out.")
    if path.is_dir() and any(path.iterdir()):
        what = "holds a run already" if (path / "config.yaml").exists() else "is not empty"
        raise RunError(f"{path} {what}. Choose another --out.")


def write_run(
    path: Path, weights: ModelWeights, task: Task, scale: float, source: Mapping[str, Any], *, prompts: int | None
) -> Path:
    """Writes the folder; a run's models are float32.

    Args:
        path: where; it must be free.
        weights, task, scale: the model.
        source: how the weights were read, for the config.
        prompts: of the report; as `probe`.

    Raises:
        OSError: it cannot be written; nothing is left there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        _fill(building, _single(weights), task, scale, source, prompts)
        os.replace(building, path)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return path


def _fill(
    folder: Path, weights: ModelWeights, task: Task, scale: float, source: Mapping[str, Any], prompts: int | None
) -> None:
    settings = model_settings(weights, scale)
    write_atomically(folder / "config.yaml", yaml.safe_dump(_config(task, settings, source), sort_keys=False).encode())
    model = build_imported(weights, task, scale)
    batch = task.sample(_CAPTURE_PROMPTS, generator=generator_for(_SEED, "evaluation"))
    snapshot = Capture(task, batch)(model)
    metrics, circuits = open_histories(folder / "history.zarr", snapshot, [_SEED], scalars=("loss", "engine_gap"))
    nothing = np.full(1, np.nan)  # was trained here
    seen = probe_circuits(snapshot.circuits, task)
    metrics.add(0, metrics_row([snapshot], [seen], loss=nothing, engine_gap=nothing))
    circuits.add(0, circuits_row([snapshot]))
    for history in (metrics, circuits):
        history.flush()
        history.sync()
    report = probe(model, task, seed=0, prompts=prompts).at(step=0, seed=_SEED)
    line = report.to_json().encode() + b"\n"
    write_atomically(folder / "probes.jsonl", line)
    lengths = {"metrics": len(metrics), "circuits": len(circuits), "reports": len(line)}
    state = start_state([model], Settings(steps=1), [_SEED])
    save_checkpoint(folder / "checkpoints", state, {"imported": True, "lengths": lengths})


def _single(weights: ModelWeights) -> ModelWeights:
    """In float32 and without biases, which were checked to be zero."""
    return ModelWeights(tuple(LayerWeights(*(w.to(torch.float32) for w in layer[:4])) for layer in weights.layers))  # pyright: ignore


def _config(task: Task, model: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "task": task.to_dict(),
        "model": dict(model),
        "training": {"steps": 0},
        "seeds": [_SEED],
        "probes": list(PROBES),
        "imported": dict(source),
        "versions": {
            "icl_mechinterp": version("icl-mechinterp"),
            "transformer_lens": tl.tl_version(),
            "torch": version("torch"),
            "python": platform.python_version(),
        },
        "git_revision": None,
    }
