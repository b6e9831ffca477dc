"""Comparison of a measured step with its plan: figures, re-timed plan, deciding path.

Where each device had a process of its own, the measured times are compared as they are. Devices that shared a process
took turns, so when anything happened there says nothing about a pipeline; then the schedule is *re-timed*: its orders,
waits and transfer delays, each op with the median duration that was measured for its kind on its stage. Medians,
because devices that take turns on one processor also share it with everything else on the machine.

`optpipe.simulate` times a schedule with one duration for each kind and stage. Here every op has its own, as measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from optpipe.compile.events import Rules
from optpipe.compile.program import RECEIVES, message_of
from optpipe.errors import DeadlockError, OrderError
from optpipe.ops import KINDS, Op
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.trace.document import Trace


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


def find_precedences(schedule: Schedule) -> Needs:
    """For each op the ends that it waits for: rules of the model, order of its stream or channel, waits.

    Raises OrderError where a wait is for no op of the schedule, DeadlockError where ops wait in a cycle.
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
        cycle = [str(op) for op in error.args[1][:-1]]
        raise DeadlockError(cycle, len(cycle)) from None


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


MOST_DIFFERENCES = 10

Spans = Mapping[Op, Span]


def compare(trace: Trace) -> Comparison:
    """Every figure of the trace against those of the schedule within it."""
    needs, planned = find_precedences(trace.schedule), planned_spans(trace.schedule)
    measured = {op: Span(action.start_us, action.end_us) for op, action in trace.ops.items()}
    kinds = tuple(_kinds(planned, measured))
    at_once = trace.devices_ran_at_once
    spans = measured if at_once else retimed(needs, _median_durations(measured, kinds))
    path, on_path = _path(needs, planned, spans)
    return Comparison(
        basis="measured" if at_once else "re-timed",
        planned_step_us=_length(planned),
        step_us=_length(spans),
        measured_step_us=trace.step_us,
        work_ratio=_ratio(_work(measured), _work(planned)),
        devices=tuple(_devices(trace, planned, measured, spans)),
        path=path,
        differences=tuple(_differences(trace, planned, measured, on_path)),
        kinds=kinds,
        transfers=tuple(_transfers(trace)),
        planned_spans=planned,
        spans=spans,
        path_ops=frozenset(on_path),
    )


def _length(spans: Spans) -> float:
    starts, ends = [span.start_us for span in spans.values()], [span.end_us for span in spans.values()]
    return max(ends, default=0.0) - min(starts, default=0.0)


def _work(spans: Spans) -> float:
    return sum(span.duration_us for op, span in spans.items() if op.stream == "compute")


def _ratio(measured: float, planned: float) -> float:
    return measured / planned if planned else 1.0


def _path(needs: Needs, planned: Spans, spans: Spans) -> tuple[PathFigures, set[Op]]:
    path = deciding_path(needs, spans)
    ops_us = sum(spans[step.op].duration_us - planned[step.op].duration_us for step in path)
    gaps_us = sum(step.gap_us - step.planned_gap_us for step in path)
    slack_us = _length(spans) - _length(planned) - ops_us - gaps_us
    return PathFigures(len(path), ops_us, gaps_us, slack_us), {step.op for step in path}


def _devices(trace: Trace, planned: Spans, measured: Spans, spans: Spans) -> Iterator[DeviceFigures]:
    planned_step_us, step_us = _length(planned), _length(spans)
    for device, plan in zip(trace.devices, trace.schedule.devices, strict=True):
        before, after = ({op: known[op] for op in device.ops} for known in (planned, spans))
        beside = [op for other in trace.devices if other.process == device.process for op in other.ops]
        yield DeviceFigures(
            planned_bubble=1 - _ratio(_work(before), planned_step_us),
            bubble=1 - _ratio(_work(after), step_us),
            planned_busy_us=_work(before),
            busy_us=_work(after),
            planned_hidden=_hidden(planned, device.ops, device.ops),
            hidden=_hidden(measured, device.ops, beside),
            schedule_peak_bytes=plan.peak_bytes,
            planned_peak_bytes=device.planned_peak_bytes,
            peak_bytes=device.peak_bytes,
        )


def _hidden(spans: Spans, moved: Iterable[Op], beside: Iterable[Op]) -> float | None:
    """The share of the time of the copies among `moved` in which compute of `beside` runs; None without copies."""
    copies = [spans[op] for op in moved if op.stream != "compute"]
    total_us = sum(copy.duration_us for copy in copies)
    if not total_us:
        return None
    compute = _merged([spans[op] for op in beside if op.stream == "compute"])
    begins, ends = np.array(compute, np.float64).reshape(-1, 2).T
    done_us = np.concatenate([[0.0], np.cumsum(ends - begins)])
    at = np.stack([begins, ends], axis=1).ravel()
    levels = np.stack([done_us[:-1], done_us[1:]], axis=1).ravel()  # compute done by the begin and end of each piece
    within = np.diff(np.interp(np.array(copies, np.float64), at, levels), axis=1) if len(at) else np.zeros(1)
    return max(0.0, float(within.sum())) / total_us


def _merged(spans: Iterable[Span]) -> list[Span]:
    """The same time without overlaps: devices of one process may compute side by side."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.start_us <= merged[-1].end_us:
            merged[-1] = Span(merged[-1].start_us, max(merged[-1].end_us, span.end_us))
        else:
            merged.append(span)
    return merged


def _differences(trace: Trace, planned: Spans, measured: Spans, on_path: set[Op]) -> list[Difference]:
    stages = trace.schedule.problem.stages
    found = []
    for op, span in measured.items():
        times_us = planned[op].duration_us, span.duration_us
        device = stages[op.stage].device
        found.append(Difference(str(op), device, *times_us, times_us[1] - times_us[0], op in on_path))
    return sorted(found, key=lambda difference: -abs(difference.difference_us))[:MOST_DIFFERENCES]


def _kinds(planned: Spans, measured: Spans) -> Iterator[KindFigures]:
    groups: dict[tuple[int, int], list[Op]] = defaultdict(list)
    for op in measured:
        groups[op.stage, KINDS.index(op.kind)].append(op)
    for (stage, kind), ops in sorted(groups.items()):
        before, after = (median(spans[op].duration_us for op in ops) for spans in (planned, measured))
        yield KindFigures(KINDS[kind], stage, len(ops), before, after)


def _median_durations(ops: Iterable[Op], kinds: Iterable[KindFigures]) -> dict[Op, float]:
    medians = {(kind.kind, kind.stage): kind.median_us for kind in kinds}
    return {op: medians[op.kind, op.stage] for op in ops}


def _transfers(trace: Trace) -> Iterator[TransferFigures]:
    groups: dict[tuple[str, int], list[float | None]] = defaultdict(list)
    for send, user in trace.messages():
        message = message_of(send.key)
        awaited = user.turn_us <= send.start_us
        groups[message.direction, message.boundary].append(user.start_us - send.start_us if awaited else None)
    for (direction, boundary), found in sorted(groups.items()):
        timed = [time_us for time_us in found if time_us is not None]
        delay_us = planned_delay_us(trace.schedule.problem, direction, boundary)
        middle = median(timed) if timed else None
        yield TransferFigures(direction, boundary, len(found), len(timed), delay_us, middle)


Basis = Literal["measured", "re-timed"]

LEAST_LIKE, MOST_LIKE = 0.5, 2.0
"""Work beyond these times the planned is hardly of the model and machine that the plan was made for."""


@dataclass(frozen=True)
class DeviceFigures:
    """One device. Bubbles are shares of the step.

    `hidden` is the share of its copies' time during which its process computed, always as it happened; None without
    copies. `schedule_peak_bytes` is the schedule's figure, the other two are the trace's.
    """

    planned_bubble: float
    bubble: float
    planned_busy_us: float
    busy_us: float
    planned_hidden: float | None
    hidden: float | None
    schedule_peak_bytes: int
    planned_peak_bytes: int | None
    peak_bytes: int

    @property
    def expected_peak_bytes(self) -> int:
        """What `peak_bytes` is to be held against: the plan with the model's own sizes, where they were measured."""
        return self.schedule_peak_bytes if self.planned_peak_bytes is None else self.planned_peak_bytes


@dataclass(frozen=True)
class KindFigures:
    """The ops of one kind on one stage: planned duration and the median of the measured ones."""

    kind: str
    stage: int
    ops: int
    planned_us: float
    median_us: float


@dataclass(frozen=True)
class TransferFigures:
    """Messages over a boundary (F: from stage b to b+1, B: back).

    Only a message that its receiver was already waiting for shows how long it took: `timed` of `messages`, and from
    the begin of its send to the begin of the op that used it `median_us`, None where no message was waited for.
    """

    direction: str
    boundary: int
    messages: int
    timed: int
    planned_us: float
    median_us: float | None


@dataclass(frozen=True)
class Difference:
    """An op that took longer (above 0) or shorter than planned; `on_path`: whether it is among those of PathFigures."""

    op: str
    device: int
    planned_us: float
    measured_us: float
    difference_us: float
    on_path: bool


@dataclass(frozen=True)
class PathFigures:
    """The chain of ops that decided when the step ended, each begun when the one before it let it.

    Along it, ops took `op_difference_us` longer than planned and the gaps between them (transfers, the host's work)
    `gap_difference_us`. The rest of the difference between the steps, `slack_us`, is what the plan had to spare along
    this chain, since another one decided its end.
    """

    ops: int
    op_difference_us: float
    gap_difference_us: float
    slack_us: float


@dataclass(frozen=True)
class Comparison:
    """All figures of a trace. A step is from the first start of an op to the last end, whatever the objective.

    `step_us` is by `basis`, `measured_step_us` always as it happened. `work_ratio` is the measured time of all compute
    ops over the planned one.
    """

    basis: Basis
    planned_step_us: float
    step_us: float
    measured_step_us: float
    work_ratio: float
    devices: tuple[DeviceFigures, ...]
    path: PathFigures
    differences: tuple[Difference, ...]
    kinds: tuple[KindFigures, ...]
    transfers: tuple[TransferFigures, ...]
    planned_spans: Mapping[Op, Span]
    """when each op was to run"""
    spans: Mapping[Op, Span]
    """when each op ran, by `basis`"""
    path_ops: frozenset[Op]
    """the ops of `path`"""

    @property
    def plan_fits(self) -> bool:
        """Whether the plan's durations are about those of what ran, so that times can be compared one to one."""
        return LEAST_LIKE <= self.work_ratio <= MOST_LIKE
