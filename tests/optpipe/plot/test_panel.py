"""Boxes can be seen however little time their ops take."""

from __future__ import annotations

import numpy as np
from matplotlib.collections import PolyCollection

from optpipe.orders import Op
from optpipe.plot.boxes import THINNEST_POINTS, Box, draw_boxes
from optpipe.plot.colours import op_colour
from optpipe.plot.output import settings
from optpipe.plot.panel import Lane, Margins, Panel
from optpipe.units import time_unit


def test_a_box_too_narrow_to_be_seen_is_a_line_of_its_colour() -> None:
    """A page of ops in which transfers take a ten-thousandth of an op's time, or none."""
    colour = op_colour("R", 0, 1)
    with settings():
        panel = Panel.of(12, 1, Margins(1, 1, 1, 1), 0.0, 1000.0, time_unit(1000.0))
        boxes = [Box(0.0, length, Op("R", 0, 0), Lane(0.1, 0.2), colour) for length in (100.0, 0.01, 0.0)]
        draw_boxes(panel, boxes)
    [drawn] = [c for c in panel.axes.collections if isinstance(c, PolyCollection)]
    borders = [tuple(float(c) for c in edge[:3]) for edge in np.asarray(drawn.get_edgecolor())]
    assert borders == [(1.0, 1.0, 1.0), colour, colour]
    widths = np.asarray(drawn.get_linewidth())
    spans = [box.end_us - box.start_us for box in boxes]
    assert widths[0] == THINNEST_POINTS
    assert np.allclose(widths[1:] + panel.points_per_us * np.array(spans[1:]), THINNEST_POINTS, atol=1e-3)
