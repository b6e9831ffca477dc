"""Figure of the best value over time while methods search: one chart per instance, one curve per method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from optpipe.errors import InputError, Issue
from optpipe.files import write_atomically
from optpipe.plot.figure import AxesGrid, encode, format_of, line_widths, logarithmic_seconds, settings, style
from optpipe.plot.legend import legend_lines
from optpipe.plot.panel import OBJECTIVE_NAMES, POINTS_PER_INCH
from optpipe.plot.style import BUDGET, FAINT_INK, INK, CurveLook, curve_looks
from optpipe.problem import Objective
from optpipe.schedule import relative_gap
from optpipe.units import Unit, percent_text, time_text, time_unit

HEIGHT_INCHES = 1.9
EARLIEST_S = 0.01
"""Start of the time scale; earlier values are drawn here."""
HIGHEST = 1.12
"""Values above this many times the best are outside the chart: the end of a search would be flat."""
HEADROOM = 0.08
LEAST_ROOM = 0.004
"""Above and below the values, as a share of their range, and of the highest where they hardly differ."""
ENDED_EARLY = 0.95
"""A method that ends before this share of the time has its end marked."""
LABEL_POINTS = 8.5


@dataclass(frozen=True)
class Curve:
    """A method's best values: (seconds, value_us) with falling values, and the second in which it ended."""

    label: str
    points: Sequence[tuple[float, float]]
    end_seconds: float
    proved: bool


@dataclass(frozen=True)
class InstanceCurves:
    """The methods on one instance, the best proved bound, and the best public value where it is known."""

    name: str
    objective: Objective
    curves: Sequence[Curve]
    bound_us: float
    public_us: float | None = None

    @property
    def best_us(self) -> float:
        """The least value at the end of any curve."""
        return min(curve.points[-1][1] for curve in self.curves)

    @property
    def public_is_near(self) -> bool:
        """True if the public value is known and within the chart."""
        return self.public_us is not None and self.public_us <= HIGHEST * self.best_us


def draw_value_over_time(instances: Sequence[InstanceCurves], time_limit_s: float, path: Path, title: str) -> None:
    """Draw the curves of runs of `time_limit_s` to a .png, .svg, .pdf or .html file.

    Raises InputError for another suffix, and where there are no curves.
    """
    picture_format = format_of(path)
    write_atomically(path, render_value_over_time(instances, time_limit_s, picture_format, title))


def render_value_over_time(
    instances: Sequence[InstanceCurves], time_limit_s: float, picture_format: str, title: str
) -> bytes:
    """The picture as bytes in one of `optpipe.plot.figure.FORMATS`. Raises InputError for nothing to draw."""
    if not instances or not all(instance.curves for instance in instances):
        raise InputError([Issue("curves", "empty", "is empty. Maybe no method found a schedule.")])
    with settings():
        return encode(value_over_time_grid(instances, time_limit_s, title).figure, picture_format, title)


def value_over_time_grid(instances: Sequence[InstanceCurves], time_limit_s: float, title: str) -> AxesGrid:
    """The whole picture on its figure; call within `optpipe.plot.figure.settings`."""
    grid = AxesGrid.of(len(instances), HEIGHT_INCHES)
    looks = curve_looks(curve.label for instance in instances for curve in instance.curves)
    ends_s = [curve.end_seconds for instance in instances for curve in instance.curves]
    last_s = max(min(max(ends_s), time_limit_s), 10 * EARLIEST_S)
    for axes, instance in zip(grid.axes, instances, strict=True):
        _draw_instance(axes, instance, looks, last_s, time_limit_s)
    grid.draw_header(title, _legend(instances, looks, time_limit_s))
    return grid


def _draw_instance(
    axes: Axes, instance: InstanceCurves, looks: Mapping[str, CurveLook], last_s: float, time_limit_s: float
) -> None:
    unit = time_unit(instance.best_us)
    style(axes, instance.name, _subtitle(instance, unit))
    logarithmic_seconds(axes, "x", EARLIEST_S, last_s)
    axes.set_ylim(*_value_range(instance, unit))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g} {unit.name}"))
    axes.axhline(instance.bound_us / unit.size, color=INK, linewidth=1.0, linestyle=(0, (2, 2)), zorder=2)
    if instance.public_us is not None and instance.public_is_near:
        axes.axhline(instance.public_us / unit.size, color=BUDGET, linewidth=1.0, linestyle=(0, (6, 2)), zorder=2)
    for curve, width in zip(instance.curves, line_widths(len(instance.curves)), strict=True):
        _draw_curve(axes, curve, looks[curve.label], width, unit, last_s)
        if _end_is_marked(curve, time_limit_s):
            end = _end_marker(looks[curve.label].colour, curve.proved)
            end.set_data([min(max(curve.end_seconds, EARLIEST_S), last_s)], [curve.points[-1][1] / unit.size])
            axes.add_line(end)
    _draw_final_values(axes, instance, looks, unit)


def _subtitle(instance: InstanceCurves, unit: Unit) -> str:
    gap = relative_gap(instance.best_us, instance.bound_us)
    parts = [
        f"{OBJECTIVE_NAMES[instance.objective]} {time_text(instance.best_us, unit)}",
        "proved optimal" if gap <= 0 else f"gap {percent_text(gap)}",
    ]
    if instance.public_us is not None:
        parts.append(f"best public {time_text(instance.public_us, unit)}")
    return "   ·   ".join(parts)


def _value_range(instance: InstanceCurves, unit: Unit) -> tuple[float, float]:
    """From the bound to the highest value that is not far off, with some room at both ends."""
    marks = [instance.bound_us, instance.public_us or instance.best_us]
    values = [value for curve in instance.curves for _, value in curve.points]
    low = min(instance.bound_us, instance.best_us)
    high = max(value for value in [*values, *marks] if value <= HIGHEST * max(instance.best_us, low))
    room = max(HEADROOM * (high - low), LEAST_ROOM * high) or 1.0
    return (low - room) / unit.size, (high + room) / unit.size


def _draw_curve(axes: Axes, curve: Curve, look: CurveLook, width: float, unit: Unit, last_s: float) -> None:
    """Steps from the first value to the end of the search, and a thin line on to the chart's end."""
    end_s = max(curve.end_seconds, EARLIEST_S)
    seconds = [*(max(s, EARLIEST_S) for s, _ in curve.points), end_s]
    values = [value / unit.size for _, value in curve.points]
    values.append(values[-1])
    axes.step(seconds, values, where="post", color=look.colour, linestyle=look.dashes, linewidth=width, zorder=3)
    axes.plot([end_s, last_s], values[-1:] * 2, color=look.colour, linewidth=0.8, zorder=3)


def _end_is_marked(curve: Curve, time_limit_s: float) -> bool:
    return curve.proved or curve.end_seconds < ENDED_EARLY * time_limit_s


def _end_marker(colour: str, proved: bool) -> Line2D:
    """Mark the end of a method: full where its value is proved optimal, open where it had no more to try."""
    face = colour if proved else "white"
    return Line2D(
        [],
        [],
        color=colour,
        marker="o",
        markersize=5.5,
        markerfacecolor=face,
        markeredgewidth=1.3,
        linestyle="",
        clip_on=False,
        zorder=4,
    )


def _draw_final_values(axes: Axes, instance: InstanceCurves, looks: Mapping[str, CurveLook], unit: Unit) -> None:
    """The last values right of the chart, in the method's colour where it is alone, moved apart where they overlap."""
    low, high = axes.get_ylim()
    line = LABEL_POINTS * 1.25 / POINTS_PER_INCH / HEIGHT_INCHES
    least = -inf
    same_text: dict[str, list[Curve]] = {}
    for curve in sorted(instance.curves, key=lambda curve: curve.points[-1][1]):
        same_text.setdefault(time_text(curve.points[-1][1], unit), []).append(curve)
    for text, curves in same_text.items():
        place = max(min((curves[0].points[-1][1] / unit.size - low) / (high - low), 1.0), least)
        colour = looks[curves[0].label].colour if len(curves) == 1 else INK
        axes.text(
            1.025, place, text, transform=axes.transAxes, fontsize=LABEL_POINTS, color=colour, va="center_baseline"
        )
        least = place + line


def _legend(instances: Sequence[InstanceCurves], looks: Mapping[str, CurveLook], time_limit_s: float) -> list[Artist]:
    entries: list[Artist] = [*legend_lines(looks)]
    entries.append(Line2D([], [], color=INK, linewidth=1.0, linestyle=(0, (2, 2)), label="proved bound"))
    if any(instance.public_is_near for instance in instances):
        entries.append(Line2D([], [], color=BUDGET, linewidth=1.0, linestyle=(0, (6, 2)), label="best public"))
    ends = {curve.proved for instance in instances for curve in instance.curves if _end_is_marked(curve, time_limit_s)}
    for proved, label in ((True, "proved optimal"), (False, "ended before its time")):
        if proved in ends:
            entries.append(_end_marker(FAINT_INK, proved))
            entries[-1].set_label(label)
    return entries
