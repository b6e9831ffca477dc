"""Schedules of microbatches that are cut into slices, in an order that any placement can run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from solver.build import build_schedule
from solver.published.seq1f1b import seq1f1b

COPY = {"bytes": 40, "offload_us": 3, "reload_us": 3}
STAGE = {
    "forward_us": 10,
    "backward_input_us": 10,
    "backward_weight_us": 8,
    "activation_bytes": 100,
    "backward_weight_bytes": 50,
    "slice_gradient_bytes": 10,
}


def sliced_problem(
    placement: Sequence[int], microbatches: int, slices: int, factors: dict[str, Any] | None = None, **stage: Any
) -> Problem:
    """A problem of equal stages without budgets; one slice: whole sequences."""
    own = {"count": slices, "factors": factors or {}}
    data = STAGE | stage
    if slices == 1:
        data.pop("slice_gradient_bytes")
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": microbatches,
            "transfer_us": 1,
            "devices": [{"memory_bytes": None}] * (max(placement) + 1),
            "stages": [{"device": d} | data for d in placement],
            **({"slices": own} if slices > 1 else {}),
        }
    )


def seq1f1b_schedule(devices: int, microbatches: int, slices: int, factors: dict[str, Any] | None = None) -> Schedule:
    """Seq1F1B, its backwards fused."""
    problem = sliced_problem(range(devices), microbatches, slices, factors)
    return build_schedule(problem, seq1f1b(problem), 0.0, "seq1f1b", 0.0)


def microbatch_by_microbatch(
    problem: Problem, backward: Sequence[str] = ("BW",), *, mode: str | None = None, offload: bool = False
) -> Schedule:
    """All forwards of a microbatch on all stages, then its backwards; each unit's backward is the ops of `backward`.

    Every unit is in the `mode` of that name, and leaves to the host where `offload` says so.
    """
    stages, n = problem.stages, problem.slice_count
    compute: list[list[Op]] = [[] for _ in problem.devices]
    copies: list[dict[str, list[Op]]] = [{"O": [], "R": []} for _ in problem.devices]

    def add(kind: str, stage: int, unit: int) -> None:
        device = stages[stage].device
        (copies[device][kind] if kind in "OR" else compute[device]).append(Op(kind, stage, unit))

    for i in range(problem.microbatches):
        units = range(i * n, (i + 1) * n)
        for unit in units:
            for s in range(len(stages)):
                add("F", s, unit)
                if offload:
                    add("O", s, unit)
        for unit in reversed(units):
            for s in reversed(range(len(stages))):
                if offload:
                    add("R", s, unit)
                for kind in backward:
                    add(kind, s, unit)
    modes = None
    if mode is not None or offload:
        name = mode or "offload"
        number = stages[0].choice_numbers[name]
        modes = np.full((len(stages), problem.units), number, np.int64)
    devices = [DeviceOrders(c, o["O"], o["R"]) for c, o in zip(compute, copies, strict=True)]
    return build_schedule(problem, Orders(devices, modes=modes), 0.0, "by hand", 0.0)
