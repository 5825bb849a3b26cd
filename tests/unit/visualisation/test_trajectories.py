"""Trajectories: every seed is drawn, medians are over groups, theory lines are where they were said to be."""

import numpy as np
import pytest

from icl_mechinterp.visualisation import as_svg, trajectories
from icl_mechinterp.visualisation.colours import NEGATIVE, POSITIVE, line_style

STEPS = np.array([0, 10, 20, 30])
THEORY = {"optimal_step": 0.9, "best_loss": 0.24, "bayes_risk": 0.21}


def draw(n_seeds: int = 1, steps=STEPS, groups=None, theory_lines=THEORY, **changed):
    size = len(steps)
    omega = np.arange(n_seeds * size * 2, dtype=float).reshape(n_seeds, size, 1, 2)
    values = {"loss": np.ones((n_seeds, size)), "omega": omega, "mu": -omega} | changed
    groups = groups or [["positive", "negative"]] * n_seeds
    return trajectories(steps, groups=groups, theory_lines=theory_lines, **values)


def lines(axis, gid: str | None = None) -> list:
    return [line for line in axis.lines if line.get_gid() == gid]


def test_one_seed_has_one_line_per_head_and_no_median():
    figure = draw(1)
    omega = figure.axes[2]
    np.testing.assert_array_equal(np.asarray(lines(omega, "median") + lines(omega, "seed")), [])
    drawn = [line for line in omega.lines if len(line.get_xdata()) == 4]
    np.testing.assert_array_equal([line.get_ydata() for line in drawn], [[0, 2, 4, 6], [1, 3, 5, 7]])
    assert {line.get_label() for line in drawn} == {"positive", "negative"}


def test_median_is_over_what_heads_became_not_over_their_numbers():
    omega = np.zeros((3, 4, 1, 2))
    omega[:, :, 0, 0], omega[:, :, 0, 1] = 1.0, -1.0
    omega[1] *= -1  # the second seed has its negative head first
    groups = [["positive", "negative"], ["negative", "positive"], ["positive", "negative"]]
    axis = draw(3, groups=groups, omega=omega).axes[2]
    medians = {line.get_label(): line.get_ydata()[0] for line in lines(axis, "median")}
    assert medians == {"median, positive": 1.0, "median, negative": -1.0}
    assert len(lines(axis, "seed")) == 6


def test_theory_lines_are_at_their_values_and_missing_ones_are_left_out():
    loss, step = draw().axes[:2]
    assert [line.get_ydata()[0] for line in lines(loss, "theory")] == [0.24, 0.21]
    assert [line.get_ydata()[0] for line in lines(step, "theory")] == [0.9]
    figure = draw(theory_lines={"best_loss": np.nan})
    assert not [line for axis in figure.axes for line in lines(axis, "theory")]


def test_effective_step_is_the_sum_over_heads_unless_it_was_recorded():
    figure = draw()
    np.testing.assert_array_equal(figure.axes[1].lines[0].get_ydata(), [-(0 + 1), -(4 + 9), -(16 + 25), -(36 + 49)])
    figure = draw(effective_step=np.full((1, 4), 7.0))
    np.testing.assert_array_equal(figure.axes[1].lines[0].get_ydata(), np.full(4, 7.0))


@pytest.mark.parametrize("n_seeds", [1, 3])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_leave_a_gap(n_seeds, bad):
    loss = np.ones((n_seeds, 4))
    loss[:, 2] = bad
    figure = draw(n_seeds, loss=loss, omega=np.full((n_seeds, 4, 1, 2), bad))
    assert np.isnan(figure.axes[0].lines[-3].get_ydata()[2])
    assert "<svg" in as_svg(figure)


def test_a_single_step_is_drawn_as_a_point():
    figure = draw(steps=np.array([0]))
    assert figure.axes[0].lines[0].get_marker() == "o"
    assert "<svg" in as_svg(figure)


def test_neighbouring_lines_differ_in_dashes_too():
    drawn = [line for line in draw().axes[2].lines if len(line.get_xdata()) == 4]
    assert drawn[0].get_linestyle() != drawn[1].get_linestyle()


@pytest.mark.parametrize(("count", "scale"), [(40, "linear"), (1000, "symlog")])
def test_early_steps_of_long_runs_are_stretched(count, scale):
    figure = draw(steps=500 * np.arange(count))
    assert figure.axes[0].get_xscale() == scale


def test_many_lines_are_stored_as_pixels():
    steps = 500 * np.arange(1000)
    text = as_svg(draw(11, steps=steps))
    assert "<image" in text
    assert len(text) < 1_500_000


@pytest.mark.parametrize(("group", "colour"), [("H1 positive", POSITIVE), ("negative", NEGATIVE)])
def test_a_sign_has_one_colour_in_every_picture(group: str, colour: str) -> None:
    assert {line_style(index, group)[0] for index in range(9)} == {colour}
