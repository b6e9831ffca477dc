"""Schedules from orders and their simulated times: ops, waits, peaks and figures of each device as a document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.kinds import KINDS, STREAMS
from optpipe.ops import DeviceOrders, Orders, WaitArray
from optpipe.problem import Problem
from optpipe.schedule import PlannedOps, Schedule, named_modes, named_partners, relative_gap
from optpipe.simulate import Simulation
from optpipe.task_graph import lower
from optpipe.worst_case_memory import worst_case_peak_bytes


def timed_schedule(
    orders: Orders, simulation: Simulation, method: str, bound_us: float = 0.0, seconds: float = 0.0
) -> Schedule:
    """The schedule of simulated orders, optimal if no value is below the bound. Nothing is verified."""
    problem, value_us = simulation.problem, simulation.value_us
    waits, gap = _named_waits(simulation, orders), relative_gap(value_us, bound_us)
    stated_order = {}
    if problem.microbatch_order != "given":
        stated_order = {"microbatch_order": list(orders.microbatch_order or range(problem.microbatches))}
    return Schedule.from_data(
        {
            "format": "optpipe.schedule/1",
            "problem": problem,
            "status": "optimal" if gap == 0 else "feasible",
            "objective": problem.objective,
            "value_us": value_us,
            "bound_us": bound_us,
            "gap": gap,
            "method": method,
            "solve_seconds": round(seconds, 3),
            **stated_order,
            "devices": [_device(orders, simulation, waits, value_us, d) for d in range(len(problem.devices))],
        }
    )


NamedWaits = tuple[NDArray[np.int64], Sequence[str]]
"""Index in a simulation of each op that waits, in ascending order, and the name of the op it waits for."""


def _named_waits(simulation: Simulation, orders: Orders) -> NamedWaits:
    waits, ops = WaitArray.of(orders.waits), simulation.ops
    places = int(max(ops.stage.max(initial=0), waits.op.stage.max(initial=0))) + 1
    at = np.zeros((len(KINDS) + len(ops.passes), places, simulation.problem.units), np.int64)
    at[ops.kind, ops.stage, ops.microbatch] = np.arange(len(ops))
    waiting = waits.op.numbered(ops.passes)
    index = at[waiting.kind, waiting.stage, waiting.microbatch]
    order = np.argsort(index, kind="stable")
    return index[order], waits.before[order].names.split()


def _device(orders: Orders, simulation: Simulation, waits: NamedWaits, value_us: float, d: int) -> dict[str, Any]:
    device, graph = orders.devices[d], lower(simulation.problem)
    first = simulation.device_slice(d).start
    plan: dict[str, Any] = {}
    for name, stream in zip(STREAMS, device.streams(), strict=True):
        plan[name] = _planned(waits, simulation, orders, slice(first, first + len(stream)))
        first += len(stream)
    # The problem's own durations, which ends minus starts give only up to rounding.
    ops = plan["compute"].ops
    durations_us = graph.duration_us[graph.types(ops, orders.modes)].tolist()
    for k, op in enumerate(ops) if orders.blocks else ():
        if op in orders.blocks:
            time_us = simulation.problem.block_of_units_us(op, orders.blocks[op])
            durations_us[k : k + 2] = time_us, 0.0
    busy = float(sum(durations_us))
    plan["peak_bytes"] = simulation.device_memory(d).peak_bytes
    plan["peak_bytes_any_timing"] = peak_any_timing_bytes(simulation.problem, device, orders)
    plan["busy_us"] = busy
    plan["bubble"] = 1 - busy / value_us if value_us else 0.0
    return plan


def peak_any_timing_bytes(problem: Problem, device: DeviceOrders, orders: Orders) -> int:
    """Peak of a device, one of `orders`, under any timing."""
    streams = device.compute, device.offload, device.reload
    return worst_case_peak_bytes(problem, streams, orders.waits, orders.modes, orders.blocks)


def _planned(waits: NamedWaits, simulation: Simulation, orders: Orders, where: slice) -> PlannedOps:
    """The ops at these places of a simulation."""
    waiting, names = waits
    first, last = np.searchsorted(waiting, (where.start, where.stop)).tolist()
    named: dict[int, list[str]] = {}
    for k, name in zip((waiting[first:last] - where.start).tolist(), names[first:last], strict=True):
        named.setdefault(k, []).append(name)
    ops = simulation.ops[where]
    modes = named_modes(simulation.problem, simulation.modes, ops)
    starts, ends = (times[where].tolist() for times in (simulation.start_us, simulation.end_us))
    return PlannedOps(ops, starts, ends, named, modes=modes, partners=named_partners(orders, ops))
