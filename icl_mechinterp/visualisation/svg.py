"""From a matplotlib figure to SVG, and to an image that stands in a page on its own.

The image is a data URI, not inline SVG: ids of several figures then cannot collide, nothing in it can run, and the
alternative text is an ordinary `alt`. Letters are drawn as outlines, so that no font is needed to read them.
"""

import base64
import html
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import matplotlib.figure


def as_svg(figure: "matplotlib.figure.Figure") -> str:
    """The figure as SVG text; the same figure gives the same text."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "icl_mechinterp", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", dpi=150, metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def as_image(figure: "matplotlib.figure.Figure", *, alt: str) -> str:
    """The figure as one `<img>` that needs no other file.

    Args:
        figure: what to draw.
        alt: what a reader who cannot see it should know; escaped here.
    """
    # 96 CSS pixels per inch: text keeps the size that the figure was designed for
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    data = base64.b64encode(as_svg(figure).encode()).decode()
    return (
        f'<img alt="{html.escape(alt, quote=True)}" width="{width}" height="{height}" '
        f'src="data:image/svg+xml;base64,{data}">'
    )
