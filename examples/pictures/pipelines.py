"""Small pipelines with equal stages, each for one concept."""

from __future__ import annotations

from collections.abc import Sequence

from optpipe.ops import Orders
from optpipe.problem import Objective, Problem
from optpipe.simulate import Simulation, simulate
from solver.limits import Limits
from solver.solve import solve

MS = 1000
"""Microseconds in a millisecond."""
GIB = 2**30

LINEAR = (0, 1, 2, 3)
INTERLEAVED = (0, 1, 2, 3, 0, 1, 2, 3)
V_SHAPED = (0, 1, 2, 3, 3, 2, 1, 0)


def pipeline(
    microbatches: int,
    budget_gib: float | None,
    placement: Sequence[int] = LINEAR,
    *,
    k: float | None = None,
    objective: Objective = "makespan",
) -> Problem:
    """Build a problem of four devices that take 1 ms each for F, B and W and 1 GiB of activations for a microbatch.

    Half of that stays until W. With several stages on a device (`placement`: the device of each) each has its share of
    the time and memory. `k` is the round trip of a microbatch's activations to the host over its compute (PipeOffload,
    section 3); without it nothing leaves. Results reach the next device at once.
    """
    share = len(LINEAR) / len(placement)
    activation_bytes = int(share * GIB)
    offload = None
    if k is not None:
        copy_us = k * 3 * MS * share / 2
        offload = {"bytes": activation_bytes, "offload_us": copy_us, "reload_us": copy_us}
    stage = {
        "forward_us": share * MS,
        "backward_input_us": share * MS,
        "backward_weight_us": share * MS,
        "activation_bytes": activation_bytes,
        "backward_weight_bytes": activation_bytes // 2,
        "offload": offload,
    }
    budget_bytes = None if budget_gib is None else int(budget_gib * GIB)
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": microbatches,
            "objective": objective,
            "transfer_us": 0,
            "devices": [{"memory_bytes": budget_bytes} for _ in LINEAR],
            "stages": [{"device": device, **stage} for device in placement],
        }
    )


def published(problem: Problem, method: str) -> Simulation:
    """Simulate a published schedule of the problem."""
    return simulate(problem, solve(problem, method).orders)


def optimum(problem: Problem) -> Simulation:
    """Simulate an optimal schedule of the problem."""
    return simulate(problem, optimal_orders(problem))


def optimal_orders(problem: Problem) -> Orders:
    """Return proved optimal orders, the same in every run."""
    schedule = solve(problem, "cp-sat", Limits(deterministic_limit=60.0, workers=1))
    assert schedule.status == "optimal", f"gap {schedule.gap} left"
    return schedule.orders
