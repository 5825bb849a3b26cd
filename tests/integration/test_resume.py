"""2N steps are N steps, a kill, `--resume` and N more: bit for bit, whatever the moment of the kill."""

import json
import multiprocessing
import os
import random
import signal
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import yaml

import icl_mechinterp as icl
from icl_mechinterp.experiment import run as run_experiment
from icl_mechinterp.experiment import train as train_models
from icl_mechinterp.experiment.recorder import Recorder
from icl_mechinterp.tracking import NullTracker
from icl_mechinterp.training import load_checkpoint

TASK = {"d": 2, "context": 4, "noise": 0.1}
TRAINING = {"steps": 60, "batch": 8, "every": 7, "checkpoint_every": 20, "threads": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "one seed": {},
    "three seeds, own prompts": {"seeds": 3},
    "three seeds, shared prompts": {"seeds": 3, "training": {"shared_prompts": True}},
    "sgd": {"training": {"optimizer": "sgd", "lr": 0.01}},
    "decaying rate": {"training": {"schedule": "decay"}},
    "clipped": {"training": {"clip": 0.05}},
    "hooked engine": {"training": {"engine": "hooked"}},
    "with evaluation and gradients": {"training": {"evaluate": 16, "gradients": True}},
    "captures as far apart as checkpoints": {"training": {"every": 20}},
}


def config(**changes: Any) -> dict[str, Any]:
    values = {"task": TASK, "model": {"n_heads": 2}, "training": TRAINING, "probes": ["structure"], **changes}
    return {**values, "training": {**TRAINING, **changes.get("training", {})}}


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncing guards against power failures, which a test cannot have, and takes most of the time of short runs."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


Whole: TypeAlias = Callable[[dict[str, Any]], Path]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The run of a config that nothing interrupts; made once, and read only."""
    made: dict[str, Path] = {}

    def make(values: dict[str, Any]) -> Path:
        key = json.dumps(values)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("whole") / "run"
            train(values, made[key])
        return made[key]

    return make


QUICK = ("one seed", "three seeds, shared prompts", "sgd")


@pytest.fixture(
    params=[
        pytest.param(changes, id=name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name, changes in VARIANTS.items()
    ]
)
def variant(request: pytest.FixtureRequest) -> dict[str, Any]:
    return config(**request.param)


class InterruptAt(NullTracker):
    """Presses Ctrl-C at the capture of a step, like a person would: a signal to the process."""

    def __init__(self, step: int) -> None:
        self.step = step

    def update(self, progress: Any) -> None:
        if progress.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


class RaiseAt(NullTracker):
    """Raises KeyboardInterrupt in the middle of a capture, as a second Ctrl-C would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def update(self, progress: Any) -> None:
        if progress.step == self.step:
            raise KeyboardInterrupt


def train(values: dict[str, Any], out: Path, *, resume: bool = False, tracker: Any = None) -> icl.Run:
    return run_experiment(values, out=out, resume=resume, tracker=tracker, progress=False)


def assert_same_run(one: Path, other: Path) -> None:
    """Histories, reports, and everything in every checkpoint of `one` are the same in `other`."""
    a, b = icl.load_run(one), icl.load_run(other)
    for name in ("metrics", "circuits"):
        x, y = getattr(a, name), getattr(b, name)
        assert set(x) == set(y)
        for variable in (*x, "step"):
            assert x[variable].dims == y[variable].dims
            np.testing.assert_array_equal(x[variable].values, y[variable].values, err_msg=f"{name}.{variable}")
    assert (one / "probes.jsonl").read_bytes() == (other / "probes.jsonl").read_bytes()
    assert set(a.steps) <= set(b.steps), "an interrupt may add a checkpoint, never take one away"
    for step in a.steps:
        left, right = a.checkpoint(step), b.checkpoint(step)
        assert left.tensors.keys() == right.tensors.keys()
        for name, tensor in left.tensors.items():
            assert torch.equal(tensor, right.tensors[name]), f"{name} at step {step}"
        assert left.record == right.record


def assert_consistent(path: Path) -> None:
    """What any reader may rely on, at any instant after any kill."""
    if not (path / "config.yaml").exists():
        return
    run = icl.load_run(path)
    metrics, circuits = run.metrics, run.circuits
    for dataset in (metrics, circuits):
        assert (np.diff(dataset.step.values) > 0).all()
    if "loss" in metrics:
        assert np.isfinite(metrics.loss.sel(step=metrics.step > 0).values).all()
        assert np.isfinite(metrics.omega.values).all()
    if "kq" in circuits:
        assert np.isfinite(circuits.kq.values).all()
        assert np.isfinite(circuits.attention.values).all()
    for report in run.reports:
        assert report.seed in run.seeds
    for step in run.steps:
        assert run.checkpoint(step).step == step


def cut_short(values: dict[str, Any], out: Path, tracker: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(values, out, tracker=tracker)
    assert_consistent(out)


@pytest.mark.parametrize("step", [14, 42], ids="Ctrl-C at step {}".format)
def test_an_interrupt_costs_nothing(tmp_path: Path, whole: Whole, step: int) -> None:
    values = config()
    cut_short(values, tmp_path / "cut", InterruptAt(step))
    assert icl.load_run(tmp_path / "cut").checkpoint().step == step, "Ctrl-C writes a checkpoint"
    train(values, tmp_path / "cut", resume=True)
    assert_same_run(whole(values), tmp_path / "cut")


def test_every_variant_resumes_bit_for_bit(tmp_path: Path, whole: Whole, variant: dict[str, Any]) -> None:
    cut_short(variant, tmp_path / "cut", InterruptAt(variant["training"]["every"] * 2))
    train(variant, tmp_path / "cut", resume=True)
    assert_same_run(whole(variant), tmp_path / "cut")


@pytest.mark.parametrize("step", [0, 20, 60], ids="in the capture of step {}".format)
def test_an_interrupt_inside_a_capture_goes_back_to_the_checkpoint_before(
    tmp_path: Path, whole: Whole, step: int
) -> None:
    values = config(training={"every": 1, "checkpoint_every": 20})
    cut_short(values, tmp_path / "cut", RaiseAt(step))
    assert all(saved < max(step, 1) for saved in icl.load_run(tmp_path / "cut").steps)
    train(values, tmp_path / "cut", resume=True)
    assert_same_run(whole(values), tmp_path / "cut")


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("name", ["flush", "save"])
@pytest.mark.parametrize("call", [1, pytest.param(3, marks=pytest.mark.slow)], ids="call {}".format)
def test_a_stop_around_any_write_costs_nothing(
    tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch, name: str, moment: str, call: int
) -> None:
    values, calls, original = config(), [0], getattr(Recorder, name)

    def stopping(self: Recorder, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and moment == "before":
            raise KeyboardInterrupt
        result = original(self, *arguments)
        if calls[0] == call and moment == "after":
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, name, stopping)
        cut_short(values, tmp_path / "cut", None)
    train(values, tmp_path / "cut", resume=True)
    assert_same_run(whole(values), tmp_path / "cut")


def test_many_interrupts_in_one_run(tmp_path: Path, whole: Whole) -> None:
    values = config(seeds=2)
    cut_short(values, tmp_path / "cut", InterruptAt(7))
    for step in (14, 21, 42, 49):
        with pytest.raises(KeyboardInterrupt):
            train(values, tmp_path / "cut", resume=True, tracker=InterruptAt(step))
    train(values, tmp_path / "cut", resume=True)
    assert_same_run(whole(values), tmp_path / "cut")


def test_a_finished_run_stays_as_it_is(tmp_path: Path) -> None:
    train(config(), tmp_path / "run")
    before = {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}
    train(config(), tmp_path / "run", resume=True)
    assert {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()} == before


def test_models_in_hand_take_the_weights_of_the_run(tmp_path: Path) -> None:
    task = icl.LinearRegression(**TASK)
    options = {**TRAINING, "probes": ["structure"], "progress": False}
    models = [icl.attention_only(task, n_heads=2, seed=seed) for seed in (1, 2)]
    with pytest.raises(KeyboardInterrupt):
        train_models(models[0], task, out=tmp_path / "cut", tracker=InterruptAt(28), **options)
    checkpoint = icl.load_run(tmp_path / "cut").checkpoint()
    train_models(models[1], task, out=tmp_path / "cut", resume=True, **options)
    run = icl.load_run(tmp_path / "cut")
    assert run.metrics.step.values[-1] == TRAINING["steps"]
    assert checkpoint.step == 28
    for name, parameter in run.model().named_parameters():
        assert torch.equal(parameter, dict(models[1].named_parameters())[name])


def test_threads_left_open_are_those_of_the_run_on_any_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = config(seeds=3)
    cut_short(values, tmp_path / "run", InterruptAt(14))
    before = icl.load_run(tmp_path / "run").config["training"]["threads"]
    monkeypatch.setattr(os, "cpu_count", lambda: 7 * before)
    train(values, tmp_path / "run", resume=True)
    assert icl.load_run(tmp_path / "run").config["training"]["threads"] == before


# --- what a kill leaves behind ------------------------------------------------------------------------------------


@pytest.fixture
def cut(tmp_path: Path, whole: Whole) -> tuple[Path, Path]:
    """A whole run, and one cut at step 35, with checkpoints at 0, 20 and 35."""
    cut_short(config(), tmp_path / "cut", InterruptAt(35))
    return whole(config()), tmp_path / "cut"


def resumes(whole: Path, cut: Path) -> None:
    assert_consistent(cut)
    train(config(), cut, resume=True)
    assert_same_run(whole, cut)


def test_a_torn_last_report_is_cut(cut: tuple[Path, Path]) -> None:
    with open(cut[1] / "probes.jsonl", "ab") as file:
        file.write(b'{"schema_version": 1, "verd')
    assert len(icl.load_run(cut[1]).reports) == 1
    resumes(*cut)


def test_rows_without_a_step_are_cut(cut: tuple[Path, Path]) -> None:
    import zarr

    for group in ("metrics", "circuits"):
        for _, array in zarr.open_group(str(cut[1] / "history.zarr" / group), mode="r+").arrays():
            if array.basename != "step":
                array.resize((array.shape[0], array.shape[1] + 3, *array.shape[2:]))
    resumes(*cut)


def test_steps_that_were_never_written_are_cut(cut: tuple[Path, Path]) -> None:
    import zarr

    for group in ("metrics", "circuits"):
        step = zarr.open_group(str(cut[1] / "history.zarr" / group), mode="r+")["step"]
        assert isinstance(step, zarr.Array)
        step.resize((step.shape[0] + 2,))
    assert len(icl.load_run(cut[1]).metrics.step) == 6
    resumes(*cut)


def test_temporary_files_are_ignored_and_removed(cut: tuple[Path, Path]) -> None:
    leftovers = [
        cut[1] / ".config.yaml.1.tmp",
        cut[1] / "checkpoints" / ".step-00000040.safetensors.1.tmp",
        cut[1] / "history.zarr" / "metrics" / "zarr.0123.partial",
        cut[1] / "history.zarr" / "metrics" / "loss" / "c" / "0" / "0.0123.partial",
    ]
    for file in leftovers:
        file.write_bytes(b"half")
    resumes(*cut)
    assert not [file for file in leftovers if file.exists()]


def test_an_array_without_metadata_is_no_array(cut: tuple[Path, Path]) -> None:
    (cut[1] / "history.zarr" / "metrics" / "half_made").mkdir()
    assert_consistent(cut[1])


def spoil_record(folder: Path) -> None:
    (folder / "step-00000035.json").unlink()


def tear_record(folder: Path) -> None:
    file = folder / "step-00000035.json"
    file.write_bytes(file.read_bytes()[:40])


def tear_weights(folder: Path) -> None:
    file = folder / "step-00000035.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(folder: Path) -> None:
    file = folder / "step-00000035.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def empty_weights(folder: Path) -> None:
    (folder / "step-00000035.safetensors").write_bytes(b"")


@pytest.mark.parametrize("damage", [spoil_record, tear_record, tear_weights, flip_a_bit, empty_weights])
def test_a_checkpoint_that_is_not_whole_is_passed_over(cut: tuple[Path, Path], damage: Any) -> None:
    damage(cut[1] / "checkpoints")
    assert icl.load_run(cut[1]).checkpoint().step == 20
    train(config(), cut[1], resume=True)
    assert_same_run(*cut)


def test_without_any_checkpoint_it_starts_again(cut: tuple[Path, Path]) -> None:
    for file in (cut[1] / "checkpoints").iterdir():
        file.unlink()
    train(config(), cut[1], resume=True)
    assert_same_run(*cut)


# --- killed for good ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"seeds": 3}, {"seeds": 3, "training": {"shared_prompts": True, "optimizer": "sgd", "schedule": "decay"}}],
    ids=["one seed", "three seeds", "three seeds, shared prompts, sgd, decaying rate"],
)
def test_killed_at_random_moments(tmp_path: Path, whole: Whole, changes: dict[str, Any]) -> None:
    """Processes killed with SIGKILL; a server that has the imports done starts them within milliseconds."""
    training = {"steps": 1200, "every": 9, "checkpoint_every": 40, **changes.get("training", {})}
    values = config(**{**changes, "training": training})
    out = tmp_path / "cut"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["icl_mechinterp.experiment"])
    moments, kills = random.Random(zlib.crc32(repr(changes).encode())), 0
    for _ in range(200):
        resume = (out / "config.yaml").exists()
        options = {"out": out, "resume": resume, "progress": False}
        process = context.Process(target=run_experiment, args=(values,), kwargs=options)
        process.start()
        if kills < 8:
            wait_for_progress(out, process, moments.uniform(0.0, 0.5))
            process.kill()
        process.join()
        killed = process.exitcode == -signal.SIGKILL
        kills += killed
        assert killed or process.exitcode == 0
        assert_consistent(out)
        if not killed:
            break
    assert kills >= 5
    assert_same_run(whole(values), out)


def wait_for_progress(out: Path, process: Any, seconds: float) -> None:
    """Until the process has begun to write, and then a random moment longer."""
    before = changed(out)
    deadline = time.monotonic() + 60
    while process.is_alive() and changed(out) == before and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(seconds)


def changed(out: Path) -> list[str]:
    return sorted(os.listdir(out / "checkpoints")) if (out / "checkpoints").exists() else []


def test_off_the_main_thread_it_trains_all_the_same(tmp_path: Path, whole: Whole) -> None:
    thread = threading.Thread(target=train, args=(config(), tmp_path / "thread"))
    thread.start()
    thread.join()
    assert_same_run(whole(config()), tmp_path / "thread")


def test_another_config_is_refused_with_the_keys_that_differ(cut: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match=r"training\.lr is 0\.001 there and 0\.1 here") as caught:
        train(config(training={"lr": 0.1}), cut[1], resume=True)
    assert "--out" in str(caught.value)
    assert "steps" not in str(caught.value)
    resumes(*cut)


def test_a_history_with_rows_missing_is_refused(cut: tuple[Path, Path]) -> None:
    import shutil

    shutil.rmtree(cut[1] / "history.zarr" / "metrics")
    with pytest.raises(ValueError, match="holds 0 rows, and 6 were written"):
        train(config(), cut[1], resume=True)


def test_reports_that_are_missing_are_refused(cut: tuple[Path, Path]) -> None:
    (cut[1] / "probes.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match=r"probes\.jsonl has 0 bytes"):
        train(config(), cut[1], resume=True)


def test_a_checkpoint_says_what_it_needs(cut: tuple[Path, Path]) -> None:
    record = json.loads((cut[1] / "checkpoints" / "step-00000035.json").read_bytes())
    assert record["step"] == 35
    assert record["window_steps"] == 0
    assert set(record["lengths"]) == {"metrics", "circuits", "reports"}
    assert load_checkpoint(cut[1] / "checkpoints" / "step-00000035.safetensors").step == 35
    assert yaml.safe_load((cut[1] / "config.yaml").read_text())["seeds"] == [0]
