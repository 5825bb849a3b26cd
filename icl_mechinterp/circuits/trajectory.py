"""Labelled arrays on disk that grow along `step`: metrics and circuits of a run, each with its own steps.

A group is a zarr group of arrays `[seed step ...]` that xarray can open. Appends write the data first and `step` last,
so a kill leaves at worst rows that no step claims; a reader cuts them off, and the next append writes over them. zarr's
local store renames every chunk into place but does not fsync; `sync` does, before a checkpoint that relies on it.
"""

import errno
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr
import zarr.errors

from ..errors import RunError

SCHEMA_VERSION = 1
_STEPS_PER_CHUNK = 32
_FORMAT = 3  # never 2: its arrays may name a pickle filter, and reading one would execute it
_DAMAGE = (
    OSError,
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    IndexError,
    RuntimeError,
    zarr.errors.BaseZarrError,
)
"""What zarr and its codecs raise on files that were torn, altered or deleted."""


class History:
    """Appends rows to one group on disk.

    Args:
        path: the zarr store, a folder; created when needed.
        group: name of the group in it.
        dims: names of the axes after `seed` and `step`, per array.
        labels: coordinate labels per axis name, stored as attributes.

    Raises:
        RunError: what is there already is not a history, or is damaged.
    """

    def __init__(
        self, path: Path, group: str, *, dims: Mapping[str, Sequence[str]], labels: Mapping[str, Sequence[Any]]
    ) -> None:
        self.path, self.name, self.dims = path, group, {name: tuple(axes) for name, axes in dims.items()}
        self._rows: list[tuple[int, dict[str, np.ndarray]]] = []
        # opening an array again and measuring it costs more than appending to it
        self._open: dict[str, zarr.Array] = {}
        self._length: int | None = None
        self._synced: dict[str, int] = {}
        self._remove_leftovers()
        attributes = {"schema_version": SCHEMA_VERSION, "labels": {k: list(v) for k, v in labels.items()}}
        with _damage_told(path / group):
            zarr.open_group(str(path), mode="a", zarr_format=_FORMAT)
            # attributes in the one write that creates the group: a kill leaves no group without them
            self._group = zarr.open_group(str(path / group), mode="a", zarr_format=_FORMAT, attributes=attributes)
            _require_schema(self._group, path / group)

    def add(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Buffers one row: arrays `[seed ...]` by name, all that were announced."""
        assert set(values) == set(self.dims), f"{self.name} holds {sorted(self.dims)}, got {sorted(values)}"
        self._rows.append((step, {name: np.array(value) for name, value in values.items()}))

    def flush(self) -> None:
        """Writes the buffered rows, `step` last."""
        if not self._rows:
            return
        start = len(self)
        self._length = None  # unknown until everything is written
        for name, axes in self.dims.items():
            block = np.stack([row[name] for _, row in self._rows], axis=1)
            array = self._array(name, block, ("seed", "step", *axes))
            array.resize((array.shape[0], start + block.shape[1], *array.shape[2:]))
            array[:, start:] = block
        steps = np.array([step for step, _ in self._rows], dtype=np.int64)
        array = self._array("step", steps, ("step",))
        array.resize((start + len(steps),))
        array[start:] = steps
        self._rows.clear()
        self._length = start + len(steps)

    def cut(self, length: int) -> None:
        """Drops all rows from `length` on, and what is buffered.

        Raises:
            RunError: there are fewer rows than that.
        """
        self._rows.clear()
        with _damage_told(self.path / self.name):
            rows = len(self)
            if rows < length:
                raise RunError(
                    f"{self.path / self.name} holds {rows} rows, and {length} were written before the checkpoint: rows "
                    "were deleted or damaged. Restore the folder, or start again with another --out."
                )
            if "step" in self._group:
                self._array("step", np.empty(0, np.int64), ("step",)).resize((length,))
            self._length = length

    def sync(self) -> None:
        """Makes what was flushed survive a power failure; files that have not changed since the last time are left out."""
        self._sync(str(self.path.parent), str(self.path), str(self.path / "zarr.json"))
        for folder, _, files in os.walk(self.path / self.name):
            self._sync(*(os.path.join(folder, file) for file in files), folder)

    def _sync(self, *paths: str) -> None:
        for path in paths:
            changed = os.stat(path).st_mtime_ns
            if self._synced.get(path) == changed:
                continue
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._synced[path] = changed

    def __len__(self) -> int:
        """Number of rows on disk."""
        if self._length is None:
            self._length = _length(self._group)
        return self._length

    def _remove_leftovers(self) -> None:
        """zarr's temporary files, left by a kill while it wrote one."""
        for file in (self.path / self.name).rglob("*.partial"):
            file.unlink(missing_ok=True)

    def _array(self, name: str, block: np.ndarray, dims: tuple[str, ...]) -> zarr.Array:
        if name in self._open:
            return self._open[name]
        if name not in self._group:
            axis = dims.index("step")
            empty = (*block.shape[:axis], 0, *block.shape[axis + 1 :])
            chunks = tuple(
                _STEPS_PER_CHUNK if dim == "step" else max(1, n) for dim, n in zip(dims, block.shape, strict=True)
            )
            fill = -1 if name == "step" else np.nan
            self._group.create_array(
                name, shape=empty, dtype=block.dtype, chunks=chunks, fill_value=fill, dimension_names=dims
            )
        array = self._group[name]
        assert isinstance(array, zarr.Array)
        self._open[name] = array
        return array


def read_group(path: Path, group: str) -> xr.Dataset:
    """A group as a labelled dataset in memory, cut back to its last whole row.

    A group that is not there yet, because the run was killed in its first moment, is an empty dataset.

    Raises:
        RunError: it is not readable, or of a newer schema.
    """
    if not (path / group / "zarr.json").exists():
        return xr.Dataset(coords={"step": np.empty(0, np.int64)})
    with _damage_told(path / group):
        stored = zarr.open_group(str(path / group), mode="r", zarr_format=_FORMAT)
        _require_schema(stored, path / group)
        length = _length(stored)
        labels = dict(stored.attrs["labels"])  # pyright: ignore[reportArgumentType, reportCallIssue]
        variables = {name: _read(array, length) for name, array in _arrays(stored) if name != "step"}
        steps = np.asarray(stored["step"][:length]) if length else np.empty(0, np.int64)  # pyright: ignore
        used = {dim for dims, _ in variables.values() for dim in dims}
        coords = {"step": steps} | {dim: label for dim, label in labels.items() if dim in used}
        return xr.Dataset(variables, coords=coords)


@contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    """Whatever zarr says of damaged files, as one message; a disk that fails is told as such by the caller."""
    try:
        yield
    except RunError:
        raise
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        raise RunError(
            f"{path} cannot be read as a history ({type(error).__name__}: {error}): it was damaged or is not one. "
            "Restore the folder, or train again with another --out."
        ) from error


def _require_schema(group: zarr.Group, path: Path) -> None:
    version = group.attrs.get("schema_version")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise RunError(
            f"{path} has schema version {version!r}; this version reads up to {SCHEMA_VERSION}. Upgrade icl-mechinterp "
            "to read it."
        )


def _read(array: zarr.Array, length: int) -> tuple[tuple[str, ...], np.ndarray]:
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{array.path} holds {array.dtype}, not numbers")
    dims = tuple(str(name) for name in array.metadata.dimension_names)  # pyright: ignore
    return dims, np.asarray(array[:, :length])


def _length(group: zarr.Group) -> int:
    """Rows that are whole: steps that were written, with data in every array."""
    if "step" not in group:
        return 0
    steps = np.asarray(group["step"][:])  # pyright: ignore
    torn = np.flatnonzero((steps < 0) | (np.diff(steps, prepend=-1) <= 0))
    whole = int(torn[0]) if len(torn) else len(steps)
    return min([whole, *(array.shape[1] for name, array in _arrays(group) if name != "step")])


def _arrays(group: zarr.Group) -> Iterator[tuple[str, zarr.Array]]:
    """The group's arrays; a folder that a kill left without its metadata is none, and zarr would warn of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Object at .* is not recognized", category=UserWarning)
        yield from list(group.arrays())
