"""Zero Bubble's automatic schedule: a list heuristic with three switches, eight runs (Zero Bubble, section 3).

Every run builds the orders of all stages together, op by op:

1. Warm-up: each stage takes as many forwards as its memory and the stages before it allow while its first B is on
   its way. Switch `even`: not more than keep the numbers of forwards evenly spread over the stages.
2. Then forwards and B alternate, round by round. Switch `by_time`: the op that can start first goes first, B before F.
3. A W goes where the device would idle at least as long as the W takes, where memory has no room for the next op,
   and where a smaller idle gap would make this stage's bubble the largest of all. Switch `fill`: also where the device
   would idle half as long as the W takes.
4. The W that are left go last.

Stage s always stays ahead of stage s + 1 in forwards. Costs, delays and budgets are each stage's own.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optpipe.errors import MethodError
from optpipe.memory import device_effect, effect_table
from optpipe.ops import OpArray, Orders
from optpipe.problem import Problem, Stage
from optpipe.simulate import simulate
from solver.published.passes import require_one_stage_a_device

Codes = NDArray[np.int8]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NO_LIMIT = 2**62
F, B, W = (cast(int, np.int64(code)) for code in range(3))
"""Numpy's integers, since numba compiles a function once more for each plain number that it is called with."""
NOTHING = -1
"""In place of a kind: no op can go."""

INTO_F, INTO_B = 3, 4
ROOM, BUDGET = 3, 6
NOW, IDLE = 0, 1
MEMORY, PENDING, MADE = 3, 4, 5
"""Rows of the arrays of _Costs and _State."""


def zb_auto(problem: Problem) -> Orders:
    """The best of the eight runs. Raises MethodError on placement, or where a single microbatch exceeds a budget."""
    require_one_stage_a_device(problem, "zb-auto")
    _check_one_microbatch_fits(problem)
    costs = _costs(problem)
    runs = [_run(costs, problem.microbatches, *switches) for switches in product((False, True), repeat=3)]
    orders = [_orders(problem, kinds) for finished, kinds in runs if finished]
    if not orders:
        raise MethodError(
            "zb-auto comes to a halt in each of its runs, without room for the next op of any stage within "
            "devices[].memory_bytes. Maybe use ada-offload or an exact method."
        )
    return min(orders, key=lambda o: simulate(problem, o).value_us)


def _orders(problem: Problem, kinds: Codes) -> Orders:
    """Orders from the kinds of the ops of every stage, an array (stages, 3 microbatches)."""
    microbatch = np.empty(kinds.shape, np.int64)
    for kind in range(3):
        microbatch[kinds == kind] = np.tile(np.arange(problem.microbatches), len(kinds))
    stage = np.repeat(np.arange(len(kinds)), kinds.shape[1]).reshape(kinds.shape)
    return Orders.of_compute(OpArray(kinds[s], stage[s], microbatch[s]) for (s,) in problem.stages_of)


def _check_one_microbatch_fits(problem: Problem) -> None:
    for s, stage in enumerate(problem.stages):
        budget = problem.devices[stage.device].memory_bytes
        needed = _room(stage)["F"]
        if budget is not None and needed > budget:
            raise MethodError(
                f"zb-auto needs {needed} bytes for one microbatch on stages[{s}], but device {stage.device} has "
                f"{budget}: {needed - budget} too few. Maybe use ada-offload or an exact method, which can offload."
            )


def _room(stage: Stage) -> dict[str, int]:
    """Bytes that must be free when an op starts, so that it and the rest of its microbatch's ops can run."""
    work, grows = stage.workspace_bytes, stage.backward_weight_bytes - stage.activation_bytes
    backward = max(work.B, grows, grows + work.W)
    return {"F": stage.activation_bytes + max(work.F, backward), "B": backward, "W": work.W}


class _Costs(NamedTuple):
    """What ops take, by row and stage; few arrays, since each costs time to compile.

    `us`: durations of F, B and W, then INTO_F and INTO_B, the delays of what a stage's F and B wait for. `bytes`: how
    F, B and W change memory, from ROOM on the room that they need, and BUDGET.
    """

    us: Floats
    bytes: Ints


def _costs(problem: Problem) -> _Costs:
    stages, budgets = problem.stages, [problem.devices[stage.device].memory_bytes for stage in problem.stages]
    durations = [[stage.duration_us(kind) for stage in stages] for kind in "FBW"]
    changes = effect_table(problem, device_effect)[:3].sum(axis=2).tolist()
    rooms = [[_room(stage)[kind] for stage in stages] for kind in "FBW"]
    return _Costs(
        np.array([*durations, [0.0, *problem.forward_delay_us], [*problem.backward_delay_us, 0.0]], np.float64),
        np.array([*changes, *rooms, [NO_LIMIT if budget is None else budget for budget in budgets]], np.int64),
    )


class _State(NamedTuple):
    """What the stages have done so far in a run.

    `end_us`: by kind, stage and microbatch. `clock_us`: by stage, NOW and IDLE. `tally`: by stage, the numbers of F, B
    and W, then MEMORY, PENDING (W that are left) and MADE (ops). `order`: for each stage the kinds of its ops.
    """

    end_us: Floats
    clock_us: Floats
    tally: Ints
    order: Codes


@njit(cache=True)
def _run(costs: _Costs, microbatches: int, even: bool, by_time: bool, fill: bool) -> tuple[bool, Codes]:
    """One run under given switches: whether it found room for every op, and the kinds of the ops of each stage."""
    stages = costs.us.shape[1]
    state = _State(
        np.zeros((3, stages, microbatches)),
        np.zeros((2, stages)),
        np.zeros((6, stages), np.int64),
        np.zeros((stages, 3 * microbatches), np.int8),
    )
    _warm_up(costs, state, even)
    finished = _by_time(costs, state, fill) if by_time else _by_rounds(costs, state, fill)
    if finished:
        for s in range(stages):
            while state.tally[PENDING, s]:
                _append(costs, state, s, W, state.clock_us[NOW, s])
    return finished, state.order


@njit(cache=True)
def _append(costs: _Costs, state: _State, s: int, kind: int, start_us: float) -> None:
    if state.tally[MADE, s]:
        state.clock_us[IDLE, s] += start_us - state.clock_us[NOW, s]
    state.clock_us[NOW, s] = start_us + costs.us[kind, s]
    state.tally[MEMORY, s] += costs.bytes[kind, s]
    state.end_us[kind, s, state.tally[kind, s]] = state.clock_us[NOW, s]
    state.order[s, state.tally[MADE, s]] = kind
    state.tally[MADE, s] += 1
    state.tally[kind, s] += 1
    if kind != F:
        state.tally[PENDING, s] += 1 if kind == B else -1


@njit(cache=True)
def _fits(costs: _Costs, s: int, kind: int, memory_bytes: int) -> bool:
    """Whether an op has room at a level of memory."""
    return bool(memory_bytes + costs.bytes[ROOM + kind, s] <= costs.bytes[BUDGET, s])


@njit(cache=True)
def _ready(costs: _Costs, state: _State, s: int, kind: int) -> float:
    """When the next F or B of stage `s` has its input."""
    i = state.tally[kind, s]
    if kind == F:
        return float(state.end_us[F, s - 1, i] + costs.us[INTO_F, s]) if s else 0.0
    if s == costs.us.shape[1] - 1:
        return float(state.end_us[F, s, i])
    return float(state.end_us[B, s + 1, i] + costs.us[INTO_B, s])


@njit(cache=True)
def _put(costs: _Costs, state: _State, s: int, kind: int) -> None:
    _append(costs, state, s, kind, max(state.clock_us[NOW, s], _ready(costs, state, s, kind)))


@njit(cache=True)
def _warm_up(costs: _Costs, state: _State, even: bool) -> None:
    """Forwards up to the first B of every stage, and these first B."""
    stages = costs.us.shape[1]
    for s in range(stages):
        _put(costs, state, s, F)
    for s in range(stages - 1, -1, -1):
        while s < stages - 1 and _wants_forward(costs, state, s, even) and _lead(costs, state, s):
            pass
        if not _fits(costs, s, B, state.tally[MEMORY, s]):
            return
        _put(costs, state, s, B)


@njit(cache=True)
def _wants_forward(costs: _Costs, state: _State, s: int, even: bool) -> bool:
    """Whether stage `s` takes one more forward before its first B."""
    forwards, microbatches = state.tally[F, s], state.end_us.shape[2]
    if forwards >= microbatches or (even and forwards >= _even_share(costs, microbatches, s)):
        return False
    return bool(state.clock_us[NOW, s] + costs.us[F, s] <= _ready(costs, state, s, B))


@njit(cache=True)
def _even_share(costs: _Costs, microbatches: int, s: int) -> int:
    """Forwards of stage `s` before its first B if the first stage fills its memory and the last takes one."""
    last = costs.us.shape[1] - 1
    room = min(costs.bytes[BUDGET, 0] // max(costs.bytes[F, 0], 1), microbatches)
    return int(max(last + 1 - s, np.floor(room - s * (room - 1) / last)))


@njit(cache=True)
def _lead(costs: _Costs, state: _State, s: int) -> bool:
    """One more forward on stage `s`, and on the stages before it as many as keep each ahead of the next.

    Does nothing and returns False where one of them has no room for that.
    """
    more = np.zeros(s + 1, np.int64)
    for j in range(s + 1):
        wanted = min(state.end_us.shape[2], state.tally[F, s] + 1 + s - j)
        more[j] = max(0, wanted - state.tally[F, j])
        level = state.tally[MEMORY, j] + (more[j] - 1) * costs.bytes[F, j]
        if more[j] and not _fits(costs, j, F, level):
            return False
    for j in range(s + 1):
        for _ in range(more[j]):
            _put(costs, state, j, F)
    return True


@njit(cache=True)
def _step(costs: _Costs, state: _State, s: int, kind: int, fill: bool) -> None:
    """An F or B of stage `s`, with the W that should go before it."""
    ready = _ready(costs, state, s, kind)
    while state.tally[PENDING, s] and not _fits(costs, s, kind, state.tally[MEMORY, s]):
        _append(costs, state, s, W, state.clock_us[NOW, s])
    while state.tally[PENDING, s] and ready - state.clock_us[NOW, s] >= costs.us[W, s]:
        _append(costs, state, s, W, state.clock_us[NOW, s])
    if state.tally[PENDING, s] and _fills_gap(costs, state, s, ready - state.clock_us[NOW, s], fill):
        _append(costs, state, s, W, state.clock_us[NOW, s])
    _put(costs, state, s, kind)


@njit(cache=True)
def _fills_gap(costs: _Costs, state: _State, s: int, gap_us: float, fill: bool) -> bool:
    """Whether a W goes into an idle gap shorter than itself."""
    if gap_us <= 0:
        return False
    if fill and 2 * gap_us >= costs.us[W, s]:
        return True
    return bool(state.clock_us[IDLE, s] + gap_us > state.clock_us[IDLE].max())


@njit(cache=True)
def _can(costs: _Costs, state: _State, s: int, kind: int) -> bool:
    """Whether the next F or B of stage `s` has its input planned, and room once all pending W are done."""
    i = state.tally[kind, s]
    after_weights = state.tally[MEMORY, s] + state.tally[PENDING, s] * costs.bytes[W, s]
    if i >= state.end_us.shape[2] or not _fits(costs, s, kind, after_weights):
        return False
    if kind == F:
        return bool(s == 0 or state.tally[F, s - 1] > i)
    return bool(state.tally[F, s] > i and (s == costs.us.shape[1] - 1 or state.tally[B, s + 1] > i))


@njit(cache=True)
def _by_rounds(costs: _Costs, state: _State, fill: bool) -> bool:
    """One F on every stage, first to last, then one B on every stage, last to first. False when stuck."""
    stages, total = costs.us.shape[1], state.end_us[B].size
    while state.tally[B].sum() < total:
        moved = False
        for turn in range(2 * stages):
            s, kind = (turn, F) if turn < stages else (2 * stages - 1 - turn, B)
            if _can(costs, state, s, kind):
                _step(costs, state, s, kind, fill)
                moved = True
        if not moved:
            return False
    return True


@njit(cache=True)
def _by_time(costs: _Costs, state: _State, fill: bool) -> bool:
    """Always the op that can start first; at equal times B before F, B of late and F of early stages first.

    False when stuck.
    """
    stages = costs.us.shape[1]
    starts, kinds = np.empty(stages), np.empty(stages, np.int64)
    for s in range(stages):
        starts[s], kinds[s] = _first_choice(costs, state, s)
    left = state.end_us[B].size - state.tally[B].sum()
    while left:
        s = int(np.argmin(starts))
        for other in range(s + 1, stages):
            if starts[other] == starts[s] and kinds[other] == B:
                s = other
        kind = kinds[s]
        if kind == NOTHING:
            return False
        _step(costs, state, s, kind, fill)
        left -= kind == B
        fed = s + 1 if kind == F else s - 1
        for changed in (s, fed):
            if 0 <= changed < stages:
                starts[changed], kinds[changed] = _first_choice(costs, state, changed)
    return True


@njit(cache=True)
def _first_choice(costs: _Costs, state: _State, s: int) -> tuple[float, int]:
    """When the F or B that stage `s` could start first can start, and its kind."""
    start, kind = np.inf, NOTHING
    for other in (B, F):
        if _can(costs, state, s, other):
            its_start = max(state.clock_us[NOW, s], _ready(costs, state, s, other))
            if its_start < start:
                start, kind = its_start, other
    return start, kind
