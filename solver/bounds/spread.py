"""Bounds of problems with spread passes: a relaxation without any, and the work of a device.

Of the relaxation every bound of other problems is one (`without_passes`). It has the path of a microbatch through the
passes between its last forward and the backward behind it, and so how long activations are held.

Then the work of a device between what comes before and behind it. An op of a device starts no earlier than the longest
chain before it of its own microbatch, barriers included, and the schedule lasts at least the longest chain behind it.
So a makespan is at least the least such head over some ops of a device, their work, and their least tail: the bound of
one machine with heads and tails (Carlier 1982), over kinds of ops. Every time is the least of all units, and a backward
that may be split counts as its two halves, so that the bound holds for all of them.

And the time between barriers where the last device has room for one microbatch and the one before it for two, with
backwards in one piece (`between_barriers_us`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from graphlib import TopologicalSorter
from itertools import product
from typing import NamedTuple

import numpy as np

from optpipe.kinds import KIND, OPTIONAL, TimeName
from optpipe.ops import Floats
from optpipe.problem import Device, DirectedTransfer, Problem
from optpipe.spread import AfterPass
from optpipe.stage import Stage
from optpipe.task_graph import Lag, TaskGraph, lower


def without_passes(problem: Problem) -> Problem:
    """A relaxation: F and B of the last stage with a further stage between them, on a device of its own.

    Its F are the ops of one device of the first pass on the longest path from the last F to a gate of the last B, its B
    and W take no time, and what remains of that path is the time of the message back. In a schedule of the problem
    these ops follow one another, and each may have its B at its end. So any schedule is one of the relaxation too. With
    factors, which are not those of messages, there is no such stage.
    """
    apart, path = problem.replaced(spread=None, gates=None), _path_to_last_backward(problem)
    if path is None or problem.has_factors:
        return apart
    between = Stage(
        device=len(problem.devices),
        forward_us=path.first_us,
        backward_input_us=0,
        backward_weight_us=0,
        activation_bytes=0,
        backward_weight_bytes=0,
    )
    no_delay = DirectedTransfer(forward=0, backward=0)
    delays_us = [
        *zip(problem.forward_delay_us, problem.backward_delay_us, strict=True),
        (path.delay_us, path.rest_us),
    ]
    return apart.replaced(
        stages=[*problem.stages, between],
        devices=[*problem.devices, Device(memory_bytes=None)],
        transfer_us=[no_delay.replaced(forward=there, backward=back) for there, back in delays_us],
    )


class _Path(NamedTuple):
    """A path from the last F to the end of a pass, or on to a gate: message, first pass, and from its end on."""

    delay_us: float
    first_us: float
    rest_us: float


def _path_to_last_backward(problem: Problem, device: int | None = None) -> _Path | None:
    """The longest path from the last F through passes to a gate of the last B; its first pass on a device, if given."""
    longest = _longest_paths(problem, device)
    paths = [
        path._replace(rest_us=path.rest_us + after.us)
        for gate in problem.gates or ()
        for after in gate.after
        if (gate.op, gate.stage) == ("B", len(problem.stages) - 1) and isinstance(after, AfterPass)
        for path in [longest(after.pass_name)]
        if path is not None
    ]
    return max(paths, key=lambda path: (sum(path), path), default=None)


def _longest_paths(problem: Problem, device: int | None) -> Callable[[str], _Path | None]:
    """The longest path to the end of a pass by name; None where no chain of passes leads there from the last F."""
    last, passes = len(problem.stages) - 1, {one.name: one for one in problem.spread or ()}

    @cache
    def longest(name: str) -> _Path | None:
        one, paths = passes[name], []
        for after in one.after:
            if isinstance(after, AfterPass):
                before = longest(after.pass_name)
                paths += [before._replace(rest_us=before.rest_us + after.us + max(one.us))] if before else []
            elif (after.op, after.stage) == ("F", last):
                own = problem.stages[last].device
                there = [(d, us) for d, us in enumerate(one.us) if us and device in (None, d)]
                paths += [_Path(0 if d == own else after.us, us, 0) for d, us in there]
        return max(paths, key=sum, default=None)

    return longest


class _Task(NamedTuple):
    """A duty of a stage, a pass on a device, or the barrier of a pass (device -1), of any microbatch."""

    kind: str
    place: int


_TIMES: Mapping[str, TimeName] = {"F": "forward", "B": "backward_input", "W": "backward_weight"}

_Needs = dict[_Task, list[tuple[_Task, float]]]
"""Tasks that each task comes after, with the least time between the two."""


def between_barriers_us(problem: Problem) -> float:
    """Least value where the last stage has room for one microbatch and the one before it, a, for two; else 0.

    Both have backwards in one piece. Let the first pass on the path to the last backward, which a's device runs too, be
    S. Between two S of that device comes the last stage's backward and forward; the backward of a comes between them as
    well, or behind the second. Then a's forward that it makes room for, for the next S but one, comes later still
    (proof: docs/math/bounds.md).
    """
    graph, last = lower(problem), len(problem.stages) - 1
    if last < 1 or problem.overlaps or not problem.has_equal_microbatches:
        return 0.0
    stages = problem.stages[last - 1 :]
    path = _path_to_last_backward(problem, stages[0].device)
    for room, stage, s in zip((2, 1), stages, (last - 1, last), strict=True):
        budget = problem.devices[stage.device].memory_bytes
        has_room = budget is None or (room + 1) * stage.activation_bytes <= budget
        if path is None or has_room or graph.splits[s] or graph.options[s] > 1 or not graph.trained[s]:
            return 0.0
    assert path is not None
    forward_us, backward_us = ([stage.duration_us(kind) for stage in stages] for kind in ("F", "BW"))
    there_us, back_us = problem.forward_delay_us[-1], problem.backward_delay_us[-1]
    returned_us = path.rest_us + backward_us[1]  # from the end of S to that of the last stage's backward
    to_pass_us = forward_us[1] + path.delay_us + path.first_us
    least_us = returned_us + to_pass_us
    inside_us = returned_us + back_us + backward_us[0] + path.first_us
    behind_us = backward_us[0] + forward_us[0] + there_us + to_pass_us
    both_us = 2 * backward_us[0] + forward_us[0] + path.first_us
    # The least time to the end of S where the last backward of a came before it, and where it comes behind it.
    before = forward_us[0] + there_us + to_pass_us
    behind = float("inf")
    for _ in range(problem.microbatches - 1):
        before, behind = (
            min(before + max(least_us, inside_us), behind + max(least_us, inside_us, behind_us, both_us)),
            min(before + least_us, behind + max(least_us, behind_us)),
        )
    end_us = min(
        before + returned_us + back_us + backward_us[0],
        behind + max(returned_us + back_us, backward_us[0]) + backward_us[0],
    )
    if problem.objective == "makespan":
        for s, (ahead_us, home_us) in enumerate(zip(problem.forward_delay_us, problem.backward_delay_us, strict=True)):
            if s < last - 1:
                stage = problem.stages[s]
                end_us += stage.forward_us + ahead_us
                end_us += home_us + stage.duration_us(graph.kind_with("B", s).name) if graph.trained[s] else 0
    return float(end_us)


def spread_bound_us(problem: Problem) -> float:
    """The greatest bound of any device, or the longest chain of one microbatch, or the time between barriers."""
    graph, barriers_us = lower(problem), between_barriers_us(problem)
    if problem.objective != "makespan":
        return float(max(*problem.work_us, barriers_us))
    needs, length_us, work_us = _chains(graph)
    befores = {task: [before for before, _ in of_task] for task, of_task in needs.items()}
    order = [*TopologicalSorter(befores).static_order()]
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
    chain_us = max(head_us[task] + length_us[task] + tail_us[task] for task in order)
    machines = (_machine_bound_us([(head_us[t], work_us[t], tail_us[t]) for t in own]) for own in of_devices.values())
    return float(max(chain_us, barriers_us, *machines))


def _machine_bound_us(tasks: Sequence[tuple[float, float, float]]) -> float:
    """The greatest sum of least head, work and least tail over sets of tasks, each given as (head, work, tail)."""
    bound_us = 0.0
    for first_us, last_us in product({head for head, *_ in tasks}, {tail for *_, tail in tasks}):
        chosen = [work for head, work, tail in tasks if head >= first_us and tail >= last_us]
        if chosen:
            bound_us = max(bound_us, first_us + sum(chosen) + last_us)
    return bound_us


def _chains(graph: TaskGraph) -> tuple[_Needs, dict[_Task, float], dict[_Task, float]]:
    """Predecessors of each task, its least length, and its work of all units where it has a device."""
    needs: _Needs = {}
    length_us: dict[_Task, float] = {}
    work_us: dict[_Task, float] = {}
    counts = np.bincount(graph.unit_class)
    delays_us = {direction: us.min(axis=1, initial=np.inf) for direction, us in graph.delays_us.items()}

    def add(task: _Task, times_us: Floats) -> None:
        length_us[task], work_us[task], needs[task] = float(times_us.min()), float(times_us @ counts), []

    for s in range(len(graph.stages)):
        there = {duty: time for duty, time in _TIMES.items() if graph.duties[duty][s].all()}
        times_us = {duty: np.nanmin(graph.times_us[time][s], axis=0) for duty, time in there.items()}
        if "W" in there and not graph.splits[s]:  # one op, which hands its gradient over at its end
            times_us["B"], times_us["W"] = times_us["B"] + times_us["W"], 0 * times_us["W"]
        for duty, of_classes_us in times_us.items():
            add(_Task(duty, s), of_classes_us)
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
            add(_Task(one.name, d), one.duration_us[d])
            needs[_Task(one.name, d)] += [after(lag, d) for lag in one.after]
    for (duty, s), lags in graph.gates.items():
        if duty not in OPTIONAL:
            needs[_Task(duty, s)] += [after(lag, int(graph.device[s])) for lag in lags]
    return needs, length_us, work_us
