"""A run folder, read."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml

import icl_mechinterp as icl
from icl_mechinterp.experiment import run as run_experiment
from icl_mechinterp.runs import build_model, read_reports

CONFIG = {
    "task": {"d": 2, "context": 4, "noise": 0.1},
    "model": {"n_heads": 2},
    "training": {"steps": 20, "batch": 8, "every": 5, "checkpoint_every": 10, "threads": 1},
    "seeds": [4, 2],
    "probes": ["structure"],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> icl.Run:
    return run_experiment(CONFIG, out=tmp_path_factory.mktemp("runs") / "run", progress=False)


def test_it_holds_what_was_asked_for(run: icl.Run) -> None:
    assert run.task == icl.LinearRegression(2, 4, 0.1)
    assert run.seeds == (4, 2)
    assert run.steps == [0, 10, 20]
    assert run.metrics.step.values.tolist() == [0, 5, 10, 15, 20]
    assert run.metrics.loss.dims == ("seed", "step")
    assert run.circuits.kq.dims == ("seed", "step", "layer", "head", "key", "query")
    assert run.circuits.ov.dims == ("seed", "step", "layer", "head", "out", "token")
    assert run.circuits["query"].values.tolist() == ["x1", "x2", "y"]
    assert [(r.step, r.seed) for r in run.reports] == [(10, 4), (10, 2), (20, 4), (20, 2)]
    assert [(r.step, r.seed) for r in run.final_reports] == [(20, 4), (20, 2)]


@pytest.mark.parametrize("seed", [4, 2])
@pytest.mark.parametrize("step", [0, 10, 20])
def test_a_model_has_the_circuits_that_were_captured(run: icl.Run, step: int, seed: int) -> None:
    found = icl.circuits(run.model(step, seed=seed), run.task)
    captured = run.circuits.sel(step=step, seed=seed)
    torch.testing.assert_close(found.kq, torch.from_numpy(captured.kq.values), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.ov, torch.from_numpy(captured.ov.values), rtol=1e-6, atol=1e-7)


def test_the_first_seed_and_the_newest_step_are_the_default(run: icl.Run) -> None:
    for one, other in zip(run.model().parameters(), run.model(20, seed=4).parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_model_is_a_copy(run: icl.Run) -> None:
    model = run.model()
    before = [parameter.clone() for parameter in run.model().parameters()]
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
    for one, other in zip(run.model().parameters(), before, strict=True):
        assert torch.equal(one, other)


def test_step_and_seed_must_be_there(run: icl.Run) -> None:
    with pytest.raises(icl.UserError, match=r"step 7 was not saved.*saved steps: 0, 10, 20"):
        run.model(7)
    with pytest.raises(icl.UserError, match=r"no seed 0; it has 4, 2"):
        run.model(seed=0)


def test_a_growing_run_is_read_anew(run: icl.Run, tmp_path: Path) -> None:
    path = shutil.copytree(run.path, tmp_path / "run")
    growing = icl.load_run(path)
    assert len(growing.reports) == 4
    lines = (path / "probes.jsonl").read_bytes()
    (path / "probes.jsonl").write_bytes(lines + lines)
    assert len(growing.reports) == 8


def test_a_run_in_its_first_moment_is_empty(run: icl.Run, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes((run.path / "config.yaml").read_bytes())
    young = icl.load_run(tmp_path)
    assert (young.reports, young.final_reports, young.steps) == ((), (), [])
    assert young.metrics.sizes == {"step": 0}
    assert young.circuits.sizes == {"step": 0}
    with pytest.raises(icl.UserError, match="no whole checkpoint"):
        young.model()


def test_only_the_torn_tail_of_reports_is_left_out(run: icl.Run, tmp_path: Path) -> None:
    content = (run.path / "probes.jsonl").read_bytes()
    for length in range(len(content) - 40, len(content)):
        (tmp_path / "probes.jsonl").write_bytes(content[:length])
        assert len(read_reports(tmp_path / "probes.jsonl")) == 3
    (tmp_path / "probes.jsonl").write_bytes(content)
    assert read_reports(tmp_path / "probes.jsonl") == run.reports


def test_the_config_of_a_run_makes_the_same_run(run: icl.Run, tmp_path: Path) -> None:
    values = yaml.safe_load((run.path / "config.yaml").read_text())
    asked = {name: values[name] for name in ("task", "model", "training", "seeds", "probes")}
    again = run_experiment(asked, out=tmp_path / "run", progress=False)
    assert again.metrics.equals(run.metrics)
    assert again.circuits.equals(run.circuits)


def test_a_temporary_run_lives_as_long_as_it_is_held() -> None:
    run = run_experiment(CONFIG, progress=False)
    path = run.path
    assert len(run.reports) == 4
    del run
    assert not path.exists()


def test_what_does_not_describe_a_model() -> None:
    task = icl.LinearRegression(2, 4, 0.1)
    for settings, part in (
        ({}, "n_heads"),
        ({"n_heads": 1, "n_hats": 2}, "n_hats"),
        ({"n_heads": 1, "seed": 3}, "seed"),
    ):
        with pytest.raises(icl.ConfigError, match=part):
            build_model(task, settings, seed=0)
