"""The examples of attaching run, and leave a run that says what happened."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import icl_mechinterp as icl

EXAMPLES = Path(__file__).parents[2] / "examples"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _holds_a_run(session: icl.Session, steps: list[int]) -> None:
    assert session.notes == []
    assert session.run.metrics.step.values.tolist() == steps
    assert session.report is not None
    assert session.report.step == steps[-1]
    assert session.report["equivalence"]["loss"].value is not None


def test_a_plain_loop(tmp_path: Path) -> None:
    session = _load("attach_plain_loop").train(6, str(tmp_path / "run"), every=3, final_prompts=200)
    _holds_a_run(session, [0, 3, 6])
    assert icl.load_run(tmp_path / "run").reports[-1].to_dict() == session.report.to_dict()


@pytest.mark.parametrize("positions", [False, True])
def test_an_embedding_of_its_own(positions: bool) -> None:
    example = _load("attach_own_embedding")
    session = example.train(example.Regressor(positions=positions), 6, every=3, final_prompts=200)
    _holds_a_run(session, [0, 3, 6])
    assert session.run.circuits.kq.shape == (1, 3, 1, 2, 4, 4)


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    _holds_a_run(_load("attach_lightning").train(6, str(tmp_path / "run"), every=3, final_prompts=200), [0, 3, 6])


@pytest.mark.filterwarnings("ignore")  # the Trainer's own
def test_huggingface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    _holds_a_run(_load("attach_huggingface").train(6, str(tmp_path / "run"), every=3, final_prompts=200), [0, 3, 6])
