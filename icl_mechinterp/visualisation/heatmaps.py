"""Static heat maps of KQ and OV, readable in print, without JavaScript, and by readers who see colours differently.

Matrices stand as the papers write them: `kq[key, query]` has keys as rows and queries as columns. All heads share one
symmetric colour scale, so that two heads can be compared by eye. Entries without meaning are grey and hatched, and
they do not stretch the scale.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float

from .colours import INK, MEANINGLESS, NEGATIVE, POSITIVE, QUIET

if TYPE_CHECKING:
    import matplotlib.figure

_PER_ROW = 4  # heads side by side
_READABLE = 14  # token coordinates up to which a cell has room for its value
_CELL = 0.36  # inches


def symmetric_limit(values: Float[np.ndarray, "..."], meaningful: Bool[np.ndarray, "..."] | None = None) -> float:
    """The largest size among finite entries that mean something; 1 when there is none, or all are zero.

    Args:
        values: what a colour scale from -limit to limit must cover.
        meaningful: broadcast against `values`; by default all are.
    """
    counted = np.isfinite(values) if meaningful is None else np.isfinite(values) & meaningful
    largest = float(np.abs(values[counted]).max(initial=0.0))
    return largest if largest > 0 else 1.0


def kq_heatmaps(
    kq: Float[np.ndarray, "head key query"],
    *,
    identifiable: Bool[np.ndarray, "key query"],
    names: Sequence[str],
    heads: Sequence[str],
    limit: float | None = None,
) -> "matplotlib.figure.Figure":
    """One heat map per head, on one colour scale.

    Args:
        kq: logit coefficients.
        identifiable: entries that the model depends on; the others are hatched.
        names: of the token coordinates, x1 ... xd, y.
        heads: one title per head.
        limit: of the colour scale; by default the largest identifiable entry.
    """
    limit = symmetric_limit(kq, identifiable) if limit is None else limit
    size = max(1.7, _CELL * min(len(names), _READABLE))
    columns = min(len(heads), _PER_ROW)
    rows = -(-len(heads) // columns)
    figure = _figure(columns * (size + 0.6) + 0.75, rows * (size + 0.75))
    axes = figure.subplots(rows, columns, squeeze=False)
    meshes = []
    for index, axis in enumerate(axes.flat):
        if index >= len(heads):
            axis.set_axis_off()
            continue
        meshes.append(_matrix(axis, kq[index], identifiable, limit=limit))
        _tick(axis, x=names, y=names)
        axis.set_title(heads[index], fontsize=9, color=INK, parse_math=False)
        axis.set_xlabel("query", fontsize=8)
        axis.set_ylabel("key" if index % columns == 0 else "", fontsize=8)
    _scale_bar(figure, meshes[0], axes, "KQ: logit coefficient")
    return figure


def ov_heatmap(
    ov: Float[np.ndarray, "head out token"],
    *,
    names: Sequence[str],
    heads: Sequence[str],
    limit: float | None = None,
) -> "matplotlib.figure.Figure":
    """One row per head and label slot read out: what an attended token adds to the prediction.

    Args:
        ov: map from token to prediction.
        names: of the token coordinates.
        heads: one label per head.
        limit: of the colour scale; by default the largest entry.
    """
    n_out = ov.shape[1]
    outs = [name if n_out == 1 else f"{name} → {out}" for name in heads for out in names[-n_out:]]
    table = ov.reshape(-1, ov.shape[-1])
    limit = symmetric_limit(table) if limit is None else limit
    figure = _figure(_CELL * 1.15 * max(5, min(len(names), 24)) + 2.3, 0.34 * len(table) + 0.85)
    axes = figure.subplots(1, 1, squeeze=False)
    mesh = _matrix(axes[0, 0], table, np.ones(table.shape, dtype=bool), limit=limit)
    axes[0, 0].set_aspect("auto")
    _tick(axes[0, 0], x=names, y=outs)
    axes[0, 0].set_xlabel("token", fontsize=8)
    axes[0, 0].set_ylabel("out", fontsize=8)
    _scale_bar(figure, mesh, axes, "OV")
    return figure


def _figure(width: float, height: float) -> "matplotlib.figure.Figure":
    from matplotlib.figure import Figure  # not pyplot: no state is shared with the caller's figures

    return Figure(figsize=(width, height), layout="constrained")


def _matrix(
    axis: Any, values: Float[np.ndarray, "row column"], meaningful: Bool[np.ndarray, "row column"], *, limit: float
) -> Any:
    """Draws one matrix with its first row on top; returns the mesh for the scale bar."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("orange-white-blue", [NEGATIVE, "white", POSITIVE])
    drawn = meaningful & np.isfinite(values)
    shown = np.ma.array(values, mask=~drawn)
    mesh = axis.pcolormesh(shown, cmap=colours, vmin=-limit, vmax=limit, edgecolors="white", linewidth=0.6)
    axis.invert_yaxis()
    axis.set_aspect("equal")
    _hatch(axis, ~drawn)
    if max(values.shape[1], len(values) if meaningful.all() else 0) <= 2 * _READABLE:
        _annotate(axis, values, meaningful, limit)
    return mesh


def _hatch(axis: Any, blank: Bool[np.ndarray, "row column"]) -> None:
    from matplotlib.patches import Rectangle

    for row, column in np.argwhere(blank):
        axis.add_patch(
            Rectangle(
                (column, row), 1, 1, facecolor=MEANINGLESS, edgecolor="#9b9b9b", hatch="////", linewidth=0, gid="blank"
            )
        )


def _annotate(
    axis: Any, values: Float[np.ndarray, "row column"], meaningful: Bool[np.ndarray, "row column"], limit: float
) -> None:
    if values.shape[1] > _READABLE:
        return
    size = 7.0 if values.shape[1] <= 8 else 5.4
    for row, column in np.argwhere(meaningful):
        value = float(values[row, column])
        # white on the dark ends of the scale, ink elsewhere: at least 4.5 to 1 everywhere
        colour = "white" if np.isfinite(value) and abs(value) > 0.62 * limit else INK
        text = _short(value, limit)
        axis.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=size, color=colour, gid="value")


def _short(value: float, limit: float) -> str:
    """As many digits as the scale makes worth reading: `.15`, `-2.9`, `0`."""
    if not np.isfinite(value):
        return "n/a"
    if limit >= 1e4 or limit < 1e-3:
        return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    digits = 3 if limit < 0.03 else 2 if limit < 10 else 1 if limit < 100 else 0
    text = f"{value:.{digits}f}"
    if float(text) == 0:
        return "0"
    return text.replace("0.", ".", 1) if abs(value) < 1 and not text.lstrip("-").startswith("1") else text


def _tick(axis: Any, *, x: Sequence[str], y: Sequence[str]) -> None:
    for which, names in ((axis.xaxis, x), (axis.yaxis, y)):
        step = 1 if len(names) <= 2 * _READABLE else -(-len(names) // _READABLE)
        chosen = sorted({*range(0, len(names), step), len(names) - 1})
        which.set_ticks([index + 0.5 for index in chosen], labels=[names[index] for index in chosen])
        for label in which.get_ticklabels():
            label.set_parse_math(False)
    axis.tick_params(length=0, labelsize=7.5, colors=INK)
    for spine in axis.spines.values():
        spine.set(color="#b9bfc6", linewidth=0.6)


def _scale_bar(figure: "matplotlib.figure.Figure", mesh: Any, axes: Any, label: str) -> None:
    bar = figure.colorbar(mesh, ax=list(axes.flat), aspect=18, pad=0.02, fraction=0.05)
    bar.set_label(label, fontsize=8, color=INK)
    bar.ax.tick_params(labelsize=7, colors=QUIET)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
