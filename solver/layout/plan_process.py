"""A plan in a process of its own: it ends in time whatever happens there, and what it finds is verified here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from threading import Thread
from typing import Any, Literal, Self

from optpipe.errors import OptPipeError
from optpipe.problem import Problem
from optpipe.schedule import Schedule, relative_gap, schedule_text
from optpipe.units import bytes_text
from solver.layout.request import PlanRequest
from solver.layout.strategies import AXES
from solver.limits import Limits
from solver.process import Child, Heartbeat, Limit, SolverDiedError, channel
from solver.process.channel import Message
from solver.process.parent import Watch, load_verifier
from solver.solution import Solution

SEPARATOR = "\x1e"
"""Stands between the texts of a plan: no JSON text has it (RFC 7464)."""


@dataclass(frozen=True)
class FoundPlan:
    """A plan as it is kept. `text`: its document, then the schedules of what is solved, in the order of ``solved``.

    `value_us`: a step of the fastest strategy, which `method` names; no strategy takes less than `bound_us`. `bubble`:
    of its schedule, where it has one.
    """

    text: str
    value_us: float
    bound_us: float
    bubble: float | None
    method: str
    solve_seconds: float

    @classmethod
    def of_text(cls, text: str, solve_seconds: float) -> Self:
        """A plan that was found in `solve_seconds`, from its text."""
        document = json.loads(text.partition(SEPARATOR)[0])
        strategies, solved = document["strategies"], document["solved"]
        best = {name: document["best"][name] for name in AXES}
        return cls(
            text=text,
            value_us=strategies[0]["seconds"] * 1e6,
            bound_us=min(one["bound_s"] for one in strategies) * 1e6,
            bubble=solved[0]["bubble"] if solved else None,
            method=" ".join(f"{name}{value}" for name, value in best.items() if value > 1) or "one GPU",
            solve_seconds=solve_seconds,
        )

    @property
    def gap(self) -> float:
        """``(value - bound) / value``."""
        return relative_gap(self.value_us, self.bound_us)

    @property
    def status(self) -> Literal["optimal", "feasible"]:
        """Status of its schedule."""
        return "optimal" if self.value_us == self.bound_us else "feasible"


def plan_part(text: str, number: int) -> str | None:
    """The document of a plan's text (0), or its schedules from the fastest on (1, 2, ...); None where it has fewer."""
    parts = text.split(SEPARATOR)
    return parts[number] if number < len(parts) else None


@dataclass(frozen=True)
class PlanResult:
    """Outcome of a plan: the last one that came, or why there is none. `limit`: what ended it early."""

    plan: FoundPlan | None
    limit: Limit | None
    error: OptPipeError | None = None


OnPlanEvent = Callable[[FoundPlan | Heartbeat], None]


def plan_in_child(
    request: PlanRequest,
    limits: Limits,
    memory_limit_bytes: int | None,
    on_event: OnPlanEvent,
    max_ops: int | None = None,
) -> PlanResult:
    """Plan in a child process; `on_event` gets each plan so far that has a strategy which fits, and heartbeats.

    There is an answer a second after the time limit, and soon after `limits.cancel` is requested. Strategies whose
    schedules have more than `max_ops` are rated, and not scheduled.

    Raises SolverDiedError, and InputError where no strategy is legal.
    """
    with Child("solver.layout.plan_child") as child:
        Thread(target=load_verifier, name="load", daemon=True).start()
        watch = _Planning(child, limits, memory_limit_bytes, on_event)
        question = {"request": request.to_data(), "limits": channel.limits_data(limits), "max_ops": max_ops}
        child.say({"type": "request"} | question)
        watch.watch()
        return watch.result()


class _Planning(Watch):
    """One plan, seen from the parent."""

    def __init__(self, child: Child, limits: Limits, memory_limit_bytes: int | None, on_event: OnPlanEvent) -> None:
        super().__init__(child, limits, memory_limit_bytes, on_event)
        self.on_event = on_event
        self.plan: FoundPlan | None = None
        self.document: dict[str, Any] | None = None
        self.schedules: list[Schedule] = []

    def take(self, message: Message) -> None:
        """Take a plan so far, or the last message."""
        if message["type"] != "plan":
            self.last = message
            return
        self.schedules += [_schedule(new) for new in message["new"]]
        self.document = document = message["document"]
        if document["best"] is not None:
            schedules = [self.schedules[k] for k in message["schedules"]]
            texts = [json.dumps(document, separators=(",", ":"), allow_nan=False), *map(schedule_text, schedules)]
            self.plan = FoundPlan.of_text(SEPARATOR.join(texts), message["seconds"])
            self.on_event(self.plan)

    def between(self) -> None:
        """Nothing: a plan is searched by one process."""

    def result(self) -> PlanResult:
        """The outcome, once it was watched to its end."""
        kind = self.last["type"] if self.last else ""
        if kind == "error":
            assert self.last is not None
            raise channel.read_error(self.last)
        limit: Limit | None = "memory" if kind == "out_of_memory" else self.stop_reason
        if kind == "done":
            assert self.last is not None
            limit = "interrupted" if self.limits.cancel.requested else None if self.last["complete"] else "time"
        elif limit is None:
            raise SolverDiedError(self.child.how_it_ended(), None)
        return PlanResult(self.plan, limit, None if self.plan else self._why_nothing(limit))

    def _why_nothing(self, limit: Limit | None) -> OptPipeError:
        if limit == "memory":
            held = bytes_text(self.memory_limit_bytes) if self.memory_limit_bytes else "all memory"
            return OptPipeError(f"no strategy was found to fit before the planner held {held}. Maybe fix more options.")
        if self.document is None:
            return OptPipeError(f"no strategy was rated in {self.limits.seconds:.1f} s. Maybe allow more time.")
        nearest = min(self.document["strategies"], key=lambda one: one["memory_bytes"] or inf)
        least = f"{nearest['reason']}, with {nearest['name']}"
        return OptPipeError(f"nothing fits: the least that is needed is {least}. Maybe take more GPUs.")


def _schedule(message: Message) -> Schedule:
    """The schedule of a message, timed and verified here."""
    progress = channel.read_solution(message, Solution())
    return progress.solution.to_schedule(Problem.from_data(message["problem"]), progress.seconds)
