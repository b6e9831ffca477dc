"""A time by which some schedule that is good enough has ended: how far the models of exact searches reach."""

from __future__ import annotations

from optpipe.problem import Problem


def horizon_us(problem: Problem, value_us: float) -> float:
    """A time by which some schedule at least as good as `value_us` has ended, if it begins at 0.

    The makespan itself; for spans twice the value: on the device of the first stage all F and B end within its span,
    every other device begins within that time and has its own span. For an infinite value: everything one after
    another.
    """
    if value_us < float("inf"):
        return value_us if problem.objective == "makespan" else 2 * value_us
    transfers = sum(stage.offload.offload_us + stage.offload.reload_us for stage in problem.stages if stage.offload)
    delays = sum(problem.forward_delay_us) + sum(problem.backward_delay_us)
    return sum(problem.work_us) + problem.microbatches * (transfers + delays)
