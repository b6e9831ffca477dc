"""Figure of a plan for a cluster: a step by kind of time, strategy by strategy; memory by rank; bubble over pp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from optpipe.errors import InputError, Issue
from optpipe.files import write_atomically
from optpipe.plot.figure import encode, format_of, settings, style
from optpipe.plot.legend import Handle, draw_legend_row
from optpipe.plot.panel import printable, shrunk
from optpipe.plot.style import BUDGET, FAINT_INK, GRID, INK
from optpipe.units import bytes_text, memory_unit, percent_text, time_text, time_unit

WIDTH_INCHES = 14.5
LEFT_INCHES, BARS_INCHES = 2.75, 5.6
"""Room for the names of strategies, and the width of their bars."""
RIGHT_INCHES, CHART_INCHES = 10.2, 4.05
"""Left edge and width of the charts at the right."""
ROW_INCHES = 0.36
HEADER_INCHES, FOOTER_INCHES = 1.62, 0.5
BETWEEN_INCHES = 1.3
"""Between the two charts at the right: their legend, titles and scales."""
LEAST_INCHES = 5.2
"""Least height below the header."""
MOST_SCHEDULED, MOST_BEATEN = 8, 4
"""Most strategies of each end that are drawn."""
LONGEST_NAME, NAME_INCHES = 70, LEFT_INCHES - 0.25
CHOICES = (
    *("tp", "cp", "ep", "etp", "dp", "pp", "vpp"),
    *("microbatch_size", "sharding", "recompute", "precision", "overlap", "vocabulary"),
)
"""Fields that tell strategies apart."""


class Kind(NamedTuple):
    """A part of a bar: its label, the fields that it sums, and its colour."""

    label: str
    fields: Sequence[str]
    colour: str


USEFUL = Kind("products, attention, experts", (), "#0072B2")
TIME_KINDS = (
    USEFUL,
    Kind("recomputation", ("recomputation", "offload"), "#56B4E9"),
    Kind("memory-bound work, launches", ("memory", "launch"), "#8A95A5"),
    Kind("tensor parallel", ("tensor",), "#E69F00"),
    Kind("context parallel", ("context",), "#F0E442"),
    Kind("expert parallel", ("expert",), "#D55E00"),
    Kind("pipeline messages", ("pipeline",), "#CC79A7"),
    Kind("data parallel", ("data", "gather"), "#009E73"),
    Kind("optimizer, start of a step", ("optimizer", "step"), "#5B4B8A"),
    Kind("bubble", ("bubble",), GRID),
)
"""Parts of a step, by the keys of a strategy's `lost_s`; what is not lost is the model's own work."""

MEMORY_KINDS = (
    Kind("weights", ("weights",), "#0072B2"),
    Kind("gradients", ("gradients",), "#56B4E9"),
    Kind("optimizer", ("optimizer",), "#5B4B8A"),
    Kind("activations", ("activations", "logits", "transient"), "#E69F00"),
    Kind("reserve", ("fragments", "context"), "#8A95A5"),
)
"""Parts of a rank's memory, by the keys of `best.ranks`."""


def draw_plan(plan: Mapping[str, Any], path: Path) -> None:
    """Draw a plan (`optpipe.plan/1`, parsed) to a .png, .svg or .html file.

    Raises InputError for another suffix, and where no strategy fits.
    """
    picture_format = format_of(path)
    write_atomically(path, render_plan(plan, picture_format))


def render_plan(plan: Mapping[str, Any], picture_format: str) -> bytes:
    """The picture as bytes in one of `optpipe.plot.figure.FORMATS`. Raises InputError where no strategy fits."""
    if plan["best"] is None:
        raise InputError([Issue("best", "nothing_fits", "is null: no strategy fits. Maybe plan for more GPUs.")])
    title = f"{plan['model']} on {plan['gpus']:,} {plan['machine']}"
    with settings():
        return encode(plan_figure(plan, title), picture_format, title)


def plan_figure(plan: Mapping[str, Any], title: str) -> Figure:
    """The whole picture; call within `optpipe.plot.figure.settings`."""
    scheduled = _scheduled(plan)
    beaten = _beaten(plan)
    height = max(ROW_INCHES * (len(scheduled) + len(beaten)), LEAST_INCHES)
    figure_height = HEADER_INCHES + height + FOOTER_INCHES
    figure = Figure(figsize=(WIDTH_INCHES, figure_height), facecolor="white")

    def axes(left: float, bottom: float, width: float, high: float) -> Axes:
        """Axes at inches from the left and from the foot of the charts."""
        bottom = (FOOTER_INCHES + bottom) / figure_height
        return figure.add_axes((left / WIDTH_INCHES, bottom, width / WIDTH_INCHES, high / figure_height))

    _draw_strategies(axes(LEFT_INCHES, 0, BARS_INCHES, height), plan, scheduled, beaten)
    chart = (height - BETWEEN_INCHES) / 2
    _draw_memory(axes(RIGHT_INCHES, chart + BETWEEN_INCHES, CHART_INCHES, chart), plan)
    _draw_bubble(axes(RIGHT_INCHES, 0, CHART_INCHES, chart), plan)
    left, top = 0.2 / WIDTH_INCHES, 1 - 0.38 / figure_height
    figure.text(left, top, printable(title, 70), fontsize=14, fontweight="bold", color=INK)
    figure.text(left, 1 - 0.66 / figure_height, _subtitle(plan), fontsize=9.5, color=FAINT_INK)
    found = [kind for kind in TIME_KINDS if any(_seconds(entry, kind) > 0 for entry in scheduled)]
    entries: list[tuple[Handle, str]] = [(Patch(facecolor=kind.colour), kind.label) for kind in found]
    draw_legend_row(
        figure, entries, (left, 1 - 0.95 / figure_height), "center left", handlelength=1.1, columnspacing=1.3
    )
    return figure


def _subtitle(plan: Mapping[str, Any]) -> str:
    best = plan["best"]
    return "   ·   ".join(
        [
            f"sequences of {plan['sequence']:,} tokens, {plan['global_batch']:,} a step",
            f"{time_text(best['seconds'] * 1e6)} a step",
            f"{best['tokens_per_s_per_gpu']:,.0f} tokens/s a GPU",
            f"{percent_text(best['utilization'])} of the peak (MFU)",
            "by formula, nothing was measured",
        ]
    )


def _choices(entry: Mapping[str, Any]) -> tuple[object, ...]:
    return tuple(entry.get(name) for name in CHOICES)


def _scheduled(plan: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The fastest strategies whose seconds are known by kind, and the one to take."""
    known = [entry for entry in plan["strategies"] if entry["end"] == "solved" and "lost_s" in entry]
    taken = _choices(plan["best"])
    shown = known[:MOST_SCHEDULED]
    return shown + [entry for entry in known[MOST_SCHEDULED:] if _choices(entry) == taken][:1]


def _beaten(plan: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Beaten strategies with the least bounds, one for each number of degrees that share a bound."""
    least: dict[float, Mapping[str, Any]] = {}
    for entry in sorted((one for one in plan["strategies"] if one["end"] == "beaten"), key=lambda one: one["bound_s"]):
        least.setdefault(entry["bound_s"], entry)
    return list(least.values())[:MOST_BEATEN]


def _seconds(entry: Mapping[str, Any], kind: Kind) -> float:
    """Seconds of a step that a part takes; what rounding makes of nothing is nothing."""
    if kind is USEFUL:
        return float(entry["seconds"] - sum(entry["lost_s"].values()))
    return max(0.0, float(sum(entry["lost_s"][name] for name in kind.fields)))


def _draw_strategies(
    axes: Axes, plan: Mapping[str, Any], scheduled: Sequence[Mapping[str, Any]], beaten: Sequence[Mapping[str, Any]]
) -> None:
    longest_s = max(entry["seconds"] or entry["bound_s"] for entry in (*scheduled, *beaten))
    unit = time_unit(longest_s * 1e6)
    bound = time_text(plan["best"]["bound_s"] * 1e6, unit)
    style(axes, "A step, strategy by strategy", f"predicted time by kind; dotted: no strategy takes less than {bound}")
    scale, taken = 1e6 / unit.size, _choices(plan["best"])
    axes.set_xlim(0, longest_s * scale * 1.22)
    axes.set_ylim(len(scheduled) + len(beaten) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g} {unit.name}"))
    axes.yaxis.set_major_locator(NullLocator())
    for row, entry in enumerate((*scheduled, *beaten)):
        seconds, weight = entry["seconds"], "normal"
        if seconds is None:
            seconds = entry["bound_s"]
            outline = Rectangle((0, row - 0.31), seconds * scale, 0.62, facecolor="none", edgecolor=FAINT_INK)
            outline.set_linestyle((0, (3, 2)))
            axes.add_patch(outline)
            text = f"at least {time_text(seconds * 1e6, unit)}"
            axes.text(0.012 * longest_s * scale, row, "beaten", va="center_baseline", fontsize=8.5, color=FAINT_INK)
        else:
            begin = 0.0
            for kind in TIME_KINDS:
                width = _seconds(entry, kind) * scale
                axes.add_patch(Rectangle((begin, row - 0.31), width, 0.62, facecolor=kind.colour, edgecolor="none"))
                begin += width
            text = time_text(seconds * 1e6, unit)
            if _choices(entry) == taken:
                text, weight = f"{text}, taken", "bold"
        axes.text(
            seconds * scale + 0.012 * longest_s * scale,
            row,
            text,
            va="center_baseline",
            fontsize=9,
            fontweight=weight,
            color=INK,
        )
        name = axes.annotate(
            printable(entry["name"], LONGEST_NAME),
            (0, row),
            xytext=(-7, 0),
            textcoords="offset points",
            ha="right",
            va="center_baseline",
            fontsize=9,
            fontweight=weight,
            color=INK,
            annotation_clip=False,
        )
        shrunk(name, NAME_INCHES)
    axes.axvline(plan["best"]["bound_s"] * scale, color=INK, linewidth=1.0, linestyle=(0, (2, 2)))


def _draw_memory(axes: Axes, plan: Mapping[str, Any]) -> None:
    ranks, budget = plan["best"]["ranks"], plan["device_memory_bytes"]
    unit = memory_unit(budget)
    totals = [sum(kinds.values()) for kinds in ranks]
    style(
        axes,
        "Memory of a rank",
        f"most {bytes_text(max(totals), unit)}, dashed: the device's {bytes_text(budget, unit)}",
    )
    below = [0.0] * len(ranks)
    for kind in MEMORY_KINDS:
        sizes = [sum(kinds[name] for name in kind.fields) / unit.size for kinds in ranks]
        axes.bar(range(len(ranks)), sizes, 0.78, bottom=below, color=kind.colour)
        below = [low + size for low, size in zip(below, sizes, strict=True)]
    axes.axhline(budget / unit.size, color=BUDGET, linewidth=1.2, linestyle=(0, (6, 2)))
    axes.set_ylim(0, max(budget, *totals) / unit.size * 1.06)
    axes.set_xlim(-0.6, len(ranks) - 0.4)
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g} {unit.name}"))
    axes.xaxis.set_major_locator(FixedLocator(list(range(0, len(ranks), -(-len(ranks) // 8)))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"pp rank {value:g}" if value == 0 else f"{value:g}"))
    entries: list[tuple[Handle, str]] = [(Patch(facecolor=kind.colour), kind.label) for kind in MEMORY_KINDS]
    height = axes.get_position().height * axes.figure.get_size_inches()[1]  # type: ignore[union-attr]
    anchor = 0, -0.4 / height
    draw_legend_row(axes, entries, anchor, "center left", handlelength=0.9, handletextpad=0.35, columnspacing=0.75)


def _draw_bubble(axes: Axes, plan: Mapping[str, Any]) -> None:
    best: dict[int, Mapping[str, Any]] = {}
    for entry in plan["strategies"]:
        if entry["end"] == "solved" and "lost_s" in entry:
            best.setdefault(entry["pp"], entry)
    sizes = sorted(best)
    bubbles = [100 * max(0.0, best[pp]["lost_s"]["bubble"]) / best[pp]["seconds"] if pp > 1 else 0.0 for pp in sizes]
    style(axes, "Bubble over pp", "of the fastest strategy with each number of devices in the pipeline")
    places = range(len(sizes))
    colours = ["#0072B2" if pp == plan["best"]["pp"] else GRID for pp in sizes]
    axes.bar(places, bubbles, 0.62, color=colours)
    for place, pp, bubble in zip(places, sizes, bubbles, strict=True):
        text = f"{percent_text(bubble / 100)}\n{time_text(best[pp]['seconds'] * 1e6)}"
        weight = "bold" if pp == plan["best"]["pp"] else "normal"
        axes.annotate(
            text,
            (place, bubble),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            fontweight=weight,
            color=INK,
        )
    axes.set_ylim(0, max(bubbles) * 1.32 or 1.0)
    axes.set_xlim(-0.6, max(len(sizes), 2) - 0.4)
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.xaxis.set_major_locator(FixedLocator(list(places)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: f"pp {sizes[round(place)]}"))
