"""Rich and HTML display of documents in notebooks and on consoles."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from optpipe.schedule import DevicePlan, Schedule
from optpipe.trace import Trace
from optpipe.trace.compare import compare
from optpipe.units import bytes_text, count_text, percent_text, time_text, time_unit

if TYPE_CHECKING:
    from rich.console import Group


@singledispatch
def summary_of(shown: Any) -> Summary:
    """The summary of an object: one of the documents, or whatever has a method `summary`."""
    found: Summary = shown.summary()
    return found


@summary_of.register
def _of_problem(problem: Problem) -> Summary:
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
    head = ("device", "stages", "busy", "bubble", "offloaded", "peak", "peak, any timing", "budget")
    rows = [_planned(schedule.problem, d, plan) for d, plan in enumerate(schedule.devices)]
    return Summary(title_text(schedule), facts, head, rows)


def _planned(problem: Problem, d: int, plan: DevicePlan) -> tuple[str, ...]:
    peaks = (
        bytes_text(plan.peak_bytes),
        bytes_text(plan.peak_bytes_any_timing),
        _budget(problem.devices[d].memory_bytes),
    )
    figures = (time_text(plan.busy_us), percent_text(plan.bubble), f"{len(plan.offload):,}")
    return (_device(problem, d), _listed(problem.stages_of[d]), *figures, *peaks)


@summary_of.register
def _trace_summary(trace: Trace) -> Summary:
    found = compare(trace)
    facts = [
        ("step", str(trace.step)),
        ("planned", time_text(found.planned_step_us)),
        (found.basis, time_text(found.step_us)),
        ("compute took", f"{found.work_ratio:.3f} times the planned"),
    ]
    head = ("device", "bubble, planned", f"bubble, {found.basis}", "peak", "peak, planned")
    rows = [
        (
            _device(trace.schedule.problem, d),
            percent_text(figures.planned_bubble),
            percent_text(figures.bubble),
            bytes_text(device.peak_bytes),
            "-" if device.planned_peak_bytes is None else bytes_text(device.planned_peak_bytes),
        )
        for d, (figures, device) in enumerate(zip(found.devices, trace.devices, strict=True))
    ]
    return Summary(f"Measured step of {trace.source or 'a training run'}", facts, head, rows)


@summary_of.register
def _of_layers(profile: LayerProfile) -> Summary:
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
    """Schedules by any name, the best first: a table of their figures, and of one problem their charts at one scale.

    What `solver.layout.ranking.rank` found, for example, are schedules of several problems::

        SideBySide({one.candidate.name: one.schedule for one in ranked if one.schedule})
    """

    schedules: Mapping[str, Schedule]

    @property
    def best_first(self) -> Sequence[tuple[str, Schedule]]:
        """The names and schedules by their value."""
        return sorted(self.schedules.items(), key=lambda named: named[1].value_us)

    @property
    def answer_one_problem(self) -> bool:
        """Whether there is a picture of them: those of several problems are not drawn together."""
        first = next(iter(self.schedules.values()), None)
        return first is not None and all(other.problem == first.problem for other in self.schedules.values())

    def summary(self) -> Summary:
        """A row for each schedule."""
        if not self.schedules:
            return Summary("No schedules")
        best_first = self.best_first
        head = ("", "method", "status", "value", "bound", "bubble", "peak, any timing")
        one = self.answer_one_problem
        title = title_text(best_first[0][1]) if one else f"{len(best_first)} schedules of several problems"
        return Summary(title, (), head, [_comparison_row(*named) for named in best_first])


def _comparison_row(name: str, schedule: Schedule) -> tuple[str, ...]:
    unit = time_unit(schedule.value_us)
    times = time_text(schedule.value_us, unit), time_text(schedule.bound_us, unit)
    return (
        name,
        schedule.method,
        schedule.status,
        *times,
        percent_text(schedule.bubble),
        bytes_text(schedule.largest_peak_bytes),
    )


MOST_OPS = 4000
"""A larger picture would take seconds for each look, and a notebook keeps every one."""

MOST_BYTES = 1_800_000

_LOOK = "max-width:100%;height:auto;stroke-linejoin:round;stroke-linecap:butt"
"""The second half is what matplotlib says in a style sheet, which would hold for the whole page."""


@singledispatch
def picture_of(_shown: object) -> str:
    """The picture of an object as a fragment of HTML; a sentence instead where it is too large, nothing without one."""
    return ""


@picture_of.register
def _schedule_picture(schedule: Schedule) -> str:
    instead = "optpipe.plot.draw_schedule(schedule, Path('schedule.svg'))"
    return _unless_too_large([schedule], lambda: render_schedule(schedule, "svg"), instead)


@picture_of.register
def _trace_picture(trace: Trace) -> str:
    def draw() -> bytes:
        return render_planned_and_measured(trace, compare(trace), "svg")

    return _unless_too_large([trace.schedule] * 2, draw, "optpipe trace TRACE.json --plot trace.svg")


@picture_of.register
def _of_several(several: SideBySide) -> str:
    instead = "optpipe.plot.draw_comparison([(name, schedule), ...], Path('schedules.svg'))"
    if not several.answer_one_problem:
        return ""
    schedules = list(several.schedules.values())
    return _unless_too_large(schedules, lambda: render_comparison(several.best_first, "svg"), instead)


def _unless_too_large(schedules: Sequence[Schedule], draw: Callable[[], bytes], instead: str) -> str:
    ops = sum(len(stream) for schedule in schedules for device in schedule.devices for _, stream in device.streams())
    picture = _fragment(draw().decode()) if ops <= MOST_OPS else ""
    if picture and len(picture.encode()) <= MOST_BYTES:
        return picture
    return f"<p>A picture of {ops:,} ops is too large for a notebook; <code>{instead}</code> draws it to a file.</p>"


def _fragment(svg: str) -> str:
    """An SVG file as a part of a page: without its prolog, and without what would reach other parts of the page.

    Of the ids those stay that are referred to. They are made from what they name, so equal ids are equal things.
    """
    svg = re.sub(r"\s*<metadata>.*?</metadata>|\s*<style[^>]*>[^<]*</style>", "", svg[svg.index("<svg") :], flags=re.S)
    return re.sub(r'<g id="[^"]*"', "<g", svg).replace("<svg ", f'<svg style="{_LOOK}" ', 1)


MOST_ROWS = 64
"""A longer table shows its beginning and says how much more there is."""

LONGEST_CELL, LONGEST_TITLE = 60, 200

_CELL = "padding:0.15em 0.8em;white-space:nowrap"
_FIRST, _NUMBER = f"{_CELL};text-align:left", f"{_CELL};text-align:right;font-variant-numeric:tabular-nums"


def html_of(shown: object) -> str:
    """A fragment of HTML that stands alone, without scripts and with every name escaped."""
    return f'<div class="optpipe">{"".join(_parts(_clean(summary_of(shown))))}{picture_of(shown)}</div>'


def line_of(shown: object) -> str:
    """The title and the facts."""
    summary = _clean(summary_of(shown))
    return ", ".join([summary.title, *(f"{name} {value}".strip() for name, value in summary.facts)])


def renderable_of(shown: object) -> Group:
    """The same as a table of rich under its headline; names are taken as they are, never as markup."""
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


def _parts(summary: Summary) -> Iterator[str]:
    yield f'<p style="margin:0.3em 0"><strong>{escape(summary.title)}</strong><br>{escape(_facts(summary))}</p>'
    if summary.rows:
        rows = "".join(f"<tr>{_row(row, 'td')}</tr>" for row in summary.rows)
        yield f"<table><thead><tr>{_row(summary.head, 'th')}</tr></thead><tbody>{rows}</tbody></table>"


def _row(cells: Sequence[str], tag: str) -> str:
    looks = [_FIRST, *[_NUMBER] * (len(cells) - 1)]
    return "".join(f'<{tag} style="{look}">{escape(cell)}</{tag}>' for look, cell in zip(looks, cells, strict=True))


def _facts(summary: Summary) -> str:
    return "   ·   ".join(f"{name} {value}".strip() for name, value in summary.facts)


def _clean(summary: Summary) -> Summary:
    """The summary fit to be shown: one line each without control characters, and no more rows than can be read."""
    rows = [[printable(cell, LONGEST_CELL) for cell in row] for row in summary.rows[:MOST_ROWS]]
    if (more := len(summary.rows) - MOST_ROWS) > 0:
        rows.append([f"... and {more:,} more", *[""] * (len(summary.head) - 1)])
    facts = [(name, printable(value, LONGEST_CELL)) for name, value in summary.facts]
    return summary._replace(title=printable(summary.title, LONGEST_TITLE), facts=facts, rows=rows)
