"""What trained models become: the numbers that the papers and our own measurements promise.

Each run is that of a shipped config, made by the command line in a process of its own (the fixture `trained_run`).
"""

from collections.abc import Callable

import numpy as np
import pytest

import icl_mechinterp as icl

pytestmark = pytest.mark.slow
TrainedRun = Callable[[str], icl.Run]


def _value(report: icl.ProbeReport, path: str) -> float:
    probe, name = path.split(".")
    value = report[probe][name].value
    assert value is not None
    return value


def test_the_papers_recipe_with_two_heads(trained_run: TrainedRun) -> None:
    run = trained_run("two_head")
    (report,) = run.final_reports
    assert report.passed, report.verdict
    assert _value(report, "equivalence.loss") == pytest.approx(0.2446, abs=0.003)
    distance = _value(report, "equivalence.distance_debiased_gd")
    assert distance < 3e-3
    assert _value(report, "equivalence.distance_gd") > 2.5 * distance
    _check_trajectory(run)


def _check_trajectory(run: icl.Run) -> None:
    """|omega| peaks early and then falls while mu grows; the diagonal is clean from 10,000 steps on (science, check 16)."""
    metrics = run.metrics.isel(seed=0, layer=0)
    step = metrics["step"].to_numpy()
    scale = np.abs(metrics["omega"].to_numpy()).mean(1)
    output = np.abs(metrics["mu"].to_numpy()).mean(1)
    trained = step >= 1000  # the first steps still carry the initialisation
    peak = step[trained][scale[trained].argmax()]
    assert peak <= 3000
    at = {s: int(np.flatnonzero(step == s)[0]) for s in (3000, 10_000, 20_000, 40_000)}
    assert scale[at[3000]] > scale[at[10_000]] > scale[at[20_000]] > scale[at[40_000]]
    assert output[at[3000]] < output[at[10_000]] < output[at[20_000]] < output[at[40_000]]
    assert float(metrics["off_diagonal_energy"].to_numpy()[step >= 10_000].max()) < 0.01
    assert float(metrics["engine_gap"].max()) < 1e-4


def test_a_decaying_rate_shows_the_structure(trained_run: TrainedRun) -> None:
    """The demo's run: 20,000 steps with a linear decay over the last 30 %."""
    run = trained_run("demo")
    (report,) = run.final_reports
    assert report.passed, report.verdict
    assert _value(report, "equivalence.loss") == pytest.approx(0.243, abs=0.003)
    assert _value(report, "structure.effective_step") == pytest.approx(0.879, abs=0.02)
    assert _value(report, "structure.zero_sum") < 0.01
    distance = _value(report, "equivalence.distance_debiased_gd")
    assert distance < 2e-3
    assert _value(report, "equivalence.distance_gd") > 4 * distance


def test_one_head_is_a_kernel_regressor(trained_run: TrainedRun) -> None:
    (report,) = trained_run("one_head").final_reports
    assert report.algorithm == "kernel regressor"
    assert not report.passed
    assert _value(report, "equivalence.loss") == pytest.approx(0.405, abs=0.007)
    assert abs(report.heads[0].omega) == pytest.approx(0.518, abs=0.03)


@pytest.mark.parametrize("config", ["three_head", "four_head", "eight_head"])
def test_more_heads_are_the_same_function(trained_run: TrainedRun, config: str) -> None:
    (report,) = trained_run(config).final_reports
    assert report.algorithm == "debiased gradient descent", report.verdict
    assert all(m.passed for m in report["equivalence"].values())
    assert _value(report, "equivalence.loss") == pytest.approx(0.244, abs=0.004)
    assert _value(report, "equivalence.distance_debiased_gd") < 4e-3
    assert _value(report, "structure.manifold_gap") < 0.03
    assert {h.label for h in report.heads} <= {"positive", "negative", "dummy"}
    assert all(h.share < 0.005 for h in report.heads if h.label == "dummy")
    if config == "eight_head":
        assert not report.passed
        assert "computes debiased gradient descent, but not with the structure" in report.verdict
        assert report["structure"]["off_diagonal_energy"].passed is False
