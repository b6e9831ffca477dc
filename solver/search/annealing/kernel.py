"""Times of merged sequences, compiled: incremental heads (earliest starts) and tails (latest starts) for the annealer.

Forwards, the sequences are swept with one pointer a group; a pointer moves on when what its op needs from other
groups has ended. The order in which ops are reached is kept, with the state of the sweep at regular marks, so that a
sweep after a change begins at the last mark before it and ends at the first mark where all is again as it was.
Backwards along that order, latest starts follow; an op that would begin later than its latest start ends a sweep,
because the value would be too large.

For spans every device begins no earlier than its release time, and its deadline counts from its first start. Moving
the releases to the latest starts that keep all ends (`hold_back`) makes that an upper bound on the span that
`optpipe.simulate` finds; most often it is equal.

Heads and tails decide a move without timing the whole schedule, as in Taillard's and in Nowicki and Smutnicki's tabu
searches for job shops (1994, 1996); here heads are computed anew only where they change. Proofs: docs/math/search.md.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from optpipe.ops import Floats, Ints
from solver.search.annealing.links import (
    NOT_YET,
    Codes,
    due_us,
    first_needed,
    has_links,
    last_needing,
    pass_classes,
    ready_us,
)
from solver.search.annealing.sequence import Merged, copy, equal, fill, size, time_in_block, variable
from solver.search.annealing.table import MARKS, NONE, B, Table, W

NEVER_US = 1e300


class Times(NamedTuple):
    """A sweep: `end_us[op]`, the `order` of codes and the `position` of each op in it, and the state at each mark.

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
    """Allocate the times of any sequences of a problem."""
    ops = table.keys << table.shift
    return Times(
        end_us=np.zeros(ops),
        order=np.full(table.keys * table.units, NONE, np.int32),
        position=np.full(ops, NONE, np.int32),
        marks=np.zeros((MARKS + 2, table.streams + 2 * table.devices + len(table.first))),
    )


def empty_latest(table: Table) -> Latest:
    """Allocate latest starts; no op has one yet."""
    return Latest(
        np.full(table.keys << table.shift, NEVER_US),
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

    Op `x` of unit `i` stands at place `q`; `record` is that of its class, `at` its earliest start and then its
    end. One function, since nearly all time is spent here: with the earliest start in a function of its own annealing
    took 1.8 to 3 times as long.
    """
    shift, step = table.shift, table.step
    compute, copies, groups = table.streams, table.streams + table.devices, table.streams + 2 * table.devices
    mask, keys = (1 << shift) - 1, table.key_mask
    backwards = B * table.stages << shift
    clock = np.empty(groups + len(table.first))
    copy(times.marks[mark], clock)
    done, total = mark * step, size(merged)
    reach = 0  # ops whose inputs have changed all stand before this position of the order
    later_us = 0.0
    progress = True
    while progress:
        progress = False
        for g in range(len(table.first)):
            q = begin = int(clock[groups + g])
            stop = table.first[g] + merged.length[g]
            while q < stop:
                code = merged.ops[q]
                record = table.classes[code >> shift]
                x = code & keys
                i = x & mask
                at = clock[record.stream]
                duration_us = time_in_block(merged.block_us, x)
                in_block = duration_us >= 0
                if not in_block:
                    duration_us = record.duration_us
                else:
                    if x < backwards:  # its backward stands behind it, and begins with it
                        follower = table.classes[merged.ops[q + 1] >> shift]
                        j = merged.ops[q + 1] & mask
                        if follower.before >= 0:
                            y = follower.before << shift | j
                            h = table.classes[follower.before].group
                            if h != g and merged.place[y] >= clock[groups + h]:
                                break
                            at = max(at, times.end_us[y] + follower.delay_us)
                        if follower.returns >= 0 and merged.place[follower.returns << shift | j] >= 0:
                            at = max(at, times.end_us[follower.returns << shift | j])
                if record.before >= 0:
                    y = record.before << shift | i
                    h = table.classes[record.before].group
                    if h != g and merged.place[y] >= clock[groups + h]:
                        break  # not timed yet: go on with the other groups; a round without progress is a deadlock
                    at = max(at, times.end_us[y] + record.delay_us)
                if record.returns >= 0 and merged.place[record.returns << shift | i] >= 0:
                    at = max(at, times.end_us[record.returns << shift | i])
                if has_links(table.links):
                    at = ready_us(
                        table.links, code >> shift, i, shift, merged.place, times.end_us, clock, groups, g, q, at
                    )
                    if at == NOT_YET:
                        break
                if record.acquires:
                    # The waits that let a sequence keep its budgets under any timing (docs/math/any-timing.md): for the
                    # last release before it on each other stream of its device. On its own stream it is later anyway.
                    at = max(at, clock[copies + record.device])
                    if record.stream >= table.devices:  # a copy
                        at = max(at, clock[compute + record.device])
                if (
                    at > latest.start_us[x] + slack_us
                    and (q < touched[0, g] or q > touched[1, g])
                    and (not in_block or x < backwards)  # a backward in a block has begun with its forward
                ):
                    return done, NONE, later_us
                at += duration_us
                if at != times.end_us[x]:
                    if x >> shift < W * table.stages:  # F and B, whose ends other stages wait for
                        later_us += at - times.end_us[x]
                    if table.spans and i == 0 and (x >> shift < table.stages or has_links(table.links)):
                        reach = total + 1  # a device may begin at another time: its span is to be measured again
                    times.end_us[x] = at
                    if record.after >= 0:
                        reach = max(reach, kept.position[record.after << shift | i] + 1)
                    if record.leaves >= 0:
                        reach = max(reach, kept.position[record.leaves << shift | i] + 1)
                    if has_links(table.links):
                        reach = 1 + last_needing(table.links, code >> shift, i, shift, kept.position, reach - 1)
                clock[record.stream] = at
                if record.releases:
                    clock[(copies if record.stream >= table.devices else compute) + record.device] = at
                times.order[done] = code
                done += 1
                q += 1
                if done % step == 0 and done < total:
                    clock[groups + g] = q
                    row = done // step
                    # From equal states, with no changed input ahead, the rest of both sweeps is the same.
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

    The rules of `sweep` read backwards. Stops early at a mark from `settled` on down where the state is as it was and
    no op before it has a successor whose latest start changed (`reach`). Returns how many ops it went through.
    """
    shift, step = table.shift, table.step
    acquired, reloaded = table.streams, table.streams + table.devices
    mask, keys = (1 << shift) - 1, table.key_mask
    clock = np.empty(latest.marks.shape[1])
    copy(latest.marks[row], clock)
    begin = size(merged) if row > MARKS else row * step
    reach = begin
    for k in range(begin - 1, -1, -1):
        code = times.order[k]
        record = table.classes[code >> shift]
        x = code & keys
        i = x & mask
        end = clock[record.stream]
        if record.after >= 0:
            end = min(end, latest.start_us[record.after << shift | i] - record.after_us)
        if record.leaves >= 0 and merged.place[record.leaves << shift | i] >= 0:
            end = min(end, latest.start_us[record.leaves << shift | i])
        if has_links(table.links):
            end = due_us(table.links, code >> shift, i, shift, latest.start_us, end)
        if record.releases:
            end = min(end, clock[reloaded + record.device])
            if record.stream >= table.devices:
                end = min(end, clock[acquired + record.device])
        start = end - record.duration_us
        own = True
        if time_in_block(merged.block_us, x) >= 0:
            start = end - time_in_block(merged.block_us, x)
            own = x >> shift < B * table.stages or x >> shift >= W * table.stages
            if x >> shift < B * table.stages:
                code = merged.ops[merged.place[x] + 1]
                follower, y = table.classes[code >> shift], code & keys
                j = y & mask
                if start != latest.start_us[y]:
                    latest.start_us[y] = start
                    if follower.before >= 0:
                        reach = min(reach, times.position[follower.before << shift | j])
                    if follower.returns >= 0 and merged.place[follower.returns << shift | j] >= 0:
                        reach = min(reach, times.position[follower.returns << shift | j])
        if own and start != latest.start_us[x]:  # a backward in a block begins with its forward
            latest.start_us[x] = start
            if record.before >= 0:
                reach = min(reach, times.position[record.before << shift | i])
            if record.returns >= 0 and merged.place[record.returns << shift | i] >= 0:
                reach = min(reach, times.position[record.returns << shift | i])
            if has_links(table.links):
                reach = first_needed(table.links, code >> shift, i, shift, times.position, reach)
        clock[record.stream] = start
        if record.acquires:
            clock[(reloaded if record.stream >= table.devices else acquired) + record.device] = start
        if k % step == 0:
            if k // step <= settled and reach >= k and equal(clock, latest.marks[k // step]):
                return begin - k
            copy(clock, latest.marks[k // step])
    return int(begin)


@njit(cache=True)
def value_us(table: Table, merged: Merged, times: Times, start_us: Floats) -> tuple[float, float]:
    """The largest and the mean time from a device's start to its end, after a sweep to the end.

    Notes in `start_us` when devices begin: with the first F of one of their stages, or pass; makespans count from 0.
    """
    fill(start_us, NEVER_US if table.spans else 0.0)
    if table.spans:
        first, end = pass_classes(table.links)
        for n in range(table.stages + end - first):
            x = (n if n < table.stages else first + n - table.stages) << table.shift
            if merged.place[x] >= 0:
                record = table.classes[merged.ops[merged.place[x]] >> table.shift]
                start_us[record.device] = min(start_us[record.device], times.end_us[x] - record.duration_us)
    largest, total = 0.0, 0.0
    for d in range(table.devices):
        if start_us[d] < NEVER_US:
            span = times.marks[MARKS + 1, d] - start_us[d]
            largest = max(largest, span)
            total += span
    return largest, total / table.devices


@njit(cache=True)
def set_deadlines(table: Table, latest: Latest, start_us: Floats, span_us: float) -> None:
    """Set the last mark of the backward sweep: every device ends `span_us` after its start."""
    fill(latest.marks[MARKS + 1], NEVER_US)
    for d in range(table.devices):
        latest.marks[MARKS + 1, d] = start_us[d] + span_us


@njit(cache=True)
def hold_back(table: Table, merged: Merged, times: Times, latest: Latest) -> bool:
    """Sweep all; for spans every device is held back as long as all of them still end as early as they can.

    A device that begins later without ending later has a shorter span. False at a deadlock.
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
    latest_starts(table, merged, times, latest, MARKS + 1, variable(NONE))
    first, end = pass_classes(table.links)
    for n in range(table.stages + end - first):
        x = (n if n < table.stages else first + n - table.stages) << table.shift
        if merged.place[x] >= 0:
            d = table.classes[x >> table.shift].device
            times.marks[0, d] = min(times.marks[0, d], latest.start_us[x])
    return _sweep_all(table, merged, times, latest)


@njit(cache=True)
def _sweep_all(table: Table, merged: Merged, times: Times, latest: Latest) -> bool:
    fill(latest.start_us, NEVER_US)
    touched = np.zeros((2, len(table.first)), np.int64)
    for g in range(len(table.first)):
        touched[1, g] = len(times.order)  # everything is new: nowhere is it as before
    row = sweep(table, merged, times, times, variable(0), latest, 0.0, touched)[1]
    for k in range(size(merged)):
        times.position[times.order[k] & table.key_mask] = k
    return row != NONE
