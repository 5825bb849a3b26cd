"""A file or a dictionary as tensors by name. Nothing in a stranger's file is executed.

safetensors holds tensors and nothing else. A `.pt` file is a pickle: it is read by `torch.load(weights_only=True)`, which
accepts tensors and refuses everything that could run code; there is no way round that here.
"""

import hashlib
import json
import math
import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ..errors import UserError
from .layouts import LAYOUTS, Layout

METADATA_KEY = "icl_mechinterp"
_PICKLES = (".pt", ".pth", ".bin", ".ckpt")
_WRAPPERS = ("state_dict", "model_state_dict", "model")


class WeightsError(UserError):
    """Weights that cannot be read as the model asked for, or a model that a layout cannot hold."""


@dataclass(frozen=True)
class Stated:
    """What a file that `export_weights` wrote says of itself."""

    layout: Layout
    n_heads: int
    scale: float


@dataclass(frozen=True)
class State:
    """Tensors by name, and where they are from.

    Attributes:
        tensors: on the CPU, detached.
        origin: how messages call the source.
        file: name of the file, without its folder; `None` for a dictionary.
        sha256: of the file.
        stated: the file's own words, where it has any.
    """

    tensors: Mapping[str, torch.Tensor]
    origin: str
    file: str | None = None
    sha256: str | None = None
    stated: Stated | None = None


def read_state(source: Any) -> State:
    """The tensors of a safetensors or `.pt` file, or of a state dict.

    Raises:
        WeightsError: missing, torn, of another kind, refused, or without tensors.
    """
    if isinstance(source, Mapping):
        return State(_tensors(source, "the state dict"), "the state dict")
    if not isinstance(source, str | Path):
        raise WeightsError(
            f"weights are a file (.safetensors, .pt or .pth) or a state dict; got a {type(source).__name__}. Give "
            f"the path, "
            "or model.state_dict()."
        )
    path = Path(source)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise WeightsError(f"{path} {what}; weights are one file. Name a .safetensors, .pt or .pth file.")
    if path.suffix.lower() == ".safetensors":
        tensors, stated = _read_safetensors(path)
    elif path.suffix.lower() in _PICKLES:
        tensors, stated = _tensors(_read_pickle(path), str(path)), None
    else:
        raise WeightsError(
            f"{path} is not a weights file by its name ('{path.suffix}'); .safetensors, .pt and .pth are read. Save "
            f"the "
            'state dict as one of these, for instance: safetensors.torch.save_file(model.state_dict(), "w.safetensors")'
        )
    return State(tensors, str(path), path.name, hashlib.sha256(path.read_bytes()).hexdigest(), stated)


def _read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], Stated | None]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
            metadata = file.metadata() or {}
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise WeightsError(
            f"{path} ({path.stat().st_size} bytes) is not a whole safetensors file ({_line(error)}): it is torn, "
            f"empty or "
            "something else. Copy it again, or save the weights anew."
        ) from error
    return _tensors(tensors, str(path)), _stated(metadata.get(METADATA_KEY), path)


def _stated(text: str | None, path: Path) -> Stated | None:
    if text is None:
        return None
    try:
        stated = Stated(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise _bad_metadata(path, _line(error)) from error
    whole = isinstance(stated.n_heads, int) and not isinstance(stated.n_heads, bool) and stated.n_heads >= 1
    positive = isinstance(stated.scale, float | int) and not isinstance(stated.scale, bool) and stated.scale > 0
    if not isinstance(stated.layout, str) or stated.layout not in LAYOUTS:
        raise _bad_metadata(path, f"layout is {stated.layout!r}")
    if not whole or not positive or not math.isfinite(stated.scale):
        raise _bad_metadata(path, f"n_heads is {stated.n_heads!r}, scale is {stated.scale!r}")
    return stated


def _bad_metadata(path: Path, why: str) -> WeightsError:
    return WeightsError(f"{path} describes itself in words that cannot be read ({why}). Export it again.")


def _read_pickle(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, on old formats
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # an operand that it does not know stands in a torn file, or in no pickle at all
        raise (_not_torch if "Unsupported operand" in str(error) else _refusal)(path, error) from error
    except OSError:
        raise
    except Exception as error:  # a parser of untrusted bytes raises whatever it stumbles over
        raise _not_torch(path, error) from error


def _not_torch(path: Path, error: Exception) -> WeightsError:
    return WeightsError(
        f"{path} ({path.stat().st_size} bytes) is not a file that torch.save wrote ({_line(error)}): it is torn, "
        f"empty or "
        "something else. Copy it again, or save the weights anew."
    )


def _refusal(path: Path, error: Exception) -> WeightsError:
    """Why a pickle was refused, and the two lines that convert it where its author is trusted."""
    return WeightsError(
        f"{path} was refused: it is a pickle that holds more than tensors, and loading such a file can run any code "
        f"that "
        f"its author put there ({_line(error)}). Ask for safetensors, or, only if you trust its author, convert it:\n"
        f"  import torch; found = torch.load({path.name!r}, weights_only=False)  # runs the code in the file\n"
        '  torch.save(found.state_dict() if hasattr(found, "state_dict") else found["state_dict"], "weights.pt")'
    )


def _line(error: Exception) -> str:
    """What a foreign message says, on one line; of torch's long one, the name that was refused."""
    text = " ".join(str(error).split())
    name = re.search(r"GLOBAL (\S+)", text)
    if name is not None:
        return f"it names {name[1]}"
    if "WeightsUnpickler error:" in text:
        text = text.partition("WeightsUnpickler error:")[2].partition(" Check the documentation")[0].strip()
    return f"{type(error).__name__}: {text[:200].rstrip('.')}"


def _tensors(values: Any, origin: str) -> dict[str, torch.Tensor]:
    """The tensors by name; a training checkpoint's own dictionary around them is taken off."""
    if not isinstance(values, Mapping):
        raise WeightsError(
            f"{origin} holds a {type(values).__name__}, not weights by name. Save model.state_dict() instead."
        )
    for wrapper in _WRAPPERS:
        if isinstance(values.get(wrapper), Mapping):
            return _tensors(values[wrapper], origin)
    tensors = {}
    for name, value in values.items():
        if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
            value = torch.from_numpy(value.copy())
        if isinstance(value, torch.Tensor):
            tensors[str(name)] = _plain(str(name), value)
    if not tensors:
        keys = ", ".join(map(str, list(values)[:5])) or "nothing"
        raise WeightsError(f"{origin} holds no tensors (it has {keys}). Save model.state_dict() instead.")
    if "generator.states" in tensors and any(name.startswith("model.blocks.") for name in tensors):
        raise WeightsError(
            f"{origin} is a checkpoint of a run, which needs no import. Open it with: icl-mechinterp probe RUN"
        )
    return tensors


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_complex() or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else f"{tensor.dtype}, {tensor.layout}".replace("torch.", "")
        raise WeightsError(
            f"{name} is not a plain tensor of real numbers ({kind}). Convert it with .to_dense().float()."
        )
    return tensor.detach().cpu()
