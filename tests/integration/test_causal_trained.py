"""The causal probes on a model that was trained by the shipped `demo` config: what must hold, to the stated accuracy."""

import numpy as np
import pytest
import torch

import icl_mechinterp as icl
from icl_mechinterp import theory
from icl_mechinterp.probes import classify
from icl_mechinterp.probes.ablation import Subject, ablate
from icl_mechinterp.probes.hook_patching import patch_hook
from icl_mechinterp.probes.patching import Runs, make_pair, patch
from icl_mechinterp.probes.row import Row
from icl_mechinterp.tasks import generator_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(trained_run):
    """The model and its task, trained for 20,000 steps."""
    run = trained_run("demo")
    return run.model(), run.task


@pytest.fixture(scope="module")
def subject(trained) -> Subject:
    model, task = trained
    found = icl.circuits(model, task)
    batch = task.sample(20_000, generator=generator_for(7, "probe"), dtype=torch.float64)
    return Subject(Row.of(found), classify(found), batch)


@pytest.fixture(scope="module")
def results(trained):
    model, task = trained
    report = icl.probe(model, task, probes=["ablation", "patching"])
    return {result.probe: result for result in report.results}


def test_every_measurement_passes(results):
    statuses = {f"{p}.{name}": m.status for p, result in results.items() for name, m in result.items()}
    assert statuses == dict.fromkeys(statuses, "passed")


def test_the_structure_is_all_there_is(results):
    assert results["ablation"]["keep_structure"].value < 1e-3


def test_without_the_diagonal_nothing_is_learned(results):
    assert results["ablation"]["remove_diagonal_loss"].value == pytest.approx(1.1, abs=0.03)


def test_ablating_nothing_is_the_clean_loss_exactly(subject):
    z, target = subject.batch
    assert ablate(subject, [], "zero").effect.loss == float((target - subject.row.predict(z)).square().numpy().mean())


def test_head_effects_are_within_one_per_cent_of_omega_and_mu(results):
    assert results["ablation"]["head_effect_gap"].value < 0.01


@pytest.mark.parametrize("head", [0, 1])
def test_losses_without_a_head_are_those_of_an_independent_computation(subject, head):
    """loss(mu) = 1 + s - 2 mu.b + mu G mu with the head's mu zero, plus mu^2 G_hh for another prompt's output.

    b and G come from (omega, mu) on other prompts, with labels integrated out; within 1 % after the sampling error of
    the measured loss, of which the loss of the clean model on the same prompts takes a part.
    """
    omega, mu = (np.array([getattr(h, name) for h in subject.heads]) for name in ("omega", "mu"))
    b, G = theory.head_moments(omega, 5, 40, 0.1, prompts=100_000, generator=torch.Generator().manual_seed(8))
    without = theory.kernel_loss(np.where(np.arange(2) == head, 0.0, mu), b, G, 0.1)
    expected = {"zero": without, "resample": without + mu[head] ** 2 * G[head, head]}
    for kind, value in expected.items():
        effect = ablate(subject, [head], kind).effect
        assert abs(effect.loss / value - 1) < 0.01 + 3 * effect.stderr / value
        assert effect.loss_gap < 0.01  # same prompts: no sampling error to allow for


def test_a_constant_added_to_the_covariates_hardly_moves_it(subject, trained):
    _, task = trained
    pair = make_pair("covariates_shifted", subject.batch, task, torch.Generator().manual_seed(0))
    runs, ideal = Runs(subject.row, pair), Runs(subject.ideal, pair)
    found = patch(runs, ideal, "output", step=0.88)
    assert found.metrics.change < 3e-3
    read = float(subject.row.ov[:, 0, :5].sum())  # all that softmax lets through
    assert float((runs.total - read).abs().max()) < 1e-9


def test_path_effects_add_up_and_shares_are_halves(results):
    assert results["patching"]["path_sum_gap"].value < 1e-6
    share = results["patching"]["head_loss_share"]
    assert share.detail["sum"] == pytest.approx(1, abs=1e-9)
    for head in share.detail["per_head"].values():
        assert abs(head["share"] - 0.5) < 4 * head["stderr"] + 0.02


def test_every_patch_is_what_theory_says(results):
    detail = results["patching"]["path_sum_gap"].detail
    assert detail["agree"] == detail["of"]


def test_hooks_on_the_trained_model_do_the_same(subject, trained):
    model, task = trained
    clean, corrupted = (task.sample(16, generator=torch.Generator().manual_seed(s)).z for s in (1, 2))
    found = patch_hook(model, clean, corrupted, "blocks.0.attn.hook_z", heads=[0]).double()
    outputs = [subject.row.outputs(z.double()) for z in (clean, corrupted)]
    assert float((found - (outputs[1][:, 0] + outputs[0][:, 1])).abs().max()) < 1e-4
