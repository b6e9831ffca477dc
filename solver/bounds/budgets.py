"""Budgets as far as they can be used."""

from __future__ import annotations

from math import gcd

from optpipe.problem import Problem, Stage


def usable_bytes(problem: Problem, device: int) -> float:
    """The device's budget, rounded down to the greatest common divisor of all sizes on it; infinite without one.

    Every level of memory is a sum of such sizes, so nothing that keeps the budget exceeds this.
    """
    budget = problem.devices[device].memory_bytes
    if budget is None:
        return float("inf")
    divisor = gcd(*(size for s in problem.stages_of[device] for size in _sizes_bytes(problem.stages[s])))
    return budget - budget % divisor if divisor else budget


def _sizes_bytes(stage: Stage) -> list[int]:
    work = stage.workspace_bytes
    moved = stage.offload.bytes if stage.offload else 0
    return [stage.activation_bytes, stage.backward_weight_bytes, moved, work.F, work.B, work.W, work.BW]
