"""Interchange against edits written out by hand, and scores against plain draws."""

import numpy as np
import pytest
import torch

import icl_mechinterp as icl
from icl_mechinterp import theory
from icl_mechinterp.circuits import circuits
from icl_mechinterp.probes import classify
from icl_mechinterp.probes.interchange import (
    ALGORITHMS,
    input_level,
    interchange,
    low_level,
    normaliser_change,
    realised_algorithm,
    recombine,
    row_level,
)
from icl_mechinterp.probes.row import Row, attend
from icl_mechinterp.probes.statistics import Context, with_labels
from icl_mechinterp.results import ProbeResult
from icl_mechinterp.tasks import LinearRegression
from tests.helpers import assert_close
from tests.planted import Heads, build, heads, sane_pair
from tests.planted_algorithms import linear_attention, overwritten

TASK = LinearRegression(5, 40, 0.1)
SHORT = LinearRegression(3, 12, 0.5, coefficient_scale=1.5)
NAMES = {*(f"interchange_{name}" for name in ALGORITHMS), "normaliser"}


def row_of(planted: Heads) -> Row:
    return Row(planted.kq, planted.ov, planted.kq.shape[-1] - 1)


def asked(planted: Heads, task: LinearRegression = TASK, **options) -> ProbeResult:
    model = build(planted, task)
    found = circuits(model, task)
    return interchange(low_level(model, found, task), classify(found), task, **options)


def leaky_pair(task: LinearRegression, leak: float) -> Heads:
    planted = sane_pair(task)
    kq = planted.kq.clone()
    kq[:, task.d, : task.d] = leak
    return planted.replaced(kq=kq)


def hooks_of(model: torch.nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


# --- taking a model apart ---------------------------------------------------------------------------------------------


def test_recombined_prompts_hold_what_their_names_say(generator: torch.Generator) -> None:
    queries, keys, values = (SHORT.sample(4, generator=generator).z for _ in range(3))
    z = recombine(queries, keys, values, SHORT.d)
    assert torch.equal(z[:, -1], queries[:, -1])
    assert torch.equal(z[:, :-1, :3], keys[:, :-1, :3])
    assert torch.equal(z[:, :-1, 3:], values[:, :-1, 3:])


def test_a_model_of_circuits_is_taken_apart_there() -> None:
    model = build(sane_pair(TASK), TASK)
    low = low_level(model, circuits(model, TASK), TASK)
    assert low.level == "circuits"
    assert low.row is not None


def test_a_model_without_softmax_is_taken_apart_at_its_hooks(generator: torch.Generator) -> None:
    """Keys that read labels show where parts come from: the keys' labels move the scores, the values' are attended to."""
    model = linear_attention(SHORT, 0.2, 4.0).double()
    model.blocks[0].attn.W_K.data += 0.1 * torch.randn(model.blocks[0].attn.W_K.shape, generator=generator)
    found, before = circuits(model, SHORT), hooks_of(model)
    low = low_level(model, found, SHORT)
    assert low.level == "hooks"
    assert low.row is None
    queries, keys, values = (SHORT.sample(6, generator=generator, dtype=torch.float64).z for _ in range(3))
    scores = torch.einsum("blk,kq,bq->bl", keys[:, :-1], found.kq[0, 0], queries[:, -1])
    expected = torch.einsum("bl,blt,ot->bo", scores / SHORT.context, values[:, :-1], found.ov[0, 0])
    assert_close(low.run(queries, keys, values), expected.detach(), rtol=1e-9, atol=1e-10)
    assert hooks_of(model) == before


def test_hooks_go_when_the_forward_fails(generator: torch.Generator) -> None:
    model = linear_attention(SHORT, 0.2, 4.0)
    low = low_level(model, circuits(model, SHORT), SHORT)
    prompts, calls = SHORT.sample(6, generator=generator, dtype=torch.float64).z, []

    def fail_at_the_third(value: torch.Tensor, hook: object) -> None:
        calls.append(1)
        if len(calls) == 3:  # keys and values are recorded first
            raise RuntimeError("the user's hook failed")

    model.add_hook("blocks.0.attn.hook_z", fail_at_the_third)
    before = hooks_of(model)
    with pytest.raises(RuntimeError, match="the user's hook failed"):
        low.run(prompts, prompts, prompts)
    assert hooks_of(model) == before


@pytest.mark.parametrize("n_layers", [1, 2])
def test_a_black_box_is_taken_apart_at_its_prompt(n_layers: int, generator: torch.Generator) -> None:
    model = overwritten(SHORT, lambda z: theory.ridge(z, 0.7), n_layers=n_layers).double()
    low = low_level(model, circuits(model, SHORT), SHORT)
    assert low.level == "inputs"
    queries, keys, values = (SHORT.sample(6, generator=generator, dtype=torch.float64).z for _ in range(3))
    expected = theory.ridge(recombine(queries, keys, values, SHORT.d), 0.7)
    assert_close(low.run(queries, keys, values), expected, rtol=1e-9)


def test_all_levels_agree_where_they_can(generator: torch.Generator) -> None:
    """A pair without label keys: circuits and prompt are two ways to the same interchange."""
    row = row_of(sane_pair(SHORT))
    queries, keys, values = (SHORT.sample(6, generator=generator, dtype=torch.float64).z for _ in range(3))
    inside, outside = row_level(row), input_level(row.predict, SHORT.d)
    assert_close(inside.run(queries, keys, values), outside.run(queries, keys, values), rtol=1e-10, atol=1e-12)


# --- the normaliser ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leak", [0.0, 0.1])
def test_the_change_of_the_denominators(leak: float, generator: torch.Generator) -> None:
    row = row_of(leaky_pair(SHORT, leak))
    first, second = (SHORT.sample(6, generator=generator, dtype=torch.float64) for _ in range(2))
    context = Context.of(first, SHORT)
    response = normaliser_change(row, first.z, second.z, context)

    def expected(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        scores, values = row.scores(one, one), row.values(one)
        moved = attend(scores, values, normaliser_of=row.scores(one, two))
        return (moved - attend(scores, values)).sum(1)[:, 0]

    assert_close(response.answers, expected(first.z, second.z), rtol=1e-9, atol=1e-12)
    flipped = (with_labels(batch.z, -batch.z[:, :-1, SHORT.d], SHORT.d) for batch in (first, second))
    minus = response.offset - response.swing + response.departure[1]
    assert_close(minus, expected(*flipped), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("planted", "low", "high"),
    [
        (sane_pair(TASK, 0.03), 0.9995, 0.9999),  # .9997
        (heads(5, [0.13, -0.13], [3.4, -3.4]), 0.905, 0.925),  # .915 +- .01
        (sane_pair(TASK, 0.15), 0.845, 0.875),  # .859
        (heads(5, [0.518], [1.494]), -0.02, 0.05),  # .007: a single head's denominator has even terms, and mu sum
    ],
    ids=["gamma.03", "gamma.13", "gamma.15", "single"],
)
def test_where_the_debiasing_lives(planted: Heads, low: float, high: float) -> None:
    measured = asked(planted, prompts=5_000)["normaliser"]
    assert measured.value is not None
    assert low < measured.value < high
    assert measured.passed is (high > 0.5)


# --- scores -----------------------------------------------------------------------------------------------------------


def test_scores_are_what_plain_draws_give() -> None:
    """Keys from a second prompt, everything written out in numpy, on other draws; within their joint error."""
    planted, eta, n = heads(5, [0.15, -0.15], [2.9, -2.9]), 2 * 0.15 * 2.9, 20_000
    measured = asked(planted, prompts=4_000)
    rng = np.random.default_rng(3)
    x, other, q = (rng.standard_normal(shape) for shape in ((n, 40, 5), (n, 40, 5), (n, 5)))
    y = np.einsum("nld,nd->nl", x, rng.standard_normal((n, 5)) / 5**0.5) + 0.1**0.5 * rng.standard_normal((n, 40))
    similarity = np.einsum("nld,nd->nl", other, q)
    weights = np.exp(0.15 * similarity)
    opposite = np.exp(-0.15 * similarity)
    yhat = 2.9 * ((weights / weights.sum(1, keepdims=True) - opposite / opposite.sum(1, keepdims=True)) * y).sum(1)
    centred = similarity - similarity.mean(1, keepdims=True)
    for name, values in (("debiased_gd", centred), ("gd", similarity)):
        squares = (yhat - eta * (values * y).mean(1)) ** 2
        parts = [a.mean() / b.var() for a, b in zip(np.split(squares, 20), np.split(yhat, 20), strict=True)]
        error = np.hypot(np.std(parts, ddof=1) / 20**0.5, measured[f"interchange_{name}"].stderr)
        score = measured[f"interchange_{name}"].detail["parts"]["keys"]
        assert abs(score - (1 - squares.mean() / yhat.var())) < 4 * error


def test_a_score_is_the_least_of_its_parts() -> None:
    for name, measured in asked(sane_pair(SHORT), SHORT, prompts=2_000).items():
        if name != "normaliser":
            assert measured.value == min(measured.detail["parts"].values())
            assert set(measured.detail["parts"]) == {"query", "keys", "values"}


def test_debiased_and_vanilla_gd_of_equal_risk_are_told_apart() -> None:
    """At eta = .936 their risks are the same, so no loss can tell them apart (d = 5, L = 40, sigma^2 = .1)."""
    eta = theory.equal_risk_step(5, 40, 0.1)
    assert eta == pytest.approx(0.936, abs=1e-3)
    result = asked(sane_pair(TASK, step=eta / theory.optimal_step(5, 40, 0.1)), prompts=2_000)
    assert realised_algorithm(result) == "debiased_gd"
    assert result["interchange_debiased_gd"].passed is True
    assert result["interchange_gd"].passed is True, "vanilla GD's score is lower, by a paired interval"
    gd = overwritten(TASK, lambda z: theory.gd(z, eta))
    black_box = interchange(low_level(gd, circuits(gd, TASK), TASK), (), TASK, prompts=2_000)
    assert realised_algorithm(black_box) == "gd"
    assert black_box["interchange_gd"].passed is False
    assert "no softmax denominator" in black_box["normaliser"].reason


def test_the_same_seed_gives_the_same_result() -> None:
    first, again, other = (asked(sane_pair(SHORT), SHORT, prompts=500, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert set(first) == NAMES


# --- questions that cannot be asked -----------------------------------------------------------------------------------


def test_a_constant_model_is_undecided() -> None:
    result = asked(heads(5, [0.0, 0.0], [0.0, 0.0]), prompts=500)
    assert set(result) == NAMES
    assert all(m.status == "undecided" and "constant" in m.reason for m in result.values())
    assert realised_algorithm(result) == "undecided"


def test_flat_heads_have_no_denominator_to_exchange() -> None:
    result = asked(heads(5, [0.0], [1.0]), prompts=500)
    assert realised_algorithm(result) == "mean_of_labels"
    assert "same in every context" in result["normaliser"].reason


def test_with_a_covariance_the_step_is_a_matrix() -> None:
    """Heads of +-gamma A* realise debiased GD, heads of +-gamma I do not."""
    covariance = [[1.0, 0.7, 0.2], [0.7, 1.0, 0.7], [0.2, 0.7, 1.0]]
    task = LinearRegression(3, 40, 0.1, covariance=covariance)
    best = torch.from_numpy(theory.optimal_preconditioner(covariance, 40, 0.1))
    plain = sane_pair(task)
    kq = plain.kq.clone()
    kq[:, :3, :3] = 0.03 * torch.stack([best, -best])
    ov = plain.ov.clone()
    ov[:, 0, 3] = torch.tensor([1.0, -1.0]) / 0.06
    with_matrix, with_number = asked(Heads(kq, ov), task, prompts=4_000), asked(plain, task, prompts=4_000)
    assert realised_algorithm(with_matrix) == "debiased_gd"
    assert with_matrix["interchange_debiased_gd"].detail["step"] == pytest.approx(1.0, abs=0.02)
    assert with_matrix["normaliser"].passed
    assert realised_algorithm(with_number) != "debiased_gd"
    assert with_number["interchange_debiased_gd"].passed is False


def test_several_label_slots_are_not_asked() -> None:
    class TwoLabels:
        """Stands for a task with two label slots."""

        d, context, n_out, noise = 3, 12, 2, 0.1
        sample, to_dict = SHORT.sample, SHORT.to_dict

    result = interchange(row_level(row_of(sane_pair(SHORT))), (), TwoLabels())
    assert all("2 label slots" in m.reason for m in result.values())


@pytest.mark.parametrize("prompts", [1, 2.5, True])
def test_a_wrong_number_of_prompts_is_refused(prompts) -> None:
    with pytest.raises(icl.ConfigError, match="at least 2"):
        asked(sane_pair(SHORT), SHORT, prompts=prompts)
