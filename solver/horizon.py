"""A time by which some schedule that is good enough has ended: how far models reach, and which copies cannot matter."""

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


def without_endless_copies(problem: Problem, horizon_us: float) -> Problem:
    """The problem without the offloads whose copies alone take longer than `horizon_us`.

    No schedule that ends by then has one. In ticks such copies may exceed the integers of solvers.
    """
    endless = [
        stage.offload is not None and stage.offload.offload_us + stage.offload.reload_us > horizon_us
        for stage in problem.stages
    ]
    if not any(endless):
        return problem
    data = problem.to_data()
    for stage, gone in zip(data["stages"], endless, strict=True):
        if gone:
            stage["offload"] = None
    return Problem.from_data(data)
