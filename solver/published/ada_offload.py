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
from optpipe.orders import OpArray, Orders
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
        raise _no_room(problem)
    return best


def _no_room(problem: Problem) -> MethodError:
    known = known_budgets_bytes(problem)
    short = [
        f"device {d} has {device.memory_bytes}: {bytes_ - device.memory_bytes} too few"
        for d, (device, bytes_) in enumerate(zip(problem.devices, known, strict=True))
        if device.memory_bytes is not None and device.memory_bytes < bytes_
    ]
    if problem.host_memory_bytes is not None:
        short.append(f"the host has {problem.host_memory_bytes} for what leaves")
    return MethodError(
        f"ada-offload finds no room even for one microbatch at a time ({'; '.join(short)}). "
        f"Maybe raise devices[].memory_bytes to {known}, which is known to do."
    )


def _candidates(problem: Problem) -> Iterator[Orders | None]:
    """The floor, then for each choice nothing leaving and everything leaving; of equal values the first is taken."""
    yield serial_orders(problem)
    budgets = [device.memory_bytes for device in problem.devices]
    everything = _offloadable(problem)
    played, seen = 0, set()
    for in_flight, late_weights, lead in _choices(problem, bool(everything)):
        if played > PLAYED_OPS:
            return
        compute = [OpArray.of(device.compute) for device in in_flight_orders(problem, in_flight, late_weights).devices]
        columns = b"".join(ops.kind.tobytes() + ops.stage.tobytes() + ops.microbatch.tobytes() for ops in compute)
        planner: TransferPlanner | None = None
        for wish in (Wish(set(), 0.0), Wish(everything, lead)):
            candidate = (columns, bool(wish.leaving), wish.lead)
            if candidate in seen:  # with few microbatches many choices come to the same
                continue
            seen.add(candidate)
            planner = planner or TransferPlanner(problem, compute)
            orders = planner.plan(wish, budgets)
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
