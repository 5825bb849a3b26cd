"""CircuitsVis figures for a page that must work offline: the only file that knows CircuitsVis.

Its Python functions make pages that load their script from a CDN, and leave a `<div/>` open that swallows what follows
it. So the script that comes with the package is put into the page once, and each figure is a closed box with one call.
The script's place in the package is not a promised path: without it there is no interactive figure, and callers show
their static picture alone.
"""

import html
import importlib.util
import json
import math
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from .colours import NEGATIVE, POSITIVE

_ELEMENT_ID = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_COLOURS = {"negativeColor": NEGATIVE, "positiveColor": POSITIVE}


def bundle_script() -> str | None:
    """The script element that CircuitsVis figures need, once per page; `None` when the package does not have it."""
    found = importlib.util.find_spec("circuitsvis")  # importing it would import torch, and is not needed
    if found is None or found.origin is None:
        return None
    file = Path(found.origin).parent / "dist" / "cdn" / "iife.js"
    if not file.is_file():
        return None
    script = re.sub(r"//# sourceMappingURL=\S*", "", file.read_text("utf-8"))
    # both would end, or change the meaning of, the script element they stand in; the bundle has them inside strings
    script = script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    return f"<script>/*! CircuitsVis {_version()}, Copyright (c) 2022 Alan Cooney, MIT License */\n{script}</script>"


def attention_pattern(
    matrix: Float[np.ndarray, "destination source"],
    labels: Sequence[str],
    *,
    element_id: str,
    limit: float,
    width: int = 340,
) -> str:
    """A square matrix as a heat map that tells its values on hover.

    CircuitsVis names the axes itself: rows are the destination (the query), columns the source (the key). A key-query
    matrix `kq[key, query]` is therefore passed as its transpose.

    Args:
        matrix: as many rows as columns; entries that are not finite are left blank.
        labels: one per row and column.
        element_id: of the element in the page, unique there.
        limit: the colour scale runs from -limit to limit; values beyond it are drawn as the end of the scale.
        width: in CSS pixels, at most; the figure would fill its container otherwise.

    Returns:
        Markup that is complete in itself; the page needs `bundle_script` before it.
    """
    assert matrix.shape == (len(labels), len(labels)), "AttentionPattern draws square matrices only"
    rows = [[_number(value) for value in row] for row in matrix]
    properties = {"attention": rows, "tokens": list(labels), "showAxisLabels": True, "maskUpperTri": False}
    return _figure("AttentionPattern", properties | _scale(limit), element_id=element_id, width=width)


def colored_tokens(
    values: Float[np.ndarray, " token"], labels: Sequence[str], *, element_id: str, limit: float, width: int = 340
) -> str:
    """A row of tokens coloured by their values, which show on hover.

    Args:
        values: one per token; those that are not finite are left blank.
        labels: the tokens.
        element_id, limit, width: as in `attention_pattern`.
    """
    assert len(values) == len(labels), f"{len(values)} values for {len(labels)} tokens"
    # this component writes its tokens as HTML
    tokens = [html.escape(f" {label} ") for label in labels]
    properties = {"tokens": tokens, "values": [_number(value) for value in values]}
    return _figure("ColoredTokens", properties | _scale(limit), element_id=element_id, width=width)


def _figure(component: str, properties: dict[str, Any], *, element_id: str, width: int) -> str:
    assert _ELEMENT_ID.fullmatch(element_id), f"{element_id!r} cannot be used as the id of an element"
    # no "<" of a label may end the script or open a comment in it; \u003c is the same character to the script
    arguments = json.dumps(properties, allow_nan=False).replace("<", "\\u003c")
    return (
        f'<div class="circuitsvis" style="max-width:{width}px"><div id="{element_id}"></div></div>'
        f'<script>CircuitsVis.render("{element_id}", CircuitsVis.{component}, {arguments})</script>'
    )


def _scale(limit: float) -> dict[str, Any]:
    assert limit > 0, f"a colour scale needs a positive limit; got {limit}"  # the script divides by it
    return {"minValue": -limit, "maxValue": limit, **_COLOURS}


def _number(value: Any) -> float | None:
    """A JSON number of six digits; `None` (drawn white) for what is not finite, which JSON cannot say."""
    return float(f"{float(value):.6g}") if math.isfinite(value) else None


def _version() -> str:
    try:
        return version("circuitsvis")
    except PackageNotFoundError:  # a checkout on the path
        return ""
