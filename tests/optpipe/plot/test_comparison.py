"""Schedules of one problem stand at one time scale with their figures beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.collections import PolyCollection

from instances import uniform
from optpipe.errors import InputError
from optpipe.ops import Op, Orders
from optpipe.plot.comparison import comparison_panel, draw_comparison
from optpipe.plot.figure import settings
from optpipe.schedule import Schedule
from tests.optpipe.plot.schedules import all_forwards_first, finished

PROBLEM = uniform(2, 2, name="$both$")


def one_at_a_time() -> Schedule:
    """Every microbatch alone in the pipeline."""
    return finished(
        PROBLEM, Orders.of_compute([[Op(kind, s, i) for i in range(2) for kind in "FBW"] for s in range(2)])
    )


def test_all_schedules_share_one_scale_from_zero() -> None:
    fast, slow = all_forwards_first(PROBLEM), one_at_a_time()
    assert fast.value_us < slow.value_us
    with settings():
        panel = comparison_panel([("fast", fast), ("slow", slow)])
    assert (panel.start_us, panel.end_us) == (0.0, slow.value_us)
    [boxes] = [c for c in panel.axes.collections if type(c) is PolyCollection and len(c.get_edgecolor())]
    starts = [path.vertices[:, 0].min() * panel.unit.size for path in boxes.get_paths()]
    ops = [op for schedule in (fast, slow) for device in schedule.devices for op in device.compute]
    assert starts == pytest.approx([op.start_us for op in ops])


def test_value_bubble_and_peak_stand_beside_and_the_best_is_bold() -> None:
    fast, slow = all_forwards_first(PROBLEM), one_at_a_time()
    with settings():
        texts = comparison_panel([("slow", slow), ("fast", fast)]).axes.texts
    weight = {text.get_text(): text.get_fontweight() for text in texts}
    assert weight[f"{fast.value_us:.2f} µs"] == "bold"
    assert weight[f"{slow.value_us:.1f} µs"] == "normal"
    assert weight[f"{100 * fast.bubble:.1f} %"] == "bold"
    assert {"value", "bubble", "peak", "fast", "slow", "2 B", "4 B"} <= set(weight)


def test_writes_the_format_of_the_suffix(tmp_path: Path) -> None:
    draw_comparison([("one", one_at_a_time())], tmp_path / "one.svg")
    assert "$both$: 2 devices, 2 microbatches" in (tmp_path / "one.svg").read_text()


def test_refuses_no_schedules_and_schedules_of_another_problem(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is empty"):
        draw_comparison([], tmp_path / "none.png")
    other = all_forwards_first(uniform(2, 2, name="other"))
    with pytest.raises(InputError, match=r"schedules\[1\] \(b\) answers the problem 'other', but a answers"):
        draw_comparison([("a", one_at_a_time()), ("b", other)], tmp_path / "two.png")
    assert not list(tmp_path.iterdir())
