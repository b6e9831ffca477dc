"""A measured step against its plan: where time and memory went otherwise than predicted.

Where each device had a process of its own, the measured times are compared as they are. Devices that shared a process
took turns, so when anything happened there says nothing about a pipeline; then the schedule is *re-timed*: its orders,
waits and transfer delays, each op with the median duration that was measured for its kind on its stage. Medians,
because devices that take turns on one processor also share it with everything else on the machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from statistics import median

import numpy as np

from optpipe.compile.actions import message_of
from optpipe.orders import KINDS, Op
from optpipe.trace.document import Trace
from optpipe.trace.figures import Comparison, DeviceFigures, Difference, KindFigures, PathFigures, TransferFigures
from optpipe.trace.precedence import Needs, Span, deciding_path, needs_of, planned_delay_us, planned_spans, retimed

MOST_DIFFERENCES = 10

Spans = Mapping[Op, Span]


def compare(trace: Trace) -> Comparison:
    """Every figure of the trace against those of the schedule within it."""
    needs, planned = needs_of(trace.schedule), planned_spans(trace.schedule)
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
