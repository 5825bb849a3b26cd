"""Every command. Imports of the package stand inside the commands, so that `--help` and mistakes in usage are instant.

Exit status: 0 when the command did its work, 1 when a probe failed and --strict was given, 2 for a user's mistake, 130
after Ctrl-C. A mistake is one message on stderr; results go to stdout, progress to stderr.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..results import ProbeReport
    from ..runs import Run

app = typer.Typer(
    help="Which algorithm did this model learn in context?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RunArgument = Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="a run folder, or one of its checkpoints")]
StrictOption = Annotated[bool, typer.Option("--strict", help="exit with 1 unless the model passes every probe")]


def main() -> None:
    """Entry point of `icl-mechinterp`."""
    app(prog_name="icl-mechinterp")


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="run folder; runs/demo or the next free name by default")] = None,
    strict: StrictOption = False,
) -> None:
    """Two heads, end to end: train, capture, probe, write a page."""
    with user_errors():
        from ..experiment import load_config
        from .show import say

        folder = _free(Path("runs/demo")) if out is None else out
        say("Training a two-head attention-only HookedTransformer on in-context linear regression.")
        say("Its seed was chosen: about one in four seeds ends with two heads of one sign instead (see the README).")
        run = _train(load_config("demo"), folder, resume=False)
        page = _page([run], None)
        say(f"\nThe run is in {folder}, its page is {page}")
    _finish([*run.final_reports], strict)


@app.command()
def train(
    config: Annotated[str, typer.Argument(help="a YAML file, or the name of a shipped config such as two_head")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", help="as in the file: task.d=8 seeds=8")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="run folder; runs/<config> by default")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the newest checkpoint in the run folder")
    ] = False,
    strict: StrictOption = False,
) -> None:
    """Train what a config describes, with captures and probes on the way."""
    with user_errors():
        from ..experiment import load_config
        from .show import say

        folder = Path("runs") / Path(config).stem if out is None else out
        run = _train(load_config(config, overrides or []), folder, resume=resume)
        say(f"\nThe run is in {folder}. For its page: icl-mechinterp report {folder}")
    _finish([*run.final_reports], strict)


@app.command()
def probe(
    run: RunArgument,
    step: Annotated[int | None, typer.Option(help="a saved step; the newest by default")] = None,
    seed: Annotated[int | None, typer.Option(help="one of the run's seeds; all by default")] = None,
    prompts: Annotated[int | None, typer.Option(help="prompts to evaluate on; 100,000 by default")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
    strict: StrictOption = False,
) -> None:
    """Say which algorithm a trained model learned, with evidence."""
    with user_errors():
        import json

        from .. import probes
        from .show import print_report

        found, step = _find_run(run, step)
        step = found.checkpoint(step).step
        seeds = found.seeds if seed is None else (seed,)
        reports = [
            probes.probe(found.model(step, seed=s), found.task, prompts=prompts).at(step=step, seed=s) for s in seeds
        ]
        if as_json:
            records = [report.to_dict() for report in reports]
            typer.echo(json.dumps(records[0] if len(records) == 1 else records, allow_nan=False, indent=1))
        else:
            for report in reports:
                print_report(report)
    _finish(reports, strict)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders")],
    out: Annotated[Path | None, typer.Option(help="file to write; report.html in the first run by default")] = None,
) -> None:
    """One self-contained page about one or more runs; works offline."""
    with user_errors():
        from ..runs import load_run
        from .show import say

        say(f"{_page([load_run(path) for path in runs], out)}")


def _train(config, folder: Path, *, resume: bool) -> "Run":
    from ..experiment import run as run_experiment
    from .show import print_report, print_seeds

    run = run_experiment(config, out=folder, resume=resume)
    reports = run.final_reports
    if len(reports) > 1:
        print_seeds(reports)
    else:
        for found in reports:
            print_report(found)
    return run


def _page(runs: "list[Run]", out: Path | None) -> Path:
    from ..experiment import theory_lines
    from ..reporting import render_report

    target = runs[0].path / "report.html" if out is None else out
    render_report(runs, theory_lines=theory_lines(runs[0].task), out=target)
    return target


def _find_run(path: Path, step: int | None) -> "tuple[Run, int | None]":
    """A run from its folder or from one of its checkpoint files, and the step that the file names."""
    from ..errors import RunError
    from ..runs import load_run

    if not path.is_file():
        return load_run(path), step
    digits = path.stem.removeprefix("step-")
    if path.suffix not in (".safetensors", ".json") or not digits.isdigit():
        raise RunError(
            f"{path} is not a checkpoint of a run (those are named step-00005000.safetensors). Name a run folder or one "
            "of its checkpoints."
        )
    if step is not None and step != int(digits):
        raise RunError(f"{path} is the checkpoint of step {int(digits)}, and --step {step} was given. Leave one out.")
    return load_run(path.parent.parent), int(digits)


def _free(path: Path) -> Path:
    """The path itself, or the first of path-2, path-3, ... that is not taken."""
    number, free = 2, path
    while free.exists():
        free = path.with_name(f"{path.name}-{number}")
        number += 1
    return free


def _finish(reports: "list[ProbeReport]", strict: bool) -> None:
    if strict and not all(report.passed for report in reports):
        raise typer.Exit(1)


@contextmanager
def user_errors() -> Iterator[None]:
    """Turns a user's mistake into one message and status 2, and Ctrl-C into status 130."""
    from ..errors import UserError

    try:
        yield
    except UserError as error:
        print(f"icl-mechinterp: {error}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print(  # noqa: T201
            "icl-mechinterp: interrupted. What was trained is checkpointed; go on with the same command and --resume.",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
