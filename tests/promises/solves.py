"""Solves in a child that heeds nothing, and what was heard of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from optpipe.verify import verify
from solver.limits import Limits
from solver.process import Child, ChildResult, Heartbeat, solve_in_child
from solver.solution import Progress, Solution
from tests import clock
from tests.problems import KNOWN_OPTIMA

PROBLEM, _ = KNOWN_OPTIMA["offload"]
Event = Progress | Heartbeat


@dataclass(frozen=True)
class Heard:
    """What a solve sent, each with the second at which it came, its result, and when that was there.

    `waited_s`: how long the child, while it loaded, and this process found no free processor.
    """

    events: list[tuple[float, Event]]
    result: ChildResult
    ended_s: float
    waited_s: float

    @property
    def incumbents(self) -> list[Solution]:
        return [event.solution for _, event in self.events if isinstance(event, Progress)]

    def check_best_is_kept(self) -> None:
        """The result is the best incumbent, valid, and better than the published schedule that came first."""
        schedule = self.result.schedule
        assert schedule is not None
        assert verify(schedule).ok
        assert schedule.value_us == min(incumbent.value_us for incumbent in self.incumbents)
        assert schedule.value_us < self.incumbents[0].value_us


def heard(method: str, limits: Limits, on_event: Callable[[Event], None] | None = None, **more: int) -> Heard:
    """Solve with a method of `stubborn`."""
    events: list[tuple[float, Event]] = []
    waited_s = [0.0]
    before_s = clock.waited_s()

    def listen(event: Event) -> None:
        events.append((limits.seconds, event))
        if not any(isinstance(known, Progress) for _, known in events[:-1]):
            waited_s.append(child.kept_waiting_s)
        if on_event:
            on_event(event)

    with Child("tests.promises.stubborn") as child:
        result = solve_in_child(PROBLEM, method, limits, on_event=listen, child=child, **more)
    ended_s = time.perf_counter() - limits.began
    return Heard(events, result, ended_s, max(waited_s) + max(0.0, clock.waited_s() - before_s))
