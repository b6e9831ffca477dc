"""What each op of a schedule waits for; the times that follow from durations; the path that decides the end.

`optpipe.simulate` times a schedule with one duration for each kind and stage. Here every op has its own, as measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

from optpipe.compile.actions import RECEIVES, message_of
from optpipe.compile.dependencies import Rules
from optpipe.errors import DeadlockError, OrderError
from optpipe.orders import Op
from optpipe.problem import Problem
from optpipe.schedule import Schedule


class Span(NamedTuple):
    """From when to when an op ran, or is to run."""

    start_us: float
    end_us: float

    @property
    def duration_us(self) -> float:
        """From start to end."""
        return self.end_us - self.start_us


class Need(NamedTuple):
    """An op starts no sooner than `delay_us` after the end of `op`."""

    op: Op
    delay_us: float


class PathStep(NamedTuple):
    """An op on the path that decides the end: it followed `gap_us` after the end of the one before it."""

    op: Op
    gap_us: float
    planned_gap_us: float


Needs = Mapping[Op, Sequence[Need]]


def planned_spans(schedule: Schedule) -> dict[Op, Span]:
    """Each op's predicted times."""
    streams = [ops for device in schedule.devices for _, ops in device.streams()]
    return {op: Span(*times) for ops in streams for op, *times in zip(ops.ops, ops.starts, ops.ends, strict=True)}


def needs_of(schedule: Schedule) -> Needs:
    """For each op the ends that it waits for: rules of the model, order of its stream or channel, waits.

    Raises OrderError where a wait is for no op of the schedule, DeadlockError where ops wait in a circle.
    """
    problem, orders = schedule.problem, schedule.orders
    rules = Rules([stage.device for stage in problem.stages], frozenset(orders.ops()))
    needs = {op: [*_by_rule(rules, problem, op)] for op in orders.ops()}
    streams = [stream for device in orders.devices for stream in device.streams()]
    for before, op in (pair for ops in (*streams, *orders.channels) for pair in pairwise(ops)):
        needs[op].append(Need(before, 0.0))
    for op, waits in orders.waits.items():
        for before in waits:
            if before not in needs:
                detail = "which is not in the schedule. Maybe run 'optpipe verify' on it."
                raise OrderError(f"{op} waits for {before}, {detail}")
            needs[op].append(Need(before, 0.0))
    _in_order(needs)
    return needs


def _in_order(needs: Needs) -> Sequence[Op]:
    """All ops, each after those that it needs. Raises DeadlockError."""
    sorter = TopologicalSorter({op: [need.op for need in before] for op, before in needs.items()})
    try:
        return [*sorter.static_order()]
    except CycleError as error:
        circle = [str(op) for op in error.args[1][:-1]]
        raise DeadlockError(circle, len(circle)) from None


def _by_rule(rules: Rules, problem: Problem, op: Op) -> Iterator[Need]:
    """The ops of the schedule that must be over; a message counts as its delay, other actions between as nothing."""
    for before in (Op(*key) for key in rules.needs(op)):
        if before in rules.present:
            yield Need(before, 0.0)
        else:
            delay_us = _delay_us(problem, before) if before.kind in RECEIVES else 0.0
            yield from (Need(need.op, need.delay_us + delay_us) for need in _by_rule(rules, problem, before))


def _delay_us(problem: Problem, receive: Op) -> float:
    message = message_of(receive)
    return planned_delay_us(problem, message.direction, message.boundary)


def planned_delay_us(problem: Problem, direction: str, boundary: int) -> float:
    """How long a message takes over a boundary: an activation (F) or a gradient (B)."""
    return (problem.forward_delay_us if direction == "F" else problem.backward_delay_us)[boundary]


def retimed(needs: Needs, duration_us: Mapping[Op, float]) -> dict[Op, Span]:
    """The times at which every op starts as soon as what it needs allows."""
    spans: dict[Op, Span] = {}
    for op in _in_order(needs):
        start = max((spans[need.op].end_us + need.delay_us for need in needs[op]), default=0.0)
        spans[op] = Span(start, start + duration_us[op])
    return spans


def deciding_path(needs: Needs, spans: Mapping[Op, Span]) -> list[PathStep]:
    """From the op that ended last back to a first one, each time by the need that was met last; in order of time."""
    if not spans:
        return []
    op = max(spans, key=lambda op: spans[op].end_us)
    path = []
    while needs[op]:
        last = max(needs[op], key=lambda need: spans[need.op].end_us + need.delay_us)
        path.append(PathStep(op, spans[op].start_us - spans[last.op].end_us, last.delay_us))
        op = last.op
    path.append(PathStep(op, 0.0, 0.0))
    return path[::-1]
