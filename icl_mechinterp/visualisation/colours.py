"""The colours of every picture, told apart by readers with any common colour blindness and in grey print.

Colour is never the only signal: heat maps carry their values, lines differ in dashes as well.
"""

POSITIVE = "#1f5fa8"
NEGATIVE = "#b8500c"
"""Ends of the diverging scale; white is zero. Blue and orange stay apart without red or green."""

INK = "#1b1f24"
QUIET = "#5c6670"
MEANINGLESS = "#e6e6e6"
"""Fill of entries that have no meaning; they are hatched too."""

LINES = ("#1f5fa8", "#b8500c", "#1a7f5a", "#8a3d8f", "#8c6d00", "#2b9bc4", "#6b6b6b", "#c2185b")
DASHES = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))


def line_style(index: int, group: str = "") -> tuple[str, object]:
    """Colour and dashes of the n-th line; neighbours differ in both, so that a grey print can still be read.

    A group that says its sign has the colour that this sign has in the heat maps.
    """
    signs = {"positive": POSITIVE, "negative": NEGATIVE}
    colour = next((c for sign, c in signs.items() if group.endswith(sign)), LINES[index % len(LINES)])
    return colour, DASHES[(index + index // len(LINES)) % len(DASHES)]
