"""Curves show what was known when; final values, proofs and the public value can be read off."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from optpipe.errors import InputError
from optpipe.plot.figure import settings
from optpipe.plot.style import BUDGET
from optpipe.plot.value_over_time import (
    EARLIEST_S,
    Curve,
    InstanceCurves,
    draw_value_over_time,
    render_value_over_time,
    value_over_time_grid,
)

FALLING = Curve("auto", [(0.001, 90_000), (0.5, 31_000), (2.0, 30_000)], 4.0, True)
FLAT = Curve("ada-offload", [(0.3, 31_000)], 0.3, False)
LIMIT_S = 5.0
FOUR = [("a", 30_000), ("b", 30_010), ("c", 30_020), ("d", 30_010)]
INSTANCE = InstanceCurves("d-p4", "makespan", [FALLING, FLAT], 29_000, public_us=50_000)


def chart(*instances: InstanceCurves) -> Axes:
    with settings():
        return value_over_time_grid(instances, LIMIT_S, "title").axes[0]


def lines(axes: Axes, colour: object) -> list[Line2D]:
    return [line for line in axes.lines if line.get_color() == colour]


def test_a_curve_steps_down_when_a_value_was_found() -> None:
    axes = chart(INSTANCE)
    step = next(line for line in axes.lines if line.get_drawstyle() == "steps-post")
    seconds, values = np.asarray(step.get_data())
    assert seconds.tolist() == [EARLIEST_S, 0.5, 2.0, 4.0]
    assert values.tolist() == [90, 31, 30, 30]
    on = [line for line in lines(axes, step.get_color()) if line is not step]
    assert [np.asarray(line.get_data()).tolist() for line in on] == [[[4.0, 4.0], [30, 30]], [[4.0], [30]]]


def test_the_range_leaves_out_a_far_start_and_a_far_public_value() -> None:
    low, high = chart(INSTANCE).get_ylim()
    assert low < 29
    assert 31 < high < 35


def test_full_and_open_ends() -> None:
    """Full where a value is proved, open where a method had no more to try, none at the time limit."""
    to_the_end = Curve("milp", [(0.1, 31_000)], 5.1, False)
    axes = chart(replace(INSTANCE, curves=[FALLING, FLAT, to_the_end]))
    ends = [line for line in axes.lines if line.get_marker() == "o"]
    assert [line.get_markerfacecolor() == line.get_color() for line in ends] == [True, False]
    assert [line.get_xdata() for line in ends] == [[4.0], [0.3]]


def test_a_public_value_is_drawn_where_it_is_near() -> None:
    def dashed(public_us: float) -> int:
        return len(lines(chart(replace(INSTANCE, public_us=public_us)), BUDGET))

    assert (dashed(33_000), dashed(50_000)) == (1, 0)


def test_final_values_and_what_is_known() -> None:
    texts = [text.get_text() for text in chart(INSTANCE).texts]
    assert texts[0] == "d-p4"
    assert texts[1].split("   ·   ") == ["makespan 30.00 ms", "gap 3.3 %", "best public 50.00 ms"]
    assert texts[2:] == ["30.00 ms", "31.00 ms"]


def test_methods_with_one_value_share_its_text_and_texts_do_not_overlap() -> None:
    close = [Curve(name, [(1.0, value)], 1.0, False) for name, value in FOUR]
    axes = chart(InstanceCurves("x", "makespan", close, 20_000))
    labels = axes.texts[2:]
    assert [text.get_text() for text in labels] == ["30.00 ms", "30.01 ms", "30.02 ms"]
    axes.figure.canvas.draw()
    boxes = [text.get_window_extent() for text in labels]
    assert all(lower.y1 <= upper.y0 + 1 for lower, upper in pairwise(boxes))


def test_a_value_that_is_its_bound_has_room_around_it() -> None:
    axes = chart(InstanceCurves("x", "makespan", [Curve("auto", [(0.001, 36_000)], 0.001, True)], 36_000))
    low, high = axes.get_ylim()
    assert low < 36 < high
    assert "proved optimal" in axes.texts[1].get_text()


def test_files(tmp_path: Path) -> None:
    draw_value_over_time([INSTANCE, INSTANCE], LIMIT_S, tmp_path / "a.svg", "Both <of> them")
    assert "Both &lt;of&gt; them" in (tmp_path / "a.svg").read_text()
    first, second = (render_value_over_time([INSTANCE], LIMIT_S, "png", "x") for _ in range(2))
    assert first == second
    with pytest.raises(InputError, match=r"\.bmp"):
        draw_value_over_time([INSTANCE], LIMIT_S, tmp_path / "a.bmp", "x")
    with pytest.raises(InputError, match=r"is empty\. Maybe no method found"):
        draw_value_over_time([], LIMIT_S, tmp_path / "b.svg", "x")
