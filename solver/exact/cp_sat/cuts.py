"""Constraints that follow from the rules but that the solver would not see by itself."""

from __future__ import annotations

from math import ceil, inf

from solver.exact.cp_sat.variables import Variables
from solver.exact.progress import least_work_around
from solver.exact.weight_order import like_pairs

SLACK = 1e-6
"""Ticks by which float sums may exceed a whole number."""


def add_work_that_memory_holds_back(variables: Variables) -> None:
    """An op begins no sooner than its device can have done what it must, and leaves time for what is left.

    An interval model propagates memory and the order of a device apart from one another. Together they say more: a
    device can only run ahead, and only put off work, as far as its memory goes. What is said counts with the memory of
    split backwards: devices that may fuse some are left out.
    """
    problem, model = variables.problem, variables.model
    fusing = {problem.stages[s].device for s in variables.fusing_stages}
    for op, before, after in least_work_around(problem, variables.length):
        if problem.stages[op.stage].device in fusing:
            continue
        task = variables.tasks[op]
        begin = variables.task("F", problem.stages_of[problem.stages[op.stage].device][0], 0).start
        if before < inf:
            model.add(task.start >= begin + ceil(before - SLACK))
        counted_from = begin if problem.objective == "device_span" else 0
        model.add(variables.objective >= task.start - counted_from + ceil(after - SLACK))


def add_weight_order(variables: Variables) -> None:
    """W of like stages run in the order of their B, where none is fused with it."""
    model = variables.model
    for pairs in like_pairs(variables.problem, variables.fusing_stages):
        first = model.new_bool_var(f"{pairs[0][0]}first{pairs[0][1]}")
        variables.firsts.append((first, *pairs[1]))
        for pair in pairs:
            one, other = (variables.tasks[op] for op in pair)
            model.add(other.start >= one.end).only_enforce_if(first)
            model.add(one.start >= other.end).only_enforce_if(~first)
