"""Figure of a measured step below its plan, device by device at one time scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.collections import PatchCollection
from matplotlib.patches import Patch, Rectangle

from optpipe.files import write_atomically
from optpipe.ops import Op
from optpipe.plot.figure import encode, format_of, settings
from optpipe.plot.panel import (
    Box,
    Lane,
    Margins,
    Panel,
    draw_boxes,
    draw_idle,
    draw_legend,
    draw_numbers,
    kinds_in,
    op_entries,
    printable,
    title_text,
    width_inches,
)
from optpipe.plot.style import FAINT_INK, INK, op_colour
from optpipe.trace.compare import Comparison, Span
from optpipe.trace.document import MeasuredDevice, Trace
from optpipe.units import bytes_text, idle_text, time_text, time_unit

MARGINS = Margins(left=1.75, right=2.95, top=1.15, bottom=0.6)
LONGEST_DEVICE_NAME = 10
COMPUTE_INCHES, COPY_INCHES, BETWEEN_INCHES, GAP_INCHES = 0.3, 0.07, 0.05, 0.2
"""Heights at 8 devices or fewer; more devices are drawn flatter."""
PATH_POINTS = 1.3

Spans = Mapping[Op, Span]


def draw_planned_and_measured(trace: Trace, comparison: Comparison, path: Path) -> None:
    """Draw a trace with its comparison to a .png, .svg, .pdf or .html file. Raises InputError for another suffix."""
    picture_format = format_of(path)
    write_atomically(path, render_planned_and_measured(trace, comparison, picture_format))


def render_planned_and_measured(trace: Trace, comparison: Comparison, picture_format: str) -> bytes:
    """Render to bytes in one of `optpipe.plot.figure.FORMATS`."""
    with settings():
        figure = planned_and_measured_panel(trace, comparison).figure
        return encode(figure, picture_format, title_text(trace.schedule))


@dataclass(frozen=True)
class _Row:
    """Lanes of one device's planned or measured ops; lanes of copies have no height without copies."""

    compute: Lane
    offload: Lane
    reload: Lane

    @classmethod
    def at(cls, top: float, stretch: float, copies: bool) -> _Row:
        compute = Lane(top, stretch * COMPUTE_INCHES)
        height = stretch * COPY_INCHES if copies else 0.0
        offload = Lane(compute.bottom, height)
        return cls(compute, offload, Lane(offload.bottom, height))

    @property
    def bottom(self) -> float:
        return self.reload.bottom

    @property
    def whole(self) -> Lane:
        return Lane(self.compute.top, self.bottom - self.compute.top)


def planned_and_measured_panel(trace: Trace, comparison: Comparison) -> Panel:
    """Draw the whole figure; call within `optpipe.plot.figure.settings`."""
    rows = list(_layout(trace.devices))
    factor = 1.0 if comparison.plan_fits else comparison.work_ratio
    both = [_from_zero(comparison.planned_spans, factor), _from_zero(comparison.spans, 1.0)]
    longest_us = max((span.end_us for spans in both for span in spans.values()), default=0.0)
    height = rows[-1][-1].bottom + 0.1
    width = width_inches(max(len(device.compute) for device in trace.schedule.devices))
    panel = Panel.of(width, height, MARGINS, 0.0, longest_us, time_unit(longest_us))
    boxes = [_boxes(trace, spans, d, pair[k]) for k, spans in enumerate(both) for d, pair in enumerate(rows)]
    for k, length_us in enumerate((comparison.planned_step_us * factor, comparison.step_us)):
        draw_idle(replace(panel, end_us=length_us), [pair[k].whole for pair in rows])
    flat = [box for part in boxes for box in part]
    draw_boxes(panel, flat)
    draw_numbers(panel, [box for box in flat if box.op.stream == "compute"])
    measured = [box for part in boxes[len(rows) :] for box in part]
    _draw_path(panel, [box for box in measured if box.op in comparison.path_ops])
    for d, pair in enumerate(rows):
        _draw_labels(panel, trace, comparison, d, pair, factor)
    _draw_header(panel, trace, comparison, factor)
    return panel


def _layout(devices: Sequence[MeasuredDevice]) -> Iterator[tuple[_Row, _Row]]:
    stretch = min(1.0, max(0.4, (8 / len(devices)) ** 0.5))
    top = 0.06
    for device in devices:
        copies = any(op.stream != "compute" for op in device.ops)
        planned = _Row.at(top, stretch, copies)
        measured = _Row.at(planned.bottom + stretch * BETWEEN_INCHES, stretch, copies)
        yield planned, measured
        top = measured.bottom + stretch * GAP_INCHES


def _from_zero(spans: Spans, factor: float) -> Spans:
    """Intervals relative to the first start, scaled by a factor."""
    first_us = min((span.start_us for span in spans.values()), default=0.0)
    return {
        op: Span((span.start_us - first_us) * factor, (span.end_us - first_us) * factor) for op, span in spans.items()
    }


def _boxes(trace: Trace, spans: Spans, device: int, row: _Row) -> list[Box]:
    stages = trace.schedule.problem.stages_of[device]
    rank = {stage: index for index, stage in enumerate(stages)}
    lanes = {"compute": row.compute, "offload": row.offload, "reload": row.reload}
    return [
        Box(*spans[op], op, lanes[op.stream], op_colour(op.kind, rank[op.stage], len(stages)), str(op.microbatch))
        for op in trace.devices[device].ops
    ]


def _draw_path(panel: Panel, boxes: Sequence[Box]) -> None:
    """Draw dark frames around the ops of the critical path, thin enough to leave narrow ops visible."""
    size = panel.unit.size
    frames = PatchCollection(
        [
            Rectangle((box.start_us / size, box.lane.top), (box.end_us - box.start_us) / size, box.lane.height)
            for box in boxes
        ],
        facecolors="none",
        edgecolors=INK,
        linewidths=[min(PATH_POINTS, 0.15 * (box.end_us - box.start_us) * panel.points_per_us) for box in boxes],
        zorder=4,
    )
    panel.axes.add_collection(frames, autolim=False)


def _draw_labels(
    panel: Panel, trace: Trace, comparison: Comparison, d: int, pair: tuple[_Row, _Row], factor: float
) -> None:
    device, figures = trace.schedule.problem.devices[d], comparison.devices[d]
    planned, measured = (row.compute.middle for row in pair)
    size = 9.5 if pair[0].compute.height > 0.2 else 7.5
    name = printable(device.name, LONGEST_DEVICE_NAME) or f"device {d}"
    panel.axes.text(
        (0.1 - MARGINS.left) / panel.width,
        (planned + measured) / 2,
        name,
        transform=panel.axes.get_yaxis_transform(),
        fontsize=size,
        fontweight="bold",
        color=INK,
        va="center_baseline",
    )
    panel.text_left(planned, "planned", fontsize=size - 1, color=FAINT_INK)
    panel.text_left(measured, comparison.basis, fontsize=size - 1, color=FAINT_INK)
    planned_idle_us = [factor * us for us in figures.planned_idle_us]
    rows = ((planned, planned_idle_us, figures.expected_peak_bytes), (measured, figures.idle_us, figures.peak_bytes))
    for (y, idle_us, peak_bytes), color in zip(rows, (FAINT_INK, INK), strict=True):
        text = f"idle {idle_text(idle_us, panel.unit)}, peak {bytes_text(peak_bytes)}"
        panel.text_right(y, text, fontsize=size - 1, color=color)


def _draw_header(panel: Panel, trace: Trace, comparison: Comparison, factor: float) -> None:
    planned_us, step_us = comparison.planned_step_us, comparison.step_us
    unit = time_unit(min(planned_us * factor, step_us))
    stretched = "" if factor == 1.0 else f" (its times x {factor:,.4g}, so that both compute equally long)"
    turns = "   ·   devices took turns in one process" if comparison.basis == "re-timed" else ""
    panel.text_above(0.85, title_text(trace.schedule), fontsize=15, fontweight="bold")
    panel.text_above(
        0.55,
        f"step {trace.step}   ·   planned {time_text(planned_us * factor, unit)}{stretched}   ·   "
        f"{comparison.basis} {time_text(step_us, unit)}   ·   ratio {step_us / (planned_us * factor or 1):.3f}{turns}",
        fontsize=10.5,
    )
    most_stages = max(map(len, trace.schedule.problem.stages_of))
    entries = op_entries(kinds_in(trace.schedule), most_stages, idle_figures=True)
    path = (Patch(facecolor="none", edgecolor=INK, linewidth=PATH_POINTS), f"decides the end ({comparison.basis})")
    draw_legend(panel, [*entries, path])
