"""Schedules written by hand: 1F1B on linear placement and a wave on V placement, each with and without offload."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from instances import uniform
from optpipe.memory import derive_waits
from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from solver.build import build_schedule

OFFLOAD = {"bytes": 2, "offload_us": 4, "reload_us": 4}

Moved = Collection[tuple[int, int]]
"""(stage, microbatch) pairs whose activations leave to the host."""


def one_f_one_b(p: int, m: int, *, fused: bool = False, moved: Moved = ()) -> Schedule:
    """1F1B on p stages, one a device; B and W split, W right after B, unless `fused`."""
    problem = uniform(p, m, offload=OFFLOAD)
    compute = []
    for d in range(p):
        warm = min(p - 1 - d, m)
        ops = [Op("F", d, i) for i in range(warm)]
        for i in range(m):
            if warm + i < m:
                ops.append(Op("F", d, warm + i))
            ops += _backward(d, i, fused=fused)
        compute.append(ops)
    return _schedule(problem, compute, moved)


def v_wave(p: int, m: int, *, fused: bool = False, moved: Moved = ()) -> Schedule:
    """2p stages in V shape on p devices: all forwards, then all backwards."""
    problem = uniform(p, m, v_shape=True, offload=OFFLOAD)
    compute = []
    for d in range(p):
        down, up = d, 2 * p - 1 - d
        forward = [Op("F", s, i) for s in (down, up) for i in range(m)]
        backward = [op for s in (up, down) for i in range(m) for op in _backward(s, i, fused=fused)]
        compute.append(forward + backward)
    return _schedule(problem, compute, moved)


def _backward(stage: int, microbatch: int, *, fused: bool) -> list[Op]:
    return [Op(kind, stage, microbatch) for kind in (["BW"] if fused else ["B", "W"])]


def _schedule(problem: Problem, compute: Sequence[Sequence[Op]], moved: Moved) -> Schedule:
    """O right after F; R once the op before B is done, as late as can be."""
    devices, waits = [], {}
    for ops in compute:
        out = [Op("O", *op[1:]) for op in ops if op.kind == "F" and op[1:] in moved]
        back = [Op("R", *op[1:]) for op in ops if op.kind in ("B", "BW") and op[1:] in moved]
        for before, op in pairwise(ops):
            if op.kind in ("B", "BW") and op[1:] in moved:
                waits[Op("R", *op[1:])] = [before]
        devices.append(DeviceOrders(ops, out, back))
    return build_schedule(problem, _with_derived_waits(problem, Orders(devices, waits)), 0.0, "by hand", 0.0)


def _with_derived_waits(problem: Problem, orders: Orders) -> Orders:
    """Add waits to orders: every op waits for offloads that had ended by its planned start: each may need memory."""
    simulation = simulate(problem, orders)
    workspace = {"workspace_bytes": {"F": 1, "B": 1, "W": 1, "BW": 1}}
    data = problem.to_data()
    needy = Problem.from_data(data | {"stages": [stage | workspace for stage in data["stages"]]})
    times = dict(zip(simulation.ops, zip(simulation.start_us, simulation.end_us, strict=True), strict=True))
    waits = {op: list(others) for op, others in orders.waits.items()}
    for op, others in derive_waits(needy, orders.devices, times).items():
        waits[op] = [*dict.fromkeys((*waits.get(op, ()), *others))]
    return Orders(orders.devices, waits, orders.channels)
