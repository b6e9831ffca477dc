"""Several schedules, shown beneath one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optpipe.display import Displayed, Summary
from optpipe.plot.headline import title_text
from optpipe.schedule import Schedule
from optpipe.units import bytes_text, percent_text, time_text, time_unit


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
        return Summary(title, (), head, [_row(*named) for named in best_first])


def _row(name: str, schedule: Schedule) -> tuple[str, ...]:
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
