"""States of progress with copies: also which activations are away, and how much time channels have had for O.

R are steps like F and B, in the order of all starts. An O is only counted when an F or R needs the room: its channel
has had time for it by then. Of a stage the latest activation leaves, and the first comes back; others need not be tried
(docs/math/bounds.md). So a state has few successors, and a part of the devices few states.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from math import ceil, floor, gcd
from typing import NamedTuple

import numpy as np
from numba import njit

from optpipe.ops import Ints
from optpipe.problem import Problem
from optpipe.stage import exact
from solver.bounds.device import usable_bytes
from solver.bounds.unit_costs import UnitCosts
from solver.exact.progress import NEVER, Ends, Tables, longer, undominated
from solver.exact.relaxation import parts, projected
from solver.exact.states import LEAST_SHARE, Dolls
from solver.limits import Limits
from solver.scale import handles_states
from solver.solution import OnSolution, Solution

MOST_STATES = 20_000
"""States with the same number of F and B begun that are kept; where there are more, a smaller value is asked for."""


MOST_STAGES = 62
"""Stages whose activations that are away are bits of one number."""


class Copies(NamedTuple):
    """Costs of copies by stage, times in ticks, and the places of the columns of a state.

    `offload`, `reload`: time of a copy. `group`: the devices that share its channels, -1 where nothing leaves. `moved`:
    its bytes. `freed`: bytes that the end of B frees at once. `whole` by ops done and device: bytes that a microbatch
    holds there if none of it is away. `budget` by device. `step` by group: ticks of which the times of all O are
    multiples. `duplex`: 1 where O and R have channels of their own.

    `at` are the first columns of the parts of a state: ops done and stages away (a bit each) of each microbatch, what
    each group reloads; then times: when the next op of each microbatch can start, when its last one ends, when each
    device is free and its debt (`states.States`), when each channel for R is free and the debt of that for O.
    """

    offload: Ints
    reload: Ints
    group: Ints
    moved: Ints
    freed: Ints
    whole: Ints
    budget: Ints
    step: Ints
    duplex: int
    at: Ints


NOTHING = -1
"""Content of the column of what a group reloads, where its channel for R is free."""


@njit(cache=True, nogil=True)
def _room_from(row: Ints, d: int, needed: int, at: int, tables: Tables, copies: Copies) -> int:
    """The earliest time from `at` on at which device d has room for what needs so many bytes beside its budget."""
    away, end, free, debt = copies.at[1], copies.at[4], copies.at[5], copies.at[6]
    stages = len(copies.moved)
    excess, until, freed = needed, at, 0
    for i in range(away):
        k = row[i]
        excess += copies.whole[k, d]
        gone, s = row[away + i], 0
        while gone:
            if gone & 1 and tables.device[s] == d:
                excess -= copies.moved[s]
            gone >>= 1
            s += 1
        if k > stages and tables.device[k - 1] == d and row[end + i] > at:  # a backward that runs
            until, freed = row[end + i], copies.freed[2 * stages - k]
    if until > at:
        room_at = max(at, _weights_free(row, d, excess + freed, row[free + d], row[debt + d], away, tables))
        if room_at < until:
            return room_at
    return max(until, _weights_free(row, d, excess, row[free + d], row[debt + d], away, tables))


@njit(cache=True, nogil=True)
def _weights_free(row: Ints, d: int, excess: int, free: int, debt: int, microbatches: int, tables: Tables) -> int:
    """The time by which W can have freed so many bytes on device d, 0 where they have by now."""
    if excess <= 0:
        return 0
    work = 0
    for rank in range(tables.ranks[d]):
        pending = 0
        for i in range(microbatches):
            pending += row[i] >= tables.weight_from[d, rank]
        freed = pending * tables.weight_bytes[d, rank]
        if freed >= excess:
            work -= -tables.weight_ticks[d, rank] * excess // tables.weight_bytes[d, rank]
            room_at: int = debt + work + -work % tables.weight_step[d]
            return 0 if room_at <= free else room_at
        work += pending * tables.weight_ticks[d, rank]
        excess -= freed
    return NEVER


@njit(cache=True, nogil=True)
def _pending(row: Ints, d: int, microbatches: int, tables: Tables) -> int:
    """The time of all W of device d whose B is done."""
    ticks = 0
    for i in range(microbatches):
        ticks += tables.weights[row[i], d]
    return ticks


@njit(cache=True, nogil=True)
def _can_leave(row: Ints, g: int, now: int, copies: Copies) -> int:
    """The time of O of all activations of group g that are there by now."""
    away, end = copies.at[1], copies.at[4]
    stages, ticks = len(copies.moved), 0
    for i in range(away):
        k = row[i]
        for s in range(min(k, 2 * stages - k)):
            if copies.group[s] == g and not row[away + i] >> s & 1 and (k > s + 1 or row[end + i] <= now):
                ticks += copies.offload[s]
    return ticks


@njit(cache=True, nogil=True)
def _pass_to(row: Ints, now: int, busy: int, tables: Tables, copies: Copies) -> None:
    """Let the time of a state be that of its last start; device `busy` has begun an op then."""
    away, last, ready, end, free = copies.at[1], copies.at[2], copies.at[3], copies.at[4], copies.at[5]
    debt, channel, owed = copies.at[6], copies.at[7], copies.at[8]
    for e in range(debt - free):
        if e == busy or row[free + e] < now:
            row[free + e] = max(row[free + e], now)
            row[debt + e] = max(row[debt + e], now - _pending(row, e, away, tables))
    for g in range(ready - last):
        if copies.duplex or row[channel + g] <= now:
            row[owed + g] = max(row[owed + g], now - _can_leave(row, g, now, copies))
        if row[channel + g] <= now:
            row[channel + g] = now
            row[last + g] = NOTHING
    for i in range(away):
        if row[end + i] <= now:
            row[end + i] = 0


@njit(cache=True, nogil=True)
def _least(row: Ints, tables: Tables, copies: Copies, ends: Ends) -> int:
    """The least value that a state can have; what can start is no earlier than its device is free from then on."""
    away, last, ready, free = copies.at[1], copies.at[2], copies.at[3], copies.at[5]
    debt, channel = copies.at[6], copies.at[7]
    ops = len(tables.length)
    least = 0
    for e in range(debt - free):
        left = 0
        for i in range(away):
            left += tables.left[row[i], e]
        if left > 0:
            least = max(least, row[free + e] + left + ends.last_tail[e])
        if ends.counted[e]:
            least = max(least, row[debt + e] + left + ends.weights[e])
    for i in range(away):
        k = row[i]
        if k == ops:
            row[ready + i] = 0
            continue
        at = row[free + tables.device[k]]
        if k > 0:
            at = row[ready + i] = max(at, row[ready + i])
        least = max(least, at + tables.length[k] + ends.tail[k, i])
        if k == 0:
            break
    for g in range(ready - last):
        reloads, tail = 0, NEVER
        for i in range(away):
            gone, s = row[away + i], 0
            while gone:
                if gone & 1 and copies.group[s] == g:
                    reloads += copies.reload[s]
                    b = ops - 1 - s
                    tail = min(tail, tables.length[b] + ends.tail[b, i])
                gone >>= 1
                s += 1
        if tail < NEVER:
            least = max(least, row[channel + g] + reloads + tail)
    return least


@njit(cache=True, nogil=True)
def _successors(
    rows: Ints, tables: Tables, copies: Copies, ends: Ends, limit: int, most: int, reloads: bool
) -> tuple[Ints, int]:
    """States after one more R, or one more F or B, that can still end by `limit`; the least value of those left out."""
    away, last, ready, end, free = copies.at[1], copies.at[2], copies.at[3], copies.at[4], copies.at[5]
    debt, channel, owed = copies.at[6], copies.at[7], copies.at[8]
    ops, stages = len(tables.length), len(copies.moved)
    room, size, beyond = max(1024, 2 * len(rows)), 0, NEVER
    found = np.empty((room, rows.shape[1]), np.int64)
    row = np.empty(rows.shape[1], np.int64)
    most_stages = np.bincount(tables.device[:stages]).max()
    depth = 2 * most_stages**2 * away + 1  # two choices for each stage and activation of a device
    stack, stack_at = np.empty((depth, rows.shape[1]), np.int64), np.empty((depth, 2), np.int64)
    for a in range(len(rows)):
        if size > most:
            break
        for n in range(stages if reloads else away):
            j, s, c = n, -1, -1
            if reloads:
                s, c = n, copies.group[n]
                j = 0
                while j < away and not rows[a, away + j] >> s & 1:  # the first that is away
                    j += 1
                if j == away:
                    continue
                k, d = rows[a, j], tables.device[s]
                start, needed = rows[a, channel + c], copies.moved[s] - copies.budget[d]
            else:
                k = rows[a, j]
                if k == ops or (j > 0 and rows[a, j - 1] <= k):
                    if k == 0:
                        break
                    continue
                d = tables.device[k]
                start, needed = max(rows[a, free + d], rows[a, ready + j]), -NEVER // 2
                if k < stages:
                    needed = tables.needed[k]
                else:
                    s = ops - 1 - k
                    if rows[a, away + j] >> s & 1:
                        continue
                    c = copies.group[s]
                    if c >= 0 and rows[a, last + c] == s * away + j:
                        start = max(start, rows[a, channel + c])
            stack[0], stack_at[0, 0], stack_at[0, 1], waiting = rows[a], start, 0, 1
            while waiting:
                waiting -= 1
                row[:] = stack[waiting]
                start, first = stack_at[waiting, 0], stack_at[waiting, 1]
                at = _room_from(row, d, needed, start, tables, copies)
                if at > start:
                    waiting = _let_leave(stack, stack_at, waiting, row, d, start, first, at, tables, copies)
                if at >= NEVER:
                    continue
                # At once, or when the W (or the O, for a reload) that is running then has ended.
                if reloads:
                    spent, step, pending = at - row[owed + c], copies.step[c], _can_leave(row, c, at, copies)
                    later = at if copies.duplex else at + (-spent) % step
                else:
                    spent, step, pending = at - row[debt + d], tables.weight_step[d], _pending(row, d, away, tables)
                    later = at + (-spent) % step
                if spent >= pending:
                    later = at
                for now in range(at, later + 1, max(later - at, 1)):
                    if size == room:
                        room *= 2
                        found = longer(found, room)
                    new = found[size]
                    new[:] = row
                    if reloads:
                        _pass_to(new, now, -1, tables, copies)
                        if not copies.duplex:
                            new[owed + c] += (now - new[owed + c]) % step + copies.reload[s]
                        new[channel + c] = now + copies.reload[s]
                        new[last + c] = s * away + j
                        new[away + j] ^= 1 << s
                    else:
                        _pass_to(new, now, d, tables, copies)
                        new[debt + d] += (now - new[debt + d]) % step + tables.length[k]
                        new[free + d] = now + tables.length[k]
                        new[j] += 1
                        new[end + j] = new[free + d]
                        new[ready + j] = new[free + d] + tables.delay[k]
                    least = _least(new, tables, copies, ends)
                    if least <= limit:
                        size += 1
                    else:
                        beyond = min(beyond, least)
            if not reloads and rows[a, j] == 0:
                break
    return found[:size], beyond


@njit(cache=True, nogil=True)
def _let_leave(
    stack: Ints,
    stack_at: Ints,
    waiting: int,
    row: Ints,
    d: int,
    start: int,
    first: int,
    before: int,
    tables: Tables,
    copies: Copies,
) -> int:
    """Put on the stack what a state becomes where one more activation of device d has left, if that is `before`.

    Of each stage the latest that is there, or one before it that is there earlier.
    """
    away, end, channel, owed = copies.at[1], copies.at[4], copies.at[7], copies.at[8]
    ops = len(tables.length)
    for s in range(first, len(copies.moved)):
        g = copies.group[s]
        if tables.device[s] != d or g < 0:
            continue
        left_at = row[owed + g] + copies.offload[s]
        without = max(start, left_at if copies.duplex or left_at > row[channel + g] else 0)
        for n in range(away):
            i = away - 1 - n
            k = row[i]
            if k <= s or k > ops - 1 - s or row[away + i] >> s & 1:
                continue
            at = max(without, row[end + i] + copies.offload[s] if k == s + 1 else 0)
            if at < before:
                stack[waiting] = row
                stack[waiting, away + i] ^= 1 << s
                stack[waiting, owed + g] = left_at
                stack_at[waiting, 0], stack_at[waiting, 1] = at, s
                waiting += 1
            if at == without:
                break
    return waiting


def copy_state_bound(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """A better bound where copies take time, from states of the first device, then of ever more, the others as delays.

    Ends at the first part whose least value is not known in half of the time left, or of all work. Reports each better
    bound; the orders of `start` come back. Returns it where there are no states for the problem (`handles_states`).
    """
    if not handles_states(problem) or len(problem.stages) > MOST_STAGES:
        return start
    answer, inside_us = start, 0.0
    for number, kept in enumerate([*parts(problem, problem.stages[0].device), range(len(problem.stages))], 1):
        if limits.cancel.requested or limits.reached(answer.value_us, answer.bound_us):
            break
        part = projected(problem, kept) if len(kept) < len(problem.stages) else problem
        dolls = CopyDolls(part, limits.part(0.5 if limits.deterministic_limit is None else 0.5**number))
        highest = ceil(Fraction(answer.value_us) / dolls.unit_us) - 1 if answer.value_us < float("inf") else NEVER
        dolls.known[-1] = floor(Fraction(inside_us) / dolls.unit_us)
        for proved in dolls.bounds(highest):
            inside_us = max(inside_us, float(proved * dolls.unit_us))
            if inside_us > answer.bound_us:
                answer = replace(answer, bound_us=inside_us)
                on_solution(answer)
        if not dolls.is_reached:
            break
    return answer


class CopyDolls(Dolls):
    """The least values of the last 1, 2, ... microbatches where copies take time."""

    most_states = MOST_STATES

    def __init__(self, problem: Problem, limits: Limits) -> None:
        super().__init__(problem, limits)
        costs, stages = UnitCosts.of(problem), problem.stages
        copied = [stage.offload if stage.offload and stage.offload.bytes else None for stage in stages]
        group_of = {d: g for g, devices in enumerate(problem.channel_groups) for d in devices}
        used = sorted({group_of[stage.device] for stage, copy in zip(stages, copied, strict=True) if copy})
        group = [used.index(group_of[stages[s].device]) if copy else -1 for s, copy in enumerate(copied)]
        offload, reload = (
            np.array([int(exact(time_us) / self.unit_us) for time_us in times_us], np.int64)
            for times_us in (
                [copy.offload_us if copy else 0 for copy in copied],
                [copy.reload_us if copy else 0 for copy in copied],
            )
        )
        whole, pending = (sizes[:, 0].astype(np.int64) for sizes in (costs.whole, np.minimum(costs.whole, costs.left)))
        held = np.zeros((2 * len(stages) + 1, len(problem.devices)), np.int64)
        for k in range(len(held)):
            for s, stage in enumerate(stages):
                held[k, stage.device] += pending[s] if k >= 2 * len(stages) - s else whole[s] if k > s else 0
        budgets = [min(usable_bytes(problem, d), NEVER // 4) for d in range(len(problem.devices))]
        steps = [
            gcd(*(int(ticks) for ticks, g in zip(offload, group, strict=True) if g == n)) or 1 for n in range(len(used))
        ]
        self.groups = len(used)
        self.copies = Copies(
            offload,
            reload,
            np.array(group, np.int64),
            np.array([copy.bytes if copy else 0 for copy in copied], np.int64),
            whole - pending,
            held,
            np.array(budgets, np.int64),
            np.array(steps, np.int64),
            int(problem.copy_channels.duplex),
            np.zeros(0, np.int64),
        )

    def _ask(self, count: int, limit: int, ends: Ends, is_over: Callable[[], bool]) -> tuple[int, bool] | None:
        ops, devices, least = len(self.tables.length), len(self.problem.devices), NEVER
        parts = [count, count, self.groups, count, count, devices, devices, self.groups, self.groups]
        at = np.cumsum([0, *parts])
        self.copies = self.copies._replace(at=at)
        rows = np.zeros((1, int(at[-1])), np.int64)
        rows[:, at[2] : at[3]] = NOTHING
        for n in range(ops * count + 1):
            newest = rows
            while len(newest):  # R may follow one another
                found, beyond = self._after(newest, ends, limit, reloads=True)
                least = min(least, beyond)
                kept = undominated(np.concatenate([rows, found]), int(at[3]))
                newest = found[kept[kept >= len(rows)] - len(rows)]
                rows = np.concatenate([rows[kept[kept < len(rows)]], newest])
                if len(rows) > self.most_states or is_over():
                    return None
            if n == ops * count:
                break
            found, beyond = self._after(rows, ends, limit, reloads=False)
            least = min(least, beyond)
            if not len(found):
                return (max(least, limit + 1), False) if least < NEVER else None
            rows = found[undominated(found, int(at[3]))]
        ends_at = np.where(ends.counted, rows[:, at[6] : at[7]] + ends.weights, 0)
        return int(ends_at.max(axis=1).min()), True

    def _after(self, rows: Ints, ends: Ends, limit: int, *, reloads: bool) -> tuple[Ints, int]:
        """`_successors`, on as many cores as the search may use."""
        shares = max(1, min(self.limits.workers, len(rows) // LEAST_SHARE))
        most = 8 * self.most_states

        def of_share(part: Ints) -> tuple[Ints, int]:
            return _successors(part, self.tables, self.copies, ends, limit, most, reloads)

        if shares == 1:
            found = [of_share(rows)]
        else:
            with ThreadPoolExecutor(shares) as pool:
                found = list(pool.map(of_share, np.array_split(rows, shares)))
        self.states_left -= sum(len(of_part) for of_part, _ in found)
        return np.concatenate([of_part for of_part, _ in found]), min(beyond for _, beyond in found)
