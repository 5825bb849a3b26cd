"""Every mistake a user makes ends in one message: what was wrong, what was given, what to do; status 2, no traceback."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
import zarr
from safetensors.torch import load_file, save_file
from transformer_lens import HookedTransformer, HookedTransformerConfig
from typer.testing import CliRunner

import icl_mechinterp as icl
from icl_mechinterp.cli import app
from icl_mechinterp.experiment import run as run_experiment
from icl_mechinterp.tracking import NullTracker
from icl_mechinterp.training import checkpoint as checkpoint_module

CONFIG = {
    "task": {"d": 2, "context": 4, "noise": 0.1},
    "model": {"n_heads": 2},
    "training": {"steps": 20, "batch": 8, "every": 5, "checkpoint_every": 10, "threads": 1},
    "probes": ["structure"],
}
PREFIX = "icl-mechinterp: "


@dataclass
class Outcome:
    code: int
    stdout: str
    stderr: str


def cli(*arguments: object) -> Outcome:
    """The command line in this process; an exception that escapes fails the test with its own traceback."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="icl-mechinterp")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


def mistake(outcome: Outcome, *parts: str) -> None:
    """One message on stderr with these parts, nothing on stdout, status 2."""
    assert outcome.code == 2, outcome
    assert outcome.stdout == ""
    assert outcome.stderr.startswith(PREFIX), outcome.stderr
    assert outcome.stderr.count(PREFIX) == 1
    assert outcome.stderr.count("\n") == 1
    assert "Traceback" not in outcome.stderr
    for part in parts:
        assert part in outcome.stderr, f"{part!r} is not in {outcome.stderr!r}"


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    return file


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at 0, 10 and 20; read only."""
    path = tmp_path_factory.mktemp("trained") / "run"
    run_experiment(CONFIG, out=path, progress=False)
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return shutil.copytree(trained, tmp_path / "run")


# --- the config ---------------------------------------------------------------------------------------------------

CONFIG_MISTAKES: dict[str, tuple[str, tuple[str, ...], str]] = {
    # override: (override, parts of the message, field)
    "mistyped task key": ("task.nois=0.1", ("task.nois", "Did you mean 'noise'"), "task.nois"),
    "mistyped model key": ("model.n_head=2", ("model.n_head", "Did you mean 'n_heads'"), "model.n_head"),
    "mistyped training key": ("training.step=5", ("training.step", "Did you mean 'steps'"), "training.step"),
    "mistyped section": ("trainin.steps=5", ("trainin", "Did you mean 'training'"), "trainin"),
    "unknown key": ("training.zebra=1", ("training.zebra", "known here are steps, optimizer"), "training.zebra"),
    "mistyped task kind": (
        "task.kind=linear_regresion",
        ("task.kind", "Did you mean 'linear_regression'"),
        "task.kind",
    ),
    "task kind that is a list": ("task.kind=[a]", ("task.kind", "['a']"), "task.kind"),
    "mistyped probe": ("probes=[structur]", ("structur", "Did you mean 'structure'"), "probes"),
    "noise that is a word": ("task.noise=loud", ("task.noise", "'loud'", "number"), "task.noise"),
    "negative noise": ("task.noise=-1", ("task.noise", "-1", "at least 0"), "task.noise"),
    "noise that is no number": ("task.noise=.nan", ("task.noise", "nan"), "task.noise"),
    "d that is a fraction": ("task.d=2.5", ("task.d", "2.5", "whole number"), "task.d"),
    "d left empty": ("task.d=", ("task.d", "None", "whole number"), "task.d"),
    "context 0": ("task.context=0", ("task.context", "0", "at least 1"), "task.context"),
    "coefficients of size zero": (
        "task.coefficient_scale=0",
        ("coefficient_scale", "positive"),
        "task.coefficient_scale",
    ),
    "covariance that is a word": ("task.covariance=round", ("covariance", "'round'"), "task.covariance"),
    "covariance not square": ("task.covariance=[[1,0]]", ("covariance", "square", "(1, 2)"), "task.covariance"),
    "ragged covariance": ("task.covariance=[[1,0],[1]]", ("covariance", "2 x 2"), "task.covariance"),
    "covariance of another size": ("task.covariance=[[1.0]]", ("covariance", "2 x 2", "1 x 1"), "task.covariance"),
    "covariance not symmetric": (
        "task.covariance=[[1,0.5],[0.25,1]]",
        ("covariance", "symmetric", "0.25", "(C + C.T) / 2"),
        "task.covariance",
    ),
    "covariance not positive definite": (
        "task.covariance=[[1,2],[2,1]]",
        ("covariance", "positive definite", "-1"),
        "task.covariance",
    ),
    "zero heads": ("model.n_heads=0", ("model.n_heads", "0", "at least 1"), "model.n_heads"),
    "heads that are a word": ("model.n_heads=two", ("model.n_heads", "'two'", "whole number"), "model.n_heads"),
    "heads that are true": ("model.n_heads=true", ("model.n_heads", "True"), "model.n_heads"),
    "unknown initialisation": ("model.init=xavier", ("model.init", "'xavier'", "uniform"), "model.init"),
    "initial weights that are no numbers": ("model.init_scale=.nan", ("model.init_scale", "nan"), "model.init_scale"),
    "attention scale 0": ("model.scale=0", ("model.scale", "positive", "0"), "model.scale"),
    "several layers, fused": ("model.n_layers=2", ("training.engine", "2 layers", "hooked"), "training.engine"),
    "zero steps": ("training.steps=0", ("training.steps", "0", "at least 1"), "training.steps"),
    "steps written as a float": ("training.steps=1e3", ("training.steps", "whole number", "1000.0"), "training.steps"),
    "zero learning rate": ("training.lr=0", ("training.lr", "positive", "0"), "training.lr"),
    "infinite learning rate": ("training.lr=.inf", ("training.lr", "inf"), "training.lr"),
    "unknown optimiser": (
        "training.optimizer=adamw",
        ("training.optimizer", "'adamw'", "'adam'"),
        "training.optimizer",
    ),
    "negative clip": ("training.clip=-1", ("training.clip", "-1", "positive"), "training.clip"),
    "captures every 0 steps": ("training.every=0", ("training.every", "0", "at least 1"), "training.every"),
    "negative evaluation": ("training.evaluate=-1", ("training.evaluate", "-1"), "training.evaluate"),
    "section that is a number": ("model=3", ("model", "section", "3"), "model"),
    "task that is a word": ("task=easy", ("task", "section", "'easy'"), "task"),
    "key below a value": ("task.d.e=1", ("task.d.e", "'d'", "not a section"), "task.d.e"),
    "no seeds": ("seeds=0", ("seeds", "0", "a number of seeds or a list"), "seeds"),
    "doubled seeds": ("seeds=[1,1]", ("seeds", "[1, 1]", "differ"), "seeds"),
    "negative seeds": ("seeds=[-1]", ("seeds", "[-1]", "from 0 on"), "seeds"),
    "an empty list of seeds": ("seeds=[]", ("seeds", "[]"), "seeds"),
    "seeds that are words": ("seeds=[a,b]", ("seeds", "whole numbers"), "seeds"),
    "a seed too large": (f"seeds=[{2**64}]", ("seeds", "2^63"), "seeds"),
}


@pytest.fixture(params=CONFIG_MISTAKES.values(), ids=CONFIG_MISTAKES.keys())
def config_mistake(request: pytest.FixtureRequest) -> tuple[str, tuple[str, ...], str]:
    return request.param


def test_a_wrong_config(config_file: Path, tmp_path: Path, config_mistake: tuple[str, tuple[str, ...], str]) -> None:
    override, parts, field = config_mistake
    mistake(cli("train", config_file, override, "--out", tmp_path / "run"), *parts)
    assert not (tmp_path / "run").exists(), "a mistake must not leave a folder in the way of the next attempt"
    values = yaml.safe_load(config_file.read_text())
    key, _, text = override.partition("=")
    *path, last = key.split(".")
    section = values
    for part in path:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            return  # plain values have no such path
    section[last] = float(text) if text == "1e3" else yaml.safe_load(text)
    with pytest.raises(icl.ConfigError) as caught:
        icl.run(values, out=tmp_path / "run")
    assert isinstance(caught.value, ValueError)
    assert caught.value.field == field
    for part in parts:
        assert part in str(caught.value)


def test_a_key_missing(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("task: {d: 2, context: 4}")
    mistake(cli("train", "c.yaml"), "task.noise is missing", "give it")
    (tmp_path / "c.yaml").write_text("model: {n_heads: 2}")
    mistake(cli("train", "c.yaml"), "task is missing", "give it")


@pytest.mark.parametrize("override", ["seeds", "=3", "seeds:3"])
def test_an_override_without_a_key_or_value(config_file: Path, override: str) -> None:
    mistake(cli("train", config_file, override), "key=value", f"'{override}'")


def test_an_override_that_is_not_yaml(config_file: Path) -> None:
    mistake(cli("train", config_file, "task.covariance=[[1,0]"), "task.covariance", "not YAML", "[[1,0]")


def test_an_empty_section_is_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("task:\nmodel: {n_heads: 2}")
    mistake(cli("train", "c.yaml", "task.d=2", "task.context=0", "task.noise=0"), "task.context")


CONFIG_FILES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b"", ("mapping", "empty")),
    "a list": (b"- 1\n- 2", ("mapping", "a list")),
    "a word": (b"hello", ("mapping", "a str")),
    "not YAML": (b"task: {d: 5", ("not YAML", "Correct")),
    "not text": (b"\xff\xfe\x00task", ("not YAML",)),
    "a Python object": (b"!!python/object/apply:os.system ['true']", ("not YAML",)),
    "keys that are numbers": (b"1: 2\ntask: {d: 2, context: 4, noise: 0.1}", ("1",)),
}


@pytest.mark.parametrize(("content", "parts"), CONFIG_FILES.values(), ids=CONFIG_FILES.keys())
def test_a_config_file_that_is(tmp_path: Path, content: bytes, parts: Sequence[str]) -> None:
    (tmp_path / "bad.yaml").write_bytes(content)
    mistake(cli("train", "bad.yaml"), *parts)


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    mistake(cli("train", "two_heads"), "two_heads", "shipped are", "Did you mean 'two_head'")
    mistake(cli("train", tmp_path), "is a folder", "Name the file")
    mistake(cli("train", "x" * 5000), "could not be read", "name too long")


def test_a_config_that_cannot_be_read() -> None:
    mistake(cli("train", "/proc/self/mem"), "/proc/self/mem", "cannot be read", "Name another")


# --- the output folder --------------------------------------------------------------------------------------------


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_a_folder_that_holds_a_run(config_file: Path, run: Path) -> None:
    before = contents(run)
    mistake(cli("train", config_file, "--out", run), str(run), "holds a run", "--resume", "another --out")
    assert contents(run) == before


def test_a_folder_that_holds_something_else(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    mistake(cli("train", config_file, "--out", "mine"), "mine", "not empty", "another --out")
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]


def test_a_folder_in_which_a_run_was_killed_at_once_can_be_used(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.yaml.123.tmp").write_text("ta")
    assert cli("train", config_file, "--out", "run").code == 0


def test_a_folder_that_is_a_file(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    mistake(cli("train", config_file, "--out", "file"), "file is a file", "another --out")
    mistake(cli("train", config_file, "--out", "file/run"), "file/run", "cannot be created", "another --out")
    mistake(cli("train", config_file, "--out", "file", "--resume"), "is a file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "out", ["/proc/run", "/proc/self/run", "y" * 300], ids=["proc", "proc/self", "a name too long"]
)
def test_a_folder_that_cannot_be_written(config_file: Path, out: str) -> None:
    mistake(cli("train", config_file, "--out", out), out, "cannot be created", "another --out")


def test_nothing_to_resume(config_file: Path, tmp_path: Path) -> None:
    mistake(cli("train", config_file, "--out", "none", "--resume"), "no run at none", "leave out --resume")
    assert not (tmp_path / "none").exists()


def test_a_resume_with_another_config(config_file: Path, run: Path) -> None:
    before = contents(run)
    arguments = ("task.noise=0.2", "training.steps=40", "--out", run, "--resume")
    mistake(
        cli("train", config_file, *arguments),
        "task.noise is 0.1 there and 0.2 here",
        "training.steps is 20 there and 40 here",
        "another --out",
    )
    assert contents(run) == before


def test_a_resume_of_a_finished_run_says_so(config_file: Path, run: Path) -> None:
    before = contents(run)
    outcome = cli("train", config_file, "--out", run, "--resume")
    assert outcome.code == 0
    assert "finished already: all 20 steps" in outcome.stdout
    assert contents(run) == before


# --- a full disk --------------------------------------------------------------------------------------------------


def fill_disk(monkeypatch: pytest.MonkeyPatch, out: Path, target: Any, name: str, call: int) -> None:
    """Writes fail like those to a full disk, from the n-th after the first checkpoint on."""
    calls, original = [0], getattr(target, name)

    def write(*arguments: Any, **options: Any) -> Any:
        calls[0] += (out / "checkpoints" / "step-00000000.json").exists()
        if calls[0] >= call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*arguments, **options)

    monkeypatch.setattr(target, name, write)


@pytest.mark.parametrize(
    ("what", "call"),
    [("checkpoint", 1), ("checkpoint", 2), ("checkpoint", 4), ("history", 1), ("history", 15), ("history", 50)],
    ids=["at weights", "at a record", "at a later record", "in metrics", "in more metrics", "in a later history"],
)
def test_a_full_disk(
    config_file: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, call: int
) -> None:
    import zarr.storage._local as local

    out = tmp_path / "full"
    with monkeypatch.context() as patch:
        target, name = (checkpoint_module, "write_atomically") if what == "checkpoint" else (local, "_put")
        fill_disk(patch, out, target, name, call)
        outcome = cli("train", config_file, "--out", out)
    assert outcome.code == 2
    assert outcome.stderr.count(PREFIX) == 1
    for part in ("No space left on device", str(out), "stays", "--resume"):
        assert part in outcome.stderr
    kept = icl.load_run(out).steps
    assert kept
    assert kept[-1] < 20
    assert icl.load_run(out).checkpoint().step == kept[-1]
    assert cli("train", config_file, "--out", out, "--resume").code == 0
    assert (out / "probes.jsonl").read_bytes() == (trained / "probes.jsonl").read_bytes()
    assert icl.load_run(out).metrics.equals(icl.load_run(trained).metrics)
    assert icl.load_run(out).circuits.equals(icl.load_run(trained).circuits)


@pytest.mark.slow
def test_a_disk_that_is_really_full(config_file: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        arguments = ("training.steps=500", "training.every=2", "--out", small / "run")
        outcome = cli("train", config_file, *arguments)
        assert outcome.code == 2, outcome
        assert "No space left on device" in outcome.stderr
        assert icl.load_run(small / "run").metrics.step.size > 0
        subprocess.run(["mount", "-o", "remount,size=40m", small], check=True)
        assert cli("train", config_file, *arguments, "--resume").code == 0
        assert len(icl.load_run(small / "run").metrics.step) == 251
    finally:
        subprocess.run(["umount", small], check=True)


# --- a run or checkpoint that cannot be read ----------------------------------------------------------------------


@pytest.mark.parametrize("command", ["probe", "report"])
def test_a_run_that_is_not_there(command: str, tmp_path: Path) -> None:
    mistake(cli(command, "runs/none"), "there is no run at runs/none", "icl-mechinterp train")
    (tmp_path / "empty").mkdir()
    mistake(cli(command, "empty"), "empty holds no config.yaml", "Name a folder")


def test_a_file_that_is_no_checkpoint(config_file: Path, run: Path) -> None:
    mistake(cli("probe", config_file), "is not a checkpoint", "step-00005000.safetensors")
    mistake(cli("report", config_file), "is a file, not a run folder", "Name a folder")
    (run / "checkpoints" / "step-²²²²²²²²²².json").write_text("{}")
    mistake(cli("probe", run / "checkpoints" / "step-²²²²²²²²²².json"), "is not a checkpoint")


RUN_CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]] = {
    "of a newer schema": (lambda c: c | {"schema_version": 2, "task": "later"}, ("schema version 2", "Upgrade")),
    "without a schema": (lambda c: c | {"schema_version": None}, ("schema_version is None",)),
    "without a task": (lambda c: {k: v for k, v in c.items() if k != "task"}, ("task is None",)),
    "with a wrong task": (lambda c: c | {"task": {"d": 0, "context": 4, "noise": 0}}, ("task.d", "Restore")),
    "with wrong seeds": (lambda c: c | {"seeds": ["a"]}, ("seeds", "Restore")),
    "with a word for the model": (lambda c: c | {"model": "big"}, ("model is 'big'",)),
    "that is a list": (lambda c: [c], ("not the config of a run",)),
}


@pytest.mark.parametrize("command", ["probe", "report"])
@pytest.mark.parametrize(("change", "parts"), RUN_CONFIGS.values(), ids=RUN_CONFIGS.keys())
def test_a_run_with_a_config(run: Path, command: str, change: Callable[[Any], Any], parts: Sequence[str]) -> None:
    file = run / "config.yaml"
    file.write_text(yaml.safe_dump(change(yaml.safe_load(file.read_text()))))
    mistake(cli(command, run), str(run), *parts)


def test_a_run_with_a_model_of_another_kind(run: Path) -> None:
    file = run / "config.yaml"
    values = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(values | {"model": {"n_haeds": 2}}))
    mistake(cli("probe", run), "model", "n_heads")
    file.write_text(yaml.safe_dump(values | {"model": {"n_heads": 3}}))
    mistake(cli("probe", run), "does not fit", "W_Q", "(1, 2, 3, 3)", "(1, 3, 3, 3)", "Restore the config")
    file.write_bytes(b"\xff\xfe{")
    mistake(cli("probe", run), "config.yaml cannot be read")


def test_a_step_that_was_not_saved(run: Path) -> None:
    mistake(cli("probe", run, "--step", 15), "step 15 was not saved", "0, 10, 20", "Choose one")
    mistake(cli("probe", run, "--step", -1), "step -1 was not saved", "0, 10, 20")
    missing = run / "checkpoints" / "step-00000015.safetensors"
    mistake(cli("probe", missing), "step 15 was not saved", "0, 10, 20")
    here = run / "checkpoints" / "step-00000010.safetensors"
    mistake(cli("probe", here, "--step", 20), "step 10", "--step 20", "Leave one out")
    mistake(cli("probe", run, "--seed", 7), "no seed 7", "it has 0")
    mistake(cli("probe", run, "--prompts", 1), "prompts", "at least 2", "1")


def test_a_checkpoint_named_from_its_own_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run / "checkpoints")
    outcome = cli("probe", "step-00000010.safetensors", "--prompts", 100, "--json")
    assert outcome.code == 0
    assert json.loads(outcome.stdout)["step"] == 10


def weights_of(run: Path, step: int = 20) -> Path:
    return run / "checkpoints" / f"step-{step:08d}.safetensors"


def resealed(weights: Path, content: bytes) -> None:
    """Writes other content and a record that vouches for it."""
    import hashlib

    weights.write_bytes(content)
    record = json.loads(weights.with_suffix(".json").read_bytes())
    weights.with_suffix(".json").write_text(json.dumps(record | {"sha256": hashlib.sha256(content).hexdigest()}))


def edit_record(run: Path, **changes: Any) -> None:
    file = weights_of(run).with_suffix(".json")
    file.write_text(json.dumps(json.loads(file.read_bytes()) | changes))


def changed_tensors(run: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(weights_of(run))
    change(tensors)
    save_file(tensors, weights_of(run))
    resealed(weights_of(run), weights_of(run).read_bytes())


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return change


def with_a_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.blocks.0.attn.W_O"].fill_(torch.nan)


def narrower(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.blocks.0.attn.W_Q"] = tensors["model.blocks.0.attn.W_Q"][..., :1].clone()


CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "without weights": (lambda run: weights_of(run).unlink(), ("there is no checkpoint", "Name a run folder")),
    "empty": (lambda run: weights_of(run).write_bytes(b""), ("(0 bytes)", "torn", "earlier")),
    "torn": (lambda run: os.truncate(weights_of(run), 900), ("(900 bytes)", "torn", "earlier")),
    "not safetensors": (lambda run: resealed(weights_of(run), b"PK\x03\x04 torch.save"), ("not a safetensors file",)),
    "of a newer schema": (lambda run: edit_record(run, schema_version=9), ("schema version 9", "Upgrade")),
    "with a torn record": (lambda run: os.truncate(weights_of(run).with_suffix(".json"), 30), ("torn", "earlier")),
    "with an empty record": (lambda run: os.truncate(weights_of(run).with_suffix(".json"), 0), ("torn", "earlier")),
    "with a record that is a list": (lambda run: weights_of(run).with_suffix(".json").write_text("[]"), ("torn",)),
    "with a record without its step": (lambda run: edit_record(run, step=None), ("step is None", "earlier")),
    "that was renamed": (lambda run: edit_record(run, step=17), ("record of step 17", "renamed")),
    "of other shapes": (lambda run: changed_tensors(run, narrower), ("does not fit", "W_Q", "(1, 2, 3, 1)")),
    "with a parameter missing": (
        lambda run: changed_tensors(run, without("model.blocks.0.attn.W_O")),
        ("does not fit", "W_O", "None"),
    ),
    "that holds a NaN": (
        lambda run: changed_tensors(run, with_a_nan),
        ("NaN", "earlier step"),
    ),
}


@pytest.mark.parametrize(("damage", "parts"), CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_a_checkpoint(run: Path, damage: Callable[[Path], Any], parts: Sequence[str]) -> None:
    damage(run)
    mistake(cli("probe", run, "--step", 20), *parts)


def test_a_checkpoint_without_its_record(run: Path) -> None:
    weights_of(run).with_suffix(".json").unlink()
    mistake(cli("probe", weights_of(run)), "step 20 was not saved", "0, 10")


def test_the_newest_whole_checkpoint_is_taken(run: Path) -> None:
    weights_of(run).write_bytes(b"")
    assert json.loads(cli("probe", run, "--json", "--prompts", 100).stdout)["step"] == 10


def test_a_run_without_a_checkpoint(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    mistake(cli("probe", run), "no whole checkpoint", "--resume")
    mistake(cli("probe", run, "--step", 3), "step 3 was not saved", "no checkpoint yet")


@pytest.mark.parametrize("key", ["generator.states", "window.loss"])
def test_a_resume_from_a_checkpoint_that_lacks(config_file: Path, run: Path, key: str) -> None:
    changed_tensors(run, without(key))
    mistake(cli("train", config_file, "--out", run, "--resume"), key, "None", "Delete it")


def test_a_resume_from_a_checkpoint_that_does_not_fit(config_file: Path, run: Path) -> None:
    changed_tensors(run, narrower)
    mistake(cli("train", config_file, "--out", run, "--resume"), "does not fit", "W_Q", "(1, 2, 3, 1)")


def test_a_resume_without_the_lengths_of_the_history(config_file: Path, run: Path) -> None:
    edit_record(run, lengths=None)
    mistake(cli("train", config_file, "--out", run, "--resume"), "how long the history was", "None")


REPORT_LINES: dict[str, tuple[bytes, str]] = {
    "torn": (b'{"schema', "not JSON"),
    "not text": (b"\xff\xfe\x00\x00\x00", "not JSON"),
    "a list": (b"[]", "a list"),
    "of a newer schema": (b'{"schema_version": 9}', "schema version 9"),
    "without its fields": (b'{"schema_version": 1}', "heads"),
    "with a NaN": (b'{"schema_version": NaN}', "NaN"),
}


@pytest.mark.parametrize(("line", "part"), REPORT_LINES.values(), ids=REPORT_LINES.keys())
def test_a_line_of_reports(run: Path, line: bytes, part: str) -> None:
    file = run / "probes.jsonl"
    file.write_bytes(line + b"\n" + file.read_bytes())
    with pytest.raises(icl.UserError, match=r"probes\.jsonl, line 1") as caught:
        _ = icl.load_run(run).reports
    assert part in str(caught.value)


@pytest.mark.parametrize("file", ["metrics/zarr.json", "circuits/kq/zarr.json", "metrics/loss/c/0/0"])
def test_a_damaged_history(run: Path, file: str) -> None:
    (run / "history.zarr" / file).write_bytes(b"{")
    with pytest.raises(icl.UserError, match=r"history\.zarr.*damaged.*Restore"):
        _ = icl.load_run(run).metrics, icl.load_run(run).circuits


def test_a_page_says_what_it_could_not_read(run: Path) -> None:
    (run / "history.zarr" / "metrics" / "zarr.json").write_bytes(b"{")
    with open(run / "probes.jsonl", "ab") as file:
        file.write(b"[]\n")
    assert cli("report", run).code == 0
    page = (run / "report.html").read_text()
    assert "was damaged" in page
    assert "probes.jsonl, line 3" in page


def test_a_damaged_history_cannot_be_resumed(config_file: Path, run: Path) -> None:
    weights_of(run).with_suffix(".json").unlink()
    (run / "history.zarr" / "metrics" / "zarr.json").write_bytes(b"")
    mistake(cli("train", config_file, "--out", run, "--resume"), "history.zarr", "damaged", "Restore")


def test_a_report_that_cannot_be_written(run: Path, tmp_path: Path) -> None:
    mistake(cli("report", run, "--out", tmp_path), str(tmp_path), "could not be written", "another --out")
    mistake(cli("report", run, "--out", "/proc/report.html"), "/proc/report.html", "another --out")


def test_a_report_into_a_new_folder(run: Path) -> None:
    outcome = cli("report", run, "--out", "new/page.html")
    assert outcome.code == 0
    assert outcome.stdout == "new/page.html\n"
    assert Path("new/page.html").is_file()


# --- opening a stranger's run -------------------------------------------------------------------------------------

opened: list[str] = []
watching = threading.Event()


def watch(event: str, arguments: Any) -> None:
    if watching.is_set() and event == "open" and isinstance(arguments[0], str | os.PathLike):
        opened.append(os.fspath(arguments[0]))


def test_a_run_reads_nothing_outside_its_folder(run: Path) -> None:
    """Names that lead out of the folder stand in every file that holds names."""
    secret = run.parent / "secret.json"
    secret.write_text("{}")
    edit_record(run, weights="../../secret.json", path=str(secret))
    with open(run / "config.yaml", "a") as file:
        file.write(f"history: ../secret.json\ncheckpoints: {secret.parent}\n")
    icl.load_run(run).model()  # imports done
    sys.addaudithook(watch)  # cannot be removed again, hence the switch
    watching.set()
    try:
        found = icl.load_run(run)
        _ = found.metrics, found.circuits, found.reports, found.model(), found.steps
    finally:
        watching.clear()
    data = [path for path in opened if not path.endswith((".py", ".pyc", ".so"))]
    assert data
    assert {os.path.realpath(path).startswith(str(run.resolve())) for path in data} == {True}, data


def test_a_stranger_cannot_execute_anything(run: Path) -> None:
    """Arrays of zarr's old format may name a pickle filter; a run has none, so it is not looked at."""
    import pickle

    flag = run.parent / "executed"

    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(flag),)

    group = run / "history.zarr" / "metrics"
    for place in (group / "zzz", group / "loss"):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        metadata = {
            "zarr_format": 2,
            "shape": [1, 5],
            "chunks": [1, 5],
            "dtype": "|O",
            "fill_value": None,
            "order": "C",
            "compressor": None,
            "filters": [{"id": "pickle", "protocol": 5}],
        }
        (place / ".zarray").write_text(json.dumps(metadata))
        (place / "0.0").write_bytes(pickle.dumps(Attack()))
    assert "zzz" not in icl.load_run(run).metrics
    (group / "zarr.json").unlink()
    (group / ".zgroup").write_text('{"zarr_format": 2}')
    (group / ".zattrs").write_text('{"schema_version": 1, "labels": {"seed": [0]}}')
    assert len(icl.load_run(run).metrics) == 0
    assert not flag.exists()
    with pytest.raises(zarr.errors.GroupNotFoundError):
        zarr.open_group(str(group), mode="r", zarr_format=3)


# --- models that a probe cannot ask -------------------------------------------------------------------------------


def foreign(normalization: str | None = None, d_model: int = 3, n_layers: int = 1) -> HookedTransformer:
    config = HookedTransformerConfig(
        n_layers=n_layers,
        d_model=d_model,
        d_head=3,
        n_heads=2,
        n_ctx=5,
        d_vocab=1,
        d_vocab_out=1,
        attn_only=True,
        normalization_type=normalization,
        seed=0,
    )
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return HookedTransformer(config)


TINY = icl.LinearRegression(d=2, context=4, noise=0.1)


def test_a_model_of_another_width(tmp_path: Path) -> None:
    for ask in (
        lambda: icl.probe(foreign(d_model=7), TINY, prompts=50),
        lambda: icl.circuits(foreign(d_model=7), TINY),
        lambda: icl.train(foreign(d_model=7), TINY, steps=1, out=tmp_path / "run", engine="hooked"),
    ):
        with pytest.raises(icl.UserError, match=r"d_model = 7") as caught:
            ask()
        assert "2 + 1 = 3" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_something_that_is_no_model() -> None:
    with pytest.raises(icl.UserError, match=r"HookedTransformer is needed; got a Linear"):
        icl.probe(torch.nn.Linear(2, 2), TINY)


def test_several_layers_leave_the_structure_undecided() -> None:
    report = icl.probe(icl.attention_only(TINY, 2, n_layers=2), TINY, prompts=50)
    for measurement in report["structure"].values():
        assert measurement.status == "undecided"
        assert measurement.reason is not None
        assert "2 layers" in measurement.reason
    assert report["equivalence"]["loss"].value is not None
    assert not report.passed


def test_layernorm_cannot_be_trained_fused(tmp_path: Path) -> None:
    with pytest.raises(icl.ConfigError, match=r"normalises the residual stream \(LNPre\).*hooked") as caught:
        icl.train(foreign("LNPre"), TINY, steps=1, out=tmp_path / "run")
    assert caught.value.field == "training.engine"
    assert not (tmp_path / "run").exists()


def test_models_and_seeds_must_be_as_many() -> None:
    with pytest.raises(icl.ConfigError, match="2 models need as many seeds") as caught:
        icl.train([icl.attention_only(TINY, 1, seed=s) for s in (0, 1)], TINY, steps=1, seeds=[3])
    assert caught.value.field == "seeds"


# --- while it trains ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 7], ids=["captured at every step", "captured rarely"])
@pytest.mark.parametrize("engine", ["fused", "hooked"])
def test_a_loss_that_is_no_number(config_file: Path, tmp_path: Path, engine: str, every: int) -> None:
    diverging = ["training.optimizer=sgd", "training.lr=1e8", "training.steps=400", f"training.engine={engine}"]
    often = [f"training.every={every}", f"training.checkpoint_every={every}"]
    outcome = cli("train", config_file, *diverging, *often, "--out", "run")
    assert outcome.code == 2, outcome
    assert outcome.stderr.count(PREFIX) == 1
    message = outcome.stderr[outcome.stderr.index(PREFIX) :]
    for part in ("not a finite number at step", "learning rate 1e+08", "lower lr", "is kept in run"):
        assert part in message
    run = icl.load_run(tmp_path / "run")
    newest = run.checkpoint()
    assert f"The checkpoint of step {newest.step} is kept" in message
    for tensor in newest.parameters.values():
        assert bool(tensor.isfinite().all())


def test_a_tracker_that_fails_never_stops_training(tmp_path: Path) -> None:
    class Broken(NullTracker):
        def update(self, progress: Any) -> None:
            raise ConnectionError("no network")

    with pytest.warns(RuntimeWarning, match=r"tracker Broken failed in update.*no network.*training goes on") as caught:
        run = run_experiment(CONFIG, out=tmp_path / "run", tracker=Broken(), progress=False)
    assert len(caught) == 1
    assert run.metrics.step.values[-1] == 20


@pytest.mark.filterwarnings("default")
def test_a_display_that_fails_never_stops_training(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from icl_mechinterp.tracking import console

    def fails(progress: Any) -> str:
        raise ZeroDivisionError("no width")

    monkeypatch.setattr(console, "line", fails)
    outcome = cli("train", config_file, "--out", "run")
    assert outcome.code == 0
    assert outcome.stderr.startswith(f"{PREFIX}warning: the tracker ConsoleTracker failed in update")
    assert outcome.stderr.count("\n") == 1


def test_ctrl_c_where_nothing_is_lost(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("icl_mechinterp.probes.probe", interrupted)
    assert cli("probe", run) == Outcome(130, "", f"{PREFIX}interrupted.\n")


def test_ctrl_c_in_the_demo_names_the_command_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt("interrupted; runs/demo holds the run up to step 7. Go on with --resume.")

    monkeypatch.setattr("icl_mechinterp.experiment.run", interrupted)
    outcome = cli("demo")
    assert outcome.code == 130
    assert "up to step 7" in outcome.stderr
    assert outcome.stderr.endswith("icl-mechinterp train demo --out runs/demo --resume\n")


# --- usage --------------------------------------------------------------------------------------------------------

USAGE = {
    "unknown command": (["tarin"], "No such command 'tarin'"),
    "unknown option": (["train", "two_head", "--outt", "x"], "No such option: --outt"),
    "missing argument": (["probe"], "Missing argument"),
    "step that is a word": (["probe", "run", "--step", "last"], "Invalid value for '--step'"),
}


@pytest.mark.parametrize(("arguments", "part"), USAGE.values(), ids=USAGE.keys())
def test_usage(arguments: list[str], part: str) -> None:
    outcome = cli(*arguments)
    assert outcome.code == 2
    assert part in " ".join(outcome.stderr.replace("│", " ").split())
    assert outcome.stdout == ""
    assert "Traceback" not in outcome.stderr


# --- the real thing: processes ------------------------------------------------------------------------------------


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "icl_mechinterp", *map(str, arguments)]


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(command(*arguments), text=True, **pipes))  # pyright: ignore
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_mistakes_in_a_process(started: Callable[..., subprocess.Popen[str]], config_file: Path, run: Path) -> None:
    os.truncate(weights_of(run), 900)
    asked = [
        (started("train", config_file, "task.nois=1"), "Did you mean 'noise'"),
        (started("probe", run, "--step", 20), "torn"),
        (started("train", config_file, "training.lr=1e30", "training.every=1", "--out", "nan"), "finite number"),
    ]
    for process, part in asked:
        stdout, stderr = process.communicate(timeout=240)
        told = stderr[stderr.index(PREFIX) :]  # progress may stand before it
        mistake(Outcome(process.returncode, stdout, told), part)
        assert "Traceback" not in stderr


@pytest.mark.slow
def test_ctrl_c_in_a_process(started: Callable[..., subprocess.Popen[str]], config_file: Path) -> None:
    arguments = ["train", config_file, "training.steps=100000000", "training.checkpoint_every=1000000", "--out", "run"]
    process = started(*arguments)
    deadline = time.monotonic() + 240
    while not list(Path("run/checkpoints").glob("*.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert stdout == ""
    assert "Traceback" not in stderr
    step = icl.load_run("run").checkpoint().step
    assert step > 0, "Ctrl-C writes a checkpoint"
    told = stderr[stderr.index(PREFIX) :]
    assert f"up to step {step}" in told
    assert "train" in told
    assert "--out run --resume" in told
