"""The legend: the kinds of op that are there, the shades of a device's stages, memory and budget."""

from __future__ import annotations

from collections.abc import Collection

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from optpipe.orders import KINDS
from optpipe.plot.colours import BUDGET, IDLE, MEMORY_EDGE, MEMORY_FILL, OP_LOOKS, op_colour
from optpipe.plot.legend_row import Handle, draw_legend_row
from optpipe.plot.panel import GUTTER_INCHES, Panel
from optpipe.schedule import Schedule

Entry = tuple[Handle, str]


def op_entries(kinds: Collection[str], stages: int) -> list[Entry]:
    """Entries for ops of `kinds` where a device has up to `stages` stages."""
    entries: list[Entry] = [
        (Patch(facecolor=look.colour), look.label) for kind, look in OP_LOOKS.items() if kind in kinds
    ]
    if stages > 1:
        shades = tuple(Patch(facecolor=op_colour("F", rank, stages)) for rank in range(min(stages, 6)))
        entries.append((shades, "first to last stage"))
    return [*entries, (Patch(facecolor=IDLE), "idle")]


def memory_entries(budgets: bool) -> list[Entry]:
    """Entries for the memory curves and, where there are `budgets`, their line."""
    entries: list[Entry] = [(Patch(facecolor=MEMORY_FILL, edgecolor=MEMORY_EDGE), "memory")]
    if budgets:
        entries.append((Line2D([], [], color=BUDGET, linewidth=1.3, linestyle=(0, (4, 2.5))), "budget"))
    return entries


def kinds_in(schedule: Schedule) -> set[str]:
    """The kinds of op in a schedule."""
    codes = {code for device in schedule.devices for _, planned in device.streams() for code in {*planned.ops.kind}}
    return {KINDS[code] for code in codes}


def draw_legend(panel: Panel, entries: list[Entry], inches_above: float) -> None:
    """One row, `inches_above` the panel, from the figure's left margin."""
    anchor = (GUTTER_INCHES - panel.margins.left) / panel.width, 1 + inches_above / panel.height
    draw_legend_row(panel.axes, entries, anchor, "lower left", handlelength=1.6, handletextpad=0.5, columnspacing=1.2)
