"""`train` and `run` end to end, small: what a run holds, and what stops it."""

from pathlib import Path

import numpy as np
import pytest
import torch

import icl_mechinterp as icl
from icl_mechinterp.errors import TrainingError
from icl_mechinterp.tracking import Progress
from tests.helpers import assert_close

TASK = icl.LinearRegression(d=3, context=6, noise=0.1)
QUICK = {"steps": 40, "batch": 16, "every": 10, "checkpoint_every": 20, "progress": False}


def test_a_run_holds_what_happened(tmp_path: Path) -> None:
    models = [icl.attention_only(TASK, 2, seed=seed) for seed in (4, 9)]
    run = icl.train(models, TASK, seeds=[4, 9], evaluate=50, gradients=True, out=tmp_path / "run", **QUICK)
    metrics, circuits = run.metrics, run.circuits
    assert metrics["step"].values.tolist() == circuits["step"].values.tolist() == [0, 10, 20, 30, 40]
    assert circuits["kq"].dims == ("seed", "step", "layer", "head", "key", "query")
    assert circuits["ov"].dims == ("seed", "step", "layer", "head", "out", "token")
    assert circuits["attention"].sizes["prompt"] == 8
    assert circuits["key"].values.tolist() == ["x1", "x2", "x3", "y"]
    assert circuits["seed"].values.tolist() == [4, 9]
    assert {"kq_gradient", "ov_gradient"} <= set(circuits)
    assert bool(np.isfinite(metrics["evaluation_loss"]).all())
    assert float(metrics["engine_gap"].max()) < 1e-5
    assert_close(circuits["attention"].sum("pos").values, np.ones((2, 5, 1, 2, 8), dtype=np.float32), rtol=1e-5)
    # training was in place, and the last row is what the models are now
    for index, model in enumerate(models):
        last = circuits.isel(seed=index, step=-1)
        found = icl.circuits(model, TASK)
        assert_close(torch.from_numpy(last["kq"].values), found.kq)
        assert_close(run.model(seed=(4, 9)[index]).blocks[0].attn.W_K.detach(), model.blocks[0].attn.W_K.detach())
        head = icl.probe(model, TASK, prompts=100).heads[1]
        assert float(metrics["omega"].isel(seed=index, step=-1, layer=0, head=1)) == pytest.approx(head.omega, rel=1e-5)
    assert [(r.step, r.seed) for r in run.reports] == [(20, 4), (20, 9), (40, 4), (40, 9)]


def test_captures_do_not_change_training(tmp_path: Path) -> None:
    trained = []
    for every in (1, 40):
        model = icl.attention_only(TASK, 2, seed=0)
        icl.train(model, TASK, out=tmp_path / str(every), **{**QUICK, "every": every, "checkpoint_every": every})
        trained.append(model.blocks[0].attn.W_K.detach())
    assert torch.equal(*trained)


def test_without_a_folder_the_run_lives_as_long_as_it_is_held() -> None:
    run = icl.train(icl.attention_only(TASK, 2), TASK, **QUICK)
    folder = run.path
    assert run.metrics.sizes["step"] == 5
    del run
    assert not folder.exists()


def test_a_model_that_only_the_hooked_engine_can_train() -> None:
    run = icl.train(icl.attention_only(TASK, 2, n_layers=2), TASK, engine="hooked", **{**QUICK, "steps": 20})
    (report,) = run.final_reports
    assert report.heads == ()
    assert report.algorithm == "undecided" or report.algorithm == "none"
    assert "one-layer models" in (report["structure"]["zero_sum"].reason or "")
    assert run.circuits.sizes["layer"] == 2


def test_a_hook_that_changes_the_forward_is_found_out() -> None:
    model = icl.attention_only(TASK, 2)
    model.add_hook("blocks.0.attn.hook_z", lambda value, hook: 2 * value)
    with pytest.raises(TrainingError) as caught:
        icl.train(model, TASK, **QUICK)
    for part in ("fused engine", "a hook changes", "engine='hooked'"):
        assert part in str(caught.value)


def test_a_failing_tracker_is_told_once_and_never_stops_training() -> None:
    class Broken:
        calls = 0

        def start(self, config: object) -> None: ...

        def update(self, progress: Progress) -> None:
            Broken.calls += 1
            raise OSError("the server is away")

        def finish(self) -> None: ...

    with pytest.warns(RuntimeWarning, match=r"Broken failed in update .*the server is away") as caught:
        run = icl.train(icl.attention_only(TASK, 2), TASK, tracker=Broken(), **QUICK)
    assert len(caught) == 1
    assert Broken.calls == 1
    assert run.metrics.sizes["step"] == 5


def test_progress_tells_what_the_history_holds(tmp_path: Path) -> None:
    seen: list[Progress] = []

    class Listening:
        def start(self, config: object) -> None: ...
        def update(self, progress: Progress) -> None:
            seen.append(progress)

        def finish(self) -> None: ...

    run = icl.train(icl.attention_only(TASK, 2), TASK, tracker=Listening(), out=tmp_path / "run", **QUICK)
    assert [p.step for p in seen] == [0, 10, 20, 30, 40]
    assert [p.losses[0] for p in seen[1:]] == pytest.approx(run.metrics["loss"].values[0, 1:].tolist())
    assert seen[-1].heads[0] == run.final_reports[0].heads
    assert seen[-1].seconds_left == 0


def test_run_takes_a_config_as_plain_values(tmp_path: Path) -> None:
    config = {
        "task": {"d": 3, "context": 6, "noise": 0.1},
        "model": {"n_heads": 1},
        "training": {"steps": 10, "batch": 8, "every": 5, "checkpoint_every": 10},
        "seeds": 2,
    }
    run = icl.run(config, out=tmp_path / "run", progress=False)
    assert run.seeds == (0, 1)
    assert run.task == TASK
    assert (
        run.model(step=0, seed=1)
        .blocks[0]
        .attn.W_Q.detach()
        .equal(icl.attention_only(TASK, 1, seed=1).blocks[0].attn.W_Q.detach())
    )
    again = icl.run(run.path / "config.yaml", out=tmp_path / "again", progress=False)
    assert torch.equal(again.model(seed=1).blocks[0].attn.W_Q, run.model(seed=1).blocks[0].attn.W_Q)
