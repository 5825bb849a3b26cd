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

_PER_ROW = 4  # heads side by side, fewer when they would make the figure wider than a page
_PAGE = 10.8  # inches
_READABLE = 14  # token coordinates up to which a cell has room for its value
_CELL, _SMALL_CELL = 0.36, 0.29  # inches; the small ones for more than 8 coordinates


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
    size = max(1.7, (_CELL if len(names) <= 8 else _SMALL_CELL) * min(len(names), _READABLE))
    columns = max(1, min(len(heads), _PER_ROW, int(_PAGE / (size + 0.4))))
    rows = -(-len(heads) // columns)
    sheet = _Sheet(width=columns * (size + 0.4) + 1.2, height=rows * (size + 0.75))
    for index, title in enumerate(heads):
        row, column = divmod(index, columns)
        axis = sheet.axes(left=0.5 + column * (size + 0.4), top=0.3 + row * (size + 0.75), width=size, height=size)
        mesh = _matrix(axis, kq[index], identifiable, limit=limit)
        _tick(axis, x=names, y=names)
        axis.set_title(title, fontsize=9, color=INK, parse_math=False)
        axis.set_xlabel("query", fontsize=8)
        axis.set_ylabel("key" if column == 0 else "", fontsize=8)
        if index == 0:
            place = sheet.axes(left=0.25 + columns * (size + 0.4), top=0.3, width=0.12, height=size)
            _scale_bar(sheet, mesh, place, "KQ: logit coefficient")
    return sheet.figure


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
    left = 0.4 + 0.075 * max(map(len, outs))  # room for the row labels
    width, height = _CELL * 1.15 * max(5, min(len(names), 24)), max(0.8, 0.34 * len(table))
    sheet = _Sheet(width=left + width + 1.0, height=height + 0.6)
    axis = sheet.axes(left=left, top=0.12, width=width, height=height)
    mesh = _matrix(axis, table, np.ones(table.shape, dtype=bool), limit=limit)
    axis.set_aspect("auto")
    _tick(axis, x=names, y=outs)
    axis.set_xlabel("token", fontsize=8)
    axis.set_ylabel("out", fontsize=8)
    _scale_bar(sheet, mesh, sheet.axes(left=left + width + 0.15, top=0.12, width=0.12, height=height), "OV")
    return sheet.figure


class _Sheet:
    """A figure on which axes are placed in inches from the top left.

    Matplotlib's automatic layouts draw every figure twice, which is half of the time a page takes.
    """

    def __init__(self, *, width: float, height: float) -> None:
        from matplotlib.figure import Figure  # not pyplot: no state is shared with the caller's figures

        self.figure = Figure(figsize=(width, height))

    def axes(self, *, left: float, top: float, width: float, height: float) -> Any:
        whole_width, whole_height = self.figure.get_size_inches()
        bottom = whole_height - top - height
        return self.figure.add_axes(
            (left / whole_width, bottom / whole_height, width / whole_width, height / whole_height)
        )


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
    """As many digits as the scale makes worth reading: `.15`, `−2.93`, `0`."""
    if not np.isfinite(value):
        return "n/a"
    if limit >= 1e4 or limit < 1e-3:
        return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    digits = 3 if limit < 0.03 else 2 if limit < 10 else 1 if limit < 100 else 0
    text = f"{abs(value):.{digits}f}"
    if float(text) == 0:
        return "0"
    return ("−" if value < 0 else "") + (text[1:] if text.startswith("0.") else text)


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


def _scale_bar(sheet: _Sheet, mesh: Any, place: Any, label: str) -> None:
    bar = sheet.figure.colorbar(mesh, cax=place)
    bar.set_label(label, fontsize=8, color=INK)
    bar.ax.tick_params(labelsize=7, colors=QUIET)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
