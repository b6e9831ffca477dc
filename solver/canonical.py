"""What a problem is up to its names and units: equal problems have equal keys, whoever wrote them.

Times are divided by the largest time of which all are multiples. Sizes are divided by the largest size of which all
are multiples; memory then only takes multiples of it, so a budget is as good as the largest multiple within it, and is
rounded down. The host holds nothing but what is offloaded, so its budget is rounded to the divisor of those sizes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import Any

from optpipe.problem import Problem, Stage
from solver.time_unit import stage_times_us, time_unit_us

Data = dict[str, Any]


@dataclass(frozen=True)
class Canonical:
    """A problem without names and units. A time of 1 in `data` is `time_us` microseconds of the problem."""

    data: Data
    time_us: Fraction

    @property
    def key(self) -> str:
        """The same for equal problems only."""
        return _digest(self.data)

    @property
    def family_key(self) -> str:
        """The same for problems that differ in microbatches, budgets and objective alone."""
        return _digest({name: self.data[name] for name in ("stages", "forward_delay", "backward_delay", "channels")})


def canonical(problem: Problem) -> Canonical:
    """The canonical form of a problem."""
    time_us = time_unit_us(problem)
    unit_bytes = gcd(*(size for stage in problem.stages for size in _sizes_bytes(stage)))
    moved_bytes = gcd(*(stage.offload.bytes for stage in problem.stages if stage.offload))
    offloads = any(stage.offload for stage in problem.stages)

    def ticks(time: float) -> int:
        return int(Fraction(str(time)) / time_us)

    data = {
        "microbatches": problem.microbatches,
        "objective": problem.objective,
        "budgets": [_units(device.memory_bytes, unit_bytes) for device in problem.devices],
        "host_budget": _units(problem.host_memory_bytes, moved_bytes),
        "stages": [
            {
                "device": stage.device,
                "times": [ticks(time) for time in stage_times_us(stage)],
                "sizes": [size // (unit_bytes or 1) for size in _sizes_bytes(stage)],
                "offloads": stage.offload is not None,
            }
            for stage in problem.stages
        ],
        "forward_delay": [ticks(time) for time in problem.forward_delay_us],
        "backward_delay": [ticks(time) for time in problem.backward_delay_us],
        "channels": _channels(problem) if offloads else None,
    }
    return Canonical(data, time_us)


def _channels(problem: Problem) -> Data:
    shared = sorted(sorted(group) for group in problem.channel_groups if len(group) > 1)
    return {"duplex": problem.copy_channels.duplex, "shared_by": shared}


def _units(budget_bytes: int | None, unit_bytes: int) -> int | None:
    """How many units fit; None where any number does, or units have no size."""
    return budget_bytes // unit_bytes if budget_bytes is not None and unit_bytes else None


def _sizes_bytes(stage: Stage) -> list[int]:
    work = stage.workspace_bytes
    moved = [stage.offload.bytes] if stage.offload else []
    return [stage.activation_bytes, stage.backward_weight_bytes, work.F, work.B, work.W, work.BW, *moved]


def _digest(data: Data) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
