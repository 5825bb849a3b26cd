"""How a report looks in a terminal."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..results import Measurement, ProbeReport

_MARKS = {"passed": ("✓", "green"), "failed": ("✗", "red"), "undecided": ("?", "yellow"), "reported": ("·", "dim")}


def say(text: str) -> None:
    """A line on stdout."""
    Console().print(text, soft_wrap=True, highlight=False, markup=False)


def print_report(report: ProbeReport) -> None:
    """Verdict, heads, and every measurement with its bound."""
    console = Console()
    where = "" if report.step is None else f"step {report.step:,}, seed {report.seed}"
    table = Table(box=None, pad_edge=False, header_style="dim", title=where, title_justify="left", title_style="dim")
    for column, justify in (("", "left"), ("measurement", "left"), ("value", "right"), ("passes if", "right")):
        table.add_column(column, justify=justify, no_wrap=True)  # pyright: ignore[reportArgumentType]
    table.add_column("theory", justify="right", no_wrap=True)
    for result in report.results:
        table.add_row("", Text(result.probe, style="dim"))
        for measurement in result.measurements:
            mark, style = _MARKS[measurement.status]
            table.add_row(Text(mark, style=style), f"  {measurement.name}", measurement.text, *_bounds(measurement))
    console.print()
    console.print(table)
    for probe, measurement in report.measurements:
        if measurement.status == "undecided":
            console.print(
                f"? {probe}.{measurement.name}: {measurement.reason}",
                style="yellow",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
    for note in report.notes:
        console.print(f"note: {note}", style="dim", highlight=False, markup=False, soft_wrap=True)
    if report.heads:
        heads = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("head", "is", "omega", "mu", "share"):
            heads.add_column(column, justify="left" if column in ("head", "is") else "right")
        for h in report.heads:
            heads.add_row(h.name, h.label, f"{h.omega:+.4f}", f"{h.mu:+.3f}", f"{h.share:.1%}")
        console.print()
        console.print(heads)
    console.print()
    console.print(report.verdict, style="bold", highlight=False, markup=False, soft_wrap=True)


def print_seeds(reports: Sequence[ProbeReport]) -> None:
    """One line per seed, and how often each algorithm came out."""
    console = Console()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("seed", "algorithm", "passed", "loss", "distance to debiased GD", "heads"):
        table.add_column(column, justify="left" if column in ("algorithm", "heads") else "right")
    for report in reports:
        measured = {m.name: m.text for _, m in report.measurements}
        heads = " ".join(h.label[0] for h in report.heads)
        table.add_row(
            str(report.seed),
            report.algorithm,
            "yes" if report.passed else "no",
            measured.get("loss", "–"),
            measured.get("distance_debiased_gd", "–"),
            heads,
        )
    console.print()
    console.print(table)
    console.print("heads: p positive, n negative, d dummy, m mixed", style="dim")
    counts = Counter(report.algorithm for report in reports)
    names = {"none": "none of the named algorithms"}
    parts = (f"{count} of {len(reports)} seeds: {names.get(name, name)}" for name, count in counts.most_common())
    console.print("; ".join(parts), style="bold", highlight=False, markup=False)


def _bounds(measurement: Measurement) -> tuple[str, str]:
    bound = "" if measurement.threshold is None else f"{measurement.rule} {measurement.threshold:.4g}"
    return bound, "" if measurement.reference is None else f"{measurement.reference:.4g}"
