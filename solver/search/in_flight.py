"""List schedules with the number of microbatches in flight that memory has room for (docs/math/search.md#in-flight).

`ada-offload` tries a dozen numbers of microbatches in flight and of W left over, and fewer of them the larger a problem
is. How long a schedule takes depends on both to within a few: one microbatch too many, and ops wait for memory; one too
few, and devices are idle. So here both are searched for, on a problem with fewer microbatches where there are many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf

from optpipe.ops import OpArray, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import within_budgets
from solver.limits import Limits
from solver.published.ada_offload import in_flight_orders
from solver.published.transfers import TransferPlanner, TransferRequest
from solver.solution import OnSolution, Solution

LATE_WEIGHTS = (1, 2, 4, 0, 8, 16)
"""Numbers of W left over on a device, tried in turn."""

LEADS = (1.5, 3.0)
"""Leads of reloads, in durations of the copy."""

SHORT = 4
"""Microbatches for each stage with which choices are compared where there are many more."""

PLAYED_PER_SECOND = 250_000
"""Compute ops ordered, played with their copies and simulated in a second, and so in a unit of work (one core)."""


@dataclass(frozen=True)
class Choice:
    """Microbatches between their first F and their last B, W left over, whether activations leave, and the lead."""

    in_flight: int
    late_weights: int
    offloads: bool
    lead: float = LEADS[0]


def in_flight_search(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """The best list schedule within the budgets, if it is better than the start."""
    few = min(problem.microbatches, SHORT * len(problem.stages))
    short = problem.from_data(problem.to_data() | {"microbatches": few}) if few < problem.microbatches else problem
    trials = Trials(short, limits)
    offers = (False, True) if any(stage.offload for stage in problem.stages) else (False,)
    best = start
    for offloads in reversed(offers):
        for choice in improving(trials, offloads):
            orders = trials.orders_of(choice) if short is problem else _orders(problem, choice)
            if orders is None:
                continue
            value_us = _value_us(problem, orders)
            if value_us < best.value_us:
                best = replace(start, orders=orders, value_us=value_us)
                on_solution(best)
    return best


def improving(trials: Trials, offloads: bool) -> Iterator[Choice]:
    """Choices, each the best so far.

    For each number of W left over the number in flight goes by steps from the one before, halved whenever neither side
    is better. The first one halves from the most until memory has room.
    """
    most = trials.problem.units
    in_flight = min(2 * len(trials.problem.stages), most)
    while in_flight > 1 and trials.value_us(Choice(in_flight, LATE_WEIGHTS[0], offloads)) == inf:
        in_flight -= max(1, in_flight // 4)
    best_us, step = inf, max(1, in_flight // 8)
    for late_weights in LATE_WEIGHTS:
        own_us = trials.value_us(Choice(in_flight, late_weights, offloads))
        while step and not trials.spent:
            beside = [n for n in (in_flight + step, in_flight - step) if 1 <= n <= most]
            values_us = [trials.value_us(Choice(n, late_weights, offloads)) for n in beside]
            if values_us and min(values_us) < own_us:
                own_us = min(values_us)
                in_flight = beside[values_us.index(own_us)]
            else:
                step //= 2
        if own_us < best_us:
            best_us = own_us
            choice = Choice(in_flight, late_weights, offloads)
            for lead in LEADS if offloads else LEADS[:1]:
                other = replace(choice, lead=lead)
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
            orders = _orders(self.problem, choice)
            self.played += 3 * len(self.problem.stages) * self.problem.units
            value_us = inf if orders is None else _value_us(self.problem, orders)
            if orders is not None and value_us < min(self._known.values(), default=inf):
                self._best = choice, orders
            self._known[choice] = value_us
        return self._known[choice]

    def orders_of(self, choice: Choice) -> Orders | None:
        """Orders of a choice."""
        return self._best[1] if self._best and self._best[0] == choice else _orders(self.problem, choice)


def _orders(problem: Problem, choice: Choice) -> Orders | None:
    """Orders of a choice; None where memory has no room for them."""
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


def _value_us(problem: Problem, orders: Orders) -> float:
    simulation = simulate(problem, orders)
    return simulation.value_us if within_budgets(problem, orders, simulation) else inf
