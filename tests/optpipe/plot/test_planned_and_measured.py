"""Plan and step stand one above the other at one time scale, and what decides the end is framed."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.collections import Collection, PatchCollection, PolyCollection

from optpipe.plot.figure import settings
from optpipe.plot.panel import Panel
from optpipe.plot.planned_and_measured import planned_and_measured_panel, render_planned_and_measured
from optpipe.trace import Trace
from optpipe.trace.compare import Span, compare, planned_spans
from optpipe.units import idle_text, time_unit
from tests.optpipe.plot.schedules import pair
from tests.optpipe.trace.traces import trace_of


def stretched(factor: float) -> Trace:
    """A step in which everything took so many times as long as planned."""
    spans = planned_spans(pair()).items()
    return trace_of(pair(), {op: Span(factor * span.start_us, factor * span.end_us) for op, span in spans})


def drawn(trace: Trace) -> Panel:
    with settings():
        return planned_and_measured_panel(trace, compare(trace))


def _rectangles(collection: Collection, panel: Panel) -> set[tuple[float, float]]:
    """Starts and ends of the boxes of a collection, in us."""
    paths = [path.vertices[:, 0] * panel.unit.size for path in collection.get_paths()]
    return {(round(float(np.min(x)), 6), round(float(np.max(x)), 6)) for x in paths}


def _collections(panel: Panel, kind: type[Collection], zorder: int) -> list[Collection]:
    return [c for c in panel.axes.collections if type(c) is kind and c.get_zorder() == zorder]


def test_both_stand_at_their_own_times_on_one_scale() -> None:
    trace = stretched(1.25)
    panel = drawn(trace)
    assert (panel.start_us, panel.end_us) == (0.0, 1.25 * pair().value_us)
    found = set().union(*(_rectangles(c, panel) for c in _collections(panel, PolyCollection, 2)))
    planned = {(s.start_us, s.end_us) for s in planned_spans(pair()).values()}
    assert found == planned | {(1.25 * start, 1.25 * end) for start, end in planned}


def test_ops_that_decide_the_end_are_framed() -> None:
    trace = stretched(1.25)
    panel = drawn(trace)
    comparison = compare(trace)
    [frames] = _collections(panel, PatchCollection, 4)
    assert _rectangles(frames, panel) == {tuple(comparison.spans[op]) for op in comparison.path_ops}


def test_a_plan_of_another_scale_is_stretched_and_says_so() -> None:
    panel = drawn(stretched(100.0))
    assert panel.end_us == pytest.approx(100 * pair().value_us)
    texts = " ".join(text.get_text() for text in panel.axes.texts)
    assert "its times x 100, so that both compute equally long" in texts
    assert "ratio 1.000" in texts


def test_figures_stand_beside_each_device() -> None:
    trace = stretched(1.25)
    texts = [text.get_text() for text in drawn(trace).axes.texts]
    assert texts.count("planned") == texts.count("measured") == 2
    for d, figures in enumerate(compare(trace).devices):
        planned_us = pair().idle_us(d)
        assert figures.planned_idle_us == pytest.approx(planned_us)
        assert figures.idle_us == pytest.approx([1.25 * us for us in planned_us])
        unit = time_unit(1.25 * pair().value_us)
        for idle_us in (figures.planned_idle_us, figures.idle_us):
            assert any(text.startswith(f"idle {idle_text(idle_us, unit)}, peak ") for text in texts)


def test_the_same_trace_gives_the_same_bytes() -> None:
    trace = stretched(1.25)
    first, second = (render_planned_and_measured(trace, compare(trace), "svg") for _ in range(2))
    assert first == second
