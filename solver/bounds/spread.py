"""Bound of problems with spread passes: the work of a device between what comes before and behind it.

An op of a device starts no earlier than the longest chain before it of its own microbatch, barriers included, and the
schedule lasts at least the longest chain behind it. So a makespan is at least the least such head over the ops of a
device, all of its work, and the least tail. Every time is the least of all units, and a fused backward counts as its
two halves, so that the bound holds for all of them.
"""

from __future__ import annotations

from collections import defaultdict
from graphlib import TopologicalSorter
from typing import NamedTuple

import numpy as np

from optpipe.kinds import KIND
from optpipe.problem import Problem
from optpipe.task_graph import Lag, TaskGraph, lower


class _Task(NamedTuple):
    """A duty of a stage, a pass on a device, or the barrier of a pass (device -1), of any microbatch."""

    kind: str
    place: int


_Needs = dict[_Task, list[tuple[_Task, float]]]
"""Tasks that each task comes after, with the least time between the two."""


def spread_bound_us(problem: Problem) -> float:
    """The greatest bound of any device, or the longest chain of one microbatch."""
    graph = lower(problem)
    if problem.objective != "makespan":
        return float(max(problem.work_us))
    needs, length_us = _chains(graph)
    order = [
        *TopologicalSorter({task: [before for before, _ in of_task] for task, of_task in needs.items()}).static_order()
    ]
    head_us, tail_us = dict.fromkeys(order, 0.0), dict.fromkeys(order, 0.0)
    for task in order:
        for before, delay_us in needs[task]:
            head_us[task] = max(head_us[task], head_us[before] + length_us[before] + delay_us)
    for task in reversed(order):
        for before, delay_us in needs[task]:
            tail_us[before] = max(tail_us[before], delay_us + length_us[task] + tail_us[task])
    of_devices: dict[int, list[_Task]] = defaultdict(list)
    for task in order:
        if task.place >= 0:
            of_devices[int(graph.device[task.place]) if task.kind in KIND else task.place].append(task)
    bounds_us = [
        min(head_us[task] for task in tasks) + problem.work_us[d] + min(tail_us[task] for task in tasks)
        for d, tasks in of_devices.items()
    ]
    return float(max(*bounds_us, *(head_us[task] + length_us[task] + tail_us[task] for task in order)))


def _chains(graph: TaskGraph) -> tuple[_Needs, dict[_Task, float]]:
    """The least lengths of all tasks, and what each comes after."""
    needs: _Needs = {}
    length_us: dict[_Task, float] = {}
    delays_us = {direction: us.min(axis=1, initial=np.inf) for direction, us in graph.delays_us.items()}
    times_us = {"F": "forward", "B": "backward_input", "W": "backward_weight"}
    for s in range(len(graph.stages)):
        for duty, time in times_us.items():
            if graph.duties[duty][s].all():
                task = _Task(duty, s)
                length_us[task], needs[task] = float(np.nanmin(graph.times_us[time][s])), []  # type: ignore[index]
    for task in list(needs):
        for need in KIND[task.kind].needs:
            before = _Task(need.duty, task.place + need.stage)
            if before in needs and not need.slice:
                delay_us = delays_us[need.direction][min(task.place, before.place)] if need.direction else 0.0
                needs[task].append((before, float(delay_us)))

    def after(lag: Lag, device: int) -> tuple[_Task, float]:
        if lag.spread is not None:
            return _Task(graph.passes[lag.spread].name, -1), float(lag.us.min())
        return _Task(lag.duty, lag.stage), float(lag.us.min()) if device != graph.device[lag.stage] else 0.0

    for one in graph.passes:
        barrier = _Task(one.name, -1)
        length_us[barrier], needs[barrier] = 0.0, [(_Task(one.name, d), 0.0) for d in one.devices]
        for d in one.devices:
            task = _Task(one.name, d)
            length_us[task], needs[task] = float(one.duration_us[d].min()), [after(lag, d) for lag in one.after]
    for (duty, s), lags in graph.gates.items():
        needs[_Task(duty, s)] += [after(lag, int(graph.device[s])) for lag in lags]
    return needs, length_us
