"""Weights of an independent trainer in the papers' code style, imported, probed, and given back."""

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

import icl_mechinterp as icl
from icl_mechinterp.cli import app
from icl_mechinterp.importing import WeightsError, read_weights
from icl_mechinterp.models import hooked_prediction
from tests import papers_trainer, planted

TASK = icl.LinearRegression(d=5, context=40, noise=0.1)
Z = TASK.sample(200, generator=torch.Generator().manual_seed(9)).z


@pytest.fixture(scope="module")
def trainer() -> papers_trainer.PapersModel:
    """The planted pair, in the trainer's layout: its q, k, v are written by hand from omega, mu, without the package."""
    model = papers_trainer.PapersModel(6, 2)
    gamma = planted.sane_scale(TASK)
    mu = planted.optimal_step(TASK) / (2 * gamma)
    basis = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(1)))[0]
    covariates = torch.diag(torch.tensor([1.0] * 5 + [0.0]))
    with torch.no_grad():
        model.k_proj.weight.copy_(torch.cat([basis, basis]))
        model.q_proj.weight.copy_(math.sqrt(6) * gamma * torch.cat([basis @ covariates, -basis @ covariates]))
        model.v_proj.weight.copy_(torch.cat([basis, basis]))
        model.o_proj.weight.copy_(mu * torch.cat([basis[:, 5], -basis[:, 5]])[None])
    return model


def agree(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.square().mean().sqrt())


def test_an_imported_model_predicts_what_the_original_does(trainer: papers_trainer.PapersModel) -> None:
    model = icl.import_weights(trainer.state_dict(), TASK, predictions=trainer)
    with torch.no_grad():
        assert agree(hooked_prediction(model, Z), trainer(Z)) < 1e-5
    report = icl.probe(model, TASK, prompts=20_000)
    assert report.passed, report.verdict
    assert [head.label for head in report.heads] == ["positive", "negative"]
    assert report.heads[0].omega == pytest.approx(planted.sane_scale(TASK), rel=1e-5)


def test_an_exported_model_is_the_original_again(trainer: papers_trainer.PapersModel) -> None:
    model = icl.import_weights(trainer.state_dict(), TASK, predictions=trainer)
    mapping = {role: f"{role}_proj.weight" for role in "qkvo"}
    state = icl.export_weights(model, "fused", rows="labels", mapping=mapping)
    assert set(state) == set(trainer.state_dict())
    for name, tensor in trainer.state_dict().items():
        assert torch.equal(state[name], tensor), name
    again = papers_trainer.PapersModel(6, 2)
    again.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(again(Z), trainer(Z))


def test_biases_of_the_original_are_carried_or_refused(trainer: papers_trainer.PapersModel, tmp_path: Path) -> None:
    biased = papers_trainer.PapersModel(6, 2, bias=True)
    biased.load_state_dict(trainer.state_dict(), strict=False)
    imported = read_weights(biased.state_dict(), TASK, predictions=biased)
    assert imported.difference is not None
    assert imported.difference < 1e-4
    assert bool(imported.model().blocks[0].attn.b_Q.any())
    with pytest.raises(WeightsError, match=r"biases that are not zero \(blocks.0.attn.b_Q.*without out="):
        icl.import_weights(biased.state_dict(), TASK, predictions=biased, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_outputs_onto_whole_tokens_count_by_their_label_row(trainer: papers_trainer.PapersModel) -> None:
    """n_out = D: the rows that are not read out may hold anything."""
    state = trainer.state_dict()
    rows = 1e3 * torch.randn(5, 12, generator=torch.Generator().manual_seed(2))
    state["o_proj.weight"] = torch.cat([rows, state["o_proj.weight"]])
    imported = icl.import_weights(state, TASK, predictions=trainer)
    report = icl.probe(imported, TASK, prompts=2_000, probes=("structure",))
    plain = icl.probe(icl.import_weights(trainer.state_dict(), TASK, predictions=trainer), TASK, prompts=2_000)
    assert report["structure"] == plain["structure"]


def test_an_imported_run_opens_like_any_other(trainer: papers_trainer.PapersModel, tmp_path: Path) -> None:
    model = icl.import_weights(trainer.state_dict(), TASK, predictions=trainer, out=tmp_path / "run", prompts=5_000)
    run = icl.load_run(tmp_path / "run")
    assert (run.steps, run.seeds, run.task) == ([0], (0,), TASK)
    for (name, parameter), other in zip(model.named_parameters(), run.model().parameters(), strict=True):
        assert torch.equal(parameter, other), name
    circuits = icl.circuits(model, TASK)
    assert run.circuits["step"].values.tolist() == [0]
    assert torch.equal(torch.as_tensor(run.circuits["kq"].values[0, 0]), circuits.kq)
    assert torch.equal(torch.as_tensor(run.circuits["ov"].values[0, 0]), circuits.ov)
    assert run.metrics["omega"].values[0, 0, 0].tolist() == pytest.approx([h.omega for h in run.reports[0].heads])
    (report,) = run.final_reports
    assert (report.step, report.seed) == (0, 0)
    assert report == icl.probe(run.model(), TASK, prompts=5_000).at(step=0, seed=0)
    source = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["imported"]
    assert source["layout"] == "fused"
    assert source["scale"] == pytest.approx(1 / math.sqrt(6))
    assert 0 <= source["difference"] < 1e-5
    assert list(tmp_path.iterdir()) == [tmp_path / "run"], "nothing is left beside it"


def test_a_run_of_several_layers_opens(tmp_path: Path) -> None:
    task = icl.LinearRegression(d=2, context=4, noise=0.1)
    model = icl.attention_only(task, 2, n_layers=2, d_head=2, seed=3)
    model = model.to(torch.float64, print_details=False)  # a run's models are float32
    state = icl.export_weights(model, "transformer_lens")
    icl.import_weights(state, task, scale=0.5, out=tmp_path / "run", prompts=100)
    reopened = icl.load_run(tmp_path / "run").model()
    assert torch.equal(reopened.blocks[1].attn.W_K, model.blocks[1].attn.W_K.float())


def cli(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "task.yaml"
    file.write_text("task: {d: 5, context: 40, noise: 0.1}\n")
    return file


def test_the_command_writes_a_run_that_probe_and_report_open(
    trainer: papers_trainer.PapersModel, config: Path, tmp_path: Path
) -> None:
    file, out = tmp_path / "weights.pt", tmp_path / "run"
    torch.save({"state_dict": trainer.state_dict(), "step": 7}, file)
    done = cli("import", file, "--task", config, "--out", out, "--scale", "1/sqrt(6)", "--prompts", 2_000)
    assert done.exit_code == 0, done.output
    for part in ("read as fused", "2 head(s)", "not checked", "This model is debiased gradient descent"):
        assert part in done.stdout
    probed = cli("probe", out, "--json", "--prompts", 2_000)
    assert json.loads(probed.stdout)["heads"] == icl.load_run(out).final_reports[0].to_dict()["heads"]
    reported = cli("report", out)
    assert reported.exit_code == 0, reported.output
    assert "debiased gradient descent" in (out / "report.html").read_text()


def test_the_command_prints_json(trainer: papers_trainer.PapersModel, tmp_path: Path) -> None:
    torch.save(trainer.state_dict(), tmp_path / "weights.pt")
    with torch.no_grad():
        torch.save({"z": Z, "yhat": trainer(Z)}, tmp_path / "predictions.pt")
    names = {role: f"{role}_proj.weight" for role in "qkvo"}
    (tmp_path / "mapping.yaml").write_text(yaml.safe_dump(names))
    options = [
        "--predictions",
        tmp_path / "predictions.pt",
        "--mapping",
        tmp_path / "mapping.yaml",
        "--layout",
        "fused",
    ]
    out = tmp_path / "run"
    done = cli(
        "import", tmp_path / "weights.pt", "--task", "two_head", "--out", out, *options, "--prompts", 500, "--json"
    )
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["imported"]["scale"] == pytest.approx(1 / math.sqrt(6))
    assert record["imported"]["difference"] < 1e-5
    assert record["report"]["algorithm"] == "debiased gradient descent"


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"scale": None}, ("scale", "not known", "--scale")),
        ({"scale": "one"}, ("--scale must be a positive number", "'one'")),
        ({"scale": "1/0"}, ("--scale must be a positive number", "'1/0'")),
        ({"scale": "-1"}, ("scale must be a positive number", "-1.0")),
        ({"layout": "sideways"}, ("layout must be one of", "'sideways'")),
        ({"file": "missing.pt"}, ("missing.pt does not exist", "Name a")),
        ({"file": "notes.txt"}, ("not a weights file", "'.txt'")),
        ({"file": "torn.safetensors"}, ("not a whole safetensors file", "torn")),
        ({"file": "pickled.pt"}, ("refused", "run any code", "weights_only=False", "torch.save(")),
        ({"file": "wide.pt"}, ("do not fit the task", "d + N = 5 + 1 = 6", "(16, 8)")),
        ({"file": "nan.pt"}, ("q.weight", "NaN", "earlier checkpoint")),
        ({"file": "stack.pt"}, ("2 ways", "layout='stacked'", "layout='stacked_transposed'", "--layout")),
        ({"mapping": "lacks.yaml"}, ("the mapping lacks o", "Give the name")),
        ({"mapping": "twice.yaml"}, ("'q.weight' twice", "as q and as k")),
        ({"predictions": "good.pt"}, ("no z and no yhat", "Save the prompts")),
        ({"task": "no_such"}, ("no shipped config of that name",)),
        ({"out": "taken"}, ("taken", "is not empty", "--out")),
    ],
)
def test_a_mistake_is_one_message_and_status_2(
    changes: dict[str, str | None], parts: tuple[str, ...], config: Path, tmp_path: Path
) -> None:
    good = icl.export_weights(icl.attention_only(TASK, 2), "fused")
    torch.save(good, tmp_path / "good.pt")
    torch.save({"state_dict": good, "task": TASK}, tmp_path / "pickled.pt")
    torch.save({role: torch.randn(2, 6, 6) for role in "qkvo"}, tmp_path / "stack.pt")
    torch.save({**good, "q.weight": good["q.weight"] * torch.nan}, tmp_path / "nan.pt")
    wide = icl.attention_only(icl.LinearRegression(d=7, context=4, noise=0.1), 2)
    torch.save(icl.export_weights(wide, "fused"), tmp_path / "wide.pt")
    (tmp_path / "notes.txt").write_text("words")
    (tmp_path / "torn.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    names = {role: f"{role}.weight" for role in "qkvo"}
    (tmp_path / "lacks.yaml").write_text(yaml.safe_dump({r: names[r] for r in "qkv"}))
    (tmp_path / "twice.yaml").write_text(yaml.safe_dump({**names, "k": "q.weight"}, sort_keys=False))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thing").write_text("x")

    options = {"file": "good.pt", "task": str(config), "out": "run", "scale": "0.5", **changes}
    for name in ("file", "mapping", "predictions", "out"):
        if name in options:
            options[name] = str(tmp_path / str(options[name]))
    file = options.pop("file")
    arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
    done = cli("import", file, *arguments)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert done.stderr.startswith("icl-mechinterp: ")
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_model_trained_by_other_code_is_debiased_gradient_descent(tmp_path: Path) -> None:
    """Seed 0 ends with heads of both signs; about one seed in four does not (both heads become one kernel)."""
    trainer = papers_trainer.train_papers_model(4_000, seed=0)
    torch.save(trainer.state_dict(), tmp_path / "weights.pt")
    model = icl.import_weights(tmp_path / "weights.pt", TASK, predictions=trainer, out=tmp_path / "run", prompts=50_000)
    (report,) = icl.load_run(tmp_path / "run").final_reports
    assert report.passed, report.verdict
    assert report.algorithm == "debiased gradient descent"
    assert sorted(head.label for head in report.heads) == ["negative", "positive"]

    again = papers_trainer.PapersModel(6, 2)
    mapping = {role: f"{role}_proj.weight" for role in "qkvo"}
    again.load_state_dict(icl.export_weights(model, "fused", rows="labels", mapping=mapping))
    with torch.no_grad():
        assert agree(again(Z), trainer(Z)) < 1e-6
        assert agree(hooked_prediction(model, Z), trainer(Z)) < 1e-5
