"""Comparison of a measured step with its plan: figures, re-timed plan, critical path.

If each device had a process of its own, the measured times are compared directly. Devices that share a process
alternate, so their times do not show a pipeline; then the schedule is *re-timed*: its orders, waits and transfer
delays, each op with the median measured duration of its kind on its stage in its activation mode. Where microbatches or
slices have costs of their own, it has its planned duration times the median ratio of measured to planned. Medians,
because devices that alternate on one processor share it with everything else on the machine.

`optpipe.simulate` takes durations from the problem; here every op has its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from optpipe.compile.events import Rules
from optpipe.compile.program import COLLECTIVES, RECEIVES, Message, message_of
from optpipe.errors import DeadlockError, OrderError
from optpipe.kinds import KINDS
from optpipe.ops import Op
from optpipe.problem import Problem
from optpipe.schedule import Schedule, idle_times_us
from optpipe.trace.document import Trace


class Span(NamedTuple):
    """Measured or planned interval of an op."""

    start_us: float
    end_us: float

    @property
    def duration_us(self) -> float:
        """Length of the interval."""
        return self.end_us - self.start_us


class Need(NamedTuple):
    """Precedence: an op starts no sooner than `delay_us` after the end of `op`."""

    op: Op
    delay_us: float


class PathStep(NamedTuple):
    """An op on the critical path, which started `gap_us` after the end of the one before it."""

    op: Op
    gap_us: float
    planned_gap_us: float


Needs = Mapping[Op, Sequence[Need]]


def planned_spans(schedule: Schedule) -> dict[Op, Span]:
    """Predicted interval of each op."""
    streams = [ops for device in schedule.devices for _, ops in device.streams()]
    return {op: Span(*times) for ops in streams for op, *times in zip(ops.ops, ops.starts, ops.ends, strict=True)}


def find_precedences(schedule: Schedule) -> Needs:
    """Precedences of each op: rules of the model, order of its stream or channel, waits.

    Raises OrderError if a wait names no op of the schedule, DeadlockError if ops wait in a cycle.
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
    """All ops in topological order. Raises DeadlockError."""
    sorter = TopologicalSorter({op: [need.op for need in before] for op, before in needs.items()})
    try:
        return [*sorter.static_order()]
    except CycleError as error:
        cycle = [str(op) for op in error.args[1][:-1]]
        raise DeadlockError(cycle, len(cycle)) from None


def _by_rule(rules: Rules, problem: Problem, op: Op) -> Iterator[Need]:
    """Precedences by the rules, with messages replaced by their delays and other actions left out."""
    for before in (Op(*key) for key in rules.needs(op)):
        if before in rules.present:
            yield Need(before, 0.0)
        else:
            delay_us = 0.0
            if before.kind in RECEIVES:
                message = message_of(before)
                delay_us = planned_delay_us(problem, message)
            yield from (Need(need.op, need.delay_us + delay_us) for need in _by_rule(rules, problem, before))


def planned_delay_us(problem: Problem, message: Message) -> float:
    """Planned transfer delay of a message, which has the factors of its microbatch or slice."""
    direction = "forward" if message.direction == "F" else "backward"
    return float(problem.unit_delays_us[direction][message.boundary, message.microbatch])


def retimed(needs: Needs, duration_us: Mapping[Op, float]) -> dict[Op, Span]:
    """Earliest interval of every op with the given durations."""
    spans: dict[Op, Span] = {}
    for op in _in_order(needs):
        start = max((spans[need.op].end_us + need.delay_us for need in needs[op]), default=0.0)
        spans[op] = Span(start, start + duration_us[op])
    return spans


def deciding_path(needs: Needs, spans: Mapping[Op, Span]) -> list[PathStep]:
    """Critical path in order of time: back from the op that ended last, each time by the precedence met last."""
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
    """Compare a trace with the schedule that it contains."""
    needs, planned = find_precedences(trace.schedule), planned_spans(trace.schedule)
    measured = {op: Span(action.start_us, action.end_us) for op, action in trace.ops.items()}
    mode_of = partial(_mode_of, trace.schedule)
    kinds = tuple(_kinds(planned, measured, mode_of))
    at_once = trace.devices_ran_at_once
    spans = measured if at_once else retimed(needs, _typical_us(trace.schedule.problem, planned, measured, mode_of))
    path = deciding_path(needs, spans)
    path_ops = frozenset(step.op for step in path)
    ops_us = sum(spans[step.op].duration_us - planned[step.op].duration_us for step in path)
    gaps_us = sum(step.gap_us - step.planned_gap_us for step in path)
    slack_us = _length(spans) - _length(planned) - ops_us - gaps_us
    return Comparison(
        basis="measured" if at_once else "re-timed",
        planned_step_us=_length(planned),
        step_us=_length(spans),
        measured_step_us=trace.step_us,
        work_ratio=_ratio(_work(measured), _work(planned)),
        devices=tuple(_devices(trace, planned, measured, spans)),
        path=PathFigures(len(path), ops_us, gaps_us, slack_us),
        differences=tuple(_differences(trace, planned, measured, path_ops)),
        kinds=kinds,
        transfers=tuple(_transfers(trace)),
        planned_spans=planned,
        spans=spans,
        path_ops=path_ops,
    )


def _length(spans: Spans) -> float:
    starts, ends = [span.start_us for span in spans.values()], [span.end_us for span in spans.values()]
    return max(ends, default=0.0) - min(starts, default=0.0)


def _work(spans: Spans) -> float:
    return sum(span.duration_us for op, span in spans.items() if op.stream == "compute")


def _ratio(measured: float, planned: float) -> float:
    return measured / planned if planned else 1.0


def _devices(trace: Trace, planned: Spans, measured: Spans, spans: Spans) -> Iterator[DeviceFigures]:
    planned_step_us, step_us = _length(planned), _length(spans)
    begin_us = min((span.start_us for span in measured.values()), default=0.0)
    end_us = max((span.end_us for span in measured.values()), default=0.0)
    for device, plan in zip(trace.devices, trace.schedule.devices, strict=True):
        before, after = ({op: times[op] for op in device.ops} for times in (planned, spans))
        collectives = [action for action in device.actions if action.action in COLLECTIVES]
        concurrent = [op for other in trace.devices if other.process == device.process for op in other.ops]
        yield DeviceFigures(
            planned_bubble=1 - _ratio(_work(before), planned_step_us),
            bubble=1 - _ratio(_work(after), step_us),
            planned_busy_us=_work(before),
            busy_us=_work(after),
            planned_hidden=_hidden(planned, device.ops, device.ops),
            hidden=_hidden(measured, device.ops, concurrent),
            schedule_peak_bytes=plan.peak_bytes,
            planned_peak_bytes=device.planned_peak_bytes,
            peak_bytes=device.peak_bytes,
            planned_idle_us=_idle_us([planned[op] for op in plan.compute.ops], planned, planned_step_us),
            idle_us=_idle_us([spans[op] for op in plan.compute.ops], spans, step_us),
            collectives_us=sum(action.duration_us for action in collectives),
            exposed_collectives_us=sum(
                action.duration_us - max(0.0, min(action.end_us, end_us) - max(action.start_us, begin_us))
                for action in collectives
            ),
        )


def _idle_us(ops: Sequence[Span], spans: Spans, step_us: float) -> tuple[float, float, float]:
    first_us = min((span.start_us for span in spans.values()), default=0.0)
    start_us, end_us = np.array(ops, np.float64).reshape(-1, 2).T
    return idle_times_us(start_us, end_us, (first_us, first_us + step_us))


def _hidden(spans: Spans, moved: Iterable[Op], concurrent: Iterable[Op]) -> float | None:
    """Share of the time of the copies among `moved` during which compute of `concurrent` runs; None without copies."""
    copies = [spans[op] for op in moved if op.stream != "compute"]
    total_us = sum(copy.duration_us for copy in copies)
    if not total_us:
        return None
    compute = _merged([spans[op] for op in concurrent if op.stream == "compute"])
    begins, ends = np.array(compute, np.float64).reshape(-1, 2).T
    done_us = np.concatenate([[0.0], np.cumsum(ends - begins)])
    at = np.stack([begins, ends], axis=1).ravel()
    levels = np.stack([done_us[:-1], done_us[1:]], axis=1).ravel()  # compute done by the begin and end of each piece
    within = np.diff(np.interp(np.array(copies, np.float64), at, levels), axis=1) if len(at) else np.zeros(1)
    return max(0.0, float(within.sum())) / total_us


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Union of the intervals: devices of one process may compute concurrently."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.start_us <= merged[-1].end_us:
            merged[-1] = Span(merged[-1].start_us, max(merged[-1].end_us, span.end_us))
        else:
            merged.append(span)
    return merged


def _differences(trace: Trace, planned: Spans, measured: Spans, on_path: Set[Op]) -> list[Difference]:
    stages = trace.schedule.problem.stages
    differences = []
    for op, span in measured.items():
        times_us = planned[op].duration_us, span.duration_us
        device = stages[op.stage].device
        differences.append(Difference(str(op), device, *times_us, times_us[1] - times_us[0], op in on_path))
    return sorted(differences, key=lambda difference: -abs(difference.difference_us))[:MOST_DIFFERENCES]


def _kinds(planned: Spans, measured: Spans, mode_of: Callable[[Op], str | None]) -> Iterator[KindFigures]:
    for (stage, kind, mode), ops in sorted(_groups(measured, mode_of).items()):
        before, after = (median(spans[op].duration_us for op in ops) for spans in (planned, measured))
        yield KindFigures(KINDS[kind], stage, len(ops), before, after, mode or None)


def _groups(ops: Iterable[Op], mode_of: Callable[[Op], str | None]) -> dict[tuple[int, int, str], list[Op]]:
    """Ops of each stage, index of the kind, and mode (empty where none is named)."""
    groups: dict[tuple[int, int, str], list[Op]] = defaultdict(list)
    for op in ops:
        groups[op.stage, KINDS.index(op.kind), mode_of(op) or ""].append(op)
    return groups


def _typical_us(
    problem: Problem, planned: Spans, measured: Spans, mode_of: Callable[[Op], str | None]
) -> dict[Op, float]:
    """Typical duration of each op for its kind, stage and mode; in proportion to the plan where units differ."""
    typical_us: dict[Op, float] = {}
    for ops in _groups(measured, mode_of).values():
        middle_us = median(measured[op].duration_us for op in ops)
        ratios = [measured[op].duration_us / planned[op].duration_us for op in ops if planned[op].duration_us]
        if not problem.has_factors or not ratios:
            typical_us |= dict.fromkeys(ops, middle_us)
        else:
            typical_us |= {op: median(ratios) * planned[op].duration_us for op in ops}
    return typical_us


OF_EVERY_MODE = ("B", "BW", "W")
"""Kinds that take as long whatever mode the activation was in before."""


def _mode_of(schedule: Schedule, op: Op) -> str | None:
    """Name of the activation mode on which the time of an op depends; None where the schedule names none."""
    if schedule.modes is None or op.kind in OF_EVERY_MODE:
        return None
    number: int = schedule.modes[op.stage, op.microbatch]
    return schedule.problem.stages[op.stage].choices[number].name


def _transfers(trace: Trace) -> Iterator[TransferFigures]:
    groups: dict[tuple[str, int], list[tuple[float, float | None]]] = defaultdict(list)
    for send, user in trace.messages():
        message = message_of(send.key)
        planned_us = planned_delay_us(trace.schedule.problem, message)
        awaited = user.turn_us <= send.start_us
        time_us = user.start_us - send.start_us if awaited else None
        groups[message.direction, message.boundary].append((planned_us, time_us))
    for (direction, boundary), times_us in sorted(groups.items()):
        timed = [(planned_us, time_us) for planned_us, time_us in times_us if time_us is not None]
        planned_us = median(planned_us for planned_us, _ in timed or times_us)
        middle = median(time_us for _, time_us in timed) if timed else None
        yield TransferFigures(direction, boundary, len(times_us), len(timed), planned_us, middle)


Basis = Literal["measured", "re-timed"]

LEAST_LIKE, MOST_LIKE = 0.5, 2.0
"""Beyond these ratios of measured to planned work, the plan was probably made for another model or machine."""


@dataclass(frozen=True)
class DeviceFigures:
    """Figures of one device. Bubbles are shares of the step.

    `hidden` is the measured share of its copies' time during which its process computed; None without copies.
    `schedule_peak_bytes` is the schedule's figure, the other two are the trace's. `collectives_us`: time in gathers of
    parameters and reductions of gradients, which no plan has: it is in the measured bubble, but for
    `exposed_collectives_us`, which lie before the first op of the step or behind its last one and make it longer.
    `planned_idle_us` and `idle_us`: time in which it does not compute, before its first op of the step, between its
    ops, and after its last.
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
    collectives_us: float = 0.0
    exposed_collectives_us: float = 0.0
    planned_idle_us: tuple[float, float, float] = (0.0, 0.0, 0.0)
    idle_us: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def expected_peak_bytes(self) -> int:
        """Peak to compare `peak_bytes` with: the plan with measured sizes if there are any."""
        return self.schedule_peak_bytes if self.planned_peak_bytes is None else self.planned_peak_bytes


@dataclass(frozen=True)
class KindFigures:
    """Ops of one kind on one stage: median planned duration and median of the measured ones.

    `mode`: the activation mode of their microbatches, where their time depends on that; None in a schedule that names
    no modes.
    """

    kind: str
    stage: int
    ops: int
    planned_us: float
    median_us: float
    mode: str | None = None


@dataclass(frozen=True)
class TransferFigures:
    """Messages over a boundary (F: from stage b to b+1, B: back).

    Only a message for which its receiver was already waiting shows its duration: `timed` of `messages` did. `median_us`
    is the median from the start of the send to the start of the op that used the message; None if none was waited for.
    `planned_us` is the median of the plan for the same messages, for all of them if none was waited for.
    """

    direction: str
    boundary: int
    messages: int
    timed: int
    planned_us: float
    median_us: float | None


@dataclass(frozen=True)
class Difference:
    """An op that took longer (above 0) or shorter than planned; `on_path`: it is on the critical path."""

    op: str
    device: int
    planned_us: float
    measured_us: float
    difference_us: float
    on_path: bool


@dataclass(frozen=True)
class PathFigures:
    """Critical path: the chain of ops that determined the end of the step, each started by the one before it.

    Along it, ops took `op_difference_us` longer than planned and the gaps between them (transfers, the host's work)
    `gap_difference_us`. The rest of the difference between the steps, `slack_us`, is the plan's slack on this chain,
    since another chain was critical in the plan.
    """

    ops: int
    op_difference_us: float
    gap_difference_us: float
    slack_us: float


@dataclass(frozen=True)
class Comparison:
    """All figures of a trace. A step lasts from the first start of an op to the last end, for either objective.

    `step_us` is by `basis`, `measured_step_us` always measured. `work_ratio` is the measured time of all compute
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
    """Planned interval of each op."""
    spans: Mapping[Op, Span]
    """Interval of each op, by `basis`."""
    path_ops: frozenset[Op]
    """Ops of `path`."""

    @property
    def plan_fits(self) -> bool:
        """True if planned and measured work are similar enough to compare times."""
        return LEAST_LIKE <= self.work_ratio <= MOST_LIKE
