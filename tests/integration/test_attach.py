"""A session attached to loops of other people: what it records is true, and the training never notices it."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformer_lens import HookedTransformer

import icl_mechinterp as icl
from icl_mechinterp.errors import RunError
from icl_mechinterp.models import hooked_prediction, query_mask
from icl_mechinterp.session import evidence
from icl_mechinterp.tracking import Progress
from tests import planted
from tests.helpers import assert_close
from tests.helpers_session import WIDTH, foreign, hook_count

TASK = icl.LinearRegression(d=3, context=6, noise=0.1)
FEW: dict[str, Any] = {"probes": ["structure"]}  # from the weights; the function is asked where it matters
ASKED: dict[str, Any] = {"probes": ["structure", "equivalence"], "final_prompts": 200}


class Loop:
    """A user's training: model, embedding with dropout, optimisers; `variant` is a way of writing it."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        torch.manual_seed(0)
        self.model: HookedTransformer = foreign(TASK, normalization_type="LN", attn_only=False, d_mlp=16)
        self.embedding = torch.nn.Sequential(torch.nn.Linear(4, WIDTH), torch.nn.Dropout(0.1))
        self.embedding.train()
        self.model.blocks[0].eval()  # a part that the user keeps in evaluation mode
        self.model.unembed.b_U.requires_grad_(False)
        parameters = [p for m in (self.model, self.embedding) for p in m.parameters() if p.requires_grad]
        groups = [parameters[::2], parameters[1::2]] if variant == "two optimisers" else [parameters]
        self.optimisers = [torch.optim.Adam(group, lr=1e-2) for group in groups]
        self.generator = torch.Generator().manual_seed(1)
        self.call: Callable[..., torch.Tensor] = self.model
        if variant == "compiled":
            from torch._dynamo.testing import CompileCounter  # importing it takes seconds

            torch._dynamo.reset()
            self.compilations = CompileCounter()
            self.call = torch.compile(self.model, backend=self.compilations)

    def predict(self, z: torch.Tensor) -> torch.Tensor:
        return self.call(self.embedding(z), start_at_layer=0, attention_mask=query_mask(z))[:, -1]

    def loss(self) -> torch.Tensor:
        z, target = TASK.sample(16, generator=self.generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.variant == "autocast"):
            return (self.predict(z) - target).square().mean()

    def step(self, session: icl.Session | None) -> None:
        for part in range(2 if self.variant == "accumulation" else 1):
            loss = self.loss()
            loss.backward()
            if part and session is not None:
                session.observe(loss)
        for optimiser in self.optimisers:
            optimiser.step()
        if session is not None:
            session.step(loss=loss)
        for optimiser in self.optimisers:  # after the session, which must not touch what is in .grad
            optimiser.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        named = [*self.model.named_parameters(), *self.embedding.named_parameters()]
        return {name: parameter.detach().clone() for name, parameter in named} | {"rng": torch.get_rng_state()}

    def flags(self) -> list[bool]:
        modules = [*self.model.modules(), *self.embedding.modules()]
        return [m.training for m in modules] + [p.requires_grad for p in self.model.parameters()]


# dynamo looks at .grad of whatever a compiled function takes in
_DYNAMO = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@_DYNAMO
@pytest.mark.parametrize(
    "variant",
    ["plain", "accumulation", "two optimisers", "autocast", pytest.param("compiled", marks=pytest.mark.slow)],
)
def test_the_training_never_notices(variant: str) -> None:
    """Bit for bit the parameters, random numbers, modes, flags and gradients of the same loop on its own."""
    alone, watched = Loop(variant), Loop(variant)
    torch.manual_seed(7)
    for _ in range(7):
        alone.step(None)
    expected, rng = alone.state(), torch.get_rng_state()
    coordinates = icl.fit_coordinates(watched.model, TASK, embed=watched.embedding)
    flags, hooks = watched.flags(), hook_count(watched.model)
    torch.manual_seed(7)
    with icl.attach(watched.model, TASK, every=2, coordinates=coordinates, **FEW) as session:
        for _ in range(7):
            watched.step(session)
    assert torch.equal(torch.get_rng_state(), rng)
    for name, value in watched.state().items():
        assert torch.equal(value, expected[name]), name
    assert watched.flags() == flags
    assert hook_count(watched.model) == hooks
    assert not session.notes
    assert session.run.metrics.step.values.tolist() == [0, 2, 4, 6, 7]
    assert np.isfinite(session.run.metrics.loss.values[0, 1:]).all()


@pytest.mark.slow
@_DYNAMO
def test_a_capture_does_not_make_a_compiled_step_compile_again() -> None:
    loop = Loop("compiled")
    for _ in range(3):
        loop.step(None)
    compiled = loop.compilations.frame_count
    assert compiled > 0
    coordinates = icl.fit_coordinates(loop.model, TASK, embed=loop.embedding)
    with icl.attach(loop.model, TASK, every=1, coordinates=coordinates, **FEW) as session:
        for _ in range(3):
            loop.step(session)
    assert not session.notes
    assert loop.compilations.frame_count == compiled


@pytest.mark.slow
@_DYNAMO
def test_hooks_run_in_a_model_that_was_compiled_before() -> None:
    model = foreign(TASK, d_model=4, d_head=4)
    z = TASK.sample(4, generator=torch.Generator().manual_seed(0)).z
    model.compile(backend="eager")  # in place: from now on calling the model runs compiled code
    model(z, start_at_layer=0)
    with icl.attach(torch.compile(model, backend="eager"), TASK, **FEW) as session:
        session.step()
    assert not session.notes
    assert float(session.run.circuits.attention[0, 0].sum("pos").min()) == pytest.approx(1.0, rel=1e-5)


def _steps(session: icl.Session, number: int, loss: object = 1.0) -> None:
    for _ in range(number):
        session.step(loss=loss)


@pytest.fixture
def trained(tmp_path: Path) -> tuple[HookedTransformer, icl.Session, list[torch.Tensor]]:
    """Ten steps of a plain loop, a capture every four."""
    model, losses = icl.attention_only(TASK, 2), []
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    generator = torch.Generator().manual_seed(0)
    with icl.attach(model, TASK, every=4, out=tmp_path / "run", checkpoint=True, **ASKED) as session:
        for _ in range(10):
            z, target = TASK.sample(16, generator=generator)
            loss = (hooked_prediction(model, z) - target).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.detach())
            session.step(loss=loss)
    return model, session, losses


def test_a_run_opens_like_any_other_and_holds_the_truth(trained, tmp_path: Path) -> None:
    model, session, losses = trained
    run = icl.load_run(tmp_path / "run")
    assert run.metrics.step.values.tolist() == run.circuits.step.values.tolist() == [0, 4, 8, 10]
    expected = [np.nan, *(float(torch.stack(losses[a:b]).mean()) for a, b in ((0, 4), (4, 8), (8, 10)))]
    np.testing.assert_allclose(run.metrics.loss.values[0], expected, rtol=1e-6)
    found = icl.circuits(model, TASK)
    for name in ("kq", "ov"):
        assert_close(run.circuits[name].values[0, -1], getattr(found, name).numpy(), rtol=0)
        assert not np.array_equal(run.circuits[name].values[0, 0], run.circuits[name].values[0, -1])
    assert run.circuits.attention.dims == ("seed", "step", "layer", "head", "prompt", "pos")
    assert [report.step for report in run.reports] == [0, 4, 8, 10, 10]
    assert run.config["training"] == {"every": 4, "steps": 10}
    assert run.config["notes"] == []
    assert session.run.path == run.path


def test_the_final_report_is_that_of_probe(trained) -> None:
    model, session, _ = trained
    report = icl.probe(model, TASK, prompts=ASKED["final_prompts"], probes=session.run.config["probes"])
    assert session.run.final_reports == (report.at(step=10, seed=0),)
    assert session.report == session.run.final_reports[0]


def test_checkpoints_where_they_were_asked_for(trained) -> None:
    model, session, _ = trained
    assert session.run.steps == [0, 4, 8, 10]
    z = TASK.sample(4, generator=torch.Generator().manual_seed(5)).z
    assert torch.equal(hooked_prediction(session.run.model(10), z), hooked_prediction(model, z))


def test_no_checkpoints_unless_asked_for(tmp_path: Path) -> None:
    with icl.attach(icl.attention_only(TASK, 2), TASK, out=tmp_path / "run", **FEW) as session:
        session.step(loss=1.0)
    for step in (None, 1):
        with pytest.raises(
            RunError, match=r"has no checkpoints unless asked for: icl\.attach\(\.\.\., checkpoint=True\)"
        ):
            icl.load_run(tmp_path / "run").model(step)


def test_a_growing_run_can_be_read_inside_the_block() -> None:
    with icl.attach(icl.attention_only(TASK, 2), TASK, every=1, **FEW) as session:
        session.step(loss=2.0)
        assert session.run.metrics.loss.values[0].tolist()[1:] == [2.0]
        assert session.report is not None
        assert session.report.algorithm == "undecided", "weights alone"


def test_a_loop_that_goes_on_counts_on() -> None:
    told: list[Progress] = []

    class Tracker:
        def start(self, config) -> None: ...
        def finish(self) -> None: ...
        def update(self, progress: Progress) -> None:
            told.append(progress)

    with icl.attach(
        icl.attention_only(TASK, 2), TASK, every=5, start=12, steps=20, seed=3, tracker=Tracker(), **FEW
    ) as s:
        for _ in range(6):
            s.step(loss=0.5)
    assert s.run.metrics.step.values.tolist() == [12, 17, 18]
    assert s.run.seeds == (3,)
    assert [(p.step, p.steps) for p in told] == [(12, 20), (17, 20), (18, 20)]
    assert told[1].losses == (0.5,)
    assert told[0].best_loss == pytest.approx(
        icl.theory.debiased_gd_risk(icl.theory.optimal_step(3, 6, 0.1), 3, 6, 0.1)
    )


# --- failures are told once, and the training goes on -----------------------------------------------------------------


def test_an_exception_of_the_users_is_theirs_and_what_was_captured_stays(tmp_path: Path) -> None:
    model = icl.attention_only(TASK, 2)
    hooks = hook_count(model)

    def loop() -> None:
        with icl.attach(model, TASK, every=2, out=tmp_path / "run", **FEW) as session:
            for _ in range(5):
                session.step(loss=1.0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert hook_count(model) == hooks
    run = icl.load_run(tmp_path / "run")
    assert run.metrics.step.values.tolist() == [0, 2, 4]
    assert run.config["notes"] == ["ended by KeyboardInterrupt after step 5: no final probe"]
    icl.attach(model, TASK)  # the model is free again


def test_a_failing_probe_is_told_once_by_name_and_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("of mine")

    def train() -> icl.Session:
        model = icl.attention_only(TASK, 2)
        with icl.attach(model, TASK, every=1, **ASKED) as session:
            _steps(session, 3)
        return session

    monkeypatch.setattr(evidence, "structure", broken)
    with pytest.warns(
        RuntimeWarning, match=r"the probe 'structure' failed at step 0 \(ZeroDivisionError: of mine"
    ) as told:
        session = train()
    assert len(told) == 1
    assert session.report is not None
    assert [result.probe for result in session.report.results] == ["equivalence"]
    for notes in (session.report.notes, session.run.config["notes"]):
        assert any("the probe 'structure' failed" in note for note in notes)
    assert np.isnan(session.run.metrics.zero_sum.values).all()
    assert np.isfinite(session.run.circuits.kq.values).all()


def test_a_hook_of_the_users_that_fails_in_a_capture_stops_nothing() -> None:
    model, armed, failures = icl.attention_only(TASK, 2), [False], []

    def fail(value: torch.Tensor, hook: object) -> None:
        if armed[0]:
            failures.append(1)
            raise RuntimeError("a hook of the user's")

    model.add_hook("blocks.0.attn.hook_z", fail)
    hooks = hook_count(model)
    with icl.attach(model, TASK, every=1, **FEW) as session:
        armed[0] = True
        with pytest.warns(
            RuntimeWarning, match=r"capture failed at step 1 .*a hook of the user's.* and is skipped"
        ) as told:
            _steps(session, 2)
        armed[0] = False
        session.step(loss=1.0)
    assert (len(told), len(failures)) == (1, 2)
    assert hook_count(model) == hooks
    assert session.run.metrics.step.values.tolist() == [0, 3]


def test_a_full_disk_stops_nothing_and_what_waited_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with icl.attach(icl.attention_only(TASK, 2), TASK, every=1, **FEW) as session:
        with monkeypatch.context() as full:
            full.setattr("icl_mechinterp.circuits.History.flush", _no_space)
            with pytest.warns(RuntimeWarning, match=r"the run folder failed .*No space left") as told:
                _steps(session, 20)
        session.step(loss=1.0)
    assert len(told) == 1
    assert session.run.metrics.step.values.tolist() == list(range(22))


def _no_space(history: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_training_that_diverges_goes_on_and_is_told_of_once() -> None:
    model = icl.attention_only(TASK, 2)

    def diverge(session: icl.Session) -> None:
        model.blocks[0].attn.W_K.data[0, 0, 0] = torch.nan
        _steps(session, 3, float("nan"))
        session.close()

    with icl.attach(model, TASK, every=1, **FEW) as session, pytest.warns(RuntimeWarning) as told:
        diverge(session)
    messages = sorted(str(warning.message) for warning in told)
    assert len(messages) == 2
    assert "the loss is not a number at step 1" in messages[0]
    assert "this training diverged" in messages[1]
    assert session.run.metrics.step.values.tolist() == [0, 1, 2, 3]


def test_warnings_made_errors_stop_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with icl.attach(icl.attention_only(TASK, 2), TASK, **FEW) as session:
        session.step(loss="0.3")  # the suite turns warnings into errors
    assert "the loss is not a number at step 1" in caplog.text


# --- the model is left alone ------------------------------------------------------------------------------------------


def test_the_forward_is_bit_identical_and_a_capture_is_one_forward() -> None:
    model, seen = icl.attention_only(TASK, 2), []
    model.add_hook("blocks.0.attn.hook_pattern", lambda value, hook: seen.append(1))
    z = TASK.sample(8, generator=torch.Generator().manual_seed(0)).z
    clean, hooks = model(z, start_at_layer=0), hook_count(model)
    with icl.attach(model, TASK, every=1, **FEW) as session:
        before = len(seen)
        for _ in range(3):
            session.step(loss=1.0)
            assert hook_count(model) == hooks
        assert len(seen) - before == 3
    assert torch.equal(model(z, start_at_layer=0), clean)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("captures", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_memory_is_flat_over_hundreds_of_captures(captures: int) -> None:
    model = icl.attention_only(TASK, 2)
    with icl.attach(model, TASK, every=1, **FEW) as session:
        _steps(session, 30)  # allocator pools fill up
        start = _resident_bytes()
        _steps(session, captures)
        assert _resident_bytes() - start < 4 * 2**20
        session.close(RuntimeError())


def _resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- what can be said of other people's models ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"normalization_type": "LN"}, "it normalises the residual stream (LN)"),
        ({"attn_only": False, "d_mlp": 16}, "it has MLPs"),
        ({"n_layers": 2}, "the model has 2 layers"),
        ({"n_layers": 3, "attention_dir": "bidirectional"}, "the model has 3 layers"),
        ({"positional_embedding_type": "rotary", "rotary_dim": 4}, "positions"),
        ({"attention_dir": "bidirectional"}, "attention to the query"),
        ({"dtype": torch.bfloat16}, "bfloat16"),
        ({"dtype": torch.float64}, "its embedding past the heads"),
        ({"biases": True}, "it has biases"),
    ],
)
def test_what_cannot_be_said_is_undecided_with_its_reason(settings: dict, reason: str) -> None:
    biases = settings.pop("biases", False)
    model = foreign(TASK, **settings)
    for name, parameter in model.named_parameters():
        if "b_" in name:
            parameter.data.fill_(0.5 if biases else 0.0)
            parameter.requires_grad_(biases)
    embedding = torch.nn.Linear(4, WIDTH, bias=False).to(settings.get("dtype", torch.float32))
    coordinates = icl.Coordinates(embedding.weight.T, model.unembed.W_U)
    with icl.attach(model, TASK, every=1, coordinates=coordinates, **ASKED) as session:
        session.step(loss=1.0)
    assert not session.notes
    assert session.report is not None
    structure = [m for m in session.report["structure"].values() if m.required]
    assert {m.status for m in structure} == {"undecided"}
    assert any(reason in str(m.reason) for m in structure), structure[0].reason
    assert session.report["equivalence"]["distance_debiased_gd"].value is not None, "its function can be asked"
    assert not session.report.passed
    assert session.run.circuits.kq.shape == (1, 2, model.cfg.n_layers, 2, 4, 4)


def test_debiased_gradient_descent_inside_an_embedding_is_recognised() -> None:
    """The planted pair, hidden in a wider residual stream: W = pinv(read_in) W_planted, written along the read-out."""
    task = icl.LinearRegression(d=3, context=20, noise=0.1)
    pair = planted.build(planted.sane_pair(task), task, hidden_noise=0.0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    basis = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)).Q
    read_in, read_out = 2 * basis[:4], basis[4:5].T.clone()  # the prediction has a direction of its own
    model = foreign(task, d_head=4, dtype=torch.float64)
    ours, theirs = pair.blocks[0].attn, model.blocks[0].attn
    scale = (float(theirs.attn_scale) / float(ours.attn_scale)) ** 0.5
    for name in ("W_Q", "W_K", "W_V"):
        getattr(theirs, name).data = (
            (scale if name != "W_V" else 1.0) * torch.linalg.pinv(read_in) @ getattr(ours, name)
        )
    theirs.W_O.data = (ours.W_O @ pair.unembed.W_U) @ read_out.T
    for coordinates in (
        icl.Coordinates(read_in, read_out),
        icl.fit_coordinates(model, task, embed=lambda z: z @ read_in, unembed=lambda residual: residual @ read_out),
    ):
        with icl.attach(
            model, task, coordinates=coordinates, probes=["structure", "equivalence"], final_prompts=20_000
        ) as session:
            session.step()
        assert session.report is not None
        assert session.report.passed, session.report.verdict
        assert_close(session.report.heads[0].omega, icl.probe(pair, task, prompts=100).heads[0].omega, rtol=1e-6)


def test_causal_probes_are_asked_of_our_models_and_undecided_for_others() -> None:
    ours, theirs = icl.attention_only(TASK, 2), foreign(TASK, n_layers=2)
    read_in = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    coordinates = icl.Coordinates(read_in, theirs.unembed.W_U)
    with (
        icl.attach(ours, TASK, probes=["ablation"], final_prompts=500) as first,
        icl.attach(theirs, TASK, probes=["ablation"], final_prompts=500, coordinates=coordinates) as second,
    ):
        pass
    assert first.notes == second.notes == []
    assert first.report is not None
    assert second.report is not None
    assert first.report["ablation"] == icl.probe(ours, TASK, probes=["ablation"], prompts=500)["ablation"]
    assert {m.status for m in second.report["ablation"].values()} == {"undecided"}


def test_a_model_that_is_called_in_another_way() -> None:
    """A loop that lets the query attend to itself: `predict` says so, and the circuits alone are not the model."""
    model = foreign(TASK, d_model=4, d_head=4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("b_" not in name)
    with icl.attach(model, TASK, predict=lambda z: model(z, start_at_layer=0)[:, -1], **FEW) as session:
        session.step()
    assert session.report is not None
    assert "attention to the query" in str(session.report["structure"]["zero_sum"].reason)
    assert session.run.config["attached"]["own_forward"] is True
