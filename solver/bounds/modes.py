"""Byte-time bound with activation modes: the cheapest mix of variants that memory, compute and copies allow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optpipe.problem import Problem
from solver.bounds.device import OnDevice
from solver.bounds.memory_time import unused_byte_us
from solver.variants import Variant, variants

ROUNDING = 1e-9
"""Share by which the solution of a linear program may exceed its optimum."""


def mode_bounds_us(problem: Problem) -> Sequence[float]:
    """A bound from each device with stages: the byte-time of its microbatches over the budget, minimum over modes.

    Proof. As for kept activations (`solver.bounds.memory_time`), with the byte-time of each variant: what it keeps
    during F, the way on to the last stage and back, and the backward; what a recomputation makes during that and the
    backward; what W needs during W; less what is on the host, during the way less both copies at most. Let x say how
    many microbatches of each stage are in each variant. In a span T the budget gives ``budget * T`` less what cannot be
    used near both ends, the device runs F, B, W and all recomputations, and a channel all copies one after another.
    Each of these is linear in x and T, so the least T over all real x of a linear program is at most that of any
    schedule. docs/math/bounds.md has the rows.
    """
    return [_bound_us(device) for device in OnDevice.each(problem)]


def _bound_us(device: OnDevice) -> float:
    if device.budget in (0, float("inf")):
        return 0.0
    later_byte_us = device.budget * max(stage.backward_weight_us for stage in device.stages)
    return device.value_us(_least_us(device, "BW", 0.0), _least_us(device, "B", later_byte_us))


def _least_us(device: OnDevice, backward: str, later_byte_us: float) -> float:
    """The least span up to the end of the last `backward` (B or BW), with `later_byte_us` of the byte-time after it."""
    from scipy.optimize import linprog  # slow to load, and only for problems with modes

    ways = [(s, way) for s in device.numbers for way in variants(device.problem.stages[s])]
    microbatches = device.problem.units
    most = [max(way.backward_bytes for way in variants(stage)) for stage in device.stages]
    unused = unused_byte_us(device, most, backward)
    work_us = microbatches * sum(stage.duration_us(kind) for stage in device.stages for kind in ("F", backward))
    copies = [way.mode.offload for _, way in ways]
    offload_us = np.array([copy.offload_us if copy else 0.0 for copy in copies])
    reload_us = np.array([copy.reload_us if copy else 0.0 for copy in copies])
    directions = [offload_us, reload_us] if device.problem.copy_channels.duplex else [offload_us + reload_us]
    rows = [  # each at most its limit: what is needed less what T gives, T being the last column
        (
            np.array([_byte_us(device, s, way) for s, way in ways]) / device.budget,
            (later_byte_us - unused) / device.budget,
        ),
        (np.array([way.mode.recompute_us for _, way in ways]), -work_us),
        *((times_us, 0.0) for times_us in directions),
    ]
    solved = linprog(
        [0.0] * len(ways) + [1.0],
        A_ub=np.column_stack([np.array([row for row, _ in rows]), np.full(len(rows), -1.0)]),
        b_ub=[limit for _, limit in rows],
        A_eq=np.array([[*(float(t == s) for t, _ in ways), 0.0] for s in device.numbers]),
        b_eq=[microbatches] * len(device.numbers),
        method="highs",
    )
    return float(solved.fun) * (1 - ROUNDING) if solved.status == 0 else 0.0


def _byte_us(device: OnDevice, s: int, way: Variant) -> float:
    """The least byte-time of one microbatch of stage s in a variant."""
    stage, mode = device.problem.stages[s], way.mode
    way_us = device.paths.turnaround_us(s, s)
    backward_us = stage.backward_input_us + (mode.recompute_us if way.inside else 0)
    kept = mode.kept_bytes * (stage.forward_us + way_us + backward_us)
    made_us = backward_us + (0 if way.inside else mode.recompute_us)
    made = (way.backward_bytes - mode.kept_bytes) * made_us
    weight = min(way.backward_bytes, stage.backward_weight_bytes) * stage.backward_weight_us
    copy = mode.offload
    away = copy.bytes * max(0.0, way_us - copy.offload_us - copy.reload_us) if copy else 0.0
    return kept + made + weight - away
