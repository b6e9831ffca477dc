"""List schedules with the number of microbatches in flight that memory has room for (docs/math/search.md#in-flight).

`ada-offload` tries a dozen numbers of microbatches in flight and of W left over, and fewer of them the larger a problem
is. How long a schedule takes depends on both to within a few: one microbatch too many, and ops wait for memory; one too
few, and devices are idle. So here both are searched for, on a problem with fewer microbatches where there are many.

In the lists memory decides what leaves and, for each mode that recomputes, what is made anew
(`solver.lists.memory`). Each kind gets its first numbers, and then they go on, the best first. At last numbers
are drawn at random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import inf
from typing import Any

import numpy as np

from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import within_budgets
from solver.by_stage import keep_what_fits
from solver.limits import Cancel, Limits
from solver.lists.memory import ON_ITS_WAY, WHEN_IDLE, WITH_GRADIENT, MemoryLists, Rules
from solver.solution import OnSolution, Solution

LATE_WEIGHTS = (1, 2, 4, 0, 8, 16)
"""Numbers of W left over on a device, tried in turn."""

SHORT = 4
"""Microbatches for each stage with which choices are compared where there are many more."""

FIRST_SHARE = 0.3
"""Largest share of the time left, or of all work, for the first numbers of a kind of lists where there are several."""

GOOD_GAP = 0.1
"""Gap of a start up to which no first lists are offered."""

RANDOM_SHARE = 0.5
"""Largest share of the time left, or of all work, for the random choices of a kind of lists."""

STALL_LIMIT = 500
"""Random choices in a row of which none is better, after which the search ends."""

REDRAWN = 0.6
"""Probability with which a random choice differs from the best in each of its numbers."""

MOST_LATE_WEIGHTS = 12
"""Largest number of W left over of a random choice."""

PLAYED_PER_SECOND = 2_000_000
"""Compute ops placed with their copies in a second, and so in a unit of work (one core)."""

Changes = Sequence[Mapping[str, Any]]
"""Fields of a choice that are tried beside its numbers, one entry after another."""

HOLD: Changes = [{"hold": hold} for hold in (1.0, 0.25, 0.5)]
TAIL: Changes = [{"tail": tail} for tail in (0.5, 0, 0.125)]
EARLY: Changes = [{"early": early} for early in (1, 2, 4)]
RESERVE: Changes = [{"reserve": reserve, "behind": 0} for reserve in (1, 2, 4)]
PLANNED: Mapping[str, Any] = {"planned": 1, "warm_up": 1.5, "reserve": 4, "ahead": WHEN_IDLE}
"""More microbatches may be in flight than it is planned for: the first ones fill the warm-up, and are recomputed."""
STOCK: Changes = [{"stock": stock} for stock in (1.2, 1.0, 1.5)]
AGAIN: Changes = [
    {"ahead": ahead, "behind": behind} for ahead, behind in product((ON_ITS_WAY, WITH_GRADIENT, WHEN_IDLE), (0, 4, 16))
]


class ListScheduler:
    """Lists in which memory decides what recomputes in mode ``modes[s]``, and what leaves in ``out[s]`` (0: nothing).

    There are a `first` choice, and the `changes` that are tried beside its numbers. `planned`: it begins with twice
    1F1B's number in flight, and recomputes what the plan for that number does.
    """

    def __init__(self, problem: Problem, modes: Sequence[int], out: Sequence[int], planned: bool = False) -> None:
        self.problem = problem
        again = [*AGAIN, *RESERVE] if any(modes) else []
        self.changes: Changes = [*STOCK, *HOLD, *again, *TAIL, *(EARLY if any(out) else [])]
        self.first = Rules(min(len(problem.stages), problem.units), LATE_WEIGHTS[0], tail=1)  # memory stops the others
        if planned:
            self.changes = [*HOLD, *RESERVE, *TAIL]
            self.first = self.first._replace(in_flight=min(2 * len(problem.stages), problem.units), **PLANNED)
        self.lists = MemoryLists(problem, modes, out)

    def orders(self, choice: Rules) -> Orders | None:
        """The orders of a choice; None where memory has no room for them."""
        orders = self.lists.orders(choice)
        return None if orders is None else keep_what_fits(self.problem, orders)

    def tried(self, choice: Rules) -> tuple[float, Orders | None]:
        """The value of a choice, infinite where memory has no room for it; with its orders, if they had to be made.

        A makespan is that which is planned, not below that of the orders.
        """
        if self.problem.objective != "makespan":
            orders = self.orders(choice)
            return (inf if orders is None else _value_us(self.problem, orders)), orders
        return self.lists.makespan_us(choice), None


Kind = Callable[[Problem], ListScheduler]
"""Makes the lists of a kind for the problem with any number of microbatches."""


def in_flight_search(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """The best list schedule within the budgets, if it is better than the start."""
    few = min(problem.microbatches, SHORT * len(problem.stages))
    short = problem.with_microbatches(few) if few < problem.microbatches else problem
    best = start

    def offer(kind: Kind, evaluations: Evaluations, choice: Rules) -> None:
        nonlocal best
        orders = evaluations.orders_of(choice) if short is problem else kind(problem).orders(choice)
        value_us = inf if orders is None else _value_us(problem, orders)
        if value_us < best.value_us:
            best = replace(start, orders=orders, value_us=value_us)
            on_solution(best)

    runs: list[tuple[float, int, Kind, Evaluations, Iterator[Rules]]] = []
    for k, (name, kind) in enumerate(_kinds(problem)):
        if name in limits.without:
            continue
        evaluations = Evaluations(kind(short), limits.part(FIRST_SHARE))
        found = improving(evaluations)
        # The orders of a million ops take seconds to make and to judge: a good start needs no first ones.
        if not runs and start.gap > GOOD_GAP and evaluations.value_us(evaluations.lists.first) < inf:
            offer(kind, evaluations, evaluations.lists.first)
        if (first := next(found, None)) is not None and (value_us := evaluations.value_us(first)) < inf:
            if value_us < min((run[0] for run in runs), default=inf):
                offer(kind, evaluations, first)
            runs.append((value_us, k, kind, evaluations, found))
    for _, _, kind, evaluations, found in sorted(runs, key=lambda run: run[:2]):
        evaluations.limits = limits
        for choice in found:
            offer(kind, evaluations, choice)
        if "random-lists" not in limits.without:
            evaluations.limits = limits.part(RANDOM_SHARE)
            for choice in varied(evaluations):
                offer(kind, evaluations, choice)
    return best


def first_in_memory(problem: Problem) -> Orders | None:
    """The orders of the first lists; None where there are none, or memory has no room for them."""
    for _, kind in _kinds(problem):
        lists = kind(problem)
        choice = lists.first
        while (orders := lists.orders(choice)) is None and choice.in_flight > 1:
            choice = _with_fewer(choice)
        if orders is not None:
            return orders
    return None


def _with_fewer(choice: Rules) -> Rules:
    """The choice with a quarter fewer microbatches in flight."""
    return choice._replace(in_flight=choice.in_flight - max(1, choice.in_flight // 4))


def list_kinds(problem: Problem) -> list[str]:
    """Names of the kinds of lists for a problem, and of the random choices among them."""
    names = [name for name, _ in _kinds(problem)]
    return [*dict.fromkeys(names), "random-lists"] if names else []


def _kinds(problem: Problem) -> Iterator[tuple[str, Kind]]:
    """The kinds of lists for a problem by name, those in which activations leave first."""
    out, again = _leaving(problem), _recomputing(problem)
    if any(out) and problem.host_memory_bytes is None:
        for modes in [[0] * len(out), *again]:
            yield "offloading-lists", partial(ListScheduler, modes=modes, out=out)
    for name, planned in (("recomputing-lists", False), ("planned-lists", True)):
        for modes in again:
            yield name, partial(ListScheduler, modes=modes, out=[0] * len(out), planned=planned)


def _leaving(problem: Problem) -> list[int]:
    """For each stage 1 if its activations may be offloaded."""
    return [int(stage.offload is not None and stage.offload.bytes > 0) for stage in problem.stages]


def _recomputing(problem: Problem) -> list[list[int]]:
    """For each stage its first mode that recomputes, then the second of each, and so on."""
    able = [
        [k for k, mode in enumerate(stage.choices) if mode.recomputes and not mode.offload] for stage in problem.stages
    ]
    return [
        [modes[min(number, len(modes) - 1)] if modes else 0 for modes in able] for number in range(max(map(len, able)))
    ]


QUICK: Changes = [
    {"in_flight": 1.5, "late_weights": 16, "tail": 1, "stock": 1.5},
    {"in_flight": 1.5, "late_weights": 2, "tail": 0.5},
    {"in_flight": 1, "late_weights": 1, "tail": 1, "hold": 1.0},
    {"in_flight": 1, "late_weights": 1, "tail": 0, "stock": 1.5},
    {"in_flight": 1.5, "late_weights": 1, "tail": 0.5, "hold": 0.5, "stock": 1.2},
    {"in_flight": 2, "late_weights": 16, "tail": 0, "stock": 1.2},
]
"""Choices of which the best is within 0.2 % of the best of 720 on average, over 120 problems; at most 4 % worse.

`in_flight` is for each stage.
"""


class QuickLists:
    """Value of a problem by a few list schedules in memory, without a search: a millisecond for a small problem.

    Of a problem of slices or unequal microbatches it is that of as many equal ones, which only compares. `most`: how
    many of the choices `QUICK` are tried; more may be later.
    """

    def __init__(self, problem: Problem, cancel: Cancel, most: int = len(QUICK)) -> None:
        self.most = most
        out, again = _leaving(problem), _recomputing(problem)
        nothing = [0] * len(out)
        leaving = [nothing, out] if any(out) and problem.host_memory_bytes is None else [nothing]
        self.achieved = problem.has_equal_microbatches
        """True if `value_us` is that of a schedule of the problem."""
        units = {"microbatches": problem.units, "slices": None, "microbatch_order": "given"}
        equal = problem if self.achieved else problem.with_equal_units().replaced(**units)
        kinds = (ListScheduler(equal, *chosen) for chosen in product([nothing, *again], leaving))
        self._evaluations = [Evaluations(lists, Limits(inf, cancel=cancel)) for lists in kinds]

    @property
    def value_us(self) -> float:
        """The least value of all kinds; infinite where memory has no room for any of these."""
        return min(self._quick_us(evaluations) for evaluations in self._evaluations)

    def improve(self, limits: Limits) -> None:
        """Search for the numbers of the best kind of lists."""
        best = self._best
        best.limits = limits
        for _ in improving(best):
            pass

    def orders(self) -> Orders | None:
        """Orders with the value, if it is achieved."""
        return self._best.orders_of(self._best.best) if self.achieved and self.value_us < inf else None

    @property
    def _best(self) -> Evaluations:
        return min(self._evaluations, key=lambda evaluations: self._quick_us(evaluations))

    def _quick_us(self, evaluations: Evaluations) -> float:
        problem, first = evaluations.lists.problem, evaluations.lists.first
        stages, units = len(problem.stages), problem.units
        for number, change in enumerate(QUICK[: self.most]):
            in_flight = min(round(change["in_flight"] * stages), units)
            choice = first._replace(**{**change, "in_flight": in_flight})
            while evaluations.value_us(choice) == inf and choice.in_flight > 1 and not number:
                choice = _with_fewer(choice)
        return evaluations.value_us(evaluations.best)


def improving(evaluations: Evaluations) -> Iterator[Rules]:
    """Choices, each the best so far.

    The first number in flight is lowered until memory has room. Changes are tried with it, and once more with the best.
    For each number of W left over the number in flight goes by steps from the one before, halved whenever neither side
    is better.
    """
    most = evaluations.lists.problem.units
    choice = evaluations.lists.first
    while choice.in_flight > 1 and evaluations.value_us(choice) == inf:
        choice = _with_fewer(choice)
    best_us, step = inf, max(1, choice.in_flight // 8)
    in_flight, choice = choice.in_flight, _changed(evaluations, choice)
    for late_weights in LATE_WEIGHTS:
        like = choice._replace(late_weights=late_weights)
        own_us = evaluations.value_us(like._replace(in_flight=in_flight))
        while step and not evaluations.spent:
            beside = [n for n in (in_flight + step, in_flight - step) if 1 <= n <= most]
            values_us = [evaluations.value_us(like._replace(in_flight=n)) for n in beside]
            if values_us and min(values_us) < own_us:
                own_us = min(values_us)
                in_flight = beside[values_us.index(own_us)]
            else:
                step //= 2
        if own_us < best_us:
            choice = _changed(evaluations, like._replace(in_flight=in_flight))
            best_us = evaluations.value_us(choice)
            yield choice
        if evaluations.spent:
            return
        step = 2  # another number of W moves the best number in flight by about as many


def varied(evaluations: Evaluations) -> Iterator[Rules]:
    """Choices, each the best so far, drawn at random with some of the numbers of the best one.

    How long a list schedule takes is a rough function of its numbers: of many choices near a good one some are better
    by several percent.
    """
    rng = np.random.default_rng(evaluations.limits.seed)
    choice, idle = evaluations.best, 0
    best_us = evaluations.value_us(choice)
    while not evaluations.spent and idle < STALL_LIMIT:
        idle += 1
        other = _varied(choice, evaluations.lists, rng)
        if (value_us := evaluations.value_us(other)) <= best_us:
            choice = other
            if value_us < best_us:
                best_us, idle = value_us, 0
                yield choice


def _varied(choice: Rules, lists: ListScheduler, rng: np.random.Generator) -> Rules:
    """A choice with new numbers, each with probability `REDRAWN`; of those with changes half are as at first."""
    drawn: dict[str, Any] = {
        "in_flight": min(max(1, round(choice.in_flight * rng.uniform(0.6, 1.5))), lists.problem.units),
        "late_weights": int(rng.integers(MOST_LATE_WEIGHTS + 1)),
    }
    for name in sorted({name for change in lists.changes for name in change}):
        tried = [change[name] for change in lists.changes if name in change]
        drawn[name] = tried[int(rng.integers(len(tried)))] if rng.random() < 0.5 else getattr(lists.first, name)
    if "stock" in drawn:
        drawn["stock"] = float(rng.uniform(0.5, 2.2))
    return choice._replace(**{name: value for name, value in drawn.items() if rng.random() < REDRAWN})


def _changed(evaluations: Evaluations, choice: Rules) -> Rules:
    """A choice with each change that makes it better."""
    for change in evaluations.lists.changes:
        choice = min(choice, choice._replace(**change), key=evaluations.value_us)
    return choice


@dataclass
class Evaluations:
    """Values of choices of a kind of lists, each found once, as long as the limits allow."""

    lists: ListScheduler
    limits: Limits
    played: int = 0
    _known: dict[Rules, float] = field(default_factory=dict)
    _best: tuple[Rules, Orders] | None = None

    @property
    def best(self) -> Rules:
        """The best choice tried, the first of several; the first of its lists where none was."""
        return min(self._known, key=self._known.__getitem__, default=self.lists.first)

    @property
    def spent(self) -> bool:
        """True if the search must end."""
        work = self.limits.deterministic_limit
        if self.limits.cancel.requested:
            return True
        return (
            self.limits.seconds >= self.limits.time_limit_s if work is None else self.played >= work * PLAYED_PER_SECOND
        )

    def value_us(self, choice: Rules) -> float:
        """Value of a choice; infinite where memory has no room for it, or there is no time left to find out."""
        if choice not in self._known:
            if self.spent:
                return inf
            problem = self.lists.problem
            self.played += 3 * len(problem.stages) * problem.units
            value_us, orders = self.lists.tried(choice)
            if orders is not None and value_us < min(self._known.values(), default=inf):
                self._best = choice, orders
            self._known[choice] = value_us
        return self._known[choice]

    def orders_of(self, choice: Rules) -> Orders | None:
        """Orders of a choice."""
        return self._best[1] if self._best and self._best[0] == choice else self.lists.orders(choice)


def _value_us(problem: Problem, orders: Orders) -> float:
    """The value of orders; infinite where they exceed a budget."""
    simulation = simulate(problem, orders)
    return simulation.value_us if within_budgets(problem, orders, simulation) else inf
