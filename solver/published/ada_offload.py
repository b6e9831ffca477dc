"""AdaOffload: a valid schedule within the budgets for any placement, quickly (OptPipe, section 4).

Compute orders with more or fewer microbatches in flight, each played within the budgets with nothing and with
everything allowed to leave: what has no time to go and come back stays, what lives longest goes first, and an op waits
until memory has room for it. The best is taken. One microbatch at a time is the floor: it runs wherever anything of
that kind does.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from optpipe.errors import MethodError
from optpipe.orders import Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.finish import within_budgets
from solver.floor import known_budgets_bytes, serial_orders
from solver.published.in_flight import in_flight_orders
from solver.published.transfers import Activation, TransferPlanner, Wish

PLAYED_OPS = 15_000
"""Compute ops played over all candidates, some tenths of a second's worth."""


def ada_offload(problem: Problem) -> Orders:
    """The best candidate within the budgets. Raises MethodError with the budgets that would do where there is none."""
    best: Orders | None = None
    best_us = inf
    for orders in _candidates(problem):
        if orders is not None:
            simulation = simulate(problem, orders)
            if simulation.value_us < best_us and within_budgets(problem, orders, simulation):
                best, best_us = orders, simulation.value_us
    if best is None:
        raise MethodError(
            "ada-offload finds no room even for one microbatch at a time. "
            f"Maybe raise devices[].memory_bytes to {known_budgets_bytes(problem)}, which is known to do."
        )
    return best


def _candidates(problem: Problem) -> Iterator[Orders | None]:
    """The floor, then for each choice nothing leaving and everything leaving; of equal values the first is taken."""
    yield serial_orders(problem)
    budgets = [device.memory_bytes for device in problem.devices]
    everything = _offloadable(problem)
    played = 0
    for in_flight, late_weights, lead in _choices(problem, bool(everything)):
        if played > PLAYED_OPS:
            return
        compute = [device.compute for device in in_flight_orders(problem, in_flight, late_weights).devices]
        planner = TransferPlanner(problem, compute)
        for leaving in (set[Activation](), everything) if everything else (everything,):
            orders = planner.plan(Wish(leaving, lead), budgets)
            played += sum(map(len, compute)) // (2 if orders else 20)  # what finds no room ends early
            yield orders


def _offloadable(problem: Problem) -> set[Activation]:
    microbatches = range(problem.microbatches)
    return {(s, i) for s, stage in enumerate(problem.stages) if stage.offload for i in microbatches}


def _choices(problem: Problem, offloads: bool) -> Iterator[tuple[int, int, float]]:
    """Microbatches in flight, W left over, and how early a reload is called: the promising ones first."""
    devices, stages = len(problem.devices), len(problem.stages)
    sizes = (devices, stages, 2 * devices, devices + 1, 3 * devices // 2, 3 * devices // 4, devices // 2, 2, 3, 4, 1)
    tried = set()
    for late_weights in (0, 2, devices):
        for lead in (3.0, 1.5) if offloads else (0.0,):
            for size in sizes:
                choice = (min(max(size, 1), problem.microbatches), late_weights, lead)
                if choice not in tried:
                    tried.add(choice)
                    yield choice
