"""Heat maps draw what means something, on one symmetric scale, and mark what does not."""

import numpy as np
import pytest
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from icl_mechinterp.visualisation import as_image, as_svg, kq_heatmaps, ov_heatmap, symmetric_limit

NAMES = ("x1", "x2", "x3", "y")
IDENTIFIABLE = np.ones((4, 4), dtype=bool)
IDENTIFIABLE[:, 3] = False


def kq(planted: float = 1e6) -> np.ndarray:
    matrices = np.stack([0.2 * np.eye(4), -0.1 * np.eye(4)])
    matrices[:, 0, 1] = 0.05
    matrices[:, :, 3] = planted
    return matrices


def panels(figure: Figure) -> list:
    """The axes that hold a matrix; the scale bar is a mesh of one column too."""
    return [
        axis
        for axis in figure.axes
        if axis.get_ylabel() != "KQ: logit coefficient" and axis.get_label() != "<colorbar>"
    ]


def mesh(axis) -> QuadMesh:
    (found,) = [c for c in axis.collections if isinstance(c, QuadMesh)]
    return found


def marked(axis, gid: str) -> set[tuple[int, int]]:
    """(row, column) of the cells that carry a mark."""
    places = [patch.get_xy() for patch in axis.patches if patch.get_gid() == gid]
    places += [text.get_position() for text in axis.texts if text.get_gid() == gid]
    return {(int(y), int(x)) for x, y in places}


def test_hatched_cells_are_those_that_are_not_identifiable():
    axis = panels(kq_heatmaps(kq(), identifiable=IDENTIFIABLE, names=NAMES, heads=("H0", "H1")))[0]
    assert marked(axis, "blank") == {(row, 3) for row in range(4)}
    assert marked(axis, "value") == {(row, column) for row in range(4) for column in range(3)}
    assert all(patch.get_hatch() for patch in axis.patches if patch.get_gid() == "blank")
    np.testing.assert_array_equal(np.ma.getmaskarray(mesh(axis).get_array()).reshape(4, 4), ~IDENTIFIABLE)


def test_scale_is_symmetric_shared_and_blind_to_meaningless_entries():
    figure = kq_heatmaps(kq(), identifiable=IDENTIFIABLE, names=NAMES, heads=("H0", "H1"))
    for axis in panels(figure):
        assert (mesh(axis).norm.vmin, mesh(axis).norm.vmax) == (-0.2, 0.2)
    again = kq_heatmaps(kq(planted=-3.0), identifiable=IDENTIFIABLE, names=NAMES, heads=("H0", "H1"))
    assert as_svg(again) == as_svg(figure)


def test_zero_is_white_and_the_ends_differ_for_every_kind_of_colour_vision():
    shown = mesh(panels(kq_heatmaps(kq(), identifiable=IDENTIFIABLE, names=NAMES, heads=("H0", "H1")))[0])
    np.testing.assert_allclose(shown.cmap(shown.norm(0.0)), (1, 1, 1, 1), atol=0.01)
    low, high = np.array(shown.cmap(0.0)), np.array(shown.cmap(1.0))
    # blue-yellow contrast survives red-green blindness, red-green contrast survives the rest
    assert high[2] - low[2] > 0.4
    assert low[0] - high[0] > 0.4


def test_keys_are_rows_from_the_top_and_queries_columns():
    matrix = np.zeros((1, 4, 4))
    matrix[0, 0, 2] = 0.7  # key x1, query x3
    axis = panels(kq_heatmaps(matrix, identifiable=IDENTIFIABLE, names=NAMES, heads=("H0",)))[0]
    (cell,) = [text for text in axis.texts if text.get_text() == ".70"]
    assert cell.get_position() == (2.5, 0.5)
    assert axis.get_ylim()[0] > axis.get_ylim()[1]
    assert (
        [t.get_text() for t in axis.get_xticklabels()] == list(NAMES) == [t.get_text() for t in axis.get_yticklabels()]
    )
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("query", "key")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_entries_that_are_not_finite_are_marked_and_do_not_stretch_the_scale(bad):
    matrices = kq()
    matrices[0, 1, 2] = bad
    axis = panels(kq_heatmaps(matrices, identifiable=IDENTIFIABLE, names=NAMES, heads=("H0", "H1")))[0]
    assert (1, 2) in marked(axis, "blank")
    assert "n/a" in {text.get_text() for text in axis.texts}
    assert mesh(axis).norm.vmax == 0.2


def test_more_heads_than_fit_in_a_row_are_all_drawn():
    figure = kq_heatmaps(np.ones((6, 4, 4)), identifiable=IDENTIFIABLE, names=NAMES, heads=[f"H{h}" for h in range(6)])
    assert [axis.get_title() for axis in panels(figure) if axis.get_title()] == [f"H{h}" for h in range(6)]


def test_large_matrices_stay_legible_by_leaving_numbers_out():
    size = 41
    figure = kq_heatmaps(
        np.ones((1, size, size)),
        identifiable=np.ones((size, size), dtype=bool),
        names=[f"x{i}" for i in range(size)],
        heads=("H0",),
    )
    axis = panels(figure)[0]
    assert not axis.texts
    assert len(axis.get_xticklabels()) < 20


def test_ov_has_a_row_per_head_and_label_slot():
    ov = np.arange(12.0).reshape(2, 2, 3) - 6
    axis = ov_heatmap(ov, names=("x1", "y1", "y2"), heads=("H0", "H1")).axes[0]
    assert [t.get_text() for t in axis.get_yticklabels()] == ["H0 → y1", "H0 → y2", "H1 → y1", "H1 → y2"]
    assert mesh(axis).norm.vmax == 6.0
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("token", "out")


def test_symmetric_limit():
    assert symmetric_limit(np.array([1.0, -3.0, np.nan])) == 3.0
    assert symmetric_limit(np.array([1.0, -3.0]), np.array([True, False])) == 1.0
    assert symmetric_limit(np.zeros(3)) == 1.0
    assert symmetric_limit(np.array([np.nan])) == 1.0


def test_names_are_not_read_as_formulas_and_alternative_text_is_escaped():
    figure = kq_heatmaps(
        np.ones((1, 4, 4)), identifiable=IDENTIFIABLE, names=("$x", "a$\\", "c", "d"), heads=("$\\frac",)
    )
    image = as_image(figure, alt='"><script>alert(1)</script>')
    assert "<script>" not in image
    assert image.startswith('<img alt="&quot;&gt;&lt;script&gt;')


def test_drawing_leaves_pyplot_alone():
    import matplotlib.pyplot as plt

    kq_heatmaps(kq(), identifiable=IDENTIFIABLE, names=NAMES, heads=("H0", "H1"))
    assert plt.get_fignums() == []
