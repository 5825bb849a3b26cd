"""How far a model is from its circuits: measured, not argued; and what `probe` then says."""

import numpy as np
import pytest
import torch
from transformer_lens import HookedTransformer

import icl_mechinterp as icl
from icl_mechinterp.circuits import Capture
from icl_mechinterp.errors import ConfigError, ModelError
from icl_mechinterp.probes import PROBES
from icl_mechinterp.probes.fidelity import circuit_gap, circuit_prediction
from icl_mechinterp.probes.report import first_look
from icl_mechinterp.tasks import Batch
from tests.helpers import assert_close, within_stderr
from tests.planted import build, sane_pair

TASK = icl.LinearRegression(d=3, context=6, noise=0.1)


def _capture(model: HookedTransformer, prompts: int = 200):
    batch = TASK.sample(prompts, generator=torch.Generator().manual_seed(1))
    snapshot = Capture(TASK, batch)(model)
    return snapshot.prediction, snapshot.circuits, batch.z


def test_the_gap_of_a_model_of_nothing_but_circuits_is_rounding() -> None:
    assert circuit_gap(*_capture(icl.attention_only(TASK, 2))) < 1e-10


def test_the_gap_is_what_the_circuits_miss() -> None:
    """A bias b on the output moves every prediction by b: the gap is b^2 / Var(yhat)."""
    model = icl.attention_only(TASK, 2)
    variance = _capture(model)[0].double().var(correction=0)
    model.unembed.b_U.data.fill_(0.3)
    prediction, circuits, z = _capture(model)
    assert_close(circuit_prediction(circuits, z) + 0.3, prediction.double(), rtol=1e-4, atol=1e-6)
    assert circuit_gap(prediction, circuits, z) == pytest.approx(0.09 / float(variance), rel=1e-4)


def test_the_gap_of_several_layers_is_no_number() -> None:
    assert np.isnan(circuit_gap(*_capture(icl.attention_only(TASK, 2, n_layers=2))))


def _positions(model: HookedTransformer) -> None:
    def moved(residual: torch.Tensor, hook: object) -> torch.Tensor:
        del hook
        return residual + 0.3 * torch.arange(residual.shape[1]).unsqueeze(-1) / residual.shape[1]

    model.add_perma_hook("blocks.0.hook_resid_pre", moved)


def _value_bias(model: HookedTransformer) -> None:
    model.blocks[0].attn.b_V.data.fill_(0.2)


@pytest.mark.parametrize(
    ("change", "cause"), [(_value_bias, "it has biases"), (_positions, "a hook")], ids=["biases", "hook"]
)
def test_matrices_decide_nothing_about_a_model_that_is_more_than_they(change, cause: str) -> None:
    """The structure is planted right; what the model adds to it must not be called debiased gradient descent by it."""
    model = build(sane_pair(TASK), TASK)
    clean = icl.probe(model, TASK, probes=["structure"])["structure"]
    change(model)
    report = icl.probe(model, TASK, prompts=2_000)
    judged = [m for m in report["structure"].values() if m.required]
    assert {m.status for m in judged} == {"undecided"}
    assert all("circuits alone do not give" in (m.reason or "") and cause in (m.reason or "") for m in judged)
    assert report["structure"]["zero_sum"].value == clean["zero_sum"].value
    assert not report.passed


def test_a_model_with_its_own_embedding_is_probed_in_task_coordinates() -> None:
    """The planted pair behind an invertible embedding: the same verdict, from its own forward pass."""
    planted = build(sane_pair(TASK), TASK).double()
    width = TASK.d + 1
    rotation = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(0)).double())[0]
    attention = planted.blocks[0].attn
    for weight in (attention.W_Q, attention.W_K, attention.W_V):
        weight.data.copy_(rotation.T @ weight.data)
    attention.W_O.data.copy_(attention.W_O.data @ rotation)
    planted.unembed.W_U.data.copy_(rotation.T @ planted.unembed.W_U.data)
    coordinates = icl.Coordinates(read_in=rotation, read_out=planted.unembed.W_U)
    report = icl.probe(planted, TASK, coordinates=coordinates, prompts=2_000)
    reference = icl.probe(build(sane_pair(TASK), TASK).double(), TASK, prompts=2_000)
    assert report.algorithm == reference.algorithm
    for (_, ours), (_, theirs) in zip(report.measurements, reference.measurements, strict=True):
        assert ours.status == theirs.status, ours.name
        if ours.value is not None:
            assert ours.value == pytest.approx(theirs.value, rel=1e-4, abs=1e-6), ours.name


# --- what must not be believed ----------------------------------------------------------------------------------------


def _nan(value: torch.Tensor, hook: object) -> torch.Tensor:
    del hook
    return value * torch.nan


def _raises(value: torch.Tensor, hook: object) -> torch.Tensor:
    raise ValueError("boom")


@pytest.mark.parametrize(("hook", "says"), [(_nan, "NaN"), (_raises, "ValueError: boom")])
@pytest.mark.parametrize("probes", [PROBES, ("structure",)], ids=["all", "structure"])
def test_a_forward_pass_without_predictions_is_refused(hook, says: str, probes) -> None:
    model = build(sane_pair(TASK), TASK)
    model.add_perma_hook("blocks.0.attn.hook_z", hook)
    with pytest.raises(ModelError, match=says):
        icl.probe(model, TASK, probes=probes)


def test_weights_of_few_digits_do_not_hide_a_hook() -> None:
    """Rounding in bfloat16 is as large as what a hook does; so only the model's own forward is believed."""
    model = build(sane_pair(TASK), TASK).bfloat16()

    def silence(z: torch.Tensor, hook: object) -> torch.Tensor:
        del hook
        return z * torch.tensor([0.0, 1.0]).to(z)[:, None]

    model.add_perma_hook("blocks.0.attn.hook_z", silence)
    report = icl.probe(model, TASK, prompts=500)
    assert report["equivalence"]["distance_debiased_gd"].passed is False
    assert {m.status for m in report["ablation"].values()} == {"undecided"}
    assert "bfloat16" in str(report["ablation"]["keep_structure"].reason)


class SineTask:
    """Labels that are no linear function; a user's task knows only the protocol."""

    d, context, n_out, noise = 3, 6, 1, 0.1

    def sample(self, batch, *, generator, context=None, dtype=torch.float32) -> Batch:
        z, _ = TASK.sample(batch, generator=generator, context=context, dtype=dtype)
        beta = torch.randn(batch, 3, 1, generator=generator, dtype=dtype)
        labels = torch.sin(2 * z[..., :3] @ beta)
        z[..., 3:] = labels
        z[:, -1, 3:] = 0
        return Batch(z, labels[:, -1])

    def to_dict(self) -> dict:
        return {"kind": "sine"}


def test_no_formula_of_linear_regression_is_applied_to_another_task(generator: torch.Generator) -> None:
    model, task = build(sane_pair(TASK), TASK), SineTask()
    report = icl.probe(model, task, probes=["structure", "equivalence", "ablation"], prompts=4_000)
    z, target = task.sample(20_000, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        errors = (model.double()(z, start_at_layer=0)[:, -1] - target).square().numpy()
    loss = report["equivalence"]["loss"]
    within_stderr(loss.value, float(errors.mean()), float(np.hypot(loss.stderr, errors.std() / 20_000**0.5)))
    for name, probe in (("loss", "equivalence"), ("manifold_gap", "structure"), ("remove_diagonal_loss", "ablation")):
        assert report[probe][name].status == "undecided"
        assert "SineTask" in str(report[probe][name].reason)
    assert not report.passed


def test_the_verdict_speaks_only_of_what_was_asked() -> None:
    model = build(sane_pair(TASK), TASK)
    assert icl.probe(model, TASK, probes=["structure"]).verdict.startswith("By its weights alone")
    for probes in (["ablation"], ["structure", "ablation"]):
        assert "its function was not asked" in icl.probe(model, TASK, probes=probes).verdict
    with pytest.raises(ConfigError, match="probes is empty"):
        icl.probe(model, TASK, probes=[])


def test_one_example_predicts_nothing_and_is_no_hook() -> None:
    """With one example x - xbar = 0: debiased GD predicts zero, and the rounding around it is no departure."""
    short = icl.LinearRegression(3, 1, 0.1)
    report = icl.probe(build(sane_pair(TASK), short), short, prompts=500)
    assert "predicts a constant" in str(report["equivalence"]["distance_debiased_gd"].reason)
    assert not report.passed
    assert not any("hook" in str(m.reason) for _, m in report.measurements)


def test_labels_of_correlated_covariates_have_their_own_variance() -> None:
    task = icl.LinearRegression(3, 20, 0.1, covariance=[[2.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.0, 0.0, 0.5]])
    measured = icl.probe(build(sane_pair(TASK), task), task, probes=["ablation"])["ablation"]["remove_diagonal_loss"]
    assert measured.reference == pytest.approx(3.5 / 3 + 0.1)


@pytest.mark.parametrize(
    ("d", "context", "expected"), [(5, 40, 2_000), (64, 1024, 2**26 // (4 * 1025 * 65)), (256, 16_384, 100)]
)
def test_long_and_wide_prompts_are_fewer(d: int, context: int, expected: int) -> None:
    assert first_look(icl.LinearRegression(d, context, 0.1), 2_000, 2**26) == expected
