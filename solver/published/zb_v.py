"""ZB-V: two chunks a device along a V, zero bubble at the memory of 1F1B (Zero Bubble, arXiv 2401.10241, section 6).

Device d holds stage d on the way out and stage 2p - 1 - d on the way back. Forwards go out and come back, and so do
backwards: each starts at device 0, turns at device p - 1 and ends at device 0. A run builds all orders together:

1. The first microbatch goes out and back. A device that waits for it to come back takes more forwards, as long as
   all the microbatches on the devices before it can still come back.
2. Each device takes forwards of both stages in turn, until it is as far as the device before it.
3. Rounds: one backward on every device, then one forward. What comes back goes before what goes out.
4. A W goes where the device would idle for at least as long, where memory has no room for the next op, and where a
   smaller gap would make this device's span the largest. Switches `in_forward` and `in_backward` say before which
   ops that last rule holds; before backwards on their way back it always does. The W that are left go last.

A run is repeated with the idle times of its devices granted to the next, as long as that makes the largest smaller.
Costs, delays and budgets are each stage's and device's own.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optpipe.errors import MethodError
from optpipe.memory import device_effect, effect_table
from optpipe.ops import Op, OpArray, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.published.passes import require_v_shape

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NO_LIMIT = 2**62
F, B, W = (cast(int, np.int64(code)) for code in range(3))
"""Numpy's integers, since numba compiles a function once more for each plain number that it is called with."""

INTO_F, INTO_B = 3, 4
NEED, ACTIVATION = 3, 6
BUDGET, MEMORY, PENDING_CHANGE, OLDEST, NEWEST, MADE = range(6)
NOW, IDLE, WORK, GRANTED = range(4)
"""Rows of the arrays of _Costs and _State."""


def zb_v(problem: Problem) -> Orders:
    """The best of all runs. Raises MethodError on placement, or where a budget is too small for every run."""
    require_v_shape(problem, "zb-v")
    costs = _costs(problem)
    runs = [run for switches in product((True, False), repeat=2) for run in _repeated(problem, costs, *switches)]
    finished = [_orders(problem, run.state) for run in runs if run.finished]
    if not finished:
        raise MethodError(_shortage(problem, costs, runs[0].state))
    return min(finished, key=lambda orders: simulate(problem, orders).value_us)


class _Costs(NamedTuple):
    """What ops take, by row and stage; few arrays, since each costs time to compile.

    `us`: durations of F, B and W, then INTO_F and INTO_B, the delays of what a stage's F and B wait for. `bytes`: how
    F, B and W change memory, from NEED on by how much it is higher while they run or after it, and the ACTIVATION.
    """

    us: Floats
    bytes: Ints


class _State(NamedTuple):
    """What the devices have done so far in a run. Device d holds stages d and 2p - 1 - d.

    `end_us`: by kind, stage and microbatch. `done`: by kind and stage. `clock_us`: by device, NOW, IDLE, the WORK of
    all its ops, and the span GRANTED by an earlier run (negative without one). `tally`: by device, BUDGET, MEMORY,
    what all pending W change in it, the OLDEST and the NEWEST of `pending` (stages of W), and the ops MADE. `order`:
    for each device its ops, as kind times stages plus stage.
    """

    end_us: Floats
    done: Ints
    clock_us: Floats
    tally: Ints
    pending: Ints
    order: Ints


class _Ran(NamedTuple):
    """A run: whether it found room for every op, and where it ended."""

    finished: bool
    state: _State

    @property
    def spans_us(self) -> Floats:
        """The span of every device."""
        spans: Floats = self.state.clock_us[WORK] + self.state.clock_us[IDLE]
        return spans


def _costs(problem: Problem) -> _Costs:
    stages, effects = problem.stages, effect_table(problem, device_effect)[:3]
    durations = [[stage.duration_us(kind) for stage in stages] for kind in "FBW"]
    change = effects.sum(axis=2)
    needed, activations = np.maximum(effects[:, :, 0], change), [stage.activation_bytes for stage in stages]
    return _Costs(
        np.array([*durations, [0.0, *problem.forward_delay_us], [*problem.backward_delay_us, 0.0]], np.float64),
        np.array([*change, *needed, activations], np.int64),
    )


def _repeated(problem: Problem, costs: _Costs, in_forward: bool, in_backward: bool) -> list[_Ran]:
    """Runs, each with the spans of the one before granted, until that helps no more.

    `in_forward`, `in_backward`: before which ops a W may fill a gap that is shorter than itself.
    """
    runs: list[_Ran] = []
    granted = np.full(len(problem.devices), -1.0)
    while True:
        state = _begin(problem, granted)
        run = _Ran(_run(costs, state, in_forward, in_backward), state)
        if runs and (not run.finished or run.spans_us.max() >= runs[-1].spans_us.max()):
            return runs
        runs.append(run)
        if not run.finished:
            return runs
        granted = run.spans_us


def _begin(problem: Problem, granted: Floats) -> _State:
    devices, stages, microbatches = len(problem.devices), len(problem.stages), problem.microbatches
    budgets = [NO_LIMIT if device.memory_bytes is None else device.memory_bytes for device in problem.devices]
    zeros = [0] * devices
    return _State(
        np.zeros((3, stages, microbatches)),
        np.zeros((3, stages), np.int64),
        np.array([zeros, zeros, problem.work_us, granted], np.float64),
        np.array([budgets, *[zeros] * 5], np.int64),
        np.zeros((devices, 2 * microbatches), np.int64),
        np.zeros((devices, 6 * microbatches), np.int64),
    )


def _orders(problem: Problem, state: _State) -> Orders:
    microbatch = np.empty(state.order.shape, np.int64)
    for d, codes in enumerate(state.order):
        for code in np.unique(codes):
            microbatch[d, codes == code] = np.arange(problem.microbatches)
    kind, stage = np.divmod(state.order, len(problem.stages))
    return Orders.of_compute(OpArray(*columns) for columns in zip(kind, stage, microbatch, strict=True))


def _shortage(problem: Problem, costs: _Costs, state: _State) -> str:
    """Which device lacks the least memory for its next op, and how much."""
    lacks = []
    for d, device in enumerate(problem.devices):
        least = state.tally[MEMORY, d] + state.tally[PENDING_CHANGE, d]
        for kind in (F, B):
            stage = _next(costs, state, d, kind)
            if device.memory_bytes is not None and not np.isnan(_ready(costs, state, kind, stage)):
                op = Op("FB"[kind], int(stage), int(state.done[kind, stage]))
                lacks.append((int(least + costs.bytes[NEED + kind, stage]) - device.memory_bytes, d, op))
    missing, number, op = min(lacks)
    return (
        f"zb-v comes to a halt before {op}, for which device {number} has {missing} bytes too few with its budget "
        f"of {problem.devices[number].memory_bytes}. Maybe use ada-offload or an exact method, which can offload."
    )


@njit(cache=True)
def _run(costs: _Costs, state: _State, in_forward: bool, in_backward: bool) -> bool:
    """Fill the orders of all devices; False where that comes to a halt."""
    _first_microbatch(costs, state)
    _forwards_in_turn(costs, state)
    while state.done[B].min() < state.end_us.shape[2]:
        if not _round(costs, state, in_forward, in_backward):
            return False
    for d in range(state.order.shape[0]):
        while _has_weights(state, d):
            _put_weight(costs, state, d)
    return True


@njit(cache=True)
def _ready(costs: _Costs, state: _State, kind: int, s: int) -> float:
    """When the next F or B of a stage has its input; NaN where that is not planned, or none is left."""
    i, last = state.done[kind, s], state.end_us.shape[1] - 1
    if i == state.end_us.shape[2]:
        return float(np.nan)
    if kind == F and s == 0:
        return 0.0
    of, source = (F, s - 1) if kind == F else (B, s + 1)
    if kind == B and s == last:
        of, source = F, last
    if i >= state.done[of, source]:
        return float(np.nan)
    return float(state.end_us[of, source, i] + costs.us[INTO_F + kind, s])


@njit(cache=True)
def _fits(costs: _Costs, state: _State, d: int, kind: int, s: int, more: int = 0) -> bool:
    """Whether an op has room now, and leaves `more` bytes."""
    return bool(state.tally[MEMORY, d] + costs.bytes[NEED + kind, s] + more <= state.tally[BUDGET, d])


@njit(cache=True)
def _can(costs: _Costs, state: _State, d: int, kind: int, s: int) -> bool:
    """Whether the next op of a stage is planned up to it, and has room once all pending W are done."""
    if np.isnan(_ready(costs, state, kind, s)):
        return False
    return _fits(costs, state, d, kind, s, state.tally[PENDING_CHANGE, d])


@njit(cache=True)
def _has_weights(state: _State, d: int) -> bool:
    return bool(state.tally[OLDEST, d] < state.tally[NEWEST, d])


@njit(cache=True)
def _append(costs: _Costs, state: _State, d: int, kind: int, s: int, start_us: float) -> None:
    state.clock_us[NOW, d] = start_us + costs.us[kind, s]
    state.tally[MEMORY, d] += costs.bytes[kind, s]
    state.order[d, state.tally[MADE, d]] = kind * state.end_us.shape[1] + s
    state.tally[MADE, d] += 1
    state.end_us[kind, s, state.done[kind, s]] = state.clock_us[NOW, d]
    state.done[kind, s] += 1


@njit(cache=True)
def _put(costs: _Costs, state: _State, d: int, kind: int, s: int) -> None:
    """The next op of a stage, as soon as it can start."""
    start = max(state.clock_us[NOW, d], _ready(costs, state, kind, s))
    if state.tally[MADE, d]:
        state.clock_us[IDLE, d] += start - state.clock_us[NOW, d]
    _append(costs, state, d, kind, s, start)
    if kind == B:
        state.pending[d, state.tally[NEWEST, d]] = s
        state.tally[NEWEST, d] += 1
        state.tally[PENDING_CHANGE, d] += costs.bytes[W, s]


@njit(cache=True)
def _put_weight(costs: _Costs, state: _State, d: int) -> None:
    s = state.pending[d, state.tally[OLDEST, d]]
    state.tally[OLDEST, d] += 1
    state.tally[PENDING_CHANGE, d] -= costs.bytes[W, s]
    _append(costs, state, d, W, s, state.clock_us[NOW, d])


@njit(cache=True)
def _first_microbatch(costs: _Costs, state: _State) -> None:
    devices, stages = state.order.shape[0], state.end_us.shape[1]
    for d in range(devices):
        if _can(costs, state, d, F, d):
            _put(costs, state, d, F, d)
    for d in range(devices - 1, -1, -1):
        while _waits(costs, state, d) and _lead(costs, state, d):
            pass
        if _can(costs, state, d, F, stages - 1 - d):
            _put(costs, state, d, F, stages - 1 - d)


@njit(cache=True)
def _waits(costs: _Costs, state: _State, d: int) -> bool:
    """Whether one more forward fits in time and memory before the first microbatch comes back to a device.

    Each device before may start the way back once more for this, and then must hold both stages of it.
    """
    there, here = d, state.end_us.shape[1] - 1 - d
    back = _ready(costs, state, F, here)
    if d == state.order.shape[0] - 1 or np.isnan(back):
        return False
    pair = costs.bytes[ACTIVATION, there] + costs.bytes[ACTIVATION, here]
    reserve = (d + 1) * pair - costs.bytes[ACTIVATION, there]
    in_time = state.clock_us[NOW, d] + costs.us[F, there] <= back
    return bool(in_time and _fits(costs, state, d, F, there, reserve))


@njit(cache=True)
def _lead(costs: _Costs, state: _State, number: int) -> bool:
    """One more forward on the way out on every device up to this one; False where that cannot be."""
    for d in range(number + 1):
        if not _can(costs, state, d, F, d) or not _fits(costs, state, d, F, d):
            return False
        _put(costs, state, d, F, d)
    return True


@njit(cache=True)
def _forwards_in_turn(costs: _Costs, state: _State) -> None:
    devices, stages = state.order.shape[0], state.end_us.shape[1]
    back = False
    for behind in range(1, devices):
        tries = 0
        while tries < 2 and _behind(state, behind):
            moved = False
            for d in range(devices - 1, behind - 1, -1):
                s = stages - 1 - d if back else d
                if _can(costs, state, d, F, s) and _fits(costs, state, d, F, s):
                    _put(costs, state, d, F, s)
                    moved = True
            back = not back
            tries = 0 if moved else tries + 1


@njit(cache=True)
def _behind(state: _State, d: int) -> bool:
    """Whether device d has fewer forwards than the one before it."""
    there, back = state.done[F, d], state.done[F, state.end_us.shape[1] - 1 - d]
    before_there, before_back = state.done[F, d - 1], state.done[F, state.end_us.shape[1] - d]
    fewer = there + back < before_there + before_back
    return bool(fewer or back <= before_back < state.end_us.shape[2])


@njit(cache=True)
def _round(costs: _Costs, state: _State, in_forward: bool, in_backward: bool) -> bool:
    """One backward, then one forward on every device that has one; False where no device has."""
    devices = state.order.shape[0]
    backward = np.empty(devices, np.int64)
    for d in range(devices):
        backward[d] = _next(costs, state, d, B)
    moved = False
    for turn in range(3 * devices):
        if turn < devices:  # coming back
            d, kind = devices - 1 - turn, B
        else:
            d, kind = turn % devices, B if turn < 2 * devices else F
        if kind == B and (backward[d] == d) != (turn < devices):
            continue
        s = backward[d] if kind == B else _next(costs, state, d, F)
        may_fill = in_forward if kind == F else in_backward or s == d
        moved = _step(costs, state, d, kind, s, may_fill) or moved
    return moved


@njit(cache=True)
def _next(costs: _Costs, state: _State, d: int, kind: int) -> int:
    """The stage of the next F or B: on the way back where its input is planned, else on the way out."""
    far = state.end_us.shape[1] - 1 - d
    out, back = (d, far) if kind == F else (far, d)
    return out if np.isnan(_ready(costs, state, kind, back)) else back


@njit(cache=True)
def _step(costs: _Costs, state: _State, d: int, kind: int, s: int, may_fill: bool) -> bool:
    """An F or B of a device, with the W that go before it; False where it has no input or no room."""
    if not _can(costs, state, d, kind, s):
        return False
    ready = _ready(costs, state, kind, s)
    while _has_weights(state, d):
        gap = ready - state.clock_us[NOW, d]
        next_weight_us = costs.us[W, state.pending[d, state.tally[OLDEST, d]]]
        if _fits(costs, state, d, kind, s) and gap < next_weight_us:
            if may_fill and gap > _slack(state, d):
                _put_weight(costs, state, d)
            break
        _put_weight(costs, state, d)
    _put(costs, state, d, kind, s)
    return True


@njit(cache=True)
def _slack(state: _State, d: int) -> float:
    """How long a device may idle before its span is the largest, or uses up what an earlier run grants."""
    clock = state.clock_us
    largest = 0.0
    for other in range(clock.shape[1]):
        largest = max(largest, clock[WORK, other] + clock[IDLE, other])
    slack = max(largest - (clock[WORK, d] + clock[IDLE, d]), 0.0)
    if clock[GRANTED, d] >= 0:
        slack = max(slack, clock[GRANTED].max() - clock[GRANTED, d] - clock[IDLE, d])
    return float(slack)
