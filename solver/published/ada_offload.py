"""AdaOffload: a valid schedule within the budgets for any placement, quickly (OptPipe, section 4).

A list schedule in time: whenever a device is free it takes what is ready, B before F (the stage nearest to the loss
first), and W when nothing else is ready or too many W are left over (`solver.lists.memory`). Budgets do not
count here: fewer microbatches in flight need less memory.

Compute orders with more or fewer microbatches in flight are each played within the budgets, once with no activation and
once with all allowed to leave: an activation without time for the round trip stays, the longest-lived goes first, and
an op waits until memory has room for it. The best is taken. The serial schedule, one microbatch at a time, is the first
candidate: it keeps the budgets wherever any of the others does.

With activation modes, and microbatches alike and whole, this is done for each choice of one variant a stage, and then
every microbatch is kept that memory has room for. The serial schedule takes for each stage the mode that needs least.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from math import inf

from optpipe.errors import MethodError
from optpipe.ops import OpArray, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import within_budgets
from solver.by_stage import choices, keep_what_fits
from solver.lists.memory import MemoryLists, Rules
from solver.published.transfers import TransferPlanner, TransferRequest
from solver.serial import known_budgets_bytes, serial_orders


def in_flight_orders(problem: Problem, in_flight: int, late_weights: int) -> Orders:
    """Orders with at most `in_flight` microbatches between their first F and their last B.

    At most `late_weights` W are left over on a device while it does other things. Never deadlocks.
    """
    orders = problem.derived(_lists_without_budgets).orders(Rules(in_flight, late_weights, tail=-1))
    assert orders is not None, "without budgets every op fits"
    return orders


def _lists_without_budgets(problem: Problem) -> MemoryLists:
    nothing = [0] * len(problem.stages)
    return MemoryLists(problem.with_equal_units(), nothing, nothing, within_budgets=False)


PLAYED_OPS = 15_000
"""Compute ops played over all candidates, some tenths of a second's worth."""


def ada_offload(problem: Problem) -> Orders:
    """The best candidate within the budgets. Raises MethodError with the budgets that would do where there is none."""
    best: Orders | None = None
    best_us = inf
    by_stage = problem.has_modes and problem.has_equal_microbatches
    for orders in _candidates_by_stage(problem) if by_stage else _candidates(problem):
        if orders is not None:
            simulation = simulate(problem, orders)
            if simulation.value_us < best_us and within_budgets(problem, orders, simulation):
                best, best_us = orders, simulation.value_us
    if best is not None:
        return best
    known = known_budgets_bytes(problem)
    short = [
        f"device {d} has {device.memory_bytes}: {bytes_ - device.memory_bytes} too few"
        for d, (device, bytes_) in enumerate(zip(problem.devices, known, strict=True))
        if device.memory_bytes is not None and device.memory_bytes < bytes_
    ]
    if problem.host_memory_bytes is not None:
        short.append(f"the host has {problem.host_memory_bytes} for what leaves")
    raise MethodError(
        f"ada-offload finds no room even for one microbatch at a time ({'; '.join(short)}). "
        f"Maybe raise devices[].memory_bytes to {known}, which is known to do."
    )


def _candidates_by_stage(problem: Problem) -> Iterator[Orders | None]:
    """The serial schedule, then the best of each choice of variants."""
    yield serial_orders(problem)
    for by_stage in choices(problem):
        with suppress(MethodError):
            orders = by_stage.with_modes(ada_offload(by_stage.plain))
            yield orders and keep_what_fits(problem, orders)


def _candidates(problem: Problem) -> Iterator[Orders | None]:
    """The serial schedule, then for each choice nothing leaving and everything leaving; of equal values the first."""
    yield serial_orders(problem)
    budgets = [device.memory_bytes for device in problem.devices]
    everything = {(s, i) for s, stage in enumerate(problem.stages) if stage.offload for i in range(problem.units)}
    played, seen = 0, set()
    for in_flight, late_weights, lead in _choices(problem, bool(everything)):
        if played > PLAYED_OPS:
            return
        compute = [OpArray.of(device.compute) for device in in_flight_orders(problem, in_flight, late_weights).devices]
        columns = b"".join(ops.kind.tobytes() + ops.stage.tobytes() + ops.microbatch.tobytes() for ops in compute)
        planner: TransferPlanner | None = None
        for request in (TransferRequest(set(), 0.0), TransferRequest(everything, lead)):
            candidate = (columns, bool(request.leaving), request.lead)
            if candidate in seen:  # with few microbatches many choices come to the same
                continue
            seen.add(candidate)
            planner = planner or TransferPlanner(problem, compute)
            orders = planner.plan(request, budgets)
            played += sum(map(len, compute)) // (2 if orders else 20)  # what finds no room ends early
            yield orders


def _choices(problem: Problem, offloads: bool) -> Iterator[tuple[int, int, float]]:
    """Microbatches in flight, W left over, and the lead of reloads: the promising ones first."""
    devices, stages = len(problem.devices), len(problem.stages)
    sizes = (devices, stages, 2 * devices, devices + 1, 3 * devices // 2, 3 * devices // 4, devices // 2, 2, 3, 4, 1)
    tried = set()
    for late_weights in (0, 2, devices):
        for lead in (3.0, 1.5) if offloads else (0.0,):
            for size in sizes:
                choice = (min(max(size, 1), problem.units), late_weights, lead)
                if choice not in tried:
                    tried.add(choice)
                    yield choice
