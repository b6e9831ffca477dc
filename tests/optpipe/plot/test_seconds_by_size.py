"""Charts over sizes share one scale of seconds, and sizes at which a moment never came have no point."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from optpipe.errors import InputError
from optpipe.plot.output import settings
from optpipe.plot.seconds_by_size import LEAST_S, SizeChart, SizeLine, draw_seconds_by_size, seconds_by_size_grid

LINEAR = SizeChart(
    "linear", "m = 4 p", "devices p", [SizeLine("first", [(4, 0.0), (8, 0.02)]), SizeLine("proved", [(4, 7.0)])]
)
V_SHAPE = SizeChart("V", "m = 4 p", "devices p", [SizeLine("first", [(4, 0.5), (8, 40.0)])])


def test_points_and_scales() -> None:
    with settings():
        linear, v_shape = seconds_by_size_grid([LINEAR, V_SHAPE], "title").axes
    assert linear.get_ylim() == v_shape.get_ylim() == (LEAST_S, 100.0)
    assert [np.asarray(line.get_data()).tolist() for line in linear.lines] == [[[4, 8], [LEAST_S, 0.02]], [[4], [7]]]
    assert [label.get_text() for label in linear.get_xticklabels()] == ["4", "8"]
    assert "0.3 s" in [label.get_text() for label in linear.get_yticklabels()]
    assert linear.lines[0].get_color() == v_shape.lines[0].get_color() != linear.lines[1].get_color()


def test_files(tmp_path: Path) -> None:
    draw_seconds_by_size([LINEAR], tmp_path / "a.svg", "Seconds")
    assert "devices p" in (tmp_path / "a.svg").read_text()
    with pytest.raises(InputError, match="is without lines"):
        draw_seconds_by_size([SizeChart("x", "", "p", [])], tmp_path / "b.svg", "Seconds")
