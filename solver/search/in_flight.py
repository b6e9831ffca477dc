"""List schedules with the number of microbatches in flight that memory has room for (docs/math/search.md#in-flight).

`ada-offload` tries a dozen numbers of microbatches in flight and of W left over, and fewer of them the larger a problem
is. How long a schedule takes depends on both to within a few: one microbatch too many, and ops wait for memory; one too
few, and devices are idle. So here both are searched for, on a problem with fewer microbatches where there are many.

With activation modes there are several kinds of lists: for each mode those that recompute what has no room
(`solver.search.recompute_lists`), and where activations may leave those of each choice of one variant a stage. Each
kind that is not far worse gets its first numbers, and then they go on, the best first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product, starmap
from math import inf
from typing import NamedTuple

from optpipe.ops import OpArray, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import within_budgets
from solver.by_stage import ByStage, choices, keep_what_fits
from solver.limits import Limits
from solver.published.ada_offload import in_flight_orders
from solver.published.transfers import TransferPlanner, TransferRequest
from solver.search.recompute_lists import ON_ITS_WAY, WHEN_IDLE, WITH_GRADIENT, recompute_lists
from solver.solution import OnSolution, Solution
from solver.variants import Variant

LATE_WEIGHTS = (1, 2, 4, 0, 8, 16)
"""Numbers of W left over on a device, tried in turn."""

LEADS = (1.5, 3.0)
"""Leads of reloads, in durations of the copy."""

SHORT = 4
"""Microbatches for each stage with which choices are compared where there are many more."""

FIRST_SHARE = 0.3
"""Largest share of the time left, or of all work, for the first numbers of a kind of lists where there are several."""

HOPEFUL = 1.1
"""A kind of lists is left out where two guesses of its numbers are worse by this factor than the best of another."""

PLAYED_PER_SECOND = 250_000
"""Compute ops ordered, played with their copies and simulated in a second, and so in a unit of work (one core)."""


class Again(NamedTuple):
    """When microbatches are recomputed, and for how many there is room beside one kept (`recompute_lists`)."""

    ahead: int
    behind: int


AGAIN = tuple(starmap(Again, product((ON_ITS_WAY, WITH_GRADIENT, WHEN_IDLE), (0, 4, 16))))
"""Ways to recompute, tried in turn."""


@dataclass(frozen=True)
class Choice:
    """Microbatches between their first F and their last B, W left over, whether activations leave, and the lead.

    `again`: how microbatches are recomputed.
    """

    in_flight: int
    late_weights: int
    offloads: bool
    lead: float = LEADS[0]
    again: Again = AGAIN[0]


Lists = Callable[[Problem, Choice], Orders | None]
"""Makes the orders of a choice for a problem; None where memory has no room for them."""


@dataclass(frozen=True)
class Kind:
    """A kind of lists; `offloads`: activations leave. `again`: the ways to recompute to choose from."""

    lists: Lists
    offloads: bool
    again: Sequence[Again] = AGAIN[:1]


def in_flight_search(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """The best list schedule within the budgets, if it is better than the start."""
    few = min(problem.microbatches, SHORT * len(problem.stages))
    short = problem.from_data(problem.to_data() | {"microbatches": few}) if few < problem.microbatches else problem
    best = start

    def offer(trials: Trials, choice: Choice) -> None:
        nonlocal best
        orders = trials.orders_of(choice) if short is problem else trials.lists(problem, choice)
        value_us = inf if orders is None else _value_us(problem, orders)
        if value_us < best.value_us:
            best = replace(start, orders=orders, value_us=value_us)
            on_solution(best)

    runs: list[tuple[float, int, Trials, Iterator[Choice]]] = []
    closest: tuple[float, Choice] | None = None
    for k, kind in enumerate(_kinds(problem)):
        trials = Trials(short, limits, kind.lists)
        found = improving(trials, kind.offloads, kind.again)
        if not problem.has_modes:
            for choice in found:
                offer(trials, choice)
            continue
        trials.limits = limits.part(FIRST_SHARE)
        if closest is not None:
            guesses = (closest[1].in_flight, 2 * len(problem.stages))
            values_us = [trials.value_us(Choice(n, LATE_WEIGHTS[0], kind.offloads)) for n in guesses]
            if min(values_us) > HOPEFUL * closest[0]:
                continue
        if (first := next(found, None)) is not None and (value_us := trials.value_us(first)) < inf:
            runs.append((value_us, k, trials, found))
            if closest is None or value_us < closest[0]:
                closest = value_us, first
                offer(trials, first)
    for _, _, trials, found in sorted(runs, key=lambda run: run[:2]):
        trials.limits = limits
        for choice in found:
            offer(trials, choice)
    return best


def _kinds(problem: Problem) -> Iterator[Kind]:
    """The kinds of lists for a problem, those in which activations leave first."""
    if not problem.has_modes:
        if any(stage.offload for stage in problem.stages):
            yield Kind(plain_lists, True)
        yield Kind(plain_lists, False)
        return
    for by_stage in choices(problem):
        if any(stage.offload for stage in by_stage.plain.stages):
            yield Kind(partial(_lists_by_stage, by_stage.chosen), True)
    able = [
        [k for k, mode in enumerate(stage.choices) if mode.recomputes and not mode.offload] for stage in problem.stages
    ]
    for number in range(max(map(len, able))):
        modes = [ways[min(number, len(ways) - 1)] if ways else 0 for ways in able]
        yield Kind(partial(_lists_with_modes, modes), False, AGAIN)


def improving(trials: Trials, offloads: bool, again: Sequence[Again] = AGAIN[:1]) -> Iterator[Choice]:
    """Choices, each the best so far.

    For each number of W left over the number in flight goes by steps from the one before, halved whenever neither side
    is better. The first one halves from the most until memory has room.
    """
    most = trials.problem.units
    start = Choice(min(2 * len(trials.problem.stages), most), LATE_WEIGHTS[0], offloads)
    in_flight = start.in_flight
    while in_flight > 1 and trials.value_us(replace(start, in_flight=in_flight)) == inf:
        in_flight -= max(1, in_flight // 4)
    best_us, step = inf, max(1, in_flight // 8)
    choice = start
    for late_weights in LATE_WEIGHTS:
        like = replace(choice, late_weights=late_weights)
        own_us = trials.value_us(replace(like, in_flight=in_flight))
        while step and not trials.spent:
            beside = [n for n in (in_flight + step, in_flight - step) if 1 <= n <= most]
            values_us = [trials.value_us(replace(like, in_flight=n)) for n in beside]
            if values_us and min(values_us) < own_us:
                own_us = min(values_us)
                in_flight = beside[values_us.index(own_us)]
            else:
                step //= 2
        if own_us < best_us:
            best_us = own_us
            choice = replace(like, in_flight=in_flight)
            others = [replace(choice, lead=lead) for lead in (LEADS if offloads else LEADS[:1])]
            for other in [*others, *(replace(choice, again=way) for way in again)]:
                if trials.value_us(other) <= best_us:
                    best_us, choice = trials.value_us(other), other
            yield choice
        if trials.spent:
            return
        step = 2  # another number of W moves the best number in flight by about as many


@dataclass
class Trials:
    """Values of choices on a problem, each found once, as long as the limits allow."""

    problem: Problem
    limits: Limits
    lists: Lists = field(default_factory=lambda: plain_lists)
    played: int = 0
    _known: dict[Choice, float] = field(default_factory=dict)
    _best: tuple[Choice, Orders] | None = None

    @property
    def spent(self) -> bool:
        """True if the search must end."""
        work = self.limits.deterministic_limit
        if self.limits.cancel.requested:
            return True
        return (
            self.limits.seconds >= self.limits.time_limit_s if work is None else self.played >= work * PLAYED_PER_SECOND
        )

    def value_us(self, choice: Choice) -> float:
        """Value of a choice; infinite where memory has no room for it, or there is no time left to find out."""
        if choice not in self._known:
            if self.spent:
                return inf
            orders = self.lists(self.problem, choice)
            self.played += 3 * len(self.problem.stages) * self.problem.units
            value_us = inf if orders is None else _value_us(self.problem, orders)
            if orders is not None and value_us < min(self._known.values(), default=inf):
                self._best = choice, orders
            self._known[choice] = value_us
        return self._known[choice]

    def orders_of(self, choice: Choice) -> Orders | None:
        """Orders of a choice."""
        return self._best[1] if self._best and self._best[0] == choice else self.lists(self.problem, choice)


def plain_lists(problem: Problem, choice: Choice) -> Orders | None:
    """List schedules of a problem without modes, with copies where activations leave."""
    compute = [
        OpArray.of(device.compute)
        for device in in_flight_orders(problem, choice.in_flight, choice.late_weights).devices
    ]
    leaving = {
        (s, i)
        for s, stage in enumerate(problem.stages)
        if choice.offloads and stage.offload
        for i in range(problem.units)
    }
    budgets = [device.memory_bytes for device in problem.devices]
    return TransferPlanner(problem, compute).plan(TransferRequest(leaving, choice.lead), budgets)


def _lists_by_stage(chosen: Sequence[Variant], problem: Problem, choice: Choice) -> Orders | None:
    """Those of the problem that one variant a stage makes, in which all is kept that fits."""
    by_stage = ByStage(problem, chosen)
    plain = plain_lists(by_stage.plain, choice)
    orders = None if plain is None else by_stage.with_modes(plain)
    return None if orders is None else keep_what_fits(problem, orders)


def _lists_with_modes(modes: Sequence[int], problem: Problem, choice: Choice) -> Orders | None:
    """Those that recompute in these modes what memory has no room for."""
    orders = recompute_lists(problem, modes, choice.in_flight, choice.late_weights, *choice.again)
    return None if orders is None else keep_what_fits(problem, orders)


def _value_us(problem: Problem, orders: Orders) -> float:
    simulation = simulate(problem, orders)
    return simulation.value_us if within_budgets(problem, orders, simulation) else inf
