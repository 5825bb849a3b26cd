"""What is read is what was added, up to the last whole row."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

from icl_mechinterp.circuits import History
from icl_mechinterp.circuits.trajectory import read_group
from icl_mechinterp.errors import RunError

DIMS: Mapping[str, Sequence[str]] = {"loss": (), "kq": ("head", "key")}
LABELS = {"seed": (3, 5), "key": ("x1", "x2", "y")}
HEADS = 4


def row(step: int) -> dict[str, np.ndarray]:
    values = np.arange(2 * HEADS * 3, dtype=np.float32).reshape(2, HEADS, 3)
    return {"loss": np.array([step, -step], dtype=np.float32), "kq": values + 100 * step}


def opened(path: Path) -> History:
    return History(path / "h.zarr", "g", dims=DIMS, labels=LABELS)


def filled(path: Path, *steps: int) -> History:
    history = opened(path)
    for step in steps:
        history.add(step, row(step))
    history.flush()
    return history


def read(path: Path) -> xr.Dataset:
    return read_group(path / "h.zarr", "g")


def assert_holds(path: Path, *steps: int) -> None:
    dataset = read(path)
    assert dataset.step.values.tolist() == list(steps)
    for step in steps:
        for name, values in row(step).items():
            np.testing.assert_array_equal(dataset[name].sel(step=step).values, values)


def array(path: Path, name: str) -> zarr.Array:
    found = zarr.open_group(str(path / "h.zarr" / "g"), mode="r+")[name]
    assert isinstance(found, zarr.Array)
    return found


def test_rows_come_back_with_their_labels(tmp_path: Path) -> None:
    filled(tmp_path, 0, 5, 10)
    assert_holds(tmp_path, 0, 5, 10)
    dataset = read(tmp_path)
    assert dataset.kq.dims == ("seed", "step", "head", "key")
    assert dataset.kq.dtype == np.float32
    assert dataset.seed.values.tolist() == [3, 5]
    assert dataset.kq.sel(seed=5, step=10, head=1, key="y").item() == row(10)["kq"][1, 1, 2]


@pytest.mark.parametrize(
    "blocks", [[1] * 40, [40], [31, 2, 7], [32, 8]], ids=["one by one", "at once", "across chunks", "by chunks"]
)
def test_blocks_of_any_size_make_the_same_history(tmp_path: Path, blocks: list[int]) -> None:
    history, step = opened(tmp_path), 0
    for size in blocks:
        for _ in range(size):
            history.add(step, row(step))
            step += 1
        history.flush()
        assert len(history) == step
    assert_holds(tmp_path, *range(40))


def test_xarray_opens_it_without_us(tmp_path: Path) -> None:
    filled(tmp_path, 0, 5)
    with xr.open_zarr(tmp_path / "h.zarr", group="g", consolidated=False) as dataset:
        np.testing.assert_array_equal(dataset.kq.values, read(tmp_path).kq.values)


def test_what_is_buffered_is_not_there_yet(tmp_path: Path) -> None:
    history = filled(tmp_path, 0)
    history.add(5, row(5))
    assert_holds(tmp_path, 0)
    history.flush()
    assert_holds(tmp_path, 0, 5)


def test_a_row_may_be_changed_after_it_was_added(tmp_path: Path) -> None:
    history, values = opened(tmp_path), row(1)
    history.add(1, values)
    values["loss"][:] = np.nan
    history.flush()
    assert_holds(tmp_path, 1)


@pytest.mark.parametrize("again", [False, True], ids=["by the same writer", "by a new one"])
def test_a_cut_is_as_if_the_rows_had_never_been(tmp_path: Path, again: bool) -> None:
    history = filled(tmp_path, 0, 5, 10, 15)
    if again:
        history = opened(tmp_path)
    history.add(20, row(20))
    history.cut(2)
    assert_holds(tmp_path, 0, 5)
    history.add(7, row(7))
    history.flush()
    assert_holds(tmp_path, 0, 5, 7)


def test_a_cut_to_more_than_there_is_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds 2 rows, and 3 were written"):
        filled(tmp_path, 0, 5).cut(3)


def test_rows_that_no_step_claims_are_written_over(tmp_path: Path) -> None:
    filled(tmp_path, 0, 5)
    loss = array(tmp_path, "loss")
    loss.resize((2, 4))
    loss[:, 2:] = 99
    assert_holds(tmp_path, 0, 5)
    filled(tmp_path, 10)
    assert_holds(tmp_path, 0, 5, 10)


def test_steps_without_a_value_are_written_over(tmp_path: Path) -> None:
    filled(tmp_path, 0, 5)
    array(tmp_path, "step").resize((40,))
    assert_holds(tmp_path, 0, 5)
    filled(tmp_path, 10)
    assert_holds(tmp_path, 0, 5, 10)


def test_a_step_whose_data_are_missing_is_not_whole(tmp_path: Path) -> None:
    filled(tmp_path, 0, 5, 10)
    array(tmp_path, "kq").resize((2, 2, HEADS, 3))
    assert_holds(tmp_path, 0, 5)


def test_a_group_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert read(tmp_path).sizes == {"step": 0}
    opened(tmp_path)
    assert read(tmp_path).sizes == {"step": 0}


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    history = filled(tmp_path, 0)
    history._group.attrs["schema_version"] = 2
    with pytest.raises(RunError, match=r"schema version 2.*Upgrade"):
        read(tmp_path)
    with pytest.raises(RunError, match=r"schema version 2.*Upgrade"):
        opened(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"zarr_format": 3, "node_type": "array"}'], ids=repr)
def test_damage_is_told(tmp_path: Path, content: bytes) -> None:
    filled(tmp_path, 0)
    (tmp_path / "h.zarr" / "g" / "zarr.json").write_bytes(content)
    for ask in (read, opened):
        with pytest.raises(RunError, match=r"h\.zarr/g cannot be read as a history.*damaged"):
            ask(tmp_path)


def test_only_what_changed_is_synced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    synced: list[Any] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    history = filled(tmp_path, 0)
    history.sync()
    files = [p for p in (tmp_path / "h.zarr").rglob("*") if p.is_file()]
    assert len(synced) >= len(files)
    synced.clear()
    history.sync()
    assert synced == []
    history.add(5, row(5))
    history.flush()
    history.sync()
    assert synced
