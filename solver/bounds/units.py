"""Bounds where units (microbatches, or slices of them) have costs of their own, or are in another order (docs/math)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optpipe.problem import Floats, Problem


def unit_bounds_us(problem: Problem) -> Sequence[float]:
    """Longest chains, and the work of each device between its head and its tail.

    On a stage F runs in one order of the units and backwards in another, so rules and orders alone say when each op can
    begin at the earliest: a longest path. Where the order of the microbatches is free that is asked of each microbatch
    alone, and heads and tails are the least of any. A device begins with F of its lowest stage, and that of the last
    unit is its last B: all its F and B are done by its end, and B on the stages before and W of the first are to come.
    """
    costs = costs_us(problem)
    forward, backward, weight = costs
    orders = [range(problem.microbatches)]
    if problem.has_free_order:
        classes = problem.unit_class[:: problem.slice_count]
        orders = [range(i, i + 1) for i in np.unique(classes, return_index=True)[1].tolist()]
    begins, ends, chains_us = zip(*(_chains(problem, order, *costs) for order in orders), strict=True)
    bounds = list(chains_us)
    head_us, tail_us = np.min(begins, axis=0), np.min(ends, axis=0)
    for numbers in problem.stages_of:
        if numbers:
            own = [float(us[numbers].sum()) for us in (forward, backward, weight)]
            before = head_us[numbers[0]] if problem.objective == "makespan" else 0.0
            bounds += [before + sum(own)]
            if problem.objective == "makespan" or numbers[0] == 0:
                bounds += [before + own[0] + own[1] + tail_us[numbers[0]]]
    return bounds


def costs_us(problem: Problem) -> tuple[Floats, Floats, Floats]:
    """Durations of F, B and W of every unit on every stage: arrays (stages, units)."""
    classes = problem.unit_class
    forward, backward, weight = (
        np.array([[stage.duration_us(kind) for stage in of_classes] for of_classes in problem.unit_stages], np.float64)
        for kind in "FBW"
    )
    return forward[:, classes], backward[:, classes], weight[:, classes]


def _chains(
    problem: Problem, microbatches: range, forward: Floats, backward: Floats, weight: Floats
) -> tuple[Floats, Floats, float]:
    """Head of the first unit and tail of the last on each stage, and the longest chain, all in us.

    The head ends when F of the first unit can begin; the tail begins at the end of the last unit's B.
    """
    ahead, back = (problem.units_in_order(kind, microbatches) for kind in "FB")
    delays = problem.unit_delays_us
    first, last, stages = ahead[0], back[-1], len(problem.stages)
    heads = np.concatenate([[0.0], np.cumsum(forward[:-1, first] + delays["forward"][:, first])])
    tails = np.concatenate([[0.0], np.cumsum(backward[:-1, last] + delays["backward"][:, last])]) + weight[0, last]
    ends, arrives = [], np.zeros(len(ahead))  # of the units in the order of F
    for s in range(stages):
        ends.append(_in_turn(arrives, forward[s, ahead]))
        arrives = ends[s] + (delays["forward"][s, ahead] if s + 1 < stages else 0.0)
    place = np.searchsorted(ahead, back, sorter=np.argsort(ahead))
    place = np.argsort(ahead)[place]
    arrives = np.zeros(len(back))
    for s in reversed(range(stages)):
        done = _in_turn(np.maximum(arrives, ends[s][place]), backward[s, back])
        arrives = done + (delays["backward"][s - 1, back] if s else 0.0)
    return heads, tails, float((arrives + weight[0, back]).max())


def _in_turn(ready_us: Floats, duration_us: Floats) -> Floats:
    """Ends of ops that run one after another, none before it is ready."""
    ends = np.cumsum(duration_us)
    latest: Floats = np.maximum.accumulate(ready_us - (ends - duration_us))
    return ends + latest
