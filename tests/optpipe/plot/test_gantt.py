"""The picture of one schedule shows every op at its time, the memory it needs, and nothing on top of something else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from instances import uniform
from optpipe.plot.figure import settings
from optpipe.plot.gantt import schedule_panel
from optpipe.plot.panel import Panel, title_text
from optpipe.plot.style import BUDGET, MEMORY_EDGE, op_colour
from optpipe.schedule import Schedule
from solver.solve import solve
from tests.optpipe.plot.schedules import all_forwards_first, pair
from tests.recomputing import every_mode
from tests.unequal import unequal


@pytest.fixture
def _drawing() -> Iterator[None]:
    with settings():
        yield


pytestmark = pytest.mark.usefixtures("_drawing")


def _boxes(panel: Panel) -> list[tuple[float, float, tuple[float, ...]]]:
    """Start and end in us, and colour, of every box (the collection with borders)."""
    [boxes] = [c for c in panel.axes.collections if type(c) is PolyCollection and len(c.get_edgecolor())]
    scale = panel.unit.size
    return [
        (path.vertices[:, 0].min() * scale, path.vertices[:, 0].max() * scale, tuple(colour[:3]))
        for path, colour in zip(boxes.get_paths(), boxes.get_facecolor(), strict=True)
    ]


def _lines(panel: Panel, colour: str) -> list[Any]:
    return [line for line in panel.axes.lines if line.get_color() == colour]


def _legend_texts(panel: Panel) -> list[str]:
    legend = panel.axes.get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


def test_every_op_has_a_box_at_its_times_in_the_colour_of_its_kind() -> None:
    schedule = pair()
    expected = [
        (op.start_us, op.end_us, op_colour(op.op, 0, 1))
        for device in schedule.devices
        for _, ops in device.streams()
        for op in ops
    ]
    found = _boxes(schedule_panel(schedule))
    assert np.allclose([box[:2] for box in found], [box[:2] for box in expected])
    assert np.allclose([box[2] for box in found], [box[2] for box in expected])


def test_only_devices_that_offload_have_transfer_lanes() -> None:
    panel = schedule_panel(pair())
    idle = next(c for c in panel.axes.collections if type(c) is PolyCollection and not len(c.get_edgecolor()))
    assert len(idle.get_paths()) == 4  # compute, offload, reload of device 0; compute of device 1
    assert [text.get_text() for text in panel.axes.texts].count("offload") == 1


def test_memory_curves_and_budgets_share_one_scale() -> None:
    schedule = pair()
    panel = schedule_panel(schedule)
    baselines = [line for line in _lines(panel, MEMORY_EDGE) if len(set(line.get_ydata())) == 1]
    curves = [line for line in _lines(panel, MEMORY_EDGE) if len(set(line.get_ydata())) > 1]
    heights = [base.get_ydata()[0] - min(curve.get_ydata()) for base, curve in zip(baselines, curves, strict=True)]
    peaks = [device.peak_bytes for device in schedule.devices]
    assert heights[0] / heights[1] == pytest.approx(peaks[0] / peaks[1])


@pytest.mark.parametrize(("budget", "lines"), [(8, 2), (1000, 0), (None, 0)])
def test_a_budget_is_a_dashed_line_unless_it_would_flatten_the_curves(budget: int | None, lines: int) -> None:
    panel = schedule_panel(all_forwards_first(uniform(2, 4, budget=budget)))
    drawn = _lines(panel, BUDGET)
    assert len(drawn) == lines
    assert all(line.is_dashed() for line in drawn)
    assert ("budget" in _legend_texts(panel)) == bool(drawn)
    named = {None: "peak 8 B, no limit", 8: "peak 8 B of 8 B", 1000: "peak 8 B of 1,000 B"}[budget]
    assert [text.get_text() for text in panel.axes.texts].count(named) == 2


def test_a_peak_above_its_budget_stands_out() -> None:
    data = all_forwards_first(uniform(2, 4)).to_data()
    data["problem"]["devices"][0]["memory_bytes"] = 6
    panel = schedule_panel(Schedule.from_data(data))
    [label] = [text for text in panel.axes.texts if text.get_text() == "peak 8 B of 6 B"]
    assert label.get_color() == BUDGET


def test_header_names_the_figures() -> None:
    schedule = pair(name="two")
    texts = [text.get_text() for text in schedule_panel(schedule).axes.texts]
    assert "two: 2 devices, 4 microbatches" in texts
    [figures] = [text for text in texts if text.startswith("by hand")]
    assert f"makespan {schedule.value_us:.1f} µs" in figures
    for word in (schedule.status, "bound", "gap", "bubble"):
        assert word in figures


def _extents(panel: Panel) -> list[tuple[Text, Bbox]]:
    renderer = FigureCanvasAgg(panel.figure).get_renderer()
    panel.figure.draw_without_rendering()
    legend = panel.axes.get_legend()
    assert legend is not None
    texts = [text for text in [*panel.axes.texts, *legend.get_texts()] if text.get_text()]
    return [(text, text.get_window_extent(renderer)) for text in texts]


@pytest.mark.parametrize(
    "schedule",
    [
        pair(name="W" * 200),
        all_forwards_first(uniform(8, 24, budget=10**15, name="main case")),
        all_forwards_first(uniform(16, 12, v_shape=True)),
        all_forwards_first(uniform(32, 8, budget=10**3)),
        every_mode(),
    ],
    ids=["pair", "main", "v-shape", "many", "modes"],
)
def test_no_text_overlaps_another_or_leaves_the_page(schedule: Schedule) -> None:
    data = schedule.to_data()
    for device in data["problem"]["devices"]:
        device["name"] = "W" * 200
    panel = schedule_panel(Schedule.from_data(data))
    extents = _extents(panel)
    page = panel.figure.bbox
    for text, box in extents:
        assert page.x0 <= box.x0, text
        assert box.x1 <= page.x1, text
        assert page.y0 <= box.y0, text
        assert box.y1 <= page.y1, text
    x0, y0, x1, y1 = np.array([box.extents for _, box in extents]).T
    apart = (x1[:, None] <= x0) | (x0[:, None] >= x1) | (y1[:, None] <= y0) | (y0[:, None] >= y1)
    overlapping = np.argwhere(np.triu(~apart, k=1))
    assert [(extents[k][0], extents[j][0]) for k, j in overlapping] == []


def test_numbers_stay_within_their_boxes() -> None:
    panel = schedule_panel(all_forwards_first(uniform(8, 24)))
    numbers = [(text, box) for text, box in _extents(panel) if text.get_text().isdigit()]
    assert len(numbers) == 3 * 8 * 24
    width = 10 * panel.points_per_us * panel.figure.dpi / 72
    assert all(box.width <= width for _, box in numbers)


def test_no_numbers_where_there_is_no_room() -> None:
    panel = schedule_panel(all_forwards_first(uniform(2, 200)))
    assert not [text for text in panel.axes.texts if text.get_text().isdigit()]


def test_stages_of_one_device_differ_in_shade() -> None:
    panel = schedule_panel(all_forwards_first(uniform(2, 2, v_shape=True)))
    assert len({colour for *_, colour in _boxes(panel)}) == 6  # F, B and W, each in two shades
    assert "first to last stage" in _legend_texts(panel)


def test_a_schedule_without_ops_is_drawn_empty() -> None:
    data = all_forwards_first(uniform(2, 1)).to_data()
    for device in data["devices"]:
        device["compute"] = []
    panel = schedule_panel(Schedule.from_data(data))
    assert panel.end_us > panel.start_us


def test_slices_are_named_by_microbatch_and_slice() -> None:
    problem = unequal(2, 2, slices={"count": 2})
    texts = {text.get_text() for text in schedule_panel(solve(problem, "seq1f1b")).axes.texts}
    assert {"0/0", "0/1", "1/0", "1/1"} <= texts
    assert title_text(solve(problem, "seq1f1b")) == "2 devices, 2 microbatches of 2 slices"


def test_only_narrow_boxes_of_a_kind_go_without_a_number() -> None:
    """Slices of 1 us and of 20 us in turns."""
    problem = unequal(2, 8, slices={"count": 2, "factors": {"forward": [1, 20], "backward_input": [1, 20]}})
    panel = schedule_panel(solve(problem, "gpipe"))
    numbers = [(text.get_text(), box) for text, box in _extents(panel) if "/" in text.get_text()]
    assert Counter(name for name, _ in numbers) == {f"{i}/1": 4 for i in range(8)}  # F and BW of two stages
    width = 20 * panel.points_per_us * panel.figure.dpi / 72
    assert all(box.width <= width for _, box in numbers)
    assert len({text.get_fontsize() for text in panel.axes.texts if "/" in text.get_text()}) == 1
