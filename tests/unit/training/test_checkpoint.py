"""A checkpoint is what was saved, or it is none."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from icl_mechinterp.errors import RunError
from icl_mechinterp.models import attention_only
from icl_mechinterp.tasks import LinearRegression
from icl_mechinterp.training import (
    Checkpoint,
    Settings,
    TrainState,
    latest_checkpoint,
    load_checkpoint,
    remove_leftovers,
    run_loop,
    save_checkpoint,
    saved_steps,
    start_state,
    step_of,
    write_atomically,
)

TASK = LinearRegression(2, 4, 0.1)


def state_after(steps: int, *, settings: Settings, seeds: tuple[int, ...] = (0, 1)) -> TrainState:
    state = start_state([attention_only(TASK, 2, seed=seed) for seed in seeds], settings, seeds)
    run_loop(state, TASK, settings, [], until=steps)
    return state


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_what_is_restored_is_what_was_saved_and_goes_on_the_same(tmp_path: Path, optimizer: Any) -> None:
    settings = Settings(steps=12, batch=8, optimizer=optimizer, lr=0.01)
    state = state_after(5, settings=settings)
    save_checkpoint(tmp_path, state, {"note": "extra"})
    other = start_state([attention_only(TASK, 2, seed=seed) for seed in (7, 8)], settings, (7, 8))
    checkpoint = load_checkpoint(tmp_path / "step-00000005.json")
    checkpoint.restore(other)
    assert (other.step, other.window_steps, checkpoint.record["note"]) == (5, 5, "extra")
    for going in (state, other):
        run_loop(going, TASK, settings, [])
    assert torch.equal(state.stack.flat, other.stack.flat)
    assert torch.equal(state.generator_states, other.generator_states)
    assert torch.equal(state.window_loss, other.window_loss)
    moments = state.optimizer.state
    assert set(moments) == ({"step", "exp_avg", "exp_avg_sq"} if optimizer == "adam" else set())
    for name, moment in moments.items():
        assert torch.equal(moment, other.optimizer.state[name])


def test_a_checkpoint_shares_nothing_with_the_state(tmp_path: Path) -> None:
    settings = Settings(steps=4, batch=8)
    state = state_after(2, settings=settings)
    save_checkpoint(tmp_path, state, {})
    checkpoint = load_checkpoint(tmp_path / "step-00000002.safetensors")
    before = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
    checkpoint.restore(state)
    run_loop(state, TASK, settings, [])
    for name, tensor in before.items():
        assert torch.equal(tensor, checkpoint.tensors[name]), name


def test_a_state_of_other_shapes_is_refused(tmp_path: Path) -> None:
    settings = Settings(steps=4, batch=8)
    save_checkpoint(tmp_path, state_after(1, settings=settings), {})
    three = start_state([attention_only(TASK, 2, seed=seed) for seed in range(3)], settings, range(3))
    with pytest.raises(RunError, match=r"shape \(2, 2, 3, 3\), the config asks for \(3, 2, 3, 3\)"):
        load_checkpoint(tmp_path / "step-00000001.json").restore(three)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of the steps 1, 2 and 10^9."""
    state = state_after(1, settings=Settings(steps=4, batch=8))
    for step in (1, 2, 10**9):
        state.step = step
        save_checkpoint(tmp_path, state, {})
    return tmp_path


def test_steps_are_listed_in_order_and_nothing_else_is(folder: Path) -> None:
    for name in ("step-00000003.safetensors", "step-4.json", "step-x.json", ".step-00000005.json.1.tmp", "notes.json"):
        (folder / name).write_text("{}")
    (folder / "step-00000006.json").mkdir()
    assert saved_steps(folder) == [1, 2, 10**9]
    assert saved_steps(folder / "none") == []


def latest(folder: Path) -> Checkpoint:
    found = latest_checkpoint(folder)
    assert found is not None
    return found


def test_the_newest_whole_one_is_found(folder: Path) -> None:
    assert latest(folder).step == 10**9
    (folder / "step-1000000000.safetensors").write_bytes(b"")
    assert latest(folder).step == 2
    (folder / "step-00000002.json").write_bytes(b'{"schema')
    assert latest(folder).step == 1
    (folder / "step-00000001.safetensors").unlink()
    assert latest_checkpoint(folder) is None


def test_a_newer_schema_is_not_passed_over(folder: Path) -> None:
    file = folder / "step-00000002.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"schema_version": 2}))
    assert latest(folder).step == 10**9
    (folder / "step-1000000000.json").unlink()
    with pytest.raises(RunError, match=r"schema version 2.*Upgrade"):
        latest_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-00000010.json", 10),
        ("step-00000010.safetensors", 10),
        ("step-1234567890.json", 1234567890),
        ("step-10.json", None),
        ("step-00000010.pt", None),
        ("step-00000010", None),
        ("step-²²²²²²²².json", None),
        ("model.safetensors", None),
    ],
    ids=str,
)
def test_the_step_in_a_name(name: str, step: int | None) -> None:
    assert step_of(Path("somewhere") / name) == step


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    file = tmp_path / "file"
    write_atomically(file, b"old")

    def fail(*arguments: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="no"):
        write_atomically(file, b"new")
    assert os.listdir(tmp_path) == ["file"]
    assert file.read_bytes() == b"old"


def test_leftovers_are_removed_and_files_are_not(tmp_path: Path) -> None:
    write_atomically(tmp_path / "file", b"content")
    (tmp_path / f".file.{os.getpid()}.tmp").write_bytes(b"half")
    (tmp_path / ".hidden").write_bytes(b"mine")
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".hidden", "file"]
