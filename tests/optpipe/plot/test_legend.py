"""The longest legend fits the narrowest picture."""

from __future__ import annotations

from optpipe.plot.colours import OP_LOOKS
from optpipe.plot.gantt import MARGINS
from optpipe.plot.legend import draw_legend, memory_entries, op_entries
from optpipe.plot.output import settings
from optpipe.plot.panel import NARROWEST_INCHES, Panel
from optpipe.units import time_unit


def test_every_entry_at_once_fits_on_one_row() -> None:
    with settings():
        panel = Panel.of(NARROWEST_INCHES, 2.0, MARGINS, 0.0, 100.0, time_unit(100.0))
        draw_legend(panel, op_entries(OP_LOOKS, 6) + memory_entries(budgets=True), 0.17)
        panel.figure.draw_without_rendering()
        legend = panel.axes.get_legend()
        assert legend is not None
        texts = legend.get_texts()
        assert len(texts) == len(OP_LOOKS) + 4
        assert max(text.get_window_extent().x1 for text in texts) < panel.figure.bbox.x1
