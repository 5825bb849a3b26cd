"""Every command. Imports of the package stand inside the commands, so that `--help` and mistakes in usage are instant.

Exit status: 0 when the command did its work, 1 when a probe failed and --strict was given, 2 for a user's mistake, 130
after Ctrl-C. A mistake is one message on stderr; results go to stdout, progress to stderr.
"""

import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..experiment import ExperimentConfig
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
    folder = _free(Path("runs/demo")) if out is None else out
    with user_errors(go_on=["train", "demo", "--out", str(folder), "--resume"]):
        from ..experiment import load_config
        from .show import say

        say("Training a two-head attention-only HookedTransformer on in-context linear regression.")
        say("Its seed was chosen: about one in four seeds ends with two heads of one sign instead (see the README).")
        run = _train(load_config("demo"), folder, resume=False)
        page = _page([run], None)
        say(f"\nThe run is in {folder}, its page is {page}")
        reports = run.final_reports
    _finish(reports, strict)


@app.command()
def train(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="a YAML file, or the name of a shipped config such as two_head")
    ],
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
    folder = Path("runs") / Path(config).stem if out is None else out
    with user_errors(go_on=["train", config, *(overrides or []), "--out", str(folder), "--resume"]):
        from ..experiment import load_config
        from .show import say

        run = _train(load_config(config, overrides or []), folder, resume=resume)
        say(f"\nThe run is in {folder}. For its page: icl-mechinterp report {shlex.quote(str(folder))}")
        reports = run.final_reports
    _finish(reports, strict)


@app.command()
def probe(
    run: RunArgument,
    step: Annotated[int | None, typer.Option(help="a saved step; the newest by default")] = None,
    seed: Annotated[int | None, typer.Option(help="one of the run's seeds; all by default")] = None,
    prompts: Annotated[int | None, typer.Option(help="prompts to evaluate on; by default as many as decide")] = None,
    causal: Annotated[bool, typer.Option(help="also intervene: ablation, patching, interchange")] = True,
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
        asked = probes.PROBES if causal else probes.CHECKPOINT_PROBES
        reports = [
            probes.probe(found.model(step, seed=s), found.task, prompts=prompts, probes=asked).at(step=step, seed=s)
            for s in seeds
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


def _train(config: "ExperimentConfig", folder: Path, *, resume: bool) -> "Run":
    from ..experiment import run as run_experiment
    from .show import print_report, print_seeds, say

    finished = resume and _is_finished(folder, config.training.steps)
    run = run_experiment(config, out=folder, resume=resume)
    if finished:
        say(f"The run in {folder} was finished already: all {config.training.steps:,} steps are done.")
    reports = run.final_reports
    if len(reports) > 1:
        print_seeds(reports)
    else:
        for found in reports:
            print_report(found)
    return run


def _is_finished(folder: Path, steps: int) -> bool:
    from ..training import latest_checkpoint

    checkpoint = latest_checkpoint(folder / "checkpoints")
    return checkpoint is not None and checkpoint.step == steps


def _page(runs: "list[Run]", out: Path | None) -> Path:
    from ..probes.history import theory_lines
    from ..reporting import render_report

    target = runs[0].path / "report.html" if out is None else out
    render_report(runs, theory_lines=[theory_lines(run.task) for run in runs], out=target)
    return target


def _find_run(path: Path, step: int | None) -> "tuple[Run, int | None]":
    """A run from its folder or from one of its checkpoint files, and the step that the file names."""
    from ..errors import RunError
    from ..runs import load_run
    from ..training import step_of

    named = step_of(path)
    if path.is_dir() or (named is None and not path.exists()):
        return load_run(path), step
    if named is None:
        raise RunError(
            f"{path} is not a checkpoint of a run (those are named step-00005000.safetensors). Name a run folder or one "
            "of its checkpoints."
        )
    if step is not None and step != named:
        raise RunError(f"{path} is the checkpoint of step {named}, and --step {step} was given. Leave one out.")
    folder = path.absolute().parent.parent  # absolute, because the path may be the bare name of the file
    return load_run(folder), named


def _free(path: Path) -> Path:
    """The path itself, or the first of path-2, path-3, ... that is not taken."""
    number, free = 2, path
    while free.exists():
        free = path.with_name(f"{path.name}-{number}")
        number += 1
    return free


def _finish(reports: "Sequence[ProbeReport]", strict: bool) -> None:
    if strict and not all(report.passed for report in reports):
        raise typer.Exit(1)


@contextmanager
def user_errors(go_on: Sequence[str] = ()) -> Iterator[None]:
    """Turns a user's mistake into one message and status 2, and Ctrl-C into status 130.

    Args:
        go_on: the command that goes on where Ctrl-C stopped, for commands that can.
    """
    from ..errors import UserError

    try:
        with _plain_warnings():
            yield
    except UserError as error:
        _tell(str(error))
        raise typer.Exit(2) from None
    except BrokenPipeError:  # `... | head` has seen enough; click ends quietly
        raise
    except OSError as error:  # the files of the user's, not ours: unreadable, on a broken or full disk
        named = f"{error.filename} " if error.filename else ""
        _tell(
            f"{named}could not be read or written ({error.strerror or error}). Check the path, its rights and the disk."
        )
        raise typer.Exit(2) from None
    except KeyboardInterrupt as interrupt:
        told = str(interrupt) or "interrupted."
        _tell(f"{told}\nThe command: icl-mechinterp {shlex.join(go_on)}" if go_on and str(interrupt) else told)
        raise typer.Exit(130) from None


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Our own warnings (a tracker that failed) as one line, without the source line that Python adds."""
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message, category, filename, lineno, file=None, line=None) -> None:
            if issubclass(category, RuntimeWarning) and "icl_mechinterp" in filename:
                _tell(f"warning: {message}")
            else:
                shown(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def _tell(message: str) -> None:
    print(f"icl-mechinterp: {message}", file=sys.stderr)  # noqa: T201
