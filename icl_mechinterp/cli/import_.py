"""`import`: weights trained elsewhere become a run."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .main import app, user_errors

if TYPE_CHECKING:
    from ..importing import Imported
    from ..results import ProbeReport

_FRACTION = re.compile(r"1/(sqrt\()?(\d+)(?(1)\))")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a .safetensors, .pt or .pth file of weights")],
    task: Annotated[
        str, typer.Option(metavar="CONFIG", help="a config, or the name of a shipped one; its task section is used")
    ],
    out: Annotated[Path, typer.Option(help="run folder to write")],
    mapping: Annotated[Path | None, typer.Option(help="YAML file: role -> name, for names that are unusual")] = None,
    scale: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="factor on the attention logits: a number, or as in 1/sqrt(6)")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="how the matrices lie, where their shapes leave it open")] = None,
    n_heads: Annotated[int | None, typer.Option(help="heads per layer, where shapes leave it open")] = None,
    predictions: Annotated[
        Path | None,
        typer.Option(
            help="a file with tensors z [batch pos token] and yhat [batch out] of the original; they decide and are checked"
        ),
    ] = None,
    prompts: Annotated[int | None, typer.Option(help="prompts to evaluate on; by default as many as decide")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print what was read, and the report, as JSON")] = False,
) -> None:
    """Turn weights trained elsewhere into a run, and probe it."""
    with user_errors():
        from ..experiment import load_config
        from ..importing import read_weights, save_run
        from ..runs import load_run

        imported = read_weights(
            file,
            load_config(task).make_task(),
            mapping=mapping,
            scale=None if scale is None else _number(scale),
            layout=layout,  # pyright: ignore[reportArgumentType]  # checked there, with a message
            n_heads=n_heads,
            predictions=None if predictions is None else _predictions(predictions),
        )
        report = load_run(save_run(imported, out, prompts=prompts)).final_reports[0]
        _show(imported, report, out, as_json)


def _show(imported: "Imported", report: "ProbeReport", out: Path, as_json: bool) -> None:
    if as_json:
        import json

        record = {"run": str(out), "imported": imported.to_dict(), "report": report.to_dict()}
        typer.echo(json.dumps(record, allow_nan=False, indent=1))
        return
    import shlex

    from ..importing import LAYOUTS
    from .show import print_report, say

    heads = imported.weights.layers[0].W_Q.shape[0]
    say(f"{imported.file}: {heads} head(s), attention scale {imported.scale:.6g}")
    say(f"read as {imported.layout}: {LAYOUTS[imported.layout]}")
    if imported.difference is None:
        say("not checked against the original: give --predictions to do so")
    else:
        say(f"largest difference to the original's predictions: {imported.difference:.1e} of their size")
    print_report(report)
    say(f"\nThe run is in {out}. For its page: icl-mechinterp report {shlex.quote(str(out))}")


def _number(text: str) -> float:
    """`0.5`, `1/6` or `1/sqrt(6)`.

    Raises:
        ConfigError: something else.
    """
    from ..errors import ConfigError

    fraction = _FRACTION.fullmatch(text.replace(" ", ""))
    try:
        if fraction is None:
            return float(text)
        return 1 / (int(fraction[2]) ** (0.5 if fraction[1] else 1.0))
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"--scale must be a positive number, or written as in 1/sqrt(6); got {text!r}.", field="scale"
        ) from error


def _predictions(file: Path) -> tuple[Any, Any]:
    from ..importing import WeightsError
    from ..importing.state import read_state

    tensors = read_state(file).tensors
    missing = [name for name in ("z", "yhat") if name not in tensors]
    if missing:
        raise WeightsError(
            f"{file} has no {' and no '.join(missing)}; it has {', '.join(tensors)}. Save the prompts as z [batch "
            f"pos token] "
            "and the original's predictions as yhat [batch out]."
        )
    return tensors["z"], tensors["yhat"]
