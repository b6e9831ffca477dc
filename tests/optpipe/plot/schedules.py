"""Schedules to draw and to export: hand-made orders, timed and verified."""

from __future__ import annotations

from typing import Any

from instances import uniform
from optpipe.memory import derive_waits
from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from solver.build import build_schedule


def pair(**problem_fields: Any) -> Schedule:
    """Two devices, four microbatches: device 0 splits its backward and offloads two activations, device 1 fuses."""
    problem = uniform(2, 4, offload={"bytes": 2, "offload_us": 12, "reload_us": 12}, budget=100, **problem_fields)
    ahead = DeviceOrders(
        compute=_ops("F0.0 F0.1 F0.2 B0.0 W0.0 F0.3 B0.1 W0.1 B0.2 B0.3 W0.2 W0.3"),
        offload=_ops("O0.1 O0.3"),
        reload=_ops("R0.1 R0.3"),
    )
    devices = [ahead, DeviceOrders(compute=_ops("F1.0 BW1.0 F1.1 BW1.1 F1.2 BW1.2 F1.3 BW1.3"))]
    simulation = simulate(problem, Orders(devices))
    planned = {op: (simulation.start_us[k], simulation.end_us[k]) for op, k in simulation.index.items()}
    return finished(problem, Orders(devices, derive_waits(problem, devices, planned)))


def all_forwards_first(problem: Problem) -> Schedule:
    """On each device every F, stage by stage, then every B, then every W."""
    devices = [
        [
            *(Op("F", s, i) for s in stages for i in range(problem.microbatches)),
            *(Op("B", s, i) for s in reversed(stages) for i in range(problem.microbatches)),
            *(Op("W", s, i) for s in reversed(stages) for i in range(problem.microbatches)),
        ]
        for stages in problem.stages_of
    ]
    return finished(problem, Orders.of_compute(devices), "all forwards first")


def finished(problem: Problem, orders: Orders, method: str = "by hand") -> Schedule:
    """The verified document, with the work of the busiest device as the bound."""
    return build_schedule(problem, orders, max(problem.work_us), method, 0.0)


def _ops(names: str) -> list[Op]:
    return [Op.parse(name) for name in names.split()]
