"""Label averages against drawn labels and exact risks; intervals and repeated looks against how often they err."""

import numpy as np
import pytest
import torch

import icl_mechinterp as icl
from icl_mechinterp import theory
from icl_mechinterp.probes.row import Row
from icl_mechinterp.probes.statistics import (
    Context,
    Estimate,
    LabelLaw,
    Moments,
    Response,
    asked_again,
    compare,
    conditional_moments,
    interval,
    judge_at,
    label_law,
    mean,
    quantile,
    ratio_influence,
    ratio_of_means,
    row_response,
    sequential,
    variance_terms,
    with_labels,
)
from icl_mechinterp.results import Measurement, ProbeResult
from icl_mechinterp.tasks import Batch, LinearRegression
from tests.helpers import assert_close, within_stderr
from tests.planted import Heads, sane_pair

TASK = LinearRegression(5, 40, 0.1)
SMALL = LinearRegression(3, 6, 0.5, coefficient_scale=1.5)
STEP = 0.88


def row_of(planted: Heads) -> Row:
    return Row(planted.kq, planted.ov, planted.kq.shape[-1] - 1)


def leaky(task: LinearRegression, leak: float = 0.02, covariate: float = 0.1) -> Row:
    """A pair whose keys read labels and whose OV reads a covariate, as every trained model's do a little."""
    planted = sane_pair(task, gamma=0.13)
    kq, ov = planted.kq.clone(), planted.ov.clone()
    kq[:, task.d, : task.d] = leak
    ov[0, 0, 0] = covariate
    return row_of(planted.replaced(kq=kq, ov=ov))


def draw(task: LinearRegression, prompts: int, generator: torch.Generator) -> tuple[Batch, Context]:
    batch = task.sample(prompts, generator=generator, dtype=torch.float64)
    return batch, Context.of(batch, task)


def algorithms(z: torch.Tensor, task: LinearRegression, context: Context, step: float = STEP) -> dict[str, Response]:
    weights = {
        "debiased_gd": theory.debiased_gd.weights(z, step),
        "gd": theory.gd.weights(z, step),
        "ridge": theory.ridge.weights(z, task.d * task.noise / task.coefficient_scale**2),
    }
    return {name: Response.linear(value, context) for name, value in weights.items()}


def series(row: Row, task: LinearRegression, prompts: int, generator: torch.Generator) -> dict[str, np.ndarray]:
    """Conditional values, and under `plain/` those of the same draws without any averaging."""
    batch, context = draw(task, prompts, generator)
    model, others, law = row_response(row, batch.z, context), algorithms(batch.z, task, context), label_law(task)
    plain = compare(model, others, context, None)
    return {**compare(model, others, context, law), **{f"plain/{name}": value for name, value in plain.items()}}


# --- responses --------------------------------------------------------------------------------------------------------


def test_algorithms_answer_what_they_predict(generator: torch.Generator) -> None:
    batch, context = draw(SMALL, 7, generator)
    expected = {
        "debiased_gd": theory.debiased_gd(batch.z, STEP),
        "gd": theory.gd(batch.z, STEP),
        "ridge": theory.ridge(batch.z, SMALL.d * SMALL.noise / 1.5**2),
    }
    for name, response in algorithms(batch.z, SMALL, context).items():
        assert_close(response.answers, expected[name][:, 0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("leak", [0.0, 0.2])
def test_a_rows_response_answers_what_the_row_predicts(leak: float, generator: torch.Generator) -> None:
    row = leaky(SMALL, leak)
    batch, context = draw(SMALL, 9, generator)
    response = row_response(row, batch.z, context)
    assert_close(response.answers, row.predict(batch.z)[:, 0], rtol=1e-10, atol=1e-12)
    flipped = with_labels(batch.z, -batch.z[:, :-1, SMALL.d], SMALL.d)
    assert_close(
        response.offset - response.swing + response.departure[1], row.predict(flipped)[:, 0], rtol=1e-10, atol=1e-12
    )
    assert bool(response.departure.any()) == (leak > 0), "the departure is exactly zero where keys read no label"


@pytest.mark.parametrize("leak", [0.0, 0.2])
def test_moved_labels(leak: float, generator: torch.Generator) -> None:
    row = leaky(SMALL, leak)
    batch, context = draw(SMALL, 9, generator)
    moved = with_labels(batch.z, batch.z[:, :-1, SMALL.d] + 1.0, SMALL.d)
    assert_close(row_response(row, batch.z, context, shift=1.0).answers, row.predict(moved)[:, 0], rtol=1e-10)


def test_responses_are_a_linear_space(generator: torch.Generator) -> None:
    batch, context = draw(SMALL, 5, generator)
    row = row_response(leaky(SMALL, 0.2), batch.z, context)
    other = algorithms(batch.z, SMALL, context)["gd"]
    assert_close((row - other).answers, row.answers - other.answers, rtol=1e-12, atol=1e-14)
    assert_close((row - other + other).departure, row.departure, rtol=1e-12, atol=1e-14)


# --- moments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leak", [0.0, 0.3])
def test_moments_given_covariates_are_those_of_drawn_labels(leak: float, generator: torch.Generator) -> None:
    """One prompt's covariates, 50,000 draws of its labels by the definition of the task."""
    draws = 50_000
    row, law = leaky(SMALL, leak, covariate=0.5), label_law(SMALL)
    (one, _), d = SMALL.sample(1, generator=generator, dtype=torch.float64), SMALL.d
    x = one[:, :, :d].expand(draws, -1, -1)
    beta = torch.randn(draws, d, 1, generator=generator, dtype=torch.float64) * 1.5 / d**0.5
    noise = torch.randn(draws, SMALL.context + 1, generator=generator, dtype=torch.float64) * SMALL.noise**0.5
    labels = (x @ beta)[..., 0] + noise
    z = with_labels(one.expand(draws, -1, -1), labels[:, :-1], d)
    context, drawn = Context(x, labels), row.predict(z)[:, 0].numpy()
    moments = conditional_moments(row_response(row, z, context), x, law)
    gap = conditional_moments(Response.target(context) - row_response(row, z, context), x, law)
    pairs = [
        (moments.first, drawn),
        (moments.second, drawn**2),
        (gap.second, (labels[:, -1].numpy() - drawn) ** 2),
    ]
    for conditional, plain in pairs:
        within_stderr(
            float(plain.mean()),
            float(conditional.mean()),
            float(np.hypot(mean(plain).stderr, mean(conditional).stderr)),
        )
        if leak == 0.0:
            assert np.ptp(conditional) < 1e-12, "nothing is left to chance: the covariates are always the same"
        else:
            assert conditional.std() < 0.5 * plain.std()


def test_losses_are_the_exact_risks(generator: torch.Generator) -> None:
    """Risks of section 3.6 for debiased and vanilla GD, and the Bayes risk for ridge with penalty d sigma^2."""
    batch, context = draw(TASK, 20_000, generator)
    exact = {
        "debiased_gd": theory.debiased_gd_risk(STEP, 5, 40, 0.1),
        "gd": theory.gd_risk(STEP, 5, 40, 0.1),
        "ridge": theory.bayes_risk(5, 40, 0.1),
    }
    for name, response in algorithms(batch.z, TASK, context).items():
        gap = conditional_moments(Response.target(context) - response, context.covariates, label_law(TASK))
        plain = mean((context.labels[:, -1] - response.answers).square().numpy())
        estimate = mean(gap.second)
        within_stderr(estimate.value, float(exact[name]), estimate.stderr)
        assert estimate.stderr < 0.5 * plain.stderr


@pytest.mark.parametrize(
    "task",
    [
        TASK,
        SMALL,
        LinearRegression(3, 10, 0.2, covariance=[[1.0, 0.5, 0.2], [0.5, 1.0, 0.5], [0.2, 0.5, 2.0]]),
    ],
    ids=["isotropic", "scaled", "covariance"],
)
@pytest.mark.parametrize("leak", [0.0, 0.02, 0.2])
def test_conditional_and_plain_averages_agree(task: LinearRegression, leak: float, generator: torch.Generator) -> None:
    """Also with keys that read labels, where only the departure from a linear answer is sampled."""
    sample = series(leaky(task, leak), task, 8_000, generator)
    for name in ("first", "second", "loss", "distance_debiased_gd", "distance_gd", "distance_ridge"):
        conditional, plain = sample[name], sample[f"plain/{name}"]
        difference = mean(conditional - plain)
        assert abs(difference.value) < 4 * difference.stderr, name


@pytest.mark.parametrize("leak", [0.0, 0.003, 0.02])
def test_conditional_averages_have_less_error(leak: float, generator: torch.Generator) -> None:
    """At leakages of 0 and of trained models (2 % and 15 % of omega)."""
    sample = series(leaky(TASK, leak, covariate=0.0), TASK, 8_000, generator)
    for name, factor in (("second", 0.6), ("loss", 0.4), ("distance_gd", 0.8)):
        assert mean(sample[name]).stderr < factor * mean(sample[f"plain/{name}"]).stderr, name


def test_both_signs_of_the_labels_cancel_the_leading_error(generator: torch.Generator) -> None:
    """With y alone, r (2 w^T y + r) would leave an error of first order in the leakage; with -y beside it, of second."""
    batch, context = draw(TASK, 4_000, generator)
    gap = row_response(leaky(TASK, 0.002, covariate=0.0), batch.z, context) - algorithms(batch.z, TASK, context)["gd"]
    both = gap.departure * (2 * torch.stack([gap.offset + gap.swing, gap.offset - gap.swing]) + gap.departure)
    assert float(both.mean(0).std()) < 0.3 * float(both[0].std())


def test_without_a_law_averages_are_plain(generator: torch.Generator) -> None:
    batch, context = draw(SMALL, 50, generator)
    model = row_response(leaky(SMALL), batch.z, context)
    others = algorithms(batch.z, SMALL, context)
    sample = compare(model, others, context, None)
    target = context.labels[:, -1]
    assert_close(torch.from_numpy(sample["loss"]), (target - model.answers).square(), rtol=1e-12)
    expected = (model.answers - others["ridge"].answers).square()
    assert_close(torch.from_numpy(sample["distance_ridge"]), expected, rtol=1e-12)
    with pytest.raises(AssertionError, match="unknown law"):
        conditional_moments(model, context.covariates, None)


def test_the_law_of_labels() -> None:
    assert label_law(SMALL) == LabelLaw(1.5**2 / 3, 0.5)

    class OtherTask:
        """A task that says nothing about its labels."""

        d, context, n_out, noise = 3, 6, 1, 0.5
        sample, to_dict = SMALL.sample, SMALL.to_dict

    assert label_law(OtherTask()) is None


# --- ratios and intervals ---------------------------------------------------------------------------------------------


def test_a_ratio_by_hand() -> None:
    numerator, denominator = np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0, 8.0])
    value, stderr = ratio_of_means(numerator, denominator)
    assert value == 0.5
    # (n - d/2) / 4 = 0, 1/4, -1/4: standard deviation 1/4, over sqrt 3
    assert ratio_influence(numerator, denominator) == pytest.approx([0.0, 0.25, -0.25])
    assert stderr == pytest.approx(0.25 / 3**0.5)


def test_a_ratio_is_exact_where_numerator_and_denominator_move_together() -> None:
    x = np.random.default_rng(0).exponential(size=100)
    value, stderr = ratio_of_means(3 * x, x)
    assert value == pytest.approx(3)
    assert stderr < 1e-14


def test_variance_terms_average_to_the_variance() -> None:
    x = np.random.default_rng(0).normal(3.0, 2.0, size=1000)
    assert variance_terms(Moments(x, x**2)).mean() == pytest.approx(x.var())


def test_intervals() -> None:
    assert quantile(0.95) == pytest.approx(1.959964, abs=1e-6)
    assert interval(Estimate(1.0, 0.5), confidence=0.95) == pytest.approx((1 - 0.979982, 1 + 0.979982), abs=1e-5)
    assert interval(Estimate(1.0, 0.1)).excludes(1.3)
    assert not interval(Estimate(1.0, 0.1)).excludes(1.1)
    with pytest.raises(icl.ConfigError, match=r"between 0 and 1; got 95"):
        quantile(95)


# --- repeated looks ---------------------------------------------------------------------------------------------------


def test_the_sample_doubles_between_looks_until_a_decision() -> None:
    asked: list[int] = []

    def sample(prompts: int) -> dict[str, np.ndarray]:
        asked.append(prompts)
        return {"x": np.full(prompts, float(len(asked)))}

    looked = sequential(sample, lambda s, _: len(s["x"]) if len(s["x"]) >= 400 else None, budget=1600)
    assert asked == [50, 50, 100, 200]
    assert (looked.decision, looked.prompts, looked.looks) == (400, 400, 4)
    assert looked.sample["x"].shape == (400,)
    assert looked.sample["x"][[0, 60, 150, 399]].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert looked.confidence == pytest.approx(1 - 0.05 / 6)


def test_a_budget_can_run_out() -> None:
    looked = sequential(lambda n: {"x": np.zeros(n)}, lambda sample, confidence: None, budget=100, looks=3)
    assert (looked.decision, looked.prompts, looked.looks) == (None, 100, 3)
    with pytest.raises(icl.ConfigError, match="budget"):
        sequential(lambda n: {"x": np.zeros(n)}, lambda sample, confidence: None, budget=20)


def test_a_probe_is_asked_again_while_more_prompts_would_help() -> None:
    """The standard error falls until the interval leaves the threshold; the error is split over the looks."""
    asked: list[tuple[int, float]] = []

    def ask(prompts: int, confidence: float) -> ProbeResult:
        asked.append((prompts, confidence))
        close = judge_at(confidence)("close", 0.9, threshold=1.0, stderr=2.0 / prompts**0.5)
        return ProbeResult("made up", (close, Measurement.undecided("never", "no circuits", threshold=1.0)))

    result = asked_again(ask, prompts=1_000, looks=6)
    assert [prompts for prompts, _ in asked] == [1_000, 2_000, 4_000]
    assert asked[0][1] == pytest.approx(1 - 0.05 / 6)
    assert result["close"].passed
    asked.clear()
    assert asked_again(ask, prompts=100, looks=3)["close"].status == "undecided"
    assert [prompts for prompts, _ in asked] == [100, 200, 400]


def test_judging_at_a_confidence_widens_the_interval() -> None:
    assert judge_at(0.95)("m", 0.0, threshold=1.0, stderr=0.45).passed
    assert judge_at(0.99)("m", 0.0, threshold=1.0, stderr=0.45).status == "undecided"


@pytest.mark.parametrize(("split", "low", "high"), [(True, 0.0, 0.06), (False, 0.12, 0.3)])
def test_splitting_the_error_keeps_it(split: bool, low: float, high: float) -> None:
    """How often a look excludes the truth, over 400 growing samples: 5 % together, against 5 % each."""
    rng = np.random.default_rng(7)
    errors = 0
    for _ in range(400):

        def wrong(sample: dict[str, np.ndarray], confidence: float) -> bool | None:
            return interval(mean(sample["x"]), confidence=confidence if split else 0.95).excludes(0.0) or None

        errors += sequential(lambda n: {"x": rng.normal(size=n)}, wrong, budget=6400).decision is True
    assert low <= errors / 400 <= high
