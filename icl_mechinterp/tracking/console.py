"""Progress in a terminal, showing the science: loss against the optimum, what every head is becoming, time left.

On a terminal one table is redrawn in place; elsewhere (a log file, CI) a plain line is written every few seconds.
Everything goes to stderr, so that stdout holds results only.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..results import HeadVerdict
from ._protocol import Progress

_BAR = 12  # characters on each side of zero
_STYLES = {"positive": "bold blue", "negative": "bold dark_orange3", "dummy": "dim", "mixed": "bold red"}
_HEADS_SHOWN = 12
_SECONDS_BETWEEN_LINES = 5.0


class ConsoleTracker:
    """Progress on stderr.

    Args:
        console: where to write; stderr by default.
        seconds: time between plain lines when it is not a terminal.
    """

    def __init__(self, console: Console | None = None, *, seconds: float = _SECONDS_BETWEEN_LINES) -> None:
        self._console = console or Console(stderr=True)
        self._seconds, self._last_line = seconds, -float("inf")
        self._live: Live | None = None

    def start(self, config: Mapping[str, Any]) -> None:
        del config
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False)
            self._live.start()

    def update(self, progress: Progress) -> None:
        if self._live is not None:
            self._live.update(picture(progress), refresh=True)
            return
        now = time.monotonic()
        if now - self._last_line >= self._seconds or progress.step >= progress.steps:
            self._last_line = now
            self._console.print(line(progress), soft_wrap=True, highlight=False, markup=False)

    def finish(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def line(progress: Progress) -> str:
    """One plain line: step, loss, step size, labels, speed, time left."""
    labels = ", ".join(f"{count} {label}" for label, count in _label_counts(progress).items())
    optimum = "" if progress.best_loss is None else f" (optimum {progress.best_loss:.4f})"
    return (
        f"step {progress.step:>7,}/{progress.steps:,}  loss {_loss(progress)}{optimum}  sum mu*omega {_steps(progress)}  "
        f"{labels}  {_speed(progress)}"
    )


def picture(progress: Progress) -> Group:
    """The live table: progress bar, loss against the optimum, a bar for omega and mu of every head of the first seed."""
    top = Table.grid(padding=(0, 2))
    top.add_row(
        f"step {progress.step:,} / {progress.steps:,}",
        ProgressBar(total=progress.steps, completed=progress.step, width=24),
        _speed(progress),
    )
    facts = Text(f"loss {_loss(progress)}")
    if progress.best_loss is not None:
        facts.append(f"   best debiased GD {progress.best_loss:.4f}", style="dim")
    facts.append(f"   sum mu·omega {_steps(progress)}")
    if progress.optimal_step is not None:
        facts.append(f"   theory {progress.optimal_step:.3f}", style="dim")
    parts = [top, facts, _head_table(progress.heads[0])] if progress.heads[0] else [top, facts]
    if len(progress.heads) > 1:
        counts = ", ".join(f"{count} {label}" for label, count in _label_counts(progress).items())
        parts.append(Text(f"{len(progress.heads)} seeds, the first one shown; heads of all: {counts}", style="dim"))
    return Group(*parts)


def _head_table(heads: tuple[HeadVerdict, ...]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in ("head", "omega", "", "mu", "", "is"):
        table.add_column(column, justify="right" if column in ("omega", "mu") else "left")
    widest = {name: max([abs(getattr(h, name)) for h in heads] + [1e-12]) for name in ("omega", "mu")}
    for head in heads[:_HEADS_SHOWN]:
        style = _STYLES[head.label]
        table.add_row(
            head.name,
            f"{head.omega:+.3f}",
            Text(bar(head.omega, widest["omega"]), style=style),
            f"{head.mu:+.2f}",
            Text(bar(head.mu, widest["mu"]), style=style),
            Text(head.label, style=style),
        )
    if len(heads) > _HEADS_SHOWN:
        table.add_row(f"+{len(heads) - _HEADS_SHOWN} more", "", "", "", "", "")
    return table


def bar(value: float, widest: float) -> str:
    """A signed bar around a centre line: `     ███│       ` for a negative value."""
    length = round(min(1.0, abs(value) / widest) * _BAR)
    left, right = ("█" * length, "") if value < 0 else ("", "█" * length)
    return f"{left:>{_BAR}}│{right:<{_BAR}}"


def _loss(progress: Progress) -> str:
    losses = sorted(progress.losses)
    if not all(map(math.isfinite, losses)):  # before the first step there is none
        return "–"
    middle = f"{statistics.median(losses):.4f}"
    return middle if len(losses) == 1 else f"{middle} [{losses[0]:.4f}, {losses[-1]:.4f}]"


def _steps(progress: Progress) -> str:
    if not progress.heads[0]:
        return "–"
    return f"{sum(h.mu * h.omega for h in progress.heads[0]):.3f}"


def _label_counts(progress: Progress) -> dict[str, int]:
    counts = Counter(head.label for heads in progress.heads for head in heads)
    return {label: counts[label] for label in _STYLES if counts[label]}


def _speed(progress: Progress) -> str:
    if not progress.steps_per_second:
        return "starting"
    return f"{progress.steps_per_second:,.0f} steps/s  {_clock(progress.seconds_left)} left"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
