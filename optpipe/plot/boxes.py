"""Ops as boxes on a lane, and microbatch numbers in those that have room for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.collections import PolyCollection

from optpipe.orders import Op
from optpipe.planned_ops import PlannedOps
from optpipe.plot.colours import IDLE, WHITE, Rgb, ink_on, op_colour
from optpipe.plot.panel import POINTS_PER_INCH, Lane, Panel
from optpipe.problem import Problem

SMALLEST_NUMBER_POINTS = 5.5
LARGEST_NUMBER_POINTS = 10.0
DIGIT_WIDTH = 0.64
"""Width of a digit as a share of the font size."""
ROOM = 0.74
"""Share of a box's width that a number may fill."""
FONT_HEIGHT = 1.45
"""Height of a box as a multiple of the font size that it needs."""
THINNEST_POINTS = 0.6
"""The width of a white border (narrow boxes have thinner ones), and the least width at which a box is drawn."""


class Box(NamedTuple):
    """An op from `start_us` to `end_us` on its lane."""

    start_us: float
    end_us: float
    op: Op
    lane: Lane
    colour: Rgb


def boxes_on(problem: Problem, device: int, planned: PlannedOps, lane: Lane) -> list[Box]:
    """The ops of one stream, coloured by kind and shaded by the place of their stage among those of the device."""
    stages = problem.stages_of[device]
    rank = {stage: place for place, stage in enumerate(stages)}
    looks = {(op.kind, op.stage) for op in planned.ops}
    colours = {(kind, stage): op_colour(kind, rank.get(stage, 0), len(stages)) for kind, stage in looks}
    return [
        Box(start_us, end_us, op, lane, colours[op.kind, op.stage])
        for op, start_us, end_us in zip(planned.ops, planned.starts, planned.ends, strict=True)
    ]


def draw_idle(panel: Panel, lanes: Sequence[Lane]) -> None:
    """The ground of each lane: what no box covers is idle."""
    start, end = panel.start_us / panel.unit.size, panel.end_us / panel.unit.size
    corners = [[(start, lane.top), (end, lane.top), (end, lane.bottom), (start, lane.bottom)] for lane in lanes]
    panel.axes.add_collection(PolyCollection(corners, facecolors=IDLE, linewidths=0, zorder=1), autolim=False)


def draw_boxes(panel: Panel, boxes: Sequence[Box]) -> None:
    """All boxes as one collection, with white borders that leave narrow ones visible."""
    if not boxes:
        return
    sides = np.array([(box.start_us, box.end_us, box.lane.top, box.lane.bottom) for box in boxes])
    widths_points = (sides[:, 1] - sides[:, 0]) * panel.points_per_us
    missing_points = np.maximum(0.0, THINNEST_POINTS - widths_points)  # made up for by a border of the box's own colour
    sides[:, :2] /= panel.unit.size
    corners = sides[:, [0, 2, 1, 2, 1, 3, 0, 3]].reshape(-1, 4, 2)
    collection = PolyCollection(
        corners,  # type: ignore[arg-type]  # one array is taken much faster than the sequence that is asked for
        facecolors=[box.colour for box in boxes],
        edgecolors=[box.colour if missing else WHITE for box, missing in zip(boxes, missing_points, strict=True)],
        linewidths=np.where(missing_points, missing_points, np.minimum(THINNEST_POINTS, 0.1 * widths_points)).round(3),
        joinstyle="miter",
        zorder=2,
    )
    panel.axes.add_collection(collection, autolim=False)


def draw_numbers(panel: Panel, boxes: Sequence[Box]) -> None:
    """Microbatch numbers: all boxes of a kind and stage have theirs or none has, and each kind has one size."""
    sizes = _number_sizes(panel, boxes)
    for box in boxes:
        points = sizes.get((box.op.kind, box.op.stage))
        if points:
            panel.axes.text(
                (box.start_us + box.end_us) / 2 / panel.unit.size,
                box.lane.middle,
                str(box.op.microbatch),
                fontsize=points,
                color=ink_on(box.colour),
                ha="center",
                va="center_baseline",
                zorder=3,
            )


def _number_sizes(panel: Panel, boxes: Sequence[Box]) -> dict[tuple[str, int], float]:
    """The font size of each kind and stage whose numbers are legible in all of its boxes."""
    rooms: dict[tuple[str, int], float] = {}
    for box in boxes:
        group = box.op.kind, box.op.stage
        rooms[group] = min(rooms.get(group, LARGEST_NUMBER_POINTS), _room_points(panel, box))
    legible = {group: room for group, room in rooms.items() if room >= SMALLEST_NUMBER_POINTS}
    smallest = {kind: min(room for (other, _), room in legible.items() if other == kind) for kind, _ in legible}
    return {group: smallest[group[0]] for group in legible}


def _room_points(panel: Panel, box: Box) -> float:
    """The largest font size at which a box holds its number."""
    width = (box.end_us - box.start_us) * panel.points_per_us
    by_width = ROOM * width / (DIGIT_WIDTH * len(str(box.op.microbatch)))
    return min(by_width, box.lane.height * POINTS_PER_INCH / FONT_HEIGHT)
