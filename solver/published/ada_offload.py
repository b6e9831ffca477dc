"""AdaOffload: a valid schedule within the budgets for any placement, quickly (OptPipe, section 4).

A list schedule in time: whenever a device is free it takes what is ready, B before F (the stage nearest to the loss
first), and W when nothing else is ready or too many W are left over. Budgets are not looked at: fewer microbatches in
flight need less memory.

Compute orders with more or fewer microbatches in flight, each played within the budgets with nothing and with
everything allowed to leave: what has no time to go and come back stays, what lives longest goes first, and an op waits
until memory has room for it. The best is taken. One microbatch at a time is the floor: it runs wherever anything of
that kind does.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import NamedTuple, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optpipe.errors import MethodError
from optpipe.ops import OpArray, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import within_budgets
from solver.published.transfers import Activation, TransferPlanner, Wish
from solver.serial import known_budgets_bytes, serial_orders

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

F, B, W = (cast(int, np.int64(code)) for code in range(3))
"""Numpy's integers, since numba compiles a function once more for each plain number that it is called with."""
NOTHING = -1
"""In place of a kind: no op can go."""

STARTED = 2
"""The row of the tally from which on it counts ops that were taken."""


def in_flight_orders(problem: Problem, in_flight: int, late_weights: int) -> Orders:
    """Orders with at most `in_flight` microbatches between their first F and their last B.

    At most `late_weights` W are left over on a device while it does other things. Never deadlocks.
    """
    lengths = [3 * problem.microbatches * len(stages) for stages in problem.stages_of]
    first = np.cumsum([0, *lengths])
    costs = _Costs(
        np.array([[stage.duration_us(kind) for stage in problem.stages] for kind in "FBW"], np.float64),
        np.array([[*problem.forward_delay_us, 0.0], [0.0, *problem.backward_delay_us]], np.float64),
        np.array([stage.device for stage in problem.stages]),
        np.concatenate([np.array(stages, np.int64) for stages in problem.stages_of]),
        first // (3 * problem.microbatches),
    )
    ops = OpArray(*_run(costs, problem.microbatches, in_flight, late_weights))
    return Orders.of_compute(ops[begin:end] for begin, end in pairwise(first))


class _Costs(NamedTuple):
    """What ops take, and where stages are.

    `us[kind, s]`: durations of F, B and W. `delay_us[kind, s]`: from the end of an F or B of stage s to its
    neighbour. `device[s]`; the stages of device d are `stages[first[d]]` to `stages[first[d + 1] - 1]`.
    """

    us: Floats
    delay_us: Floats
    device: Ints
    stages: Ints
    first: Ints


class _State(NamedTuple):
    """What has happened so far.

    `input_us`: from when on each F and B (kind, stage, microbatch) has its input, where that is known. `tally`: by
    stage, of how many F and B it is known, and from STARTED on how many F, B and W were taken. `free_us`: when each
    device is free. `weights`: for each device, where its stages begin times microbatches, the stages of its W in the
    order of their B. `left`: by device, where the first W that is left and the end of them are.
    """

    input_us: Floats
    tally: Ints
    free_us: Floats
    weights: Ints
    left: Ints


@njit(cache=True)
def _run(costs: _Costs, microbatches: int, in_flight: int, late_weights: int) -> tuple[Ints, Ints, Ints]:
    """Kind, stage and microbatch of the ops, device by device, those of each in its order."""
    devices, stages = len(costs.first) - 1, len(costs.device)
    begin = costs.first[:-1] * microbatches
    state = _State(
        np.zeros((2, stages, microbatches)),
        np.zeros((5, stages), np.int64),
        np.zeros(devices),
        np.empty(stages * microbatches, np.int64),
        np.stack((begin, begin)),
    )
    made = 3 * begin
    kinds, places, microbatch = np.empty((3, 3 * stages * microbatches), np.int64)
    state.tally[F, 0] = min(in_flight, microbatches)
    wake = [(0.0, costs.device[0])]
    while wake:
        now, d = heappop(wake)
        if now < state.free_us[d]:
            continue
        kind, s = _choose(costs, state, d, now, late_weights)
        if kind == NOTHING:
            continue
        kinds[made[d]], places[made[d]], microbatch[made[d]] = kind, s, state.tally[STARTED + kind, s]
        made[d] += 1
        state.tally[STARTED + kind, s] += 1
        state.free_us[d] = now + costs.us[kind, s]
        heappush(wake, (state.free_us[d], d))
        fed, when_us = _release(costs, state, kind, s, in_flight)
        if fed >= 0:
            heappush(wake, (max(when_us, state.free_us[costs.device[fed]]), costs.device[fed]))
    return kinds, places, microbatch


@njit(cache=True)
def _choose(costs: _Costs, state: _State, d: int, now: float, late_weights: int) -> tuple[int, int]:
    """Kind and stage of what a free device runs now, or NOTHING."""
    microbatches = state.input_us.shape[2]
    rank, chosen, arrival_us = (microbatches, 0), (NOTHING, 0), np.inf
    for kind in (B, F):
        for k in range(costs.first[d], costs.first[d + 1]):
            s = costs.stages[k]
            i = state.tally[STARTED + kind, s]
            if i == state.tally[kind, s]:
                continue
            arrival_us = min(arrival_us, state.input_us[kind, s, i])
            if state.input_us[kind, s, i] <= now and (i, -s) < rank:
                rank, chosen = (i, -s), (kind, s)
        if chosen[0] != NOTHING:
            break
    begin, end = state.left[0, d], state.left[1, d]
    if begin < end:
        # A gap is long if the oldest W is done before the next op arrives.
        s = state.weights[begin]
        fills_gap = chosen[0] == NOTHING and now + costs.us[W, s] <= arrival_us
        if end - begin > late_weights or fills_gap:
            state.left[0, d] += 1
            return W, s
    return chosen


@njit(cache=True)
def _release(costs: _Costs, state: _State, kind: int, s: int, in_flight: int) -> tuple[int, float]:
    """Book what the end of an op of stage `s` makes possible: the stage that it feeds (-1: none), and from when on."""
    if kind == W:
        return -1, 0.0
    stages, microbatches = state.input_us.shape[1:]
    d = costs.device[s]
    i = state.tally[STARTED + kind, s] - 1
    into, fed = kind, s + 1 if kind == F else s - 1
    when_us = state.free_us[d] + costs.delay_us[kind, s]
    if kind == B:
        state.weights[state.left[1, d]] = s
        state.left[1, d] += 1
    if fed == stages:
        into, fed = B, s
    if fed < 0:
        into, fed, i = F, s, i + in_flight
        if i >= microbatches:
            return -1, 0.0
    state.input_us[into, fed, i] = when_us
    state.tally[into, fed] += 1
    return fed, when_us


PLAYED_OPS = 15_000
"""Compute ops played over all candidates, some tenths of a second's worth."""


def ada_offload(problem: Problem) -> Orders:
    """The best candidate within the budgets. Raises MethodError with the budgets that would do where there is none."""
    best: Orders | None = None
    best_us = inf
    for orders in _candidates(problem):
        if orders is not None:
            simulation = simulate(problem, orders)
            if simulation.value_us < best_us and within_budgets(problem, orders, simulation):
                best, best_us = orders, simulation.value_us
    if best is None:
        raise _no_room(problem)
    return best


def _no_room(problem: Problem) -> MethodError:
    known = known_budgets_bytes(problem)
    short = [
        f"device {d} has {device.memory_bytes}: {bytes_ - device.memory_bytes} too few"
        for d, (device, bytes_) in enumerate(zip(problem.devices, known, strict=True))
        if device.memory_bytes is not None and device.memory_bytes < bytes_
    ]
    if problem.host_memory_bytes is not None:
        short.append(f"the host has {problem.host_memory_bytes} for what leaves")
    return MethodError(
        f"ada-offload finds no room even for one microbatch at a time ({'; '.join(short)}). "
        f"Maybe raise devices[].memory_bytes to {known}, which is known to do."
    )


def _candidates(problem: Problem) -> Iterator[Orders | None]:
    """The floor, then for each choice nothing leaving and everything leaving; of equal values the first is taken."""
    yield serial_orders(problem)
    budgets = [device.memory_bytes for device in problem.devices]
    everything = _offloadable(problem)
    played, seen = 0, set()
    for in_flight, late_weights, lead in _choices(problem, bool(everything)):
        if played > PLAYED_OPS:
            return
        compute = [OpArray.of(device.compute) for device in in_flight_orders(problem, in_flight, late_weights).devices]
        columns = b"".join(ops.kind.tobytes() + ops.stage.tobytes() + ops.microbatch.tobytes() for ops in compute)
        planner: TransferPlanner | None = None
        for wish in (Wish(set(), 0.0), Wish(everything, lead)):
            candidate = (columns, bool(wish.leaving), wish.lead)
            if candidate in seen:  # with few microbatches many choices come to the same
                continue
            seen.add(candidate)
            planner = planner or TransferPlanner(problem, compute)
            orders = planner.plan(wish, budgets)
            played += sum(map(len, compute)) // (2 if orders else 20)  # what finds no room ends early
            yield orders


def _offloadable(problem: Problem) -> set[Activation]:
    microbatches = range(problem.microbatches)
    return {(s, i) for s, stage in enumerate(problem.stages) if stage.offload for i in microbatches}


def _choices(problem: Problem, offloads: bool) -> Iterator[tuple[int, int, float]]:
    """Microbatches in flight, W left over, and how early a reload is called: the promising ones first."""
    devices, stages = len(problem.devices), len(problem.stages)
    sizes = (devices, stages, 2 * devices, devices + 1, 3 * devices // 2, 3 * devices // 4, devices // 2, 2, 3, 4, 1)
    tried = set()
    for late_weights in (0, 2, devices):
        for lead in (3.0, 1.5) if offloads else (0.0,):
            for size in sizes:
                choice = (min(max(size, 1), problem.microbatches), late_weights, lead)
                if choice not in tried:
                    tried.add(choice)
                    yield choice
