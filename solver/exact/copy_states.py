"""States of progress with copies: also which activations are away, and when channels are free.

O and R are steps like F and B, in the order of all starts. Of a stage the latest activation leaves, and the first comes
back; others need not be tried (docs/math/bounds.md). So a state has few successors, and one, two or three devices have
few states: what lies between their ops on other devices is a delay, what lies before and behind them a head and a tail.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from math import ceil, floor
from threading import Lock
from typing import NamedTuple, TypeVar

import numpy as np
from numba import njit

from optpipe.ops import Ints
from optpipe.problem import Floats, Problem
from optpipe.stage import exact
from solver.bounds.device import usable_bytes
from solver.bounds.unit_costs import UnitCosts
from solver.bounds.unit_order import OpTimes, from_stage, op_times
from solver.exact.progress import NEVER, Ends, Tables, longer, undominated
from solver.exact.states import LEAST_SHARE, Dolls
from solver.limits import Limits
from solver.scale import handles_states
from solver.solution import OnSolution, Solution

MOST_STATES = 40_000
"""States with the same number of F and B begun that are kept; where there are more, a smaller value is asked for.

Before those that others dominate are left out there may be four times as many.
"""

MOST_STAGES = 62
"""Stages whose activations that are away are bits of one number."""

Part = TypeVar("Part")
Found = TypeVar("Found")


class Copies(NamedTuple):
    """Costs of copies by stage, times in ticks, and the places of the columns of a state.

    `offload`, `reload`: time of a copy. `group`: the devices that share its channels, -1 where nothing leaves. `moved`:
    its bytes. `freed`: bytes that the end of B frees at once. `whole` by ops done and device: bytes that a microbatch
    holds there if none of it is away. `budget` by device. `duplex`: 1 where O and R have channels of their own.

    `at` are the first columns of the parts of a state: ops done and stages away (a bit each) of each microbatch, what
    each group reloads; then times: when the next op of each microbatch can start, when its last one ends, when each
    device is free and its debt (`states.States`), when the channels for O and for R are free, when the last activation
    of each stage that leaves has left; and the least value that the state can have.
    """

    offload: Ints
    reload: Ints
    group: Ints
    moved: Ints
    freed: Ints
    whole: Ints
    budget: Ints
    duplex: int
    at: Ints


NOTHING = -1
"""Content of the column of what a group reloads, where its channel for R is free."""


@njit(cache=True, nogil=True)
def _room_from(row: Ints, d: int, needed: int, at: int, tables: Tables, copies: Copies) -> int:
    """The earliest time from `at` on at which device d has room for what needs so many bytes beside its budget."""
    away, end, free, debt, gone = copies.at[1], copies.at[4], copies.at[5], copies.at[6], copies.at[9]
    stages = len(copies.moved)
    excess, b_until, freed, o_until, moved = needed, at, 0, at, 0
    for i in range(away):
        k = row[i]
        excess += copies.whole[k, d]
        for s in range(stages):
            if row[away + i] >> s & 1 and tables.device[s] == d:
                excess -= copies.moved[s]
        if k > stages and tables.device[k - 1] == d and row[end + i] > at:  # a backward that runs
            b_until, freed = row[end + i], copies.freed[2 * stages - k]
    for s in range(stages):
        if tables.device[s] == d and row[gone + s] > at:  # an O that runs
            o_until, moved = row[gone + s], copies.moved[s]
    earliest = NEVER
    for time in (at, b_until, o_until):
        held = excess + (freed if b_until > time else 0) + (moved if o_until > time else 0)
        room_at: int = max(time, _weights_free(row, d, held, row[free + d], row[debt + d], away, tables))
        earliest = min(earliest, room_at)
    return earliest


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
def _pass_to(row: Ints, now: int, busy: int, tables: Tables, copies: Copies) -> None:
    """Let the time of a state be that of its last start; device `busy` has begun an op then."""
    away, last, ready, end, free = copies.at[1], copies.at[2], copies.at[3], copies.at[4], copies.at[5]
    debt, leaving, coming, gone = copies.at[6], copies.at[7], copies.at[8], copies.at[9]
    for e in range(debt - free):
        if e == busy or row[free + e] < now:
            row[free + e] = max(row[free + e], now)
            row[debt + e] = max(row[debt + e], now - _pending(row, e, away, tables))
    for g in range(ready - last):
        row[leaving + g] = max(row[leaving + g], now)
        if row[coming + g] <= now:
            row[coming + g] = now
            row[last + g] = NOTHING
    for s in range(len(copies.moved)):
        if row[gone + s] <= now:
            row[gone + s] = 0
    for i in range(away):
        if row[end + i] <= now:
            row[end + i] = 0


@njit(cache=True, nogil=True)
def _least(row: Ints, tables: Tables, copies: Copies, ends: Ends) -> int:
    """The least value that a state can have; what can start is no earlier than its device is free from then on."""
    away, last, ready, free = copies.at[1], copies.at[2], copies.at[3], copies.at[5]
    debt, coming, value = copies.at[6], copies.at[8], copies.at[10]
    ops = len(tables.length)
    least: int = row[value]
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
        at = max(row[free + tables.device[k]], row[ready + i])
        if i > 0 and k > 0 and row[i - 1] == k:
            at = max(at, row[ready + i - 1] + tables.length[k])  # it comes behind the one before
        row[ready + i] = at
        least = max(least, at + tables.length[k] + ends.tail[k, i])
        if k == 0:
            break
    for g in range(ready - last):
        reloads, tail = 0, NEVER
        for i in range(away):
            for s in range(len(copies.moved)):
                if row[away + i] >> s & 1 and copies.group[s] == g:
                    reloads += copies.reload[s]
                    b = ops - 1 - s
                    tail = min(tail, tables.length[b] + ends.tail[b, i])
        if tail < NEVER:
            least = max(least, row[coming + g] + reloads + tail)
    row[value] = least
    return least


@njit(cache=True, nogil=True)
def _after_copies(rows: Ints, tables: Tables, copies: Copies, ends: Ends, limit: int, most: int) -> tuple[Ints, int]:
    """States after one more O or R that can still end by `limit`; the least value of those left out."""
    away, last, end, leaving, coming = copies.at[1], copies.at[2], copies.at[4], copies.at[7], copies.at[8]
    gone = copies.at[9]
    ops, stages = len(tables.length), len(copies.moved)
    room, size, beyond = max(1024, 2 * len(rows)), 0, NEVER
    found = np.empty((room, rows.shape[1]), np.int64)
    for a in range(len(rows)):
        if size > most:
            break
        row = rows[a]
        for s in range(stages):
            g, d = copies.group[s], tables.device[s]
            if g < 0:
                continue
            if size + away + 1 > room:
                room *= 2
                found = longer(found, room)
            first, count, before = -1, 0, NEVER
            for n in range(away):
                i = away - 1 - n
                k = row[i]
                if row[away + i] >> s & 1:
                    first, count = i, count + 1
                elif s < k < ops - s and before > row[leaving + g]:
                    at = max(row[leaving + g], row[end + i] if k == s + 1 else 0)
                    if at < before:  # the latest that can leave by then
                        before = at
                        new = found[size]
                        new[:] = row
                        _pass_to(new, at, -1, tables, copies)
                        new[away + i] ^= 1 << s
                        new[gone + s] = new[leaving + g] = at + copies.offload[s]
                        if not copies.duplex:
                            new[coming + g] = new[leaving + g]
                        least = _least(new, tables, copies, ends)
                        if least <= limit:
                            size += 1
                        else:
                            beyond = min(beyond, least)
            if count == 0:
                continue
            at = max(row[coming + g], row[gone + s] if count == 1 else 0)
            at = _room_from(row, d, copies.moved[s] - copies.budget[d], at, tables, copies)
            if at >= NEVER:
                continue
            new = found[size]
            new[:] = row
            _pass_to(new, at, -1, tables, copies)
            new[away + first] ^= 1 << s
            new[last + g] = s * away + first
            new[coming + g] = at + copies.reload[s]
            if not copies.duplex:
                new[leaving + g] = new[coming + g]
            least = _least(new, tables, copies, ends)
            if least <= limit:
                size += 1
            else:
                beyond = min(beyond, least)
    return found[:size], beyond


@njit(cache=True, nogil=True)
def _after_ops(
    rows: Ints, tables: Tables, copies: Copies, head: Ints, ends: Ends, limit: int, most: int
) -> tuple[Ints, int]:
    """States after one more F or B that can still end by `limit`; the least value of those left out.

    `head` (ops, microbatches): the earliest start of each op.
    """
    away, last, ready, end, free = copies.at[1], copies.at[2], copies.at[3], copies.at[4], copies.at[5]
    debt, coming, value = copies.at[6], copies.at[8], copies.at[10]
    ops, stages = len(tables.length), len(copies.moved)
    room, size, beyond = max(1024, 2 * len(rows)), 0, NEVER
    found = np.empty((room, rows.shape[1]), np.int64)
    for a in range(len(rows)):
        if size > most:
            break
        row = rows[a]
        if size + 2 * away > room:
            room *= 2
            found = longer(found, room)
        for j in range(away):
            k = row[j]
            if j > 0 and row[j - 1] == 0:
                break
            if k == ops or (j > 0 and row[j - 1] <= k):
                continue
            d = tables.device[k]
            at = max(row[free + d], row[ready + j])
            if k < stages:
                at = _room_from(row, d, tables.needed[k], at, tables, copies)
                if at >= NEVER:
                    continue
            else:
                s = ops - 1 - k
                if row[away + j] >> s & 1:
                    continue
                g = copies.group[s]
                if g >= 0 and row[last + g] == s * away + j:
                    at = max(at, row[coming + g])
            # At once, or when the W that is running then has ended.
            spent, later = at - row[debt + d], at
            if spent < _pending(row, d, away, tables):
                later = at + (-spent) % tables.weight_step[d]
            for now in range(at, later + 1, max(later - at, 1)):
                new = found[size]
                new[:] = row
                _pass_to(new, now, d, tables, copies)
                new[debt + d] += (now - new[debt + d]) % tables.weight_step[d] + tables.length[k]
                new[free + d] = new[end + j] = now + tables.length[k]
                new[j] += 1
                if k + 1 < ops:
                    new[ready + j] = max(new[free + d] + tables.delay[k], head[k + 1, j])
                new[value] = max(new[value], new[free + d] + ends.tail[k, j])
                least = _least(new, tables, copies, ends)
                if least <= limit:
                    size += 1
                else:
                    beyond = min(beyond, least)
    return found[:size], beyond


class PartTimes:
    """Heads and tails of all F and B of so many of the last microbatches, from any stage on; each made once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._times: dict[tuple[int, int], OpTimes | None] = {}

    def of(self, microbatches: int, low: int) -> OpTimes | None:
        """Heads and tails in the pipeline from stage `low` on; None where no schedule keeps the budgets."""
        if (microbatches, low) not in self._times:
            part = from_stage(self.problem.with_microbatches(microbatches), low)
            self._times[microbatches, low] = op_times(UnitCosts.of(part))
        return self._times[microbatches, low]


def copy_state_proof(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """A proof that `start` is optimal, from states of one device or a few, the others as delays.

    Each device is asked whether it has anything better, then each two, and so on; until a question is not answered in
    its share of the time. Takes little of it where there are few states, and says nothing where `start` is not optimal.
    """
    return start if start.orders is None else _ask_groups(problem, limits, start, on_solution, is_question=True)


def copy_state_bound(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """A better bound where copies take time, from states of each device, then of each two, and so on.

    The others are delays. Ends where no part of so many devices is solved in its share of the time. Reports each better
    bound; the orders of `start` come back. Returns it where there are no states for the problem (`handles_states`).
    """
    return _ask_groups(problem, limits, start, on_solution, is_question=False)


def _ask_groups(
    problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution, *, is_question: bool
) -> Solution:
    if not handles_states(problem) or len(problem.stages) > MOST_STAGES:
        return start
    answer, share, times, lock = start, 1.0, PartTimes(problem), Lock()
    devices = [d for d, stages in enumerate(problem.stages_of) if stages]
    counted = limits.deterministic_limit is not None  # one after another, so that every run is the same
    beside = 1 if counted else limits.workers

    def is_over() -> bool:
        return limits.cancel.requested or limits.reached(answer.value_us, answer.bound_us)

    def is_solved(group: Sequence[int], share: float) -> bool:
        nonlocal answer
        if is_over():
            return True
        own = replace(limits.part(share), workers=limits.workers if len(devices) == len(group) else 1)
        dolls = CopyDolls(problem, own, group, times)
        highest = ceil(Fraction(answer.value_us) / dolls.unit_us) - 1 if answer.value_us < float("inf") else NEVER
        dolls.known[-1] = floor(Fraction(answer.bound_us) / dolls.unit_us)
        for proved in dolls.question(highest) if is_question else dolls.bounds(highest):
            with lock:
                if (bound_us := float(proved * dolls.unit_us)) > answer.bound_us:
                    answer = replace(answer, bound_us=bound_us)
                    on_solution(answer)
        return dolls.is_reached

    for number in range(1, len(devices) + 1):
        groups = list(combinations(devices, number))
        share /= len(groups) + 1
        # What one group leaves of the time is for the others; of work, which is not given back, each has a share.
        more = 1 if number < len(devices) else 0
        shares = [share if counted else 1 / ((len(groups) - n - 1) // beside + 1 + more) for n in range(len(groups))]
        with ThreadPoolExecutor(beside) as pool:
            solved = list(pool.map(is_solved, groups, shares))
        if is_over() or not (all(solved) if is_question else any(solved)):
            break
    return answer


class CopyDolls(Dolls):
    """The least values of the last 1, 2, ... microbatches of some devices where copies take time.

    `keeps_values`: False where it is only asked whether a value is possible (`question`). A state may then be left out
    for another with a larger value, as long as that is possible too.
    """

    most_states, most_found = MOST_STATES, 4 * MOST_STATES

    def __init__(self, problem: Problem, limits: Limits, devices: Collection[int], times: PartTimes) -> None:
        super().__init__(problem, limits)
        self.devices, self.times, self.keeps_values = sorted(devices), times, True
        self.kept = [s for s, stage in enumerate(problem.stages) if stage.device in devices]
        ops, costs = 2 * len(problem.stages), UnitCosts.of(problem)
        self.places = np.array([*self.kept, *(ops - 1 - s for s in reversed(self.kept))])
        stages = [problem.stages[s] for s in self.kept]
        copied = [stage.offload if stage.offload and stage.offload.bytes else None for stage in stages]
        group_of = {d: g for g, members in enumerate(problem.channel_groups) for d in members}
        used = sorted({group_of[stage.device] for stage, copy in zip(stages, copied, strict=True) if copy})
        group = [used.index(group_of[stage.device]) if copy else -1 for stage, copy in zip(stages, copied, strict=True)]
        offload, reload = (
            np.array([int(exact(time_us) / self.unit_us) for time_us in times_us], np.int64)
            for times_us in (
                [copy.offload_us if copy else 0 for copy in copied],
                [copy.reload_us if copy else 0 for copy in copied],
            )
        )
        self.tables = self._part_of(self.tables)
        whole, pending = (sizes[:, 0].astype(np.int64) for sizes in (costs.whole, np.minimum(costs.whole, costs.left)))
        held = np.zeros((len(self.places) + 1, len(self.devices)), np.int64)
        for k in range(len(held)):
            for n, (s, stage) in enumerate(zip(self.kept, stages, strict=True)):
                size = pending[s] if k >= len(self.places) - n else whole[s] if k > n else 0
                held[k, self.devices.index(stage.device)] += size
        self.groups = len(used)
        self.copies = Copies(
            offload,
            reload,
            np.array(group, np.int64),
            np.array([copy.bytes if copy else 0 for copy in copied], np.int64),
            (whole - pending)[self.kept],
            held,
            np.array([min(usable_bytes(problem, d), NEVER // 4) for d in self.devices], np.int64),
            int(problem.copy_channels.duplex),
            np.zeros(0, np.int64),
        )

    def _part_of(self, tables: Tables) -> Tables:
        """Costs of the ops of the devices alone; the way from one to the next, over others, is a delay."""
        ends = np.cumsum(np.concatenate([[0], tables.length + tables.delay]))
        delay = np.zeros(len(self.places), np.int64)
        delay[:-1] = ends[self.places[1:]] - ends[self.places[:-1]] - tables.length[self.places[:-1]]
        number = {d: n for n, d in enumerate(self.devices)}
        begun = np.concatenate([[0], self.places + 1])  # ops done of all where so many of the part are
        return tables._replace(  # what is left as it is the states with copies do not ask for
            length=tables.length[self.places],
            delay=delay,
            device=np.array([number[int(d)] for d in tables.device[self.places]], np.int64),
            needed=tables.needed[self.places],
            held=tables.held[begun][:, self.devices],
            weights=tables.weights[begun][:, self.devices],
            left=tables.left[begun][:, self.devices],
            weight_ticks=tables.weight_ticks[self.devices],
            weight_bytes=tables.weight_bytes[self.devices],
            weight_from=np.searchsorted(self.places, tables.weight_from[self.devices] - 1) + 1,
            ranks=tables.ranks[self.devices],
            weight_step=tables.weight_step[self.devices],
        )

    def question(self, highest: int) -> Iterator[int]:
        """Yield a lower bound above `highest` if nothing is at most that. `is_reached` then says if that is known."""
        self.keeps_values, self.least = False, [0] * self.problem.microbatches
        ends = self._ends(self.problem.microbatches)
        answered = self._ask(self.problem.microbatches, highest, ends, self.over(1.0)) if ends is not None else None
        self.is_reached = answered is not None
        if answered is not None and answered[0] > highest:
            yield answered[0]

    def _known(self, count: int) -> int:
        return self.known[count]  # other bounds need not hold from the first F of the part on

    def _ends(self, count: int) -> Ends | None:
        """Heads and tails of the last microbatches; None where no schedule keeps the budgets.

        Where stages before those of the devices are left out, microbatches may have waited for the first F of these
        ones, and what heads from before it say of the others need not hold then. Those from that F on do.
        """
        low, everything = self.kept[0], self.problem.microbatches
        one, own, whole = self.times.of(1, 0), self.times.of(count, low), self.times.of(count, 0)
        if one is None or own is None or whole is None:
            return None
        before = ceil(one.forward_heads[low, 0] / float(self.unit_us) - 1e-6)
        kept, own_kept = self.kept, [s - low for s in self.kept]
        self.head = before + self._ticks(own.forward_heads[own_kept], own.backward_heads[own_kept], upwards=True)
        if count == everything:
            heads = self._ticks(whole.forward_heads[kept], whole.backward_heads[kept], upwards=True)
            self.head = np.maximum(self.head, heads)
        tail = self._ticks(whole.forward_tails[kept], whole.backward_tails[kept], upwards=False)
        first_tails = np.array(self.least[count - 1 : 0 : -1]) - before - self.tables.length[0]
        tail[0, 1:] = np.maximum(tail[0, 1:], first_tails)
        weights, last_tail = np.zeros(len(self.devices), np.int64), np.zeros(len(self.devices), np.int64)
        for n, d in enumerate(self.devices):
            weights[n] = self.tables.weights[-1, n] * count
            last_tail[n] = tail[len(tail) - 1 - kept.index(self.problem.stages_of[d][0]), -1]
        spans, first = self.problem.objective == "device_span", self.problem.stages[0].device
        return Ends(tail, last_tail, weights, np.array([not spans or d == first for d in self.devices]))

    def _ticks(self, forward_us: Floats, backward_us: Floats, *, upwards: bool) -> Ints:
        """Times of F and B of the stages kept as whole ticks by op."""
        ticks = np.concatenate([forward_us, backward_us[::-1]]) / float(self.unit_us)
        rounded: Ints = (np.ceil(ticks - 1e-6) if upwards else np.floor(ticks + 1e-6)).astype(np.int64)
        return rounded

    def _ask(self, count: int, limit: int, ends: Ends, is_over: Callable[[], bool]) -> tuple[int, bool] | None:
        ops, devices, least = len(self.tables.length), len(self.devices), NEVER
        sizes = [count, count, self.groups, count, count, devices, devices, self.groups, self.groups, len(self.kept), 1]
        at = np.cumsum([0, *sizes])
        self.copies = self.copies._replace(at=at)
        rows = np.zeros((1, int(at[-1])), np.int64)
        rows[:, at[2] : at[3]] = NOTHING
        rows[:, at[3] : at[4]] = self.head[0]
        for n in range(ops * count + 1):
            newest = rows
            while len(newest):  # copies may follow one another
                found, beyond = self._after(newest, ends, limit, copies=True)
                if len(found) > self.most_found:
                    return None
                least = min(least, beyond)
                found[:, -1] *= self.keeps_values
                kept = self._undominated(np.concatenate([rows, found]), count, int(at[3]))
                newest = found[kept[kept >= len(rows)] - len(rows)]
                rows = np.concatenate([rows[kept[kept < len(rows)]], newest])
                if len(rows) > self.most_states or is_over():
                    return None
            if n == ops * count:
                break
            found, beyond = self._after(rows, ends, limit, copies=False)
            if len(found) > self.most_found:
                return None
            least = min(least, beyond)
            if not len(found):
                return (max(least, limit + 1), False) if least < NEVER else None
            found[:, -1] *= self.keeps_values
            rows = found[self._undominated(found, count, int(at[3]))]
        return int(rows[:, -1].min()), True

    def _after(self, rows: Ints, ends: Ends, limit: int, *, copies: bool) -> tuple[Ints, int]:
        """States after one more copy, or one more F or B, on as many cores as the search may use.

        Not all of them where there are more than `most_found`.
        """

        def of_share(part: Ints) -> tuple[Ints, int]:
            if copies:
                return _after_copies(part, self.tables, self.copies, ends, limit, self.most_found)
            return _after_ops(part, self.tables, self.copies, self.head, ends, limit, self.most_found)

        found = self._beside(of_share, np.array_split(rows, self._shares(rows)))
        self.states_left -= sum(len(of_part) for of_part, _ in found)
        return np.concatenate([of_part for of_part, _ in found]), min(beyond for _, beyond in found)

    def _undominated(self, rows: Ints, count: int, times: int) -> Ints:
        """`undominated` states of so many microbatches, on as many cores as the search may use."""
        parts = self._shares(rows)

        def of_part(part: int) -> Ints:
            return undominated(rows, count, len(self.kept), times, part, parts)

        return np.concatenate(self._beside(of_part, range(parts)))

    def _shares(self, rows: Ints) -> int:
        return max(1, min(self.limits.workers, len(rows) // LEAST_SHARE))

    def _beside(self, search: Callable[[Part], Found], parts: Sequence[Part]) -> Sequence[Found]:
        """What a kernel finds of each part, each on its core."""
        if len(parts) == 1:
            return [search(parts[0])]
        with ThreadPoolExecutor(len(parts)) as pool:
            return list(pool.map(search, parts))
