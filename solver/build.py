"""Schedules from orders or from times: simulated, verified and wrapped. Every result of a solver is built here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from optpipe.errors import VerificationError
from optpipe.kinds import PASSAGE, ROWS, STREAMS
from optpipe.memory import Times, derive_waits
from optpipe.ops import DeviceOrders, OpArray, Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule, shared_channels
from optpipe.simulate import Simulation, simulate
from optpipe.task_graph import lower
from optpipe.timed import peak_any_timing_bytes, timed_schedule
from optpipe.verify import verify
from solver.scale import MAX_STEPS, value_step_us

RELATIVE_TOLERANCE = 1e-9
"""Values and bounds that differ by less than this share may be equal: it is what float sums of decimal times need."""


def build_schedule(problem: Problem, orders: Orders, bound_us: float, method: str, seconds: float) -> Schedule:
    """Time the orders, fill in the document and verify it.

    Raises VerificationError if any rule or budget is broken, or the bound exceeds the value: a bug of the caller.
    """
    simulation = simulate(problem, orders)
    bound_us = snapped_bound(simulation.value_us, bound_us, value_step_us(problem))
    schedule = timed_schedule(orders, simulation, method, bound_us, seconds)
    verdict = verify(schedule)
    if not verdict.ok:
        broken = "; ".join(str(violation) for violation in verdict.violations[:5])
        raise VerificationError(f"{method} answered with an invalid schedule: {broken}")
    return schedule


def snapped_bound(value_us: float, bound_us: float, step_us: float = float("inf")) -> float:
    """The bound, or the value itself where the two differ by rounding alone: by a billionth of the value at most.

    `step_us`: the least by which two values of the problem differ (`solver.scale.value_step_us`). Where values are
    multiples of it that floats and 64-bit integers can tell apart, a bound that is lower by half of it is another one.
    """
    rounding_us = RELATIVE_TOLERANCE * abs(value_us)
    below_us = min(rounding_us, step_us / 2) if abs(value_us) <= MAX_STEPS * step_us else rounding_us
    return value_us if -below_us <= bound_us - value_us <= rounding_us else float(bound_us)


def over_budget(problem: Problem, orders: Orders) -> list[tuple[int, int, int]]:
    """The devices whose any-timing peak exceeds the budget, as (device, peak_bytes, budget_bytes)."""
    over = []
    for d, (device, entry) in enumerate(zip(orders.devices, problem.devices, strict=True)):
        if entry.memory_bytes is not None:
            peak = peak_any_timing_bytes(problem, device, orders)
            if peak > entry.memory_bytes:
                over.append((d, peak, entry.memory_bytes))
    return over


def within_budgets(problem: Problem, orders: Orders, simulation: Simulation) -> bool:
    """True if simulated orders keep every device's budget under any timing, and the host's at the simulated times.

    Plans of exact models keep the host's budget at their own times. An op may start earlier when simulated, and no
    wait reaches from one device's offload to another's reload (docs/adr/0003), so it is asked for again here.
    """
    limit = problem.host_memory_bytes
    on_host = 0 if limit is None else simulation.host_memory().peak_bytes
    return (limit is None or on_host <= limit) and not over_budget(problem, orders)


def peak_budgets(problem: Problem, orders: Orders) -> list[int]:
    """The smallest budget of each device with which these orders would be allowed, under any timing."""
    return [peak_any_timing_bytes(problem, device, orders) for device in orders.devices]


def orders_from_times(
    problem: Problem,
    planned: Times,
    tolerance: float = 0.0,
    modes: NDArray[np.int64] | None = None,
    microbatch_order: Sequence[int] | None = None,
) -> Orders:
    """Orders, channel orders and waits of a plan that gives every op's start and end.

    Its modes and the order of its microbatches are as in `Orders`. A plan is in any unit of time; times that differ by
    at most `tolerance` count as equal where waits are derived.
    """
    ops = _in_order(problem, planned, microbatch_order)
    lists = lower(problem).device_of(ops) * len(STREAMS) + ops.stream
    by_list = np.argsort(lists, kind="stable")
    ends = np.cumsum(np.bincount(lists, minlength=len(problem.devices) * len(STREAMS)))
    streams = [ops[places] for places in np.split(by_list, ends[:-1])]
    devices = [DeviceOrders(*streams[k : k + len(STREAMS)]) for k in range(0, len(streams), len(STREAMS))]
    waits = derive_waits(problem, devices, planned, tolerance, modes)
    channels = []
    for served in shared_channels(problem):
        mine = np.isin(lists, [d * len(STREAMS) + STREAMS.index(stream) for d, stream in served])
        channels.append(ops[np.flatnonzero(mine)])
    return Orders(devices, waits, [channel for channel in channels if channel], modes, microbatch_order)


def _in_order(problem: Problem, planned: Times, microbatch_order: Sequence[int] | None) -> OpArray:
    """Ops by time; ops without length at one instant in the order in which a microbatch passes through them."""
    ops = OpArray.of(list(planned)).numbered(problem.pass_names)
    start, end = np.array(list(planned.values())).reshape(-1, 2).T
    passes = range(len(problem.pass_names))
    rank = np.array([*(PASSAGE.index(row.duties[0]) for row in ROWS), *(len(PASSAGE) + n for n in passes)])[ops.kind]
    ahead = np.array([*(row.ascends for row in ROWS), *(True for _ in passes)])[ops.kind]
    depth = np.where(ahead, ops.stage, -ops.stage)
    forward, backward = (np.argsort(problem.units_in_order(kind, microbatch_order)) for kind in "FB")
    place = np.where(ahead, forward[ops.microbatch], backward[ops.microbatch])
    return ops[np.lexsort((place, depth, rank, end, start))]
