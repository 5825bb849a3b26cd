"""How omega, mu, their sum of products and the loss moved over training, beside what theory expects.

Each seed is a thin line; where a group has several lines, its median is drawn on top. Grouping is the caller's: over
several seeds the number of a head means nothing (head 0 is positive in one seed and negative in the next), so heads are
grouped by what they became.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from .colours import INK, QUIET, line_style

if TYPE_CHECKING:
    import matplotlib.figure

_LONG = 100  # a run of more captures is drawn with its early steps stretched
_MANY = 20_000  # points; above, lines are stored as pixels, since a vector file of them would take megabytes


def trajectories(
    steps: Int[np.ndarray, " step"],
    *,
    loss: Float[np.ndarray, "seed step"],
    omega: Float[np.ndarray, "seed step layer head"],
    mu: Float[np.ndarray, "seed step layer head"],
    groups: Sequence[Sequence[str]],
    theory_lines: Mapping[str, float],
    effective_step: Float[np.ndarray, "seed step"] | None = None,
) -> "matplotlib.figure.Figure":
    """Four panels over training steps: loss, effective step, omega and mu of every head.

    Args:
        steps: of the captures.
        loss: training loss.
        omega, mu: of every head; values that are not finite leave a gap.
        groups: for every seed, the group of every head, layer by layer; a group has one colour and one median.
        theory_lines: `optimal_step`, `best_loss`, `bayes_risk`; those that are missing are not drawn.
        effective_step: as it was recorded; by default the sum of mu omega over heads.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.4, 5.8))
    margins = {"left": 0.045, "right": 0.985, "top": 0.955, "bottom": 0.085, "wspace": 0.11, "hspace": 0.17}
    panels = figure.subplots(2, 2, sharex=True, gridspec_kw=margins)
    rasterized = omega.size > _MANY
    whole = [["model"]] * len(loss)
    omega, mu = (np.where(np.isfinite(values), values, np.nan) for values in (omega, mu))
    total = (mu * omega).sum((2, 3)) if effective_step is None else effective_step
    _panel(panels[0, 0], steps, loss[..., None], whole, "training loss", rasterized)
    _panel(panels[0, 1], steps, total[..., None], whole, "effective step η = Σ μω", rasterized)
    flat = (*omega.shape[:2], -1)
    _panel(panels[1, 0], steps, omega.reshape(flat), groups, "ω of each head", rasterized, zero=True)
    _panel(panels[1, 1], steps, mu.reshape(flat), groups, "μ of each head", rasterized, zero=True)
    _reference(panels[0, 0], theory_lines.get("best_loss"), "best debiased GD", (0, (5, 2)))
    _reference(panels[0, 0], theory_lines.get("bayes_risk"), "Bayes risk", (0, (1.5, 1.5)))
    _reference(panels[0, 1], theory_lines.get("optimal_step"), "optimal step", (0, (5, 2)))
    _log_loss(panels[0, 0], loss)
    for axis in panels.flat:
        _step_axis(axis, steps)
    for axis in panels[1]:
        axis.set_xlabel("training step", fontsize=9)
    for axis in (panels[0, 0], panels[0, 1], panels[1, 0]):
        _legend(axis)
    return figure


def _panel(
    axis: Any,
    steps: Int[np.ndarray, " step"],
    values: Float[np.ndarray, "seed step line"],
    groups: Sequence[Sequence[str]],
    title: str,
    rasterized: bool,
    *,
    zero: bool = False,
) -> None:
    """Thin lines, and a median per group that has several."""
    values = np.where(np.isfinite(values), values, np.nan).astype(np.float64)
    if zero:
        axis.axhline(0, color="#c6ccd2", linewidth=0.8, zorder=0)
    several = len(values) > 1
    marker = "o" if len(steps) < 4 else ""  # a line of one point cannot be seen
    for index, group in enumerate(_in_order(groups)):
        lines = [values[s, :, i] for s, row in enumerate(groups) for i, name in enumerate(row) if name == group]
        colour, dashes = line_style(index, group)
        style: dict[str, Any] = {"color": colour, "linestyle": dashes, "marker": marker, "markersize": 4}
        label = group if group != "model" else None
        if not several:
            for line in lines:
                axis.plot(steps, line, linewidth=1.8, label=label, **style)
                label = None
            continue
        for line in lines:
            thin = {**style, "linestyle": "solid"}
            axis.plot(steps, line, linewidth=0.7, alpha=0.45, rasterized=rasterized, gid="seed", **thin)
        label = f"median, {group}" if group != "model" else "median over seeds"
        axis.plot(steps, _median(lines), linewidth=2.2, label=label, gid="median", **style)
    axis.set_title(title, fontsize=10, loc="left", color=INK)
    axis.tick_params(labelsize=8, colors=QUIET)
    axis.grid(axis="y", color="#eceff2", linewidth=0.7)
    axis.spines[["top", "right"]].set_visible(False)


def _reference(axis: Any, value: float | None, name: str, dashes: Any) -> None:
    if value is not None and math.isfinite(value):
        axis.axhline(value, color=INK, linewidth=1.1, linestyle=dashes, label=f"{name} {value:.4g}", gid="theory")


def _log_loss(axis: Any, loss: Float[np.ndarray, "seed step"]) -> None:
    """A loss that spans decades is drawn on a log axis."""
    finite = loss[np.isfinite(loss)]
    if len(finite) and finite.min() > 0 and finite.max() / finite.min() > 10:
        axis.set_yscale("log")


def _step_axis(axis: Any, steps: Int[np.ndarray, " step"]) -> None:
    """Linear; in long runs logarithmic after the first capture, since most of them is plateau and the rest early."""
    positive = steps[steps > 0]
    if len(steps) > _LONG and positive[-1] > _LONG * positive[0]:
        axis.set_xscale("symlog", linthresh=float(positive[0]))
    if len(steps) > 1:
        axis.set_xlim(float(steps[0]), float(steps[-1]))


def _legend(axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    if not handles:
        return
    legend = axis.legend(
        handles, labels, fontsize=8, frameon=True, framealpha=0.85, edgecolor="none", loc="best", handlelength=3.2
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _median(lines: Sequence[Float[np.ndarray, " step"]]) -> Float[np.ndarray, " step"]:
    """Over lines, gaps left out; a gap where no line has a value."""
    median = np.ma.median(np.ma.masked_invalid(np.stack(lines)), axis=0)
    return np.ma.filled(median, np.nan)


def _in_order(groups: Sequence[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(name for row in groups for name in row))
