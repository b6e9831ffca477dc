"""Panel of a schedule: time axis, lanes, boxes of ops, memory strips, legend and headline."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import StrMethodFormatter

from optpipe.kinds import KIND, KINDS, RECOMPUTATIONS, look_of
from optpipe.memory import planned_memory
from optpipe.ops import Op
from optpipe.plot.legend import Handle, draw_legend_row
from optpipe.plot.style import (
    BUDGET,
    FAINT_INK,
    GRID,
    IDLE,
    INK,
    MEMORY_EDGE,
    MEMORY_FILL,
    WHITE,
    Rgb,
    ink_on,
    op_colour,
)
from optpipe.problem import Problem
from optpipe.schedule import PlannedOps, Schedule
from optpipe.units import Unit, bytes_text, count_text, memory_unit, percent_text, time_text, time_unit

POINTS_PER_INCH = 72
AXIS_POINTS = 9.0
"""Size of the numbers at the time axis; its marks and gaps grow with it."""
GUTTER_INCHES = 0.1
"""Gap between the panel and the text at its sides."""
NARROWEST_INCHES, WIDEST_INCHES = 12.5, 22.0
"""Limits of the width of a figure that depends on the number of its boxes."""


class Lane(NamedTuple):
    """A horizontal strip: inches from the panel's top to its own top, and its height."""

    top: float
    height: float

    @property
    def middle(self) -> float:
        """Vertical middle, in inches from the panel's top."""
        return self.top + self.height / 2

    @property
    def bottom(self) -> float:
        """Lower edge, in inches from the panel's top."""
        return self.top + self.height


class Margins(NamedTuple):
    """Inches around the panel."""

    left: float
    right: float
    top: float
    bottom: float


@dataclass(frozen=True)
class Panel:
    """Axes from `start_us` to `end_us`, `width` by `height` inches, with `margins` in the figure around it."""

    figure: Figure
    axes: Axes
    margins: Margins
    width: float
    height: float
    start_us: float
    end_us: float
    unit: Unit

    @classmethod
    def of(
        cls,
        figure_width: float,
        height: float,
        margins: Margins,
        start_us: float,
        end_us: float,
        unit: Unit,
        axis_points: float = AXIS_POINTS,
    ) -> Panel:
        """A new figure with an empty panel that is `height` inches high."""
        figure_height = height + margins.top + margins.bottom
        width = figure_width - margins.left - margins.right
        figure = Figure(figsize=(figure_width, figure_height), facecolor="white")
        FigureCanvasAgg(figure)  # measures all labels with one renderer; a bare figure makes one per label
        axes = figure.add_axes(
            (
                margins.left / figure_width,
                margins.bottom / figure_height,
                width / figure_width,
                height / figure_height,
            )
        )
        end_us = end_us if end_us > start_us else start_us + unit.size
        axes.set_xlim(start_us / unit.size, end_us / unit.size)
        axes.set_ylim(height, 0)
        panel = cls(figure, axes, margins, width, height, start_us, end_us, unit)
        panel._draw_time_axis(axis_points)
        return panel

    @property
    def points_per_us(self) -> float:
        """Scale of the time axis: typographic points per microsecond."""
        return self.width * POINTS_PER_INCH / (self.end_us - self.start_us)

    def text_left(self, y: float, text: str, **look: object) -> Text:
        """Text left of the panel, ending at its edge; `y` in inches from its top."""
        label = self._text(-GUTTER_INCHES, y, text, ha="right", va="center_baseline", **look)
        return shrunk(label, self.margins.left - 2 * GUTTER_INCHES)

    def text_right(self, y: float, text: str, inches: float = GUTTER_INCHES, **look: object) -> Text:
        """Text right of the panel, from `inches` right of its right edge."""
        label = self._text(self.width + inches, y, text, va="center_baseline", **look)
        return shrunk(label, self.margins.right - inches)

    def text_above(self, inches: float, text: str, **look: object) -> Text:
        """Text above the panel, from the figure's left margin."""
        line = self._text(GUTTER_INCHES - self.margins.left, -inches, text, va="baseline", **look)
        return shrunk(line, self.margins.left + self.width + self.margins.right - 2 * GUTTER_INCHES)

    def _text(self, x: float, y: float, text: str, **look: object) -> Text:
        place = self.axes.get_yaxis_transform()
        options = {"color": INK, "clip_on": False, **look}
        return self.axes.text(x / self.width, y, text, transform=place, parse_math=False, **options)  # type: ignore[arg-type]

    def _draw_time_axis(self, points: float) -> None:
        axes, scale = self.axes, points / AXIS_POINTS
        axes.set_yticks([])
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.spines["bottom"].set_color(FAINT_INK)
        axes.tick_params(axis="x", colors=FAINT_INK, labelsize=points, length=3.5 * scale, pad=3.5 * scale)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
        axes.grid(axis="x", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel(f"time ({self.unit.name})", color=FAINT_INK, fontsize=points + 1, labelpad=4 * scale)


def width_inches(most_ops: int) -> float:
    """Width of a figure: wider for more ops on a lane, so that boxes can hold their numbers."""
    return min(WIDEST_INCHES, max(NARROWEST_INCHES, 5.0 + 0.165 * most_ops))


def shrunk(text: Text, room_inches: float) -> Text:
    """Shrink a text to a width, and return it."""
    figure = text.get_figure(root=True)
    assert figure is not None
    while (width_inches := text.get_window_extent().width / figure.dpi) > room_inches:  # widths go in steps of pixels
        text.set_fontsize(float(text.get_fontsize()) * min(0.99, room_inches / width_inches))
    return text


def printable(text: str, most: int) -> str:
    """Text of a name for a label: one line without control characters, at most `most` characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else line[: most - 1] + "…"


SMALLEST_NUMBER_POINTS = 5.5
LARGEST_NUMBER_POINTS = 10.0
DIGIT_WIDTH = 0.64
"""Width of a digit as a share of the font size."""
NUMBER_ROOM = 0.74
"""Share of a box's width that a number may fill."""
FONT_HEIGHT = 1.45
"""Height of a box as a multiple of the font size that it needs."""
THINNEST_POINTS = 0.6
"""Width of a white border (narrower boxes have thinner ones), and smallest width of a drawn box."""


class Box(NamedTuple):
    """An op from `start_us` to `end_us` on its lane."""

    start_us: float
    end_us: float
    op: Op
    lane: Lane
    colour: Rgb
    label: str


def boxes_on(problem: Problem, device: int, planned: PlannedOps, lane: Lane) -> list[Box]:
    """Boxes of one stream, coloured by kind and shaded by the rank of their stage on the device.

    Of a block the forward has the upper half of the lane, the backward the lower one.
    """
    stages = problem.stages_of[device]
    rank = {stage: index for index, stage in enumerate(stages)}
    looks = {(op.kind, op.stage) for op in planned.ops}
    colours = {
        (kind, stage): op_colour(kind, rank.get(stage, 0) if kind in KIND else 0, len(stages)) for kind, stage in looks
    }
    lanes = [lane] * len(planned)
    for k in planned.partners:
        lanes[k] = Lane(lane.top if planned.ops[k].kind == "F" else lane.middle, lane.height / 2)
    return [
        Box(start_us, end_us, op, own_lane, colours[op.kind, op.stage], problem.unit_name(op.microbatch))
        for op, start_us, end_us, own_lane in zip(planned.ops, planned.starts, planned.ends, lanes, strict=True)
    ]


def draw_idle(panel: Panel, lanes: Sequence[Lane]) -> None:
    """Draw the background of each lane, which shows idle time between boxes."""
    start, end = panel.start_us / panel.unit.size, panel.end_us / panel.unit.size
    corners = [[(start, lane.top), (end, lane.top), (end, lane.bottom), (start, lane.bottom)] for lane in lanes]
    panel.axes.add_collection(PolyCollection(corners, facecolors=IDLE, linewidths=0, zorder=1), autolim=False)


def draw_boxes(panel: Panel, boxes: Sequence[Box]) -> None:
    """Draw all boxes as one collection, with white borders that leave narrow ones visible."""
    if not boxes:
        return
    sides = np.array([(box.start_us, box.end_us, box.lane.top, box.lane.bottom) for box in boxes])
    widths_points = (sides[:, 1] - sides[:, 0]) * panel.points_per_us
    missing_points = np.maximum(0.0, THINNEST_POINTS - widths_points)  # added by a border in the box's own colour
    sides[:, :2] /= panel.unit.size
    corners = sides[:, [0, 2, 1, 2, 1, 3, 0, 3]].reshape(-1, 4, 2)
    collection = PolyCollection(
        corners,  # type: ignore[arg-type]  # an array is much faster than the annotated sequence
        facecolors=[box.colour for box in boxes],
        edgecolors=[box.colour if missing else WHITE for box, missing in zip(boxes, missing_points, strict=True)],
        linewidths=np.where(missing_points, missing_points, np.minimum(THINNEST_POINTS, 0.1 * widths_points)).round(3),
        joinstyle="miter",
        zorder=2,
    )
    panel.axes.add_collection(collection, autolim=False)


def draw_numbers(panel: Panel, boxes: Sequence[Box]) -> None:
    """Draw microbatch numbers where boxes have room for them, with one size per kind.

    Room is needed for the longest number of a kind and stage: where its boxes are of one width, all have a number or
    none has. Of slices and unequal microbatches the narrow ones go without.
    """
    longest: dict[tuple[str, int], int] = {}
    for box in boxes:
        group = box.op.kind, box.op.stage
        longest[group] = max(longest.get(group, 0), len(box.label))
    points = [_number_points(panel, box, longest[box.op.kind, box.op.stage]) for box in boxes]
    legible = [(box, size) for box, size in zip(boxes, points, strict=True) if size >= SMALLEST_NUMBER_POINTS]
    sizes: dict[str, float] = {}
    for box, size in legible:
        sizes[box.op.kind] = min(sizes.get(box.op.kind, LARGEST_NUMBER_POINTS), size)
    for box, _ in legible:
        panel.axes.text(
            (box.start_us + box.end_us) / 2 / panel.unit.size,
            box.lane.middle,
            box.label,
            fontsize=sizes[box.op.kind],
            color=ink_on(box.colour),
            ha="center",
            va="center_baseline",
            zorder=3,
        )


def _number_points(panel: Panel, box: Box, characters: int) -> float:
    """Largest font size of a number of so many characters in a box."""
    width_points = (box.end_us - box.start_us) * panel.points_per_us
    by_width = NUMBER_ROOM * width_points / (DIGIT_WIDTH * characters)
    by_height = box.lane.height * POINTS_PER_INCH / FONT_HEIGHT
    return round(min(by_width, by_height), 3)  # ends minus starts are equal up to rounding alone


MEMORY_HEADROOM = 1.06
FARTHEST_BUDGET = 3.0
"""A budget beyond this many times the highest peak is named but not drawn: the curves would be flat."""


@dataclass(frozen=True)
class MemoryScale:
    """One scale for all devices, so that their strips can be compared: `top_bytes` is at the top of a strip."""

    top_bytes: float

    @classmethod
    def of(cls, schedule: Schedule) -> MemoryScale:
        """Scale for the peaks of all devices and the budgets not far above the highest peak."""
        peak = max(plan.peak_bytes for plan in schedule.devices)
        budgets = [device.memory_bytes or 0 for device in schedule.problem.devices]
        drawn = [budget for budget in budgets if budget <= FARTHEST_BUDGET * peak]
        return cls(MEMORY_HEADROOM * max([peak, *drawn, 1]))

    def shows(self, budget_bytes: int | None) -> TypeGuard[int]:
        """True if the line of a budget is within the strips."""
        return budget_bytes is not None and budget_bytes <= self.top_bytes

    @property
    def unit(self) -> Unit:
        """Unit of the labels."""
        return memory_unit(self.top_bytes / MEMORY_HEADROOM)


def draw_memory(panel: Panel, strip: Lane, schedule: Schedule, device: int, scale: MemoryScale) -> None:
    """Draw the memory curve at the predicted times, and the budget as a dashed line."""
    levels = planned_memory(schedule, device)
    times = np.concatenate([[panel.start_us], levels.times_us, [panel.end_us]]) / panel.unit.size
    sizes = np.concatenate([[0], levels.bytes, levels.bytes[-1:]])
    heights = strip.bottom - strip.height * sizes / scale.top_bytes
    axes = panel.axes
    axes.fill_between(times, heights, strip.bottom, step="post", color=MEMORY_FILL, linewidth=0, zorder=2)
    axes.step(times, heights, where="post", color=MEMORY_EDGE, linewidth=0.8, zorder=3)
    axes.plot(times[[0, -1]], [strip.bottom] * 2, color=MEMORY_EDGE, linewidth=0.8, zorder=3)
    budget = schedule.problem.devices[device].memory_bytes
    if scale.shows(budget):
        y = strip.bottom - strip.height * budget / scale.top_bytes
        axes.plot(times[[0, -1]], [y] * 2, color=BUDGET, linewidth=1.1, linestyle=(0, (5, 3)), zorder=4)


def peak_text(peak_bytes: int, budget_bytes: int | None, scale: MemoryScale) -> str:
    """Text of a peak and its budget, in the unit of the scale unless the budget is far above it."""
    peak = f"peak {bytes_text(peak_bytes, scale.unit)}"
    if budget_bytes is None:
        return f"{peak}, no limit"
    return f"{peak} of {bytes_text(budget_bytes, scale.unit if scale.shows(budget_bytes) else None)}"


Entry = tuple[Handle, str]


def op_entries(
    kinds: Collection[str], stages: int, names_only: bool = False, idle_figures: bool = False
) -> list[Entry]:
    """Legend entries for ops of `kinds` with up to `stages` stages per device; in a column only the kinds' names.

    With `idle_figures` the last one says what the three numbers of `idle_text` are.
    """
    crowded = not {*RECOMPUTATIONS}.isdisjoint(kinds)
    entries: list[Entry] = [
        (
            Patch(facecolor=row.colour),
            row.name if names_only else f"{row.name}  {row.short if crowded else row.label}".rstrip(),
        )
        for row in map(look_of, [*(kind for kind in KINDS if kind in kinds), *sorted({*kinds} - {*KINDS})])
    ]
    if stages > 1 and not names_only:
        shades = tuple(Patch(facecolor=op_colour("F", rank, stages)) for rank in range(min(stages, 6)))
        entries.append((shades, "first to last stage"))
    return [*entries, (Patch(facecolor=IDLE), "idle before + within + after" if idle_figures else "idle")]


def memory_entries(budgets: bool) -> list[Entry]:
    """Legend entries for the memory curves and, with `budgets`, for their line."""
    entries: list[Entry] = [(Patch(facecolor=MEMORY_FILL, edgecolor=MEMORY_EDGE), "memory")]
    if budgets:
        entries.append((Line2D([], [], color=BUDGET, linewidth=1.3, linestyle=(0, (4, 2.5))), "budget"))
    return entries


def kinds_in(schedule: Schedule) -> set[str]:
    """Kinds of op in a schedule."""
    names = (*KINDS, *schedule.problem.pass_names)
    codes = {code for device in schedule.devices for _, planned in device.streams() for code in {*planned.ops.kind}}
    return {names[code] for code in codes}


LEGEND_INCHES = 0.17
"""Distance of the legend from the panel below it."""


def draw_legend(panel: Panel, entries: list[Entry]) -> None:
    """Draw the legend in one row above the panel, from the figure's left margin."""
    anchor = (GUTTER_INCHES - panel.margins.left) / panel.width, 1 + LEGEND_INCHES / panel.height
    room = panel.margins.left + panel.width + panel.margins.right - 2 * GUTTER_INCHES
    _draw_row(panel, entries, anchor, room, 9.0, handlelength=1.6, handletextpad=0.5, columnspacing=1.2)


COLUMN_POINTS = 7.0
"""Size of the text of a picture in a column of print."""
COLUMN_MARGINS = Margins(left=0.3, right=0.12, top=0.24, bottom=0.38)


def draw_column_legend(panel: Panel, entries: list[Entry]) -> None:
    """Draw the legend above a panel in a column of print, as small as its text."""
    left = GUTTER_INCHES / 2 - panel.margins.left
    anchor, room = (left / panel.width, 1 + 0.07 / panel.height), panel.width - left
    _draw_row(panel, entries, anchor, room, COLUMN_POINTS, handlelength=1.1, handletextpad=0.35, columnspacing=0.9)


def _draw_row(
    panel: Panel, entries: list[Entry], anchor: tuple[float, float], room_inches: float, points: float, **lengths: float
) -> None:
    """Draw a legend row with text of a size, or as much smaller as it has to be to fit."""
    legend = draw_legend_row(panel.axes, entries, anchor, "lower left", fontsize=points, **lengths)
    share = room_inches * panel.figure.dpi / legend.get_window_extent().width
    if share < 1:  # drawing another one replaces it
        draw_legend_row(panel.axes, entries, anchor, "lower left", fontsize=share * points, **lengths)


OBJECTIVE_NAMES = {"makespan": "makespan", "device_span": "device span"}
LONGEST_TITLE = 70


def title_text(schedule: Schedule) -> str:
    """Name and size of the problem."""
    problem = schedule.problem
    slices = f" of {count_text(problem.slice_count, 'slice')}" if problem.slice_count > 1 else ""
    size = f"{count_text(len(problem.devices), 'device')}, {count_text(problem.microbatches, 'microbatch')}{slices}"
    name = printable(problem.name, LONGEST_TITLE)
    return f"{name}: {size}" if name else size[0].upper() + size[1:]


def figures_text(schedule: Schedule) -> str:
    """Method, status, value, bound, gap and bubble on one line."""
    unit = time_unit(schedule.value_us)
    return "   ·   ".join(
        (
            printable(schedule.method, 30),
            schedule.status,
            f"{OBJECTIVE_NAMES[schedule.objective]} {time_text(schedule.value_us, unit)}",
            f"bound {time_text(schedule.bound_us, unit)}",
            f"gap {percent_text(schedule.gap)}",
            f"bubble {percent_text(schedule.bubble)}",
        )
    )
