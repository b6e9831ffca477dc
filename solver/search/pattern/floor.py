"""The least period that work and memory allow, whatever the pattern."""

from __future__ import annotations

import numpy as np

from optpipe.problem import Problem
from solver.search.pattern.passes import Passes


def least_period_us(problem: Problem) -> float:
    """A bound on the time a microbatch of anything that repeats.

    A device works off one microbatch's passes a period. And it holds each stage's activation from F to the end of B,
    at least as long as one microbatch alone takes through the stages behind, and what B leaves for as long as W runs:
    the integral of that over a period cannot exceed the budget times the period. What may leave to the host does not
    count.
    """
    passes = Passes.of(problem)
    start = passes.alone_us()
    end = start + passes.duration_us
    count = passes.stages
    moved = np.array([stage.offload.bytes if stage.offload else 0 for stage in problem.stages])
    lives = end[count : 2 * count] - start[:count]
    held = (passes.stage_bytes - moved) * lives + passes.weight_bytes * passes.duration_us[2 * count :]
    areas = np.bincount(passes.device[:count], held, passes.devices)
    floors = [
        area / device.memory_bytes
        for area, device in zip(areas.tolist(), problem.devices, strict=True)
        if device.memory_bytes
    ]
    return float(max([*floors, float(passes.work_us().max())]))
