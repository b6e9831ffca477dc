"""Bubbles step down as memory grows; schedules of others are marks beside the lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from optpipe.errors import InputError
from optpipe.plot.bubble_over_memory import (
    Mark,
    MemoryChart,
    MemoryLine,
    bubble_over_memory_grid,
    draw_bubble_over_memory,
)
from optpipe.plot.output import settings

FEW = MemoryLine("m = 8", [(2.0, 0.5), (4.0, 0.25)])
MANY = MemoryLine("m = 64", [(2.0, 0.3), (4.0, 0.1)])
CHART = MemoryChart("a V", "one device", "microbatches", [FEW, MANY], [Mark(3.0, 0.6, "public one")])


def test_lines_and_marks() -> None:
    with settings():
        [axes] = bubble_over_memory_grid(CHART, "title").axes
    few, many, mark = axes.lines
    assert np.asarray(few.get_data()).T.tolist() == [list(point) for point in FEW.points]
    assert few.get_drawstyle() == "steps-post"
    assert few.get_color() != many.get_color()
    assert np.asarray(mark.get_data()).ravel().tolist() == [3.0, 0.6]
    assert "public one" in [text.get_text() for text in axes.texts]
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] > 0.6


def test_files(tmp_path: Path) -> None:
    draw_bubble_over_memory(CHART, tmp_path / "a.svg", "Bubbles")
    assert "public one" in (tmp_path / "a.svg").read_text()
    with pytest.raises(InputError, match="Maybe no pattern fits"):
        draw_bubble_over_memory(MemoryChart("x", "", "", []), tmp_path / "b.svg", "Bubbles")
