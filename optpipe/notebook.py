"""Rich and HTML display of documents in notebooks and on consoles."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from html import escape
from typing import TYPE_CHECKING, Any

from optpipe.display import Displayed, Summary
from optpipe.layers import LayerProfile
from optpipe.plot import render_comparison, render_schedule
from optpipe.plot.panel import OBJECTIVE_NAMES, printable, title_text
from optpipe.plot.planned_and_measured import render_planned_and_measured
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.trace import Trace
from optpipe.trace.compare import compare
from optpipe.units import bytes_text, count_text, idle_text, percent_text, time_text, time_unit

if TYPE_CHECKING:
    from rich.console import Group


@singledispatch
def summary_of(shown: Any) -> Summary:
    """Summary of a document, or of any object with a method `summary`."""
    summary: Summary = shown.summary()
    return summary


@summary_of.register
def _problem_summary(problem: Problem) -> Summary:
    sizes = (("device", len(problem.devices)), ("stage", len(problem.stages)), ("microbatch", problem.microbatches))
    facts = [
        ("", ", ".join(count_text(count, name) for name, count in sizes)),
        ("objective", OBJECTIVE_NAMES[problem.objective]),
        ("", "may offload" if any(stage.offload for stage in problem.stages) else "nothing to offload"),
    ]
    rows = [
        (
            _device(problem, d),
            _listed(problem.stages_of[d]),
            time_text(problem.work_us[d]),
            _budget(device.memory_bytes),
        )
        for d, device in enumerate(problem.devices)
    ]
    return Summary(problem.name or "Problem", facts, ("device", "stages", "work", "memory"), rows)


@summary_of.register
def _schedule_summary(schedule: Schedule) -> Summary:
    facts = [
        ("", f"{schedule.method}, {schedule.status}"),
        (OBJECTIVE_NAMES[schedule.objective], time_text(schedule.value_us)),
        ("bound", time_text(schedule.bound_us)),
        ("gap", percent_text(schedule.gap)),
        ("bubble", percent_text(schedule.bubble)),
    ]
    again = ("recomputed",) if schedule.problem.has_modes else ()
    times = ("busy", "idle before", "within", "after")
    head = ("device", "stages", *times, "offloaded", *again, "peak", "peak, any timing", "budget")
    rows = [
        (
            _device(schedule.problem, d),
            _listed(schedule.problem.stages_of[d]),
            *(time_text(time_us) for time_us in (plan.busy_us, *schedule.idle_us(d))),
            f"{len(plan.offload):,}",
            *(f"{plan.recomputed:,}" for _ in again),
            bytes_text(plan.peak_bytes),
            bytes_text(plan.peak_bytes_any_timing),
            _budget(schedule.problem.devices[d].memory_bytes),
        )
        for d, plan in enumerate(schedule.devices)
    ]
    return Summary(title_text(schedule), facts, head, rows)


@summary_of.register
def _trace_summary(trace: Trace) -> Summary:
    comparison = compare(trace)
    facts = [
        ("step", str(trace.step)),
        ("planned", time_text(comparison.planned_step_us)),
        (comparison.basis, time_text(comparison.step_us)),
        ("compute took", f"{comparison.work_ratio:.3f} times the planned"),
    ]
    unit = time_unit(max(comparison.planned_step_us, comparison.step_us))
    idle = "idle before + within + after"
    head = ("device", f"{idle}, planned", comparison.basis, "peak", "peak, planned")
    rows = [
        (
            _device(trace.schedule.problem, d),
            idle_text(figures.planned_idle_us, unit),
            idle_text(figures.idle_us, unit),
            bytes_text(device.peak_bytes),
            "-" if device.planned_peak_bytes is None else bytes_text(device.planned_peak_bytes),
        )
        for d, (figures, device) in enumerate(zip(comparison.devices, trace.devices, strict=True))
    ]
    return Summary(f"Measured step of {trace.source or 'a training run'}", facts, head, rows)


@summary_of.register
def _layers_summary(profile: LayerProfile) -> Summary:
    facts = [
        ("", count_text(len(profile.each_layer), "layer")),
        ("microbatches of", str(profile.microbatch_size)),
        ("memory", _budget(profile.memory_bytes)),
    ]
    head = ("layer", "repeat", "forward", "backward input", "backward weight", "activation", "parameters")
    rows = [
        (
            layer.name or str(k),
            str(layer.repeat),
            *map(time_text, (layer.forward_us, layer.backward_input_us, layer.backward_weight_us)),
            *map(bytes_text, (layer.activation_bytes, layer.parameter_bytes)),
        )
        for k, layer in enumerate(profile.layers)
    ]
    return Summary(profile.name or "Layers", facts, head, rows)


def _device(problem: Problem, d: int) -> str:
    return problem.devices[d].name or f"device {d}"


def _listed(stages: Any) -> str:
    return ", ".join(map(str, stages)) if len(stages) <= 4 else f"{len(stages)} stages"


def _budget(size_bytes: int | None) -> str:
    return "no limit" if size_bytes is None else bytes_text(size_bytes)


@dataclass(frozen=True)
class SideBySide(Displayed):
    """Named schedules, best first: a table of their figures, and charts at one scale if they answer one problem.

    For example, the schedules of several problems that `solver.layout.ranking.rank` returns::

        SideBySide({one.candidate.name: one.schedule for one in ranked if one.schedule})
    """

    schedules: Mapping[str, Schedule]

    @property
    def best_first(self) -> Sequence[tuple[str, Schedule]]:
        """Names and schedules by ascending value."""
        return sorted(self.schedules.items(), key=lambda named: named[1].value_us)

    @property
    def answer_one_problem(self) -> bool:
        """True if all schedules are of one problem, and so can be drawn together."""
        first = next(iter(self.schedules.values()), None)
        return first is not None and all(other.problem == first.problem for other in self.schedules.values())

    def summary(self) -> Summary:
        """One row per schedule."""
        if not self.schedules:
            return Summary("No schedules")
        best_first = self.best_first
        head = ("", "method", "status", "value", "bound", "bubble", "peak, any timing")
        one = self.answer_one_problem
        title = title_text(best_first[0][1]) if one else f"{len(best_first)} schedules of several problems"
        rows = [
            (
                name,
                schedule.method,
                schedule.status,
                time_text(schedule.value_us, time_unit(schedule.value_us)),
                time_text(schedule.bound_us, time_unit(schedule.value_us)),
                percent_text(schedule.bubble),
                bytes_text(schedule.largest_peak_bytes),
            )
            for name, schedule in best_first
        ]
        return Summary(title, (), head, rows)


MOST_OPS = 4000
"""Most ops in a figure; a larger one would take seconds to draw, and the notebook stores every output."""

MOST_BYTES = 1_800_000
"""Largest figure."""

_LOOK = "max-width:100%;height:auto;stroke-linejoin:round;stroke-linecap:butt"
"""The stroke properties replace matplotlib's style sheet, which would apply to the whole page."""


@singledispatch
def render_figure(shown: object) -> str:
    """Figure of an object as an HTML fragment: a sentence if it is too large, empty if the object has none.

    An object of another package has one by a method `svg`, which may return nothing.
    """
    draw = getattr(shown, "svg", None)
    picture = draw() if draw else b""
    return _embedded(picture) if picture else ""


@render_figure.register
def _schedule_figure(schedule: Schedule) -> str:
    instead = "optpipe.plot.draw_schedule(schedule, Path('schedule.svg'))"
    return _unless_too_large([schedule], lambda: render_schedule(schedule, "svg"), instead)


@render_figure.register
def _trace_figure(trace: Trace) -> str:
    def draw() -> bytes:
        return render_planned_and_measured(trace, compare(trace), "svg")

    return _unless_too_large([trace.schedule] * 2, draw, "optpipe trace TRACE.json --plot trace.svg")


@render_figure.register
def _comparison_figure(several: SideBySide) -> str:
    instead = "optpipe.plot.draw_comparison([(name, schedule), ...], Path('schedules.svg'))"
    if not several.answer_one_problem:
        return ""
    schedules = list(several.schedules.values())
    return _unless_too_large(schedules, lambda: render_comparison(several.best_first, "svg"), instead)


def _embedded(picture: bytes) -> str:
    """An SVG for a page: without its prolog, and without the metadata, styles and ids that would affect other parts.

    Ids that are referred to stay: matplotlib derives them from their content, so equal ids are equal objects.
    """
    svg = picture.decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>|\s*<style[^>]*>[^<]*</style>", "", svg, flags=re.S)
    return re.sub(r'<g id="[^"]*"', "<g", svg).replace("<svg ", f'<svg style="{_LOOK}" ', 1)


def _unless_too_large(schedules: Sequence[Schedule], draw: Callable[[], bytes], instead: str) -> str:
    ops = sum(len(stream) for schedule in schedules for device in schedule.devices for _, stream in device.streams())
    if ops <= MOST_OPS:
        svg = _embedded(draw())
        if len(svg.encode()) <= MOST_BYTES:
            return svg
    return f"<p>A picture of {ops:,} ops is too large for a notebook; <code>{instead}</code> draws it to a file.</p>"


MOST_ROWS = 64
"""Most rows of a table; a longer one is cut and ends with the number of further rows."""

LONGEST_CELL, LONGEST_TITLE = 60, 200

_CELL = "padding:0.15em 0.8em;white-space:nowrap"
_FIRST, _NUMBER = f"{_CELL};text-align:left", f"{_CELL};text-align:right;font-variant-numeric:tabular-nums"


def render_html(shown: object) -> str:
    """Self-contained HTML fragment, without scripts and with every name escaped."""
    summary = _clean(summary_of(shown))
    title, facts = escape(summary.title), escape(_facts(summary))
    html = f'<p style="margin:0.3em 0"><strong>{title}</strong><br>{facts}</p>'
    if summary.rows:
        rows = "".join(f"<tr>{_row(row, 'td')}</tr>" for row in summary.rows)
        html += f"<table><thead><tr>{_row(summary.head, 'th')}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="optpipe">{html}{render_figure(shown)}</div>'


def render_line(shown: object) -> str:
    """Title and facts on one line."""
    summary = _clean(summary_of(shown))
    return ", ".join([summary.title, *(f"{name} {value}".strip() for name, value in summary.facts)])


def render_rich(shown: object) -> Group:
    """Headline and table for rich; names are never interpreted as markup."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    summary = _clean(summary_of(shown))
    lines = [Text(summary.title, style="bold"), Text(_facts(summary))]
    if not summary.rows:
        return Group(*lines)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for k, name in enumerate(summary.head):
        table.add_column(Text(name), justify="left" if k == 0 else "right", no_wrap=k == 0)
    for row in summary.rows:
        table.add_row(*map(Text, row))
    return Group(*lines, table)


def _row(cells: Sequence[str], tag: str) -> str:
    looks = [_FIRST, *[_NUMBER] * (len(cells) - 1)]
    return "".join(f'<{tag} style="{look}">{escape(cell)}</{tag}>' for look, cell in zip(looks, cells, strict=True))


def _facts(summary: Summary) -> str:
    return "   ·   ".join(f"{name} {value}".strip() for name, value in summary.facts)


def _clean(summary: Summary) -> Summary:
    """The summary without control characters and line breaks, with long texts and tables cut."""
    rows = [[printable(cell, LONGEST_CELL) for cell in row] for row in summary.rows[:MOST_ROWS]]
    if (more := len(summary.rows) - MOST_ROWS) > 0:
        rows.append([f"... and {more:,} more", *[""] * (len(summary.head) - 1)])
    facts = [(name, printable(value, LONGEST_CELL)) for name, value in summary.facts]
    return summary._replace(title=printable(summary.title, LONGEST_TITLE), facts=facts, rows=rows)
