"""Boxes can be seen however little time their ops take."""

from __future__ import annotations

import numpy as np
from matplotlib.collections import PolyCollection

from optpipe.kinds import KIND
from optpipe.ops import Op
from optpipe.plot.figure import settings
from optpipe.plot.gantt import MARGINS
from optpipe.plot.panel import (
    NARROWEST_INCHES,
    THINNEST_POINTS,
    Box,
    Lane,
    Margins,
    Panel,
    draw_boxes,
    draw_legend,
    memory_entries,
    op_entries,
)
from optpipe.plot.style import op_colour
from optpipe.units import time_unit


def test_a_box_too_narrow_to_be_seen_is_a_line_of_its_colour() -> None:
    """A page of ops in which transfers take a ten-thousandth of an op's time, or none."""
    colour = op_colour("R", 0, 1)
    with settings():
        panel = Panel.of(12, 1, Margins(1, 1, 1, 1), 0.0, 1000.0, time_unit(1000.0))
        boxes = [Box(0.0, length, Op("R", 0, 0), Lane(0.1, 0.2), colour, "0") for length in (100.0, 0.01, 0.0)]
        draw_boxes(panel, boxes)
    [drawn] = [c for c in panel.axes.collections if isinstance(c, PolyCollection)]
    borders = [tuple(float(c) for c in edge[:3]) for edge in np.asarray(drawn.get_edgecolor())]
    assert borders == [(1.0, 1.0, 1.0), colour, colour]
    widths = np.asarray(drawn.get_linewidth())
    spans = [box.end_us - box.start_us for box in boxes]
    assert widths[0] == THINNEST_POINTS
    assert np.allclose(widths[1:] + panel.points_per_us * np.array(spans[1:]), THINNEST_POINTS, atol=1e-3)


def test_every_entry_at_once_fits_on_one_row() -> None:
    with settings():
        panel = Panel.of(NARROWEST_INCHES, 2.0, MARGINS, 0.0, 100.0, time_unit(100.0))
        draw_legend(panel, op_entries(KIND, 6) + memory_entries(budgets=True))
        panel.figure.draw_without_rendering()
        legend = panel.axes.get_legend()
        assert legend is not None
        texts = legend.get_texts()
        assert len(texts) == len(KIND) + 4
        assert max(text.get_window_extent().x1 for text in texts) < panel.figure.bbox.x1


def test_long_texts_stay_in_the_picture_on_all_sides() -> None:
    text = "idle 10.4 + 14.3 + 10.8 ms, peak 1,023.9 MiB"
    with settings():
        panel = Panel.of(NARROWEST_INCHES, 2.0, MARGINS, 0.0, 100.0, time_unit(100.0))
        labels = [panel.text_left(0.2, text), panel.text_right(0.2, text), panel.text_above(0.2, 4 * text)]
        extents = [label.get_window_extent() for label in labels]
        assert min(extent.x0 for extent in extents) >= 0
        assert max(extent.x1 for extent in extents) <= panel.figure.bbox.x1
