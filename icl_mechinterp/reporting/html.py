"""One self-contained HTML page about one run or several: opens from a file, needs no network and no JavaScript.

Every picture is there as a static image; interactive figures stand beside them and are shown only where scripts run.
All text goes through the template's escaping; the only markup passed in is what this package drew itself.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import overload

import jinja2
from markupsafe import Markup

from ..errors import RunError, UserError
from ..runs import Run
from ..training import write_atomically
from ..visualisation import bundle_script
from .page import INTERACTIVE_HEADS, SEEDS_SHOWN, number, run_page


@overload
def render_report(
    runs: Sequence[Run], *, theory_lines: Mapping[str, float] | Sequence[Mapping[str, float]], out: None = None
) -> str: ...


@overload
def render_report(
    runs: Sequence[Run], *, theory_lines: Mapping[str, float] | Sequence[Mapping[str, float]], out: Path
) -> Path: ...


def render_report(
    runs: Sequence[Run],
    *,
    theory_lines: Mapping[str, float] | Sequence[Mapping[str, float]],
    out: Path | None = None,
) -> str | Path:
    """The report page of some runs.

    Args:
        runs: one or more, finished or growing; a run without reports or history is said to be one.
        theory_lines: `optimal_step`, `best_loss`, `bayes_risk` for the pictures, computed by the caller: one mapping
            for all runs, or one per run where their tasks differ.
        out: where to write the page, whole or not at all.

    Returns:
        The page's text, or `out` when it was written there.

    Raises:
        UserError: no run was given.
        RunError: `out` cannot be written.
    """
    if not runs:
        raise UserError("a report needs at least one run; name the run folders to report on.")
    lines = [theory_lines] * len(runs) if isinstance(theory_lines, Mapping) else list(theory_lines)
    assert len(lines) == len(runs), f"{len(lines)} sets of theory lines for {len(runs)} runs"
    script = bundle_script()
    pages = [
        run_page(run, f"run{index}", lines[index], interactive=script is not None) for index, run in enumerate(runs)
    ]
    needed = any(layer.interactive for page in pages for seed in page.seeds for layer in seed.layers)
    text = _template().render(
        runs=pages,
        script=Markup(script) if script is not None and needed else None,
        interactive_heads=INTERACTIVE_HEADS,
        seeds_shown=SEEDS_SHOWN,
    )
    return text if out is None else _write(Path(out), text)


def _write(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except OSError as error:
        raise RunError(
            f"the report could not be written to {path} ({error.strerror or error}). Choose another --out."
        ) from error
    return path


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("icl_mechinterp.reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    return environment.get_template("report.html.j2")
