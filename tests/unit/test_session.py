"""The parts of an attached session, and every mistake in attaching one."""

import random
import re

import numpy as np
import pytest
import torch

import icl_mechinterp as icl
from icl_mechinterp.circuits import Capture
from icl_mechinterp.errors import ConfigError, ModelError, RunError, UserError
from icl_mechinterp.models.undisturbed import modules_behind, undisturbed
from icl_mechinterp.session.losses import LossWindow
from tests.helpers import assert_close
from tests.helpers_session import WIDTH, foreign

TASK = icl.LinearRegression(d=3, context=6, noise=0.1)
CPU = torch.device("cpu")


def _says(error: pytest.ExceptionInfo, *parts: str) -> None:
    for part in parts:
        assert part in str(error.value), f"{part!r} is not in: {error.value}"


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"every": 0}, ("every", "0", "at least 1")),
        ({"every": 2.5}, ("every", "2.5", "whole number")),
        ({"probes": ["structur"]}, ("structur", "Did you mean 'structure'?")),
        ({"probes": "structure"}, ("list of names",)),
        ({"final_prompts": 1}, ("final_prompts", "at least 2")),
        ({"start": -1}, ("start", "-1")),
    ],
)
def test_a_value_that_cannot_be_used(options: dict, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        icl.attach(icl.attention_only(TASK, 2), TASK, **options)
    _says(error, *parts)


def test_something_that_is_no_task() -> None:
    with pytest.raises(ConfigError, match=r"task must be a task such as icl\.LinearRegression; got a dict"):
        icl.attach(icl.attention_only(TASK, 2), {"d": 3})


def test_something_that_is_no_hooked_transformer() -> None:
    with pytest.raises(ModelError) as error:
        icl.attach(torch.nn.Linear(4, 4), TASK)
    _says(error, "HookedTransformer", "got a Linear", "attention_only")


def test_a_model_without_the_hooks_needed() -> None:
    model = icl.attention_only(TASK, 2)
    del model.hook_dict["blocks.0.attn.hook_pattern"]
    with pytest.raises(ModelError, match=r"no hook point 'blocks\.0\.attn\.hook_pattern'"):
        icl.attach(model, TASK)


def test_a_model_whose_hooks_do_nothing() -> None:
    model = icl.attention_only(TASK, 2)
    model.blocks[0].attn.forward = lambda query_input, **_: torch.zeros_like(query_input)
    with pytest.raises(ModelError, match="does not change the output"):
        icl.attach(model, TASK)


def test_twice_to_one_model() -> None:
    model = icl.attention_only(TASK, 2)
    early = icl.attach(model, TASK, probes=["structure"])
    with icl.attach(model, TASK, probes=["structure"]):
        for again in (lambda: icl.attach(model, TASK), early.open):
            with pytest.raises(ModelError) as error:
                again()
            _says(error, "attached to a session that is still open", "close()")
    with icl.attach(model, TASK, probes=["structure"]):
        pass


def test_a_folder_in_use(tmp_path) -> None:
    model, other = icl.attention_only(TASK, 2), icl.attention_only(TASK, 2)
    waiting = icl.attach(other, TASK, out=tmp_path / "run")
    with icl.attach(model, TASK, out=tmp_path / "run", probes=["structure"]):
        for again in (lambda: icl.attach(other, TASK, out=tmp_path / "run"), waiting.open):
            with pytest.raises(RunError, match="is in use: it holds a run, finished or being recorded"):
                again()
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="is a file"):
        icl.attach(model, TASK, out=tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(RunError, match="is not empty and holds no run"):
        icl.attach(model, TASK, out=tmp_path / "full")


def test_a_step_outside_the_block() -> None:
    session = icl.attach(icl.attention_only(TASK, 2), TASK, probes=["structure"])
    with pytest.raises(UserError) as error:
        session.step(loss=1.0)
    _says(error, "session.step() was called outside the session's block", "is new", "with icl.attach(...)")
    with pytest.raises(RunError, match="nothing was recorded yet"):
        session.run  # noqa: B018
    with session:
        session.step(loss=1.0)
    for method in (session.step, session.capture, lambda: session.observe(1.0)):
        with pytest.raises(UserError, match="the session is closed"):
            method()
    with pytest.raises(UserError, match="one session is one training"):
        session.open()
    session.close()  # a second time does nothing


def test_coordinates_that_do_not_fit() -> None:
    model, embedding = foreign(TASK), torch.nn.Linear(TASK.d + 1, WIDTH, bias=False)
    W_U = model.unembed.W_U
    with pytest.raises(ModelError) as error:
        icl.attach(model, TASK)
    _says(error, f"d_model = {WIDTH}", "coordinates=icl.Coordinates(")
    with pytest.raises(ModelError, match=r"share d_model.*pass embedding\.weight\.T"):
        icl.Coordinates(embedding.weight, W_U)
    with pytest.raises(ModelError) as error:
        icl.attach(model, TASK, coordinates=icl.Coordinates(torch.randn(TASK.d, WIDTH), W_U))
    _says(error, "read_in must be [token d_model] = (4, 8)", "got (3, 8)")
    with pytest.raises(ModelError) as error:
        icl.attach(model, TASK, coordinates=icl.Coordinates(embedding.weight.T, torch.randn(WIDTH, 2)))
    _says(error, "read_out must be", "(8, 1)", "got (8, 2)")
    with pytest.raises(ModelError, match="must be a matrix of floats"):
        icl.Coordinates([[1.0]], W_U)
    with pytest.raises(ModelError, match="or a function that returns them; got a tuple"):
        icl.attach(model, TASK, coordinates=lambda: (embedding.weight.T, W_U))


def test_a_read_in_that_loses_a_coordinate() -> None:
    model, read_in = foreign(TASK), torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    read_in[1] = 2 * read_in[0]
    with pytest.raises(ModelError) as error:
        icl.attach(model, TASK, coordinates=icl.Coordinates(read_in, model.unembed.W_U))
    _says(error, "not injective", "rank is 3", "d + N = 4")
    with pytest.raises(ModelError, match="its rank is 3"):
        icl.fit_coordinates(model, TASK, embed=lambda z: z @ read_in)


def test_prompts_with_the_querys_label(generator: torch.Generator) -> None:
    model = icl.attention_only(TASK, 2)
    z, target = TASK.sample(5, generator=generator)
    leaking = z.clone()
    leaking[1:3, -1, TASK.d :] = target[1:3]
    with pytest.raises(ConfigError) as error:
        icl.attach(model, TASK, prompts=icl.Batch(leaking, target))
    _says(error, "query's label is filled in in 2 of 5 prompts", "z[:, -1, 3:]")
    session = icl.attach(model, TASK, prompts=icl.Batch(z, target))
    session.check_prompts(z)
    with pytest.raises(ConfigError, match="leaks"):
        session.check_prompts(leaking)
    with pytest.raises(ConfigError, match=r"d \+ N = 3 \+ 1 = 4.*got \(5, 7, 3\)"):
        session.check_prompts(z[..., :3])
    with pytest.raises(ConfigError, match="NaN"):
        session.check_prompts(z * torch.nan)


@pytest.mark.parametrize(
    ("predict", "parts"),
    [
        (lambda model, z: model(z, start_at_layer=0), ("[batch out] = (32, 1)", "got (32, 7, 1)")),
        (lambda model, z: None, ("got NoneType",)),
        (lambda model, z: z[:, -1, :1], ("exactly once", "fired 0 times")),
        (lambda model, z: model(z, start_at_layer=0)[:, -1] + model(z, start_at_layer=0)[:, -1], ("fired 2 times",)),
    ],
)
def test_a_predict_that_is_not_the_models(predict, parts: tuple[str, ...]) -> None:
    model = icl.attention_only(TASK, 2)
    with pytest.raises(ModelError) as error:
        icl.attach(model, TASK, predict=lambda z: predict(model, z))
    _says(error, *parts)


def test_an_embed_of_another_width() -> None:
    with pytest.raises(ModelError, match=r"embed must turn prompts .* into \[batch pos d_model\].*got \(256, 7, 3\)"):
        icl.fit_coordinates(foreign(TASK), TASK, embed=lambda z: z[..., :3])


def test_checkpoints_of_a_model_that_a_run_cannot_give_back() -> None:
    model = icl.attention_only(TASK, 2)
    model.unembed.W_U.data[0] = 1.0
    with pytest.raises(ConfigError, match=r"checkpoint=True is for models as .*W_U is not the fixed one"):
        icl.attach(model, TASK, checkpoint=True)
    model = icl.attention_only(TASK, 2)
    with pytest.raises(ConfigError, match="a forward pass of its own"):
        icl.attach(model, TASK, checkpoint=True, predict=lambda z: model(z, start_at_layer=0)[:, -1])


# --- losses -----------------------------------------------------------------------------------------------------------


def test_a_window_takes_every_kind_of_number() -> None:
    told: list[str] = []
    window = LossWindow(lambda name, message: told.append(message))
    parameter = torch.tensor(3.0, requires_grad=True)
    for step, loss in enumerate(
        [1, 2.0, np.float32(3.0), parameter * 1.0, torch.tensor([[5.0]]), torch.tensor(6.0).bfloat16()]
    ):
        window.add(loss, step)
    assert window.take() == pytest.approx(20 / 6)
    assert np.isnan(window.take()), "a window without a loss"
    assert not told


@pytest.mark.parametrize("loss", [float("nan"), torch.tensor(torch.inf), "0.3", torch.ones(2), 1j, [1.0]])
def test_a_loss_that_is_no_number_is_told_once(loss) -> None:
    told: list[str] = []
    window = LossWindow(lambda name, message: told.append(message))
    for step in (7, 8):
        window.add(loss, step)
    assert not np.isfinite(window.take())
    assert len(told) == 1
    assert re.search("the loss is not a number at step 7", told[0])
    window.add(1.0, 9)
    assert window.take() == 1.0, "the next window is clean"


# --- looking without a trace ------------------------------------------------------------------------------------------


def test_modes_and_generators_are_put_back_also_after_an_exception() -> None:
    module = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(2, 2), torch.nn.Dropout())
    module[2].eval()
    modes = [m.training for m in module.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002

    def look() -> None:
        with torch.autocast("cpu", torch.bfloat16), undisturbed(CPU, module):
            assert not any(m.training for m in module.modules())
            assert not torch.is_grad_enabled()
            assert module(torch.ones(1, 2)).dtype == torch.float32
            torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        look()
    assert [m.training for m in module.modules()] == modes
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])  # noqa: NPY002
    assert torch.is_grad_enabled()


_GLOBAL = torch.nn.Dropout()


def test_the_modules_behind_a_function_are_found() -> None:
    class Owner(torch.nn.Module):
        def embed(self, z: torch.Tensor) -> torch.Tensor:
            return z

    module, owner = torch.nn.Linear(2, 2), Owner()
    assert modules_behind(None) == []
    assert modules_behind(module) == [module]
    assert modules_behind(owner.embed) == [owner]
    assert modules_behind(lambda z: module(z)) == [module]
    assert modules_behind(lambda z: _GLOBAL(z)) == [_GLOBAL]
    assert modules_behind(torch.relu) == []


# --- coordinates ------------------------------------------------------------------------------------------------------


def test_a_fit_finds_an_affine_embedding_with_positions(generator: torch.Generator) -> None:
    model, embedding = foreign(TASK).double(), torch.nn.Linear(4, WIDTH).double()
    positions = torch.randn(TASK.context + 1, WIDTH, generator=generator, dtype=torch.float64)
    found = icl.fit_coordinates(model, TASK, embed=lambda z: embedding(z) + positions)
    assert_close(found.read_in, embedding.weight.detach().T, rtol=1e-9, atol=1e-12)
    assert found.unexplained[0] < 1e-20
    assert torch.equal(found.read_out, model.unembed.W_U.detach())


def test_a_fit_leaves_the_embedding_as_it_was() -> None:
    """Dropout is off while the maps are fitted, and the user's random numbers are not used."""
    model, embedding = foreign(TASK), torch.nn.Sequential(torch.nn.Linear(4, WIDTH), torch.nn.Dropout(0.5))
    state = torch.get_rng_state()
    found = icl.fit_coordinates(model, TASK, embed=lambda z: embedding(z))
    assert_close(found.read_in, embedding[0].weight.detach().T, rtol=1e-4, atol=1e-5)
    assert torch.equal(torch.get_rng_state(), state)
    assert embedding[1].training


def test_a_fit_reports_what_it_leaves_unexplained() -> None:
    """x + c x^2 per coordinate: the square is uncorrelated with x, so the share is 2 c^2 / (1 + 2 c^2) for a Gaussian."""
    model = foreign(TASK).double()
    basis = torch.eye(4, WIDTH, dtype=torch.float64)
    square = torch.zeros(4, WIDTH, dtype=torch.float64)
    square[0, 0] = 0.5  # on the first covariate only: variances 1, 1, 1 and 1.1 of the label (0 at the query)
    found = icl.fit_coordinates(model, TASK, embed=lambda z: z @ basis + z.square() @ square, prompts=20_000)
    label = 1.1 * TASK.context / (TASK.context + 1)
    extra = 2 * 0.5**2
    assert found.unexplained[0] == pytest.approx(extra / (3 + label + extra), rel=0.05)


def test_a_fit_of_the_read_out_gives_the_predictions(generator: torch.Generator) -> None:
    model, embedding, head = (
        foreign(TASK).double(),
        torch.nn.Linear(4, WIDTH).double(),
        torch.nn.Linear(WIDTH, 1).double(),
    )
    found = icl.fit_coordinates(model, TASK, embed=embedding, unembed=head)
    assert found.unexplained[1] < 1e-12
    z = TASK.sample(50, generator=generator, dtype=torch.float64).z
    residual = model(embedding(z), start_at_layer=0, stop_at_layer=1).detach()[:, -1]
    change = (residual - residual.mean(0)) @ found.read_out
    truth = head(residual).detach()
    assert_close(change, truth - truth.mean(0), rtol=1e-6, atol=1e-9)


def test_the_read_in_is_read_anew_where_it_trains() -> None:
    model, embedding = foreign(TASK), torch.nn.Linear(4, WIDTH, bias=False)
    capture = Capture(TASK, TASK.sample(8, generator=torch.Generator().manual_seed(0)))
    given = icl.Coordinates(embedding.weight.T, model.unembed.W_U)
    fit = icl.fit_coordinates(model, TASK, embed=embedding)
    before = [capture(model, coordinates=c).circuits for c in (given, fit)]
    embedding.weight.data *= 2
    after = [capture(model, coordinates=c).circuits for c in (given, fit)]
    for old, new in zip(before, after, strict=True):
        assert_close(new.kq, 4 * old.kq, rtol=1e-3, atol=1e-5)
