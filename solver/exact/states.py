"""Bounds and schedules from dynamic programming over states of progress (`solver.exact.progress`).

Which values no schedule has is asked for ever larger ones, as long as there are few states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import floor

import numpy as np

from optpipe.ops import Ints, Op, Orders
from optpipe.problem import Problem
from optpipe.stage import exact
from optpipe.task_graph import lower
from solver.bounds.lower_bound import lower_bound_us
from solver.bounds.unit_costs import UnitCosts
from solver.bounds.unit_order import op_times
from solver.build import orders_from_times
from solver.exact.memory_order import memory_precedences
from solver.exact.progress import NEVER, Ends, States, build_tables, successors, undominated
from solver.limits import Limits
from solver.scale import time_unit_us

MOST_STATES = 8_000
"""Most states kept with the same number of ops begun; where there are more, a smaller value is tried."""

STATES_A_UNIT = 400_000
"""States that are expanded in about a second, the unit of deterministic limits."""


DOLL = 0.3
"""Largest share of the time or work left that each number of the last microbatches may take."""


LEAST_SHARE = 200
"""Fewest states that are worth the start of another thread."""


class Dolls:
    """Lower bounds in ticks for the last 1, 2, ... microbatches, from the start of the first F of them.

    A Russian doll search: what is proved of fewer microbatches bounds the states of one more. The bounds are those of a
    `whole` problem, if one is given, by a part of it with the stages `kept`, the others as delays.

    `known`: such bounds from elsewhere, by the number of microbatches. `is_reached`: the last one is the least value
    itself; for a part, the least that it can say with the tails of the whole.
    """

    def __init__(
        self, problem: Problem, limits: Limits, whole: Problem | None = None, kept: Sequence[int] = ()
    ) -> None:
        self.problem, self.limits = problem, limits
        self.unit_us = time_unit_us(whole or problem)  # of all ops: tails are those of the whole
        self.tables = build_tables(problem, self.unit_us)
        self.graph = lower(problem)
        weights_us = self.graph.times_us["backward_weight"][:, 0, 0].tolist()
        self.weight_ticks = [int(exact(time_us) / self.unit_us) for time_us in weights_us]
        self.tails = self._tails(problem)
        if whole is not None and self.tails is not None and (tails := self._tails(whole)) is not None:
            rows = [*kept, *(len(tails) - 1 - s for s in reversed(kept))]
            self.tails = np.maximum(self.tails, tails[rows])
        self.forced = self._forced()
        self.least = [0]
        self.is_reached = False
        self.known = [0] * (problem.microbatches + 1)
        counted = limits.deterministic_limit
        self.states_left = float("inf") if counted is None else STATES_A_UNIT * counted

    def _tails(self, problem: Problem) -> Ints | None:
        """The least time in ticks that follows each op, by its place on the way and microbatch; None: no schedule."""
        times = op_times(UnitCosts.of(problem))
        if times is None:
            return None
        tails_us = np.concatenate([times.forward_tails, times.backward_tails[::-1]])
        return np.floor(tails_us / float(self.unit_us) + 1e-6).astype(np.int64)

    def _forced(self) -> Sequence[Sequence[tuple[int, int, int]]]:
        """Ops that memory forces to follow each op: which, by how many microbatches later, and the ticks between them.

        Those of a W are between the end of its B and the op that waits for it.
        """
        ops, forced = len(self.tables.length), set()
        for before, after in memory_precedences(self.problem):
            ticks = self.weight_ticks[before.stage] if before.kind == "W" else 0
            first, second = (op.stage if op.kind == "F" else ops - 1 - op.stage for op in (before, after))
            forced.add((first, second, after.microbatch - before.microbatch, ticks))
        return [[entry[1:] for entry in forced if entry[0] == k] for k in range(ops)]

    def bounds(self, highest: int) -> Iterator[int]:
        """Yield ever larger lower bounds for all microbatches, after those for the last 1, 2, ... of them."""
        for count in range(1, self.problem.microbatches):
            for _ in self._climb(count, highest, DOLL):
                pass
        yield from self._climb(self.problem.microbatches, highest, 1.0)

    def _climb(self, count: int, highest: int, share: float) -> Iterator[int]:
        """Yield ever larger lower bounds for the last `count` microbatches, until one is above `highest`.

        Ends at the least value itself, where there are too many states, or when this share of what is left is spent.
        """
        is_over, self.is_reached = self.over(share), False
        ends, proved = self._ends(count), max(self.least[-1], self._known(count))
        self.least.append(proved)
        stride, refused = max(proved // 512, 1), highest + 1
        limit = min(proved, highest)
        while ends is not None and limit < refused:
            answered = self._ask(count, limit, ends, is_over)
            if answered is None and (count < self.problem.microbatches or is_over()):
                return
            if answered is None:
                refused, stride = limit, stride // 4
                limit = proved + min((refused - proved) // 4, stride)
                continue
            proved, is_least = max(answered[0], self.least[count]), answered[1]
            self.least[count] = proved
            yield proved
            self.is_reached = is_least
            if is_least or proved > highest:
                return
            stride *= 2
            limit = min(proved + stride, refused - 1)

    def _known(self, count: int) -> int:
        """A bound in ticks for the last `count` microbatches without a search."""
        if count < self.problem.microbatches and self.problem.objective == "device_span":
            return self.known[count]  # the largest span may be that of another device
        bound_us = lower_bound_us(self.problem.with_microbatches(count), self.limits.without)
        return max(self.known[count], floor(bound_us * (1 - 1e-11) / self.unit_us))

    def over(self, share: float) -> Callable[[], bool]:
        """A function that is True once this share of the time or work that is left now has been spent."""
        limits, kept = self.limits.part(share), self.states_left * (1 - share)
        if limits.deterministic_limit is not None:
            return lambda: limits.cancel.requested or self.states_left <= kept
        return lambda: limits.cancel.requested or limits.seconds >= limits.time_limit_s

    def _ask(self, count: int, limit: int, ends: Ends, is_over: Callable[[], bool]) -> tuple[int, bool] | None:
        """The least value if it is at most `limit`, and True; a larger bound, and False; None where it is not known."""
        ops, devices = len(self.tables.length), len(self.problem.devices)
        sizes = (1, count), (1, count), (1, devices), (1, devices)
        states, least = States(*(np.zeros(size, np.int64) for size in sizes)), NEVER
        self.layers: list[Ints] = []
        for _ in range(ops * count):
            states, steps, beyond = self._step(states, ends, limit, 8 * MOST_STATES)
            self.states_left -= len(states.done)
            least = min(least, beyond)
            if not len(states.done):
                return (max(least, limit + 1), False) if least < NEVER else None
            if len(states.done) <= 8 * MOST_STATES:
                kept = undominated(np.concatenate(states, axis=1), count)
                states, steps = States(*(rows[kept] for rows in states)), steps[kept]
            self.layers.append(steps)
            if len(states.done) > MOST_STATES or is_over():
                return None
        ends_at = np.where(ends.counted, states.debt + ends.weights, 0)
        self.last = int(ends_at.max(axis=1).argmin())
        return int(ends_at.max(axis=1).min()), True

    def _step(self, states: States, ends: Ends, limit: int, most: int) -> tuple[States, Ints, int]:
        """`successors`, on as many cores as the search may use."""
        count = len(states.done)
        shares = min(self.limits.workers, count // LEAST_SHARE)
        if shares <= 1:
            return successors(states, self.tables, ends, limit, most)
        rows = [slice(count * n // shares, count * (n + 1) // shares) for n in range(shares)]

        def of_share(part: slice) -> tuple[States, Ints, int]:
            states_of_part = States(*(values[part] for values in states))
            # Each may have as many as all together, so that one that stops early always makes them too many.
            found, steps, beyond = successors(states_of_part, self.tables, ends, limit, most)
            steps[:, 0] += part.start
            return found, steps, beyond

        with ThreadPoolExecutor(shares) as pool:
            found = list(pool.map(of_share, rows))
        all_states = States(*(np.concatenate(values) for values in zip(*(one[0] for one in found), strict=True)))
        return all_states, np.concatenate([one[1] for one in found]), min(one[2] for one in found)

    def orders(self) -> Orders:
        """Orders of the least value that was reached: W in the gaps where they were counted, as far as they fit whole.

        They keep the budgets, and reach that value, where no activation has to leave and W of a device are alike.
        """
        problem, stages = self.problem, len(self.problem.stages)
        path, row = [], self.last
        for steps in reversed(self.layers):
            row, i, start = steps[row, :3].tolist()
            path.append((start, i))
        planned: dict[Op, tuple[int, int]] = {}
        free, pending = [0] * len(problem.devices), [deque[Op]() for _ in problem.devices]
        ran = [0] * problem.microbatches

        def run_weights(d: int, until: float) -> None:
            while pending[d] and free[d] + (ticks := self.weight_ticks[pending[d][0].stage]) <= until:
                planned[pending[d].popleft()] = free[d], free[d] + ticks
                free[d] += ticks

        for start, i in reversed(path):
            k = ran[i]
            ran[i] += 1
            s = k if k < stages else 2 * stages - 1 - k
            op = Op(self.graph.kind_with("F" if k < stages else "B", s).name, s, i)
            d = int(self.graph.device[s])
            run_weights(d, start)
            free[d] = start + int(self.tables.length[k])
            planned[op] = start, free[d]
            if op.kind == "B":
                pending[d].append(Op("W", op.stage, i))
        for d in range(len(problem.devices)):
            run_weights(d, float("inf"))
        return orders_from_times(problem, planned)

    def _ends(self, count: int) -> Ends | None:
        """Lower bounds on what follows each op of the last microbatches; None where no schedule keeps the budgets."""
        if self.tails is None:
            return None
        problem, length = self.problem, self.tables.length
        tail = self.tails[:, problem.microbatches - count :].copy()
        tail[0, 1:] = np.maximum(tail[0, 1:], np.array(self.least[count - 1 : 0 : -1]) - length[0])
        for i in reversed(range(count)):
            for k in reversed(range(len(length))):
                later = [tail[k, i]]
                if k + 1 < len(length):
                    later.append(self.tables.delay[k] + length[k + 1] + tail[k + 1, i])
                if i + 1 < count:
                    later.append(length[k] + tail[k, i + 1])
                for other, apart, ticks in self.forced[k]:
                    if i + apart < count:
                        later.append(ticks + length[other] + tail[other, i + apart])
                tail[k, i] = max(later)
        weights, last_tail = np.zeros(len(problem.devices), np.int64), np.zeros(len(problem.devices), np.int64)
        for d, numbers in enumerate(problem.stages_of):
            if numbers:
                weights[d] = self.tables.weights[len(length), d] * count
                last_tail[d] = tail[len(length) - 1 - numbers[0], -1]
        spans = problem.objective == "device_span"
        counted = np.array([not spans or d == self.graph.device[0] for d in range(len(problem.devices))])
        return Ends(tail, last_tail, weights, counted)
