"""What a terminal shows, and that a failing tracker stops nothing."""

import io
import warnings
from typing import Any

import pytest
from rich.console import Console

from icl_mechinterp.results import HeadVerdict
from icl_mechinterp.tracking import ConsoleTracker, NullTracker, Progress, guarded
from icl_mechinterp.tracking.console import bar, line, picture

POSITIVE = HeadVerdict(0, 0, "positive", omega=0.2, mu=2.0, share=0.5, margin=0.4)
NEGATIVE = HeadVerdict(0, 1, "negative", omega=-0.1, mu=-4.0, share=0.5, margin=0.4)


def progress(**changes: Any) -> Progress:
    values: dict[str, Any] = {
        "step": 500,
        "steps": 2_000,
        "losses": (0.31,),
        "best_loss": 0.2429,
        "optimal_step": 0.879,
        "heads": ((POSITIVE, NEGATIVE),),
        "steps_per_second": 10.0,
    }
    return Progress(**{**values, **changes})


def shown(renderable: Any, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_time_left() -> None:
    assert progress().seconds_left == 150
    assert progress(steps_per_second=0.0).seconds_left == float("inf")


def test_a_line_has_the_science_in_it() -> None:
    text = line(progress())
    for part in ("500/2,000", "0.3100", "0.2429", "0.800", "1 positive", "1 negative", "10 steps/s", "2:30"):
        assert part in text
    assert "\n" not in text


def test_a_line_of_several_seeds_shows_median_and_range() -> None:
    assert "loss 0.4000 [0.3000, 0.5000]" in line(progress(losses=(0.5, 0.3), heads=((), ())))
    text = line(progress(losses=(0.5, 0.3, 0.4), heads=((POSITIVE,), (NEGATIVE,), (NEGATIVE,))))
    assert "0.4000 [0.3000, 0.5000]" in text
    assert "1 positive, 2 negative" in text


def test_before_the_first_step_there_is_no_loss() -> None:
    for text in (line(progress(losses=(float("nan"),))), shown(picture(progress(losses=(float("nan"),))))):
        assert "nan" not in text


def test_at_the_start_there_is_no_speed() -> None:
    for text in (line(progress(steps_per_second=0.0)), shown(picture(progress(steps_per_second=0.0)))):
        assert "starting" in text
        assert "steps/s" not in text


def test_a_model_without_a_taxonomy_has_a_line_too() -> None:
    for text in (line(progress(heads=((),))), shown(picture(progress(heads=((),), best_loss=None, optimal_step=None)))):
        assert "0.3100" in text


def test_the_picture_shows_every_head() -> None:
    text = shown(picture(progress()))
    for part in ("H0", "+0.200", "+2.00", "positive", "H1", "-0.100", "-4.00", "negative", "theory 0.879", "0.2429"):
        assert part in text


def test_many_heads_and_seeds_are_summed_up() -> None:
    text = shown(picture(progress(heads=((POSITIVE,) * 20, (NEGATIVE,) * 20))))
    assert "+8 more" in text
    assert "2 seeds, the first one shown; heads of all: 20 positive, 20 negative" in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_picture_fits(width: int) -> None:
    assert max(map(len, shown(picture(progress()), width).splitlines())) <= width


def test_a_bar_grows_from_the_middle() -> None:
    for value, left, right in ((1.0, 0, 12), (-1.0, 12, 0), (0.5, 0, 6), (-0.25, 3, 0), (0.0, 0, 0), (9.0, 0, 12)):
        text = bar(value, 1.0)
        assert len(text) == 25
        assert text[12] == "│"
        assert (text[:12].count("█"), text[13:].count("█")) == (left, right)
        assert text[:12] == text[:12].strip().rjust(12)


class Terminal(Console):
    def __init__(self, *, terminal: bool) -> None:
        super().__init__(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)

    @property
    def text(self) -> str:
        assert isinstance(self.file, io.StringIO)
        return self.file.getvalue()


def test_a_log_file_gets_a_line_now_and_then() -> None:
    console = Terminal(terminal=False)
    tracker = ConsoleTracker(console, seconds=1e9)
    tracker.start({})
    for step in (0, 500, 1000, 2000):
        tracker.update(progress(step=step))
    tracker.finish()
    assert [text.split()[1] for text in console.text.splitlines()] == ["0/2,000", "2,000/2,000"]
    assert "\x1b" not in console.text


def test_a_terminal_gets_one_picture_and_its_cursor_back() -> None:
    console = Terminal(terminal=True)
    tracker = ConsoleTracker(console)
    tracker.start({})
    tracker.update(progress())
    tracker.finish()
    tracker.finish()
    assert "positive" in console.text
    assert console.text.rindex("\x1b[?25h") > console.text.rindex("\x1b[?25l")


class Failing(NullTracker):
    def __init__(self) -> None:
        self.updates, self.finished = 0, 0

    def update(self, progress: Progress) -> None:
        self.updates += 1
        raise ConnectionError("no network")

    def finish(self) -> None:
        self.finished += 1


def test_a_failing_tracker_is_told_of_once_and_switched_off() -> None:
    tracker = Failing()
    guard = guarded(tracker)
    guard.start({})
    with pytest.warns(RuntimeWarning, match=r"Failing failed in update \(ConnectionError: no network\)") as caught:
        guard.update(progress())
    guard.update(progress())  # warnings are errors here: nothing more is said
    guard.finish()
    assert len(caught) == 1
    assert (tracker.updates, tracker.finished) == (1, 1), "it is closed, for it may hold the terminal"


def test_warnings_made_errors_stop_nothing_either(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guarded(Failing()).update(progress())
    assert "training goes on" in caplog.text


def test_ctrl_c_in_a_tracker_is_not_a_failure() -> None:
    class Interrupting(NullTracker):
        def update(self, progress: Progress) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded(Interrupting()).update(progress())
