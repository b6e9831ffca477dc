"""Times of merged sequences, compiled: what every step of the local search asks for.

Forwards, the sequences are swept with one pointer a group; a pointer moves on when what its op needs from other
groups has ended. The order in which ops are reached is kept, with the state of the sweep at regular marks, so that a
sweep after a change begins at the last mark before it and ends at the first mark where all is again as it was.
Backwards along that order, latest starts follow; an op that would begin later than its latest start ends a sweep,
because the value would be too large.

For spans every device begins no earlier than its release time, and its deadline counts from its first start. Moving
the releases to the latest starts that keep all ends (`hold_back`) makes that an upper bound on the span that
`optpipe.simulate` finds; most often it is equal.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from optpipe.ops import Floats, Ints
from solver.search.annealing.sequence import MARKS, NONE, Codes, Merged, O, R, Table, W, copy, equal, fill, size

NEVER_US = 1e300


class Times(NamedTuple):
    """A sweep: `end_us[op]`, the `order` of ops and the `position` of each in it, and the state at each mark.

    The state: when each stream is free; by device, the end of the last release on compute, then on offload; each
    group's pointer. The row after the last mark is the end of the sweep.
    """

    end_us: Floats
    order: Codes
    position: Codes
    marks: Floats


class Latest(NamedTuple):
    """Latest starts of ops, and the state of the backward sweep at each mark.

    The state: the latest end that each stream allows; by device, the latest start of the next op that takes memory
    on compute, then of the next reload.
    """

    start_us: Floats
    marks: Floats


def empty_times(table: Table) -> Times:
    """Room for the times of any sequences of a problem."""
    ops = len(table.classes) << table.shift
    return Times(
        end_us=np.zeros(ops),
        order=np.full(len(table.classes) * table.microbatches, NONE, np.int32),
        position=np.full(ops, NONE, np.int32),
        marks=np.zeros((MARKS + 2, table.streams + 2 * table.devices + len(table.first))),
    )


def empty_latest(table: Table) -> Latest:
    """Room for latest starts; no op has one yet."""
    return Latest(
        np.full(len(table.classes) << table.shift, NEVER_US),
        np.full((MARKS + 2, table.streams + 2 * table.devices), NEVER_US),
    )


@njit(cache=True)
def sweep(
    table: Table,
    merged: Merged,
    kept: Times,
    times: Times,
    mark: int,
    latest: Latest,
    slack_us: float,
    touched: Ints,
) -> tuple[int, int, float]:
    """Times of changed sequences, from a mark on.

    `times` holds those of `kept` before the change; `touched[0, g]` to `touched[1, g]` are the places of group g that
    changed. It gives up at a deadlock, and at an op that begins more than `slack_us` too late, touched places aside,
    whose latest starts are out of date. Returns how many ops of the order are new; the mark from which on all is as
    before (MARKS + 1: the end; NONE: it gave up); by how much later all F and B end, together.

    Op `x` of microbatch `i` stands at place `q`; `one` is the record of its class, `at` its earliest start and then its
    end. All this is one piece because all time is spent here: with the earliest start in a function of its own
    annealing took 1.8 to 3 times as long.
    """
    shift, step, offloads = table.shift, table.step, O * table.stages
    compute, copies, groups = table.streams, table.streams + table.devices, table.streams + 2 * table.devices
    mask = (1 << shift) - 1
    clock = np.empty(groups + len(table.first))
    copy(times.marks[mark], clock)
    done, total = mark * step, size(merged)
    reach = 0  # whatever may still differ because of ops that differ stands before this position
    later_us = 0.0
    progress = True
    while progress:
        progress = False
        for g in range(len(table.first)):
            q = begin = int(clock[groups + g])
            stop = table.first[g] + merged.length[g]
            while q < stop:
                x = merged.ops[q]
                one = table.classes[x >> shift]
                i = x & mask
                at = clock[one.stream]
                if one.before >= 0:
                    y = one.before << shift | i
                    h = table.classes[one.before].group
                    if h != g and merged.place[y] >= clock[groups + h]:
                        break  # the pointer of the other group has not come there yet
                    at = max(at, times.end_us[y] + one.delay_us)
                if one.returns >= 0 and merged.place[one.returns << shift | i] >= 0:
                    at = max(at, times.end_us[one.returns << shift | i])
                if one.acquires:  # waits for the last release before it on each other stream of its device
                    at = max(at, clock[copies + one.device])
                    if x >> shift >= offloads:
                        at = max(at, clock[compute + one.device])
                if at > latest.start_us[x] + slack_us and (q < touched[0, g] or q > touched[1, g]):
                    return done, NONE, later_us
                at += one.duration_us
                if at != times.end_us[x]:
                    if x >> shift < W * table.stages:
                        later_us += at - times.end_us[x]
                    if table.spans and i == 0 and x >> shift < table.stages:
                        reach = total + 1  # a device may begin at another time: its span is to be measured again
                    times.end_us[x] = at
                    if one.after >= 0:
                        reach = max(reach, kept.position[one.after << shift | i] + 1)
                    if one.leaves >= 0:
                        reach = max(reach, kept.position[one.leaves << shift | i] + 1)
                clock[one.stream] = at
                if one.releases:
                    clock[(copies if x >> shift >= offloads else compute) + one.device] = at
                times.order[done] = x
                done += 1
                q += 1
                if done % step == 0 and done < total:
                    clock[groups + g] = q
                    row = done // step
                    if reach <= done and _as_before(kept.marks[row], clock, groups, touched):
                        return done, row, later_us
                    copy(clock, times.marks[row])
            progress = progress or q > begin
            clock[groups + g] = q
    copy(clock, times.marks[MARKS + 1])
    return done, MARKS + 1 if done == total else NONE, later_us


@njit(cache=True)
def _as_before(state: Floats, clock: Floats, groups: int, touched: Ints) -> bool:
    """True if a sweep goes on as it did before the change: the same state, all that changed behind it."""
    if not equal(state, clock):
        return False
    for g in range(touched.shape[1]):  # noqa: SIM110 (numba compiles no all())
        if touched[1, g] >= clock[groups + g]:
            return False
    return True


@njit(cache=True)
def latest_starts(table: Table, merged: Merged, times: Times, latest: Latest, row: int, settled: int) -> int:
    """Latest starts of the ops before a mark (all, for row MARKS + 1), from the backward state there.

    Stops early at a mark from `settled` on down where the state is as it was. Returns how many ops it went through.
    """
    shift, step, offloads, reloads = table.shift, table.step, O * table.stages, R * table.stages
    acquired, reloaded = table.streams, table.streams + table.devices
    mask = (1 << shift) - 1
    clock = np.empty(latest.marks.shape[1])
    copy(latest.marks[row], clock)
    begin = size(merged) if row > MARKS else row * step
    reach = begin
    for k in range(begin - 1, -1, -1):
        x = times.order[k]
        one = table.classes[x >> shift]
        i = x & mask
        end = clock[one.stream]
        if one.after >= 0:
            end = min(end, latest.start_us[one.after << shift | i] - one.after_us)
        if one.leaves >= 0 and merged.place[one.leaves << shift | i] >= 0:
            end = min(end, latest.start_us[one.leaves << shift | i])
        if one.releases:
            end = min(end, clock[reloaded + one.device])
            if x >> shift >= offloads:
                end = min(end, clock[acquired + one.device])
        start = end - one.duration_us
        if start != latest.start_us[x]:
            latest.start_us[x] = start
            if one.before >= 0:
                reach = min(reach, times.position[one.before << shift | i])
            if one.returns >= 0 and merged.place[one.returns << shift | i] >= 0:
                reach = min(reach, times.position[one.returns << shift | i])
        clock[one.stream] = start
        if one.acquires:
            clock[(reloaded if x >> shift >= reloads else acquired) + one.device] = start
        if k % step == 0:
            if k // step <= settled and reach >= k and equal(clock, latest.marks[k // step]):
                return begin - k
            copy(clock, latest.marks[k // step])
    return int(begin)


@njit(cache=True)
def value_us(table: Table, times: Times, start_us: Floats) -> tuple[float, float]:
    """The largest and the mean time from a device's start to its end, after a sweep to the end.

    Notes in `start_us` when devices begin: with the first F of one of their stages; makespans count from 0.
    """
    fill(start_us, NEVER_US if table.spans else 0.0)
    if table.spans:
        for s in range(table.stages):
            one = table.classes[s]
            start_us[one.device] = min(start_us[one.device], times.end_us[s << table.shift] - one.duration_us)
    largest, total = 0.0, 0.0
    for d in range(table.devices):
        if start_us[d] < NEVER_US:
            span = times.marks[MARKS + 1, d] - start_us[d]
            largest = max(largest, span)
            total += span
    return largest, total / table.devices


@njit(cache=True)
def set_deadlines(table: Table, latest: Latest, start_us: Floats, span_us: float) -> None:
    """Put the last mark of the backward sweep: every device ends `span_us` after its start."""
    fill(latest.marks[MARKS + 1], NEVER_US)
    for d in range(table.devices):
        latest.marks[MARKS + 1, d] = start_us[d] + span_us


@njit(cache=True)
def hold_back(table: Table, merged: Merged, times: Times, latest: Latest) -> bool:
    """Sweep all, for spans with every device held back as long as all of them still end as early as they can.

    False at a deadlock.
    """
    fill(times.marks[0], 0.0)
    for g in range(len(table.first)):
        times.marks[0, table.streams + 2 * table.devices + g] = table.first[g]
    whole = _sweep_all(table, merged, times, latest)
    if not table.spans or not whole:
        return whole
    fill(latest.marks[MARKS + 1], NEVER_US)
    for d in range(table.devices):
        latest.marks[MARKS + 1, d] = times.marks[MARKS + 1, d]
        times.marks[0, d] = NEVER_US
    latest_starts(table, merged, times, latest, MARKS + 1, NONE)
    for s in range(table.stages):
        d = table.classes[s].device
        times.marks[0, d] = min(times.marks[0, d], latest.start_us[s << table.shift])
    return _sweep_all(table, merged, times, latest)


@njit(cache=True)
def _sweep_all(table: Table, merged: Merged, times: Times, latest: Latest) -> bool:
    fill(latest.start_us, NEVER_US)
    touched = np.zeros((2, len(table.first)), np.int64)
    for g in range(len(table.first)):
        touched[1, g] = len(times.order)  # everything is new: nowhere is it as before
    row = sweep(table, merged, times, times, 0, latest, 0.0, touched)[1]
    for k in range(size(merged)):
        times.position[times.order[k]] = k
    return row != NONE
