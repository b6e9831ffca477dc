"""Bubbles step down as memory grows, with public schedules as marks; charts over sizes share one scale of seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.curves import (
    LEAST_S,
    Mark,
    MemoryChart,
    MemoryLine,
    SizeChart,
    SizeLine,
    bubble_over_memory_grid,
    draw_bubble_over_memory,
    draw_seconds_by_size,
    seconds_by_size_grid,
)
from optpipe.errors import InputError
from optpipe.plot.figure import settings

FEW = MemoryLine("m = 8", [(2.0, 0.5), (4.0, 0.25)])
MANY = MemoryLine("m = 64", [(2.0, 0.3), (4.0, 0.1)])
CHART = MemoryChart("a V", "one device", "microbatches", [FEW, MANY], [Mark(3.0, 0.6, "public one")])
LINEAR = SizeChart(
    "linear", "m = 4 p", "devices p", [SizeLine("first", [(4, 0.0), (8, 0.02)]), SizeLine("proved", [(4, 7.0)])]
)
V_SHAPE = SizeChart("V", "m = 4 p", "devices p", [SizeLine("first", [(4, 0.5), (8, 40.0)])])


def test_memory_lines_and_marks() -> None:
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


def test_memory_files(tmp_path: Path) -> None:
    draw_bubble_over_memory(CHART, tmp_path / "a.svg", "Bubbles")
    assert "public one" in (tmp_path / "a.svg").read_text()
    with pytest.raises(InputError, match="Maybe no pattern fits"):
        draw_bubble_over_memory(MemoryChart("x", "", "", []), tmp_path / "b.svg", "Bubbles")


def test_size_points_and_scales() -> None:
    with settings():
        linear, v_shape = seconds_by_size_grid([LINEAR, V_SHAPE], "title").axes
    assert linear.get_ylim() == v_shape.get_ylim() == (LEAST_S, 100.0)
    assert [np.asarray(line.get_data()).tolist() for line in linear.lines] == [[[4, 8], [LEAST_S, 0.02]], [[4], [7]]]
    assert [label.get_text() for label in linear.get_xticklabels()] == ["4", "8"]
    assert "0.3 s" in [label.get_text() for label in linear.get_yticklabels()]
    assert linear.lines[0].get_color() == v_shape.lines[0].get_color() != linear.lines[1].get_color()


def test_size_files(tmp_path: Path) -> None:
    draw_seconds_by_size([LINEAR], tmp_path / "a.svg", "Seconds")
    assert "devices p" in (tmp_path / "a.svg").read_text()
    with pytest.raises(InputError, match="is without lines"):
        draw_seconds_by_size([SizeChart("x", "", "p", [])], tmp_path / "b.svg", "Seconds")
