"""Ablations and surgeries against hooks on the model, against matrices edited by hand, and against closed forms."""

import json
import math
from typing import get_args

import numpy as np
import pytest
import torch

import icl_mechinterp as icl
from icl_mechinterp import theory
from icl_mechinterp.probes import classify
from icl_mechinterp.probes.ablation import Kind, Operation, Subject, ablate, ablated, ablation, operate, operated
from icl_mechinterp.probes.row import Row, row_or_reason
from icl_mechinterp.tasks import generator_for
from tests.helpers import assert_close, within_stderr
from tests.planted import Heads, build, heads, sane_group, sane_pair

TASK = icl.LinearRegression(d=3, context=12, noise=0.1)
KINDS = get_args(Kind)
OPERATIONS = get_args(Operation)


def subject_of(model, *, prompts: int = 500, task=TASK) -> Subject:
    found = icl.circuits(model, task)
    batch = task.sample(prompts, generator=generator_for(4, "probe"), dtype=torch.float64)
    return Subject(Row.of(found), classify(found), batch)


def planted_subject(planted: Heads, *, prompts: int = 500, task=TASK) -> Subject:
    return subject_of(build(planted, task, dtype=torch.float64), prompts=prompts, task=task)


def result_of(model, task=TASK, **options):
    found = icl.circuits(model, task)
    heads = classify(found)
    few = task.sample(32, generator=generator_for(0, "fit"), dtype=torch.float64).z
    return ablation(row_or_reason(model, found, heads, few), heads, task, **options)


@pytest.fixture(scope="module")
def model():
    """Untrained, so that nothing about its matrices is special."""
    return icl.attention_only(TASK, 3, seed=2).double()


@pytest.fixture(scope="module")
def subject(model) -> Subject:
    return subject_of(model)


# --- ablation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_ablating_nothing_gives_the_clean_loss_exactly(subject, kind):
    effect = ablate(subject, [], kind).effect
    z, target = subject.batch
    assert effect.loss == float((target - subject.row.predict(z)).square().numpy().mean())
    assert effect.distance == 0
    assert effect.predicted_distance == 0


def test_zeroing_all_heads_gives_the_predictor_zero(subject):
    effect = ablate(subject, range(3), "zero").effect
    nothing = pytest.approx(float(subject.batch.target.square().mean()), rel=1e-14)
    assert effect.loss == nothing
    assert effect.predicted_loss == nothing
    assert effect.loss_gap == 0


@pytest.mark.parametrize("kind", ["zero", "mean", "resample"])
@pytest.mark.parametrize("chosen", [(0,), (2,), (0, 1), (0, 1, 2)])
def test_an_ablation_is_what_hooks_on_the_model_do(model, subject, kind, chosen):
    """The heads are edited inside the model's forward pass, at hook_z."""
    z, target = subject.batch
    edits = {
        "zero": torch.zeros_like,
        "mean": lambda value: value.mean(0, keepdim=True).expand_as(value),
        "resample": lambda value: torch.cat([value[-1:], value[:-1]]),
    }

    def edit(value, hook):
        value[:, :, list(chosen)] = edits[kind](value[:, :, list(chosen)].clone())
        return value

    with torch.no_grad():
        hooked = model.run_with_hooks(z, start_at_layer=0, fwd_hooks=[("blocks.0.attn.hook_z", edit)])[:, -1]
    clean = subject.row.predict(z)
    effect = ablate(subject, chosen, kind).effect
    assert effect.loss == pytest.approx(float((target - hooked).square().mean()), rel=1e-9)
    distance = float((hooked - clean).square().mean() / clean.var(correction=0))
    assert effect.distance == pytest.approx(distance, rel=1e-7)


def test_theory_puts_the_kernel_of_the_taxonomy_in_the_heads_place(subject):
    z, target = subject.batch
    head = subject.heads[1]
    kernel = theory.nadaraya_watson(z, head.omega, head.mu)
    expected = subject.outputs[:, 0] + kernel + subject.outputs[:, 2]
    effect = ablate(subject, [1], "theory").effect
    assert effect.loss == pytest.approx(float((target - expected).square().mean()), rel=1e-9)


def test_a_mean_ablation_has_its_closed_form(subject):
    """E (r + o - E o)^2 = E a^2 - 2 E a E o + (E o)^2, with r = t - yhat and a = r + o."""
    output = subject.outputs[:, 1, 0]
    a = subject.batch.target[:, 0] - subject.outputs.sum(1)[:, 0] + output
    expected = a.square().mean() - 2 * a.mean() * output.mean() + output.mean() ** 2
    assert ablate(subject, [1], "mean").effect.loss == pytest.approx(float(expected), rel=1e-9)


def test_resampling_over_all_other_prompts_has_its_closed_form(subject):
    """Over all shifts of the batch o' is independent of the prompt: E (a - o')^2 = E a^2 - 2 E a E o + E o^2."""
    outputs, target = subject.outputs[:40], subject.batch.target[:40]
    losses = [
        (target - ablated(outputs, [1], "resample", theory=outputs, shift=shift).sum(1)).square().mean()
        for shift in range(40)
    ]
    output = outputs[:, 1]
    a = target - outputs.sum(1) + output
    expected = a.square().mean() - 2 * a.mean() * output.mean() + output.square().mean()
    assert_close(torch.stack(losses).mean(), expected, rtol=1e-9)


def test_losses_of_planted_heads_are_those_of_the_exact_moments():
    """Zeroing and resampling one of three heads, beside loss(mu) = 1 + s - 2 mu.b + mu G mu from b and G of their own.

    The mean of a head is zero by symmetry, so the mean ablation has the loss of zeroing; another prompt's output adds
    mu^2 G_hh.
    """
    prompts = 8_000
    subject = planted_subject(sane_group(TASK, [0.5, -0.3, -0.2], gamma=0.2), prompts=prompts)
    omega, mu = (np.array([getattr(h, name) for h in subject.heads]) for name in ("omega", "mu"))
    b, G = theory.head_moments(omega, 3, 12, 0.1, prompts=20_000, generator=torch.Generator().manual_seed(8))
    for head in range(3):
        without = np.where(np.arange(3) == head, 0.0, mu)
        zeroed = theory.kernel_loss(without, b, G, 0.1)
        for kind, expected in (
            ("zero", zeroed),
            ("mean", zeroed),
            ("resample", zeroed + mu[head] ** 2 * G[head, head]),
        ):
            effect = ablate(subject, [head], kind).effect
            within_stderr(effect.loss, expected, effect.stderr)


def test_planted_heads_are_what_their_taxonomy_says():
    subject = planted_subject(sane_group(TASK, [0.5, -0.3, -0.2]).with_head(0.001, 0.01))
    for head in range(4):
        for kind in KINDS:
            effect = ablate(subject, [head], kind).effect
            assert effect.loss_gap < 1e-10
            assert effect.agrees
        assert ablate(subject, [head], "theory").effect.distance < 1e-20


# --- surgery ----------------------------------------------------------------------------------------------------------


def by_hand(kind: str, kq: np.ndarray, ov: np.ndarray, dummies: list[int]) -> None:
    """The operation entry by entry, in place."""
    n_heads, width, _ = kq.shape
    d, total = width - 1, ov[:, 0, -1].sum()
    size = np.abs(ov[:, 0, -1]).sum()
    for h in range(n_heads):
        mean = np.mean([kq[h, i, i] for i in range(d)])
        for i in range(width):
            for j in range(width):
                diagonal = i == j and i < d
                if kind == "keep_structure" and not diagonal:
                    kq[h, i, j] = 0
                if kind == "remove_diagonal" and diagonal:
                    kq[h, i, j] = 0
                if kind == "mean_diagonal" and diagonal:
                    kq[h, i, j] = mean
                if kind == "swap_signs":
                    kq[h, i, j] *= -1
        if kind == "keep_structure":
            ov[h, 0, :d] = 0
        if kind == "remove_label_entry":
            ov[h, 0, d] = 0
        if kind == "zero_sum":
            ov[h, 0, d] -= abs(ov[h, 0, d]) * total / size
        if kind == "swap_signs" or (kind == "drop_dummies" and h in dummies):
            ov[h] *= -1.0 if kind == "swap_signs" else 0.0


@pytest.mark.parametrize("kind", OPERATIONS)
def test_a_surgery_is_the_edit_by_hand(model, kind):
    planted = heads(3, [0.3, 0.001, -0.2], [2.0, 0.01, -1.0])
    found = Row.of(icl.circuits(model, TASK))
    row = Row(found.kq + planted.kq, found.ov + planted.ov, 3)
    kq, ov = row.kq.numpy().copy(), row.ov.numpy().copy()
    verdicts = planted_subject(planted).heads
    assert [h.label for h in verdicts] == ["positive", "dummy", "negative"]
    before = row.kq.clone(), row.ov.clone()
    changed = operated(row, kind, verdicts)
    by_hand(kind, kq, ov, dummies=[1])
    assert_close(changed.kq, torch.from_numpy(kq), rtol=1e-12)
    assert_close(changed.ov, torch.from_numpy(ov), rtol=1e-12)
    assert torch.equal(row.kq, before[0])
    assert torch.equal(row.ov, before[1])


def test_a_surgery_names_the_heads_that_it_changed():
    subject = planted_subject(sane_pair(TASK).with_head(0.001, 0.01))
    assert operate(subject, "drop_dummies").heads == (2,)
    assert operate(subject, "remove_diagonal").heads == (0, 1, 2)
    clean = subject_of(build(sane_pair(TASK), TASK, seed=None, dtype=torch.float64))
    assert operate(clean, "keep_structure").heads == ()


def test_swapped_signs_answer_the_opposite_query_with_the_opposite_sign(subject):
    """-OV softmax(-KQ q) v is minus the prediction for -q; a symmetric pair goes over into itself."""
    z = subject.batch.z
    opposite = z.clone()
    opposite[:, -1] *= -1
    swapped = operated(subject.row, "swap_signs", subject.heads).predict(z)
    assert_close(swapped, -subject.row.predict(opposite), rtol=1e-9, atol=1e-12)
    assert operate(planted_subject(sane_pair(TASK)), "swap_signs").effect.distance < 1e-20


def test_a_zero_sum_stays_and_another_is_made():
    assert operate(planted_subject(sane_pair(TASK)), "zero_sum").effect.distance < 1e-20
    lone = planted_subject(heads(3, [0.4, 0.1], [1.5, 0.5]))
    assert float(operated(lone.row, "zero_sum", lone.heads).ov[:, 0, -1].sum()) == pytest.approx(0, abs=1e-12)


# --- the measurements -------------------------------------------------------------------------------------------------


def test_a_planted_pair_passes_everything():
    result = result_of(build(sane_pair(TASK), TASK))
    assert {name: m.passed for name, m in result.items()} == dict.fromkeys(result, True)
    assert result["head_effect_gap"].value < 1e-4  # float32 parameters in a random basis
    assert result["keep_structure"].value < 1e-10
    assert result["drop_dummies"].value == 0
    within_stderr(result["remove_diagonal_loss"].value, 1.1, result["remove_diagonal_loss"].stderr + 1e-9)


def test_without_its_diagonal_a_lone_head_predicts_the_mean_label():
    """Loss 1 + s + mu^2 E ybar^2 with E ybar^2 = (1 + s) / L; plain prompts have a larger error."""
    measured = result_of(build(heads(3, [0.5], [1.2]), TASK), prompts=5_000)["remove_diagonal_loss"]
    within_stderr(measured.value, 1.1 + 1.2**2 * 1.1 / 12, measured.stderr)
    assert measured.stderr < 0.7 * math.sqrt(2 / 5_000) * measured.value  # squares of Gaussians at the least


def test_parts_that_theory_has_no_use_for_are_found():
    planted = sane_pair(TASK)
    kq, ov = planted.kq.clone(), planted.ov.clone()
    kq[0, 0, 1] += 0.4
    ov[1, 0, 0] += 0.5
    result = result_of(build(planted.replaced(kq=kq, ov=ov), TASK))
    assert result["keep_structure"].passed is False
    assert result["head_effect_gap"].passed is False


def test_a_model_that_works_without_its_diagonal_is_found():
    """KQ is a permutation of the covariates: its diagonal is zero, and off it lies what the model uses."""
    cycle = torch.roll(torch.eye(3, dtype=torch.float64), 1, 0)
    planted = sane_pair(TASK)
    kq = planted.kq.clone()
    kq[:, :3, :3] = torch.tensor([0.3, -0.3]).double()[:, None, None] * cycle + 0.05 * planted.kq[:, :3, :3]
    result = result_of(build(planted.replaced(kq=kq), TASK))
    assert result["keep_structure"].passed is False


def test_the_details_are_plain_values():
    result = result_of(build(sane_pair(TASK).with_head(0.001, 0.01), TASK), prompts=200)
    text = json.dumps([m.to_dict() for m in result.values()], allow_nan=False)
    table = result["head_effect_gap"].detail["table"]
    assert {tuple(row["heads"]) for row in table} == {(0,), (1,), (2,), (0, 1, 2)}
    assert {row["kind"] for row in table} == set(KINDS)
    assert {row["kind"] for row in result["keep_structure"].detail["surgeries"]} == set(OPERATIONS)
    assert result["drop_dummies"].detail["dummies"] == ["H2"]
    assert json.loads(text) == [m.to_dict() for m in result.values()]


def test_a_seed_gives_one_result_and_another_seed_another():
    model = build(sane_pair(TASK, gamma=0.3), TASK)
    first, again, other = (result_of(model, prompts=200, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


# --- what cannot be asked ---------------------------------------------------------------------------------------------


def undecided_because(result, words: str) -> None:
    for measurement in result.values():
        assert measurement.status == "undecided"
        assert measurement.required
        assert words in measurement.reason


def test_a_deeper_model_is_undecided():
    undecided_because(result_of(icl.attention_only(TASK, 2, n_layers=2)), "2 layers")


def test_a_model_that_predicts_a_constant_is_undecided():
    undecided_because(result_of(build(heads(3, [0.3, -0.3], [0.0, 0.0]), TASK)), "constant")


def test_covariates_with_a_covariance_leave_only_the_dummies_decided():
    task = icl.LinearRegression(3, 12, 0.1, covariance=torch.diag(torch.tensor([1.0, 2.0, 3.0])))
    result = result_of(build(sane_pair(task), task), task)
    assert {name: m.status for name, m in result.items()} == {
        "keep_structure": "undecided",
        "remove_diagonal_loss": "undecided",
        "drop_dummies": "passed",
        "head_effect_gap": "undecided",
    }
    assert result["head_effect_gap"].value is not None


# --- causal lies ------------------------------------------------------------------------------------------------------


def test_a_head_that_is_right_on_paper_but_bypassed_decides_nothing():
    """Perfect weights, and a hook that lets the head's output come from elsewhere."""
    model = build(sane_pair(TASK), TASK)
    assert result_of(model)["head_effect_gap"].passed

    def bypass(value, hook):
        value[:, :, 0] = value[:, :, 0].roll(1, 0)
        return value

    model.add_hook("blocks.0.attn.hook_z", bypass)
    undecided_because(result_of(model), "a hook changes its forward pass")


def test_a_head_with_a_tiny_kq_can_be_essential():
    """Softmax(gamma x.q) minus the flat mean is debiased GD: the flat head has no share of the step, and all the bias."""
    gamma = 0.05
    mu = theory.optimal_step(3, 12, 0.1) / gamma
    model = build(heads(3, [gamma, 1e-5], [mu, -mu]), TASK)
    assert [h.label for h in classify(icl.circuits(model, TASK))] == ["positive", "dummy"]
    result = result_of(model)
    assert result["keep_structure"].passed
    assert result["head_effect_gap"].passed
    assert result["drop_dummies"].passed is False
    assert result["drop_dummies"].value > 1


def test_heads_that_cancel_show_alone_and_vanish_together():
    subject = planted_subject(sane_pair(TASK).with_head(0.3, 3.0).with_head(0.3, -3.0))
    for head in (2, 3):
        assert ablate(subject, [head], "zero").effect.distance > 1
    assert ablate(subject, [2, 3], "zero").effect.distance < 1e-20
    assert ablate(subject, [2, 3], "resample").effect.distance < 1e-20


def test_heads_that_cancel_against_their_structure_are_found():
    """Dense KQs and covariate-reading OVs that cancel exactly: the prediction is perfect, each head is not its diagonal."""
    planted = sane_pair(TASK).with_head(0.1, 1.0).with_head(0.1, -1.0)
    kq, ov = planted.kq.clone(), planted.ov.clone()
    kq[2:, 0, 1] += 1.0
    ov[2, 0, 1], ov[3, 0, 1] = 1.0, -1.0
    model = build(planted.replaced(kq=kq, ov=ov), TASK)
    result = result_of(model)
    assert result["keep_structure"].passed
    assert result["head_effect_gap"].passed is False
    assert result["head_effect_gap"].detail["worst_head"] in ("H2", "H3")
