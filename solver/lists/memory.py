"""List schedules in which memory decides how each microbatch is held: kept, sent to the host, or recomputed.

As in `ada-offload` a device that is free takes what is ready: B before F, and W when nothing else is ready or too many
are left over. Here every device keeps its budget at every op. An F runs in the mode that keeps its activation if there
is room, else in one that recomputes; some room stays free so that the next backward can always have its activation. A
recomputation runs inside the backward where the stage can do that, else ahead of it: as soon as the gradient is on its
way, or whenever the device has nothing else to do.

Where a stage may offload, kept activations are offloaded in the order of their F as soon as the channel is free, unless
they are needed too soon. They are reloaded when their gradient is on its way, or some backwards earlier where copies
are slow. An op that takes memory waits for the last releases on the other streams that had ended when it started, which
keeps memory safe under any timing (`optpipe.memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple, TypeVar, cast

import numpy as np
from numba import njit

from optpipe.kinds import KINDS
from optpipe.ops import Bools, DeviceOrders, Floats, Ints, OpArray, Orders, WaitArray
from optpipe.problem import Problem
from optpipe.task_graph import lower
from solver.timeline import NO_LIMIT, NONE, B, F, W

Kernel = TypeVar("Kernel", bound=Callable[..., object])

DROP, MAKE, INSIDE, OUT, BACK = (cast(int, np.int64(row)) for row in range(3, 8))
"""Rows beside F, B and W: the F of a microbatch that is recomputed, its C, its CB, and the copies O and R."""

_KIND_OF_ROW = np.array([KINDS.index(kind) for kind in ("F", "B", "W", "F", "C", "CB", "O", "R")])

KEPT, DROPPED, RECOMPUTED, OFFLOADING, OFFLOADED, RELOADING, RELOADED = range(7)
"""States of an activation."""

WITH_GRADIENT, ON_ITS_WAY, WHEN_IDLE = range(3)
"""Start of a recomputation: once the gradient is there, once it is known to come, or in idle time as well."""

GOLDEN = (5**0.5 - 1) / 2
"""Golden ratio: fractional parts of its multiples are spread evenly, and so are the multiples whose part is small."""

LEFT_BEFORE_DROP = 1
"""Most pending W with which an F drops its activation; with more, a W runs first, to make room for keeping it."""

COMPUTE, OFFLOAD, RELOAD = range(3)
"""Streams of a device. Its channels are numbered from OFFLOAD on; with one for both directions that is OFFLOAD."""


class StageCosts(NamedTuple):
    """Costs of ops by row and stage, and where stages are; device d holds ``stages[first[d]:first[d + 1]]``.

    Group g of devices behind one channel is ``members[first_member[g]:first_member[g + 1]]``.

    `delay_us`: from the end of the neighbour's F or B to the start of the F or B that it feeds. `need_bytes` must be
    free when an op starts, `change_bytes` is its change of memory in all; `frees`: True if memory is freed at its end.
    `backward_bytes`: what stays free after an F so that the activation of one microbatch can be restored;
    `forward_bytes`: beside it, so that the microbatch gets through the later stages of its device; `more_bytes`: also
    beside it after an F whose activation is kept, so that others can follow that are recomputed. `leaves`: activations
    may be offloaded, if at least `soon` backwards come before theirs, or if they are back before their backward can
    start: `way_us` is the least time from the end of F to the start of B. `trained`: stages that have a backward, of
    which `first_trained` is the lowest. `at_speed`: activations of a device between F and W if no microbatch waits and
    the device is never idle.
    """

    us: Floats
    delay_us: Floats
    need_bytes: Ints
    change_bytes: Ints
    frees: Bools
    backward_bytes: Ints
    forward_bytes: Ints
    more_bytes: Ints
    recomputes: Bools
    inside: Bools
    leaves: Bools
    soon: Ints
    way_us: Floats
    trained: Bools
    first_trained: int
    device_of: Ints
    first: Ints
    stages: Ints
    budget_bytes: Ints
    group_of: Ints
    first_member: Ints
    members: Ints
    at_speed: Floats
    duplex: bool


class State(NamedTuple):
    """Ops placed so far, each on a stage in the order of microbatches; op (row, s, i) is ``(row * S + s) * M + i``.

    `end_us[kind, s, i]`: the end of an F or B. `placed[row, s]`: how many F, B, W and copies. `held[s, i]`: the state
    of an activation; `next_out[s]`: the first microbatch that may still leave. `order[d]`: the compute ops of a device,
    ``length[d]`` of them. `pending[d]`: stages of B in their order, whose W from ``left[0, d]`` to ``left[1, d]`` are
    left. By stream and device: `free_us`, the end of its last op; `running`, that op until its end is settled, or NONE;
    `released`, the last op that ended and freed memory; `waited[stream]`, for each stream the last one waited for.
    `served`: by stream and group the device whose copy came last. `copies`: in the order of their starts. `waits`:
    pairs of an op and one that it waits for. `counts`: how many of both.
    """

    end_us: Floats
    placed: Ints
    held: Ints
    next_out: Ints
    level_bytes: Ints
    order: Ints
    length: Ints
    pending: Ints
    left: Ints
    free_us: Floats
    running: Ints
    released: Ints
    waited: Ints
    served: Ints
    copies: Ints
    waits: Ints
    counts: Ints


class Rules(NamedTuple):
    """Limits and priorities by which a list schedule takes what is ready.

    At most `in_flight` microbatches are between their first F and their last B. At most `late_weights` W are left over
    on a device while it does other things; any number once its first stage has no more than `tail` F left for each
    stage of the model, so that they fill the gaps between the last backwards (-1: never). `ahead`: when C may run.
    `early`: backwards before its own at which an activation may be reloaded; 0: when its gradient is on its way.

    F go before B while fewer activations of a device are in flight than `stock` times those there are if no microbatch
    waits and no device is idle: the B that are put off fill the cool-down.

    No F begins less than `hold` times its duration before a gradient comes: an F that runs as the gradient comes delays
    the backwards of all stages before.

    An activation is kept only where there is room beside it for `behind` microbatches that are recomputed: without it
    devices wait for memory. Where `reserve` is at least 0, a plan decides instead which are recomputed: of the
    microbatches that a device has in flight, the share that leaves room for `reserve` more. The plan may be made for
    fewer in flight than there are, `planned` for each stage of the model (0: `in_flight`); the first `warm_up` for each
    stage are then recomputed as well.
    """

    in_flight: int
    late_weights: int
    tail: float = 0
    ahead: int = ON_ITS_WAY
    behind: int = 0
    early: int = 0
    reserve: int = -1
    hold: float = 0
    planned: float = 0
    warm_up: float = 0
    stock: float = 0


class MemoryLists:
    """List schedules of a problem whose stage s recomputes in mode ``modes[s]``, and offloads in mode ``out[s]``.

    Both are indices into `Stage.choices`; with 0 the stage never does. The host must not be limited, unless nothing is
    offloaded. `within_budgets`: False for schedules to which devices have no limit.
    """

    def __init__(
        self, problem: Problem, modes: Sequence[int], out: Sequence[int], *, within_budgets: bool = True
    ) -> None:
        self.problem = problem
        self.modes = np.array(modes, np.int64)
        self.out = np.array(out, np.int64)
        self.within_budgets = within_budgets
        self._costs: dict[int, StageCosts] = {}

    def play(self, rules: Rules) -> State | None:
        """The state with all ops placed by these rules; None if a device is left with ops that never fit its budget."""
        state, shares = self._begin(), np.zeros(0)
        tail, planned, warm_up = (round(n * len(self.modes)) for n in (rules.tail, rules.planned, rules.warm_up))
        if rules.reserve >= 0:
            shares = self._planned_shares(planned or rules.in_flight, rules.reserve)
        # Of one type each: numba compiles for every other.
        counted = rules._replace(
            tail=tail, planned=planned, warm_up=warm_up, hold=float(rules.hold), stock=float(rules.stock)
        )
        return state if _run(self._costs_of(rules.behind), state, counted, shares) else None

    def _costs_of(self, behind: int) -> StageCosts:
        if behind not in self._costs:
            costs = _stage_costs(self.problem, self.modes, self.out, behind)
            if not self.within_budgets:
                costs = costs._replace(budget_bytes=np.full_like(costs.budget_bytes, NO_LIMIT))
            self._costs[behind] = costs
        return self._costs[behind]

    def makespan_us(self, rules: Rules) -> float:
        """The end of the last op in us; infinite if memory lacks room. The orders may end earlier, not later."""
        state = self.play(rules)
        return float("inf") if state is None else float(state.free_us.max())

    def orders(self, rules: Rules) -> Orders | None:
        """The orders by these rules; None if memory lacks room."""
        state = self.play(rules)
        if state is None:
            return None
        copies, pairs = state.counts.tolist()
        moved = self._ops(state.copies[:copies])
        device = lower(self.problem).device[moved.stage]
        devices, channels = [], []
        for d, (ops, count) in enumerate(zip(state.order, state.length.tolist(), strict=True)):
            own = moved[np.flatnonzero(device == d)] if copies else moved
            devices.append(DeviceOrders(self._ops(ops[:count]), *_by_kind(own)))
        duplex = self.problem.copy_channels.duplex
        for group in self.problem.channel_groups if copies else ():
            own = moved[np.flatnonzero(np.isin(device, group))]
            if not duplex or len(group) > 1:
                channels += [served for served in (_by_kind(own) if duplex else (own,)) if len(served)]
        waits = WaitArray(*map(self._ops, state.waits[:pairs].T))
        if not self.problem.has_modes:
            return Orders(devices, waits, channels)
        held = [state.held == KEPT, state.held == RELOADED]
        modes = np.select(held, [0, self.out[:, None]], self.modes[:, None]).astype(np.int64)
        return Orders(devices, waits, channels, modes)

    def _planned_shares(self, in_flight: int, reserve: int) -> Floats:
        """The share of each stage's microbatches that is recomputed, the same on all stages of a device."""
        costs = self._costs_of(0)
        held = (costs.change_bytes[F] + costs.change_bytes[OUT]).tolist()
        less = np.where(costs.recomputes, np.maximum(held - costs.change_bytes[DROP], 0), 0).tolist()
        stages = len(held)
        numbers = [in_flight * (1 - s / stages) for s in range(stages)]  # as in 1F1B
        shares = np.zeros(stages)
        for device, of_device in zip(self.problem.devices, self.problem.stages_of, strict=True):
            if device.memory_bytes is None:
                continue
            needed = sum(numbers[s] * held[s] for s in of_device) + reserve * max(
                (held[s] for s in of_device), default=0
            )
            saved = sum(numbers[s] * less[s] for s in of_device)
            if saved:
                shares[of_device] = min(max((needed - device.memory_bytes) / saved, 0.0), 1.0)
        return shares

    def _ops(self, numbers: Ints) -> OpArray:
        rest, microbatch = np.divmod(numbers, self.problem.units)
        row, stage = np.divmod(rest, len(self.problem.stages))
        return OpArray(_KIND_OF_ROW[row], stage, microbatch)

    def _begin(self) -> State:
        problem = self.problem
        stages, m, devices = len(problem.stages), problem.units, len(problem.devices)
        most = max(map(len, problem.stages_of)) * m
        ways = 4 if self.modes.any() else 3
        copies = 2 * np.count_nonzero(self.out) * m
        return State(
            end_us=np.zeros((2, stages, m)),
            placed=np.zeros((len(_KIND_OF_ROW), stages), np.int64),
            held=np.zeros((stages, m), np.int64),
            next_out=np.zeros(stages, np.int64),
            level_bytes=np.zeros(devices, np.int64),
            order=np.zeros((devices, ways * most), np.int64),
            length=np.zeros(devices, np.int64),
            pending=np.zeros((devices, most), np.int64),
            left=np.zeros((2, devices), np.int64),
            free_us=np.zeros((3, devices)),
            running=np.full((3, devices), NONE, np.int64),
            released=np.full((3, devices), NONE, np.int64),
            waited=np.full((3, 3, devices), NONE, np.int64),
            served=np.full((3, len(problem.channel_groups)), NONE, np.int64),
            copies=np.zeros(copies, np.int64),
            waits=np.zeros(((ways * stages * m + copies if copies else 0), 2), np.int64),
            counts=np.zeros(2, np.int64),
        )


def _by_kind(copies: OpArray) -> tuple[OpArray, OpArray]:
    """Offloads and reloads, each in their order."""
    offloads = copies.kind == KINDS.index("O")
    return copies[np.flatnonzero(offloads)], copies[np.flatnonzero(~offloads)]


def _stage_costs(problem: Problem, modes: Ints, out: Ints, behind: int) -> StageCosts:
    graph, groups = lower(problem), problem.channel_groups
    stages = np.arange(len(modes))
    members = np.concatenate([np.array(group, np.int64) for group in groups])
    kept = np.zeros_like(modes)
    options = np.stack([kept, kept, kept, modes, modes, modes, out, out])
    types = np.ravel_multi_index((_KIND_OF_ROW[:, None], stages, options, 0), graph.shape)
    there = ~np.isnan(graph.duration_us[types])
    us = np.where(there, graph.duration_us[types], 0.0)
    change, need, at_end = (
        np.where(there, sizes[types], 0) for sizes in (graph.change_bytes, graph.needed_bytes, graph.device_bytes[:, 1])
    )
    trained, recomputes, inside = there[B], there[MAKE], there[INSIDE]
    backward = np.maximum(need[B], 0)
    made = np.where(recomputes, np.where(inside, need[INSIDE], need[MAKE] + backward), 0)
    backward_bytes = np.maximum(np.maximum(made, need[BACK] + backward), need[B])
    forward = np.where(recomputes, need[DROP], need[F])
    forward_bytes = np.zeros(len(stages), np.int64)
    for of_device in problem.stages_of:
        room = 0  # later stages of the device need room as well, or its microbatches stand
        for s in reversed(of_device):
            forward_bytes[s] = room if trained[s] else max(room - forward[s], 0)
            backward_bytes[s] = backward_bytes[of_device].max()
            room = forward[s] + forward_bytes[s]
    ahead_us, back_us = (graph.delays_us[direction][:, 0] for direction in ("forward", "backward"))
    passes_us = us[F] + us[B]
    delays_us = np.append(ahead_us, 0.0) + np.append(back_us, 0.0)
    period_us = us[F] + us[B] + us[W]
    way_us = np.cumsum((passes_us + delays_us)[::-1])[::-1] - passes_us
    sizes = graph.sizes_bytes
    return StageCosts(
        us=us,
        delay_us=np.array([np.append(0.0, ahead_us), np.append(back_us, 0.0)]),
        need_bytes=need,
        change_bytes=change,
        frees=at_end < 0,
        backward_bytes=backward_bytes,
        forward_bytes=forward_bytes,
        more_bytes=(sizes["forward_workspace"] + behind * sizes["kept"])[stages, modes, 0] * (behind > 0),
        recomputes=recomputes,
        inside=inside,
        leaves=need[BACK] > 0,
        soon=1 + np.ceil((us[OUT] + us[BACK]) / np.maximum(period_us, 1e-9)).astype(np.int64),
        way_us=way_us,
        trained=trained,
        first_trained=int(np.argmax(trained)),
        device_of=graph.device,
        first=np.cumsum([0, *map(len, problem.stages_of)]),
        stages=np.concatenate([np.array(of_device, np.int64) for of_device in problem.stages_of]),
        budget_bytes=np.array([NO_LIMIT if d.memory_bytes is None else d.memory_bytes for d in problem.devices]),
        group_of=np.repeat(np.arange(len(groups)), [*map(len, groups)])[np.argsort(members)],
        first_member=np.cumsum([0, *map(len, groups)]),
        members=members,
        at_speed=np.array(
            [((way_us + period_us) * trained)[own].sum() / max(period_us[own].sum(), 1e-9) for own in problem.stages_of]
        ),
        duplex=problem.copy_channels.duplex,
    )


def _without_reference_counts(function: Kernel) -> Kernel:
    """Compile a function that makes no arrays without reference counts of its arguments.

    Counting takes seven times as long as all else here: every call counts some thirty arrays, each an atomic step.
    """
    return cast(Kernel, njit(cache=True, _nrt=False)(function))  # type: ignore[call-overload]  # not in its stubs


@njit(cache=True, nogil=True)
def _run(costs: StageCosts, state: State, rules: Rules, shares: Floats) -> bool:
    """Place ops in the order of time; False if a device is left with ops for which it never had room."""
    (stages, microbatches), devices = state.held.shape, len(state.length)
    copies = costs.leaves.any()
    wake = [(0.0, costs.device_of[0])]
    while wake:
        now, d = heappop(wake)
        if d >= devices:
            _copy(costs, state, rules, wake, d - devices, now)
            continue
        for stream in range(3):
            if state.running[stream, d] != NONE and state.free_us[stream, d] <= now:
                _end(costs, state, d, stream)
        if state.running[COMPUTE, d] == NONE:
            row, s = _choose(costs, state, rules, shares, d, now)
            if row != NONE:
                _start(costs, state, d, COMPUTE, row, s, now)
                heappush(wake, (state.free_us[COMPUTE, d], d))
                if row not in (W, MAKE):
                    forwards = row in (F, DROP)
                    fed = s + 1 if forwards else s - 1
                    if 0 <= fed < stages:
                        near = costs.device_of[fed]
                        comes_us = state.free_us[COMPUTE, d] + costs.delay_us[F if forwards else B, fed]
                        idle = state.running[COMPUTE, near] == NONE  # else it looks again when its op ends
                        if idle or comes_us > state.free_us[COMPUTE, near]:
                            heappush(wake, (comes_us, near))
                        if not forwards:
                            if s == costs.first_trained:  # the first stage may wait for a microbatch to end
                                heappush(wake, (state.free_us[COMPUTE, d], costs.device_of[0]))
                            held = state.held[fed, state.placed[B, s] - 1]
                            if held == OFFLOADED or (held == DROPPED and idle and rules.ahead != WITH_GRADIENT):
                                heappush(wake, (now, near))
        if copies:
            g = costs.group_of[d]
            if costs.first_member[g + 1] - costs.first_member[g] == 1:
                _copy(costs, state, rules, wake, g, now)
            else:
                heappush(wake, (now, devices + g))  # when all devices have ended and begun what they can now
    return bool((state.placed[F] == microbatches).all() and (state.placed[W] == microbatches * costs.trained).all())


@njit(cache=True, nogil=True)
def _copy(costs: StageCosts, state: State, rules: Rules, wake: list[tuple[float, int]], g: int, now: float) -> None:
    """Let the channels of a group serve its devices now: the reload that is due first, or the fullest device."""
    reloads = RELOAD if costs.duplex else OFFLOAD
    for channel, row in ((reloads, BACK), (OFFLOAD, OUT)):
        last = state.served[channel, g]
        if last != NONE and state.running[channel, last] != NONE:
            continue
        first, chosen, served = (np.inf, 0, 0), NONE, NONE
        for d in costs.members[costs.first_member[g] : costs.first_member[g + 1]]:
            if row == BACK:
                s = _next_back(costs, state, rules, d)
                urgency = 0.0 if s == NONE else _due_us(costs, state, s)
            else:
                s = _next_out(costs, state, d, now)
                urgency = -state.level_bytes[d] / costs.budget_bytes[d]
            rank = (urgency, int(last == d), d)
            if s != NONE and (chosen == NONE or rank < first):
                first, chosen, served = rank, s, d
        if chosen != NONE:
            _start(costs, state, served, channel, row, chosen, now)
            state.served[channel, g] = served
            heappush(wake, (state.free_us[channel, served], served))


@_without_reference_counts
def _due_us(costs: StageCosts, state: State, s: int) -> float:
    """Arrival of the gradient of the next activation of a stage to come back; infinite where it is not on its way."""
    stages, i = len(state.held), _next_away(state, s)
    kind, near = (F, s) if s + 1 == stages else (B, s + 1)
    return float(state.end_us[kind, near, i] + costs.delay_us[B, s]) if i < state.placed[kind, near] else np.inf


@_without_reference_counts
def _start(costs: StageCosts, state: State, d: int, stream: int, row: int, s: int, now: float) -> None:
    """Run the next op of a row on a stage now."""
    stages, microbatches = state.held.shape
    end_us = now + costs.us[row, s]
    state.free_us[stream, d] = end_us
    state.level_bytes[d] += costs.need_bytes[row, s]
    kind = F if row == DROP else B if row in (INSIDE, MAKE) else row
    if row == OUT:
        i = state.next_out[s]
    elif row == BACK:
        i = _next_away(state, s)
    else:
        i = state.placed[kind, s]
    x = (row * stages + s) * microbatches + i
    state.running[stream, d] = x
    if row in (OUT, BACK):
        state.copies[state.counts[0]] = x
        state.counts[0] += 1
        state.placed[row, s] = i + 1
        if row == OUT:
            state.next_out[s] = i + 1
        state.held[s, i] = OFFLOADING if row == OUT else RELOADING
    else:
        state.order[d, state.length[d]] = x
        state.length[d] += 1
        if row == MAKE:
            state.held[s, i] = RECOMPUTED
        else:
            state.placed[kind, s] += 1
            if row == DROP:
                state.held[s, i] = DROPPED
            if kind == W:
                state.left[0, d] += 1
            else:
                state.end_us[kind, s, i] = end_us
            if kind == B:
                state.pending[d, state.left[1, d]] = s
                state.left[1, d] += 1
    if costs.need_bytes[row, s] > 0:
        # A release counts on the stream that an op is of; a copy back is on its own, whichever channel serves it.
        own = RELOAD if row == BACK else stream
        for other in (COMPUTE, OFFLOAD):
            before = state.released[other, d]
            if other != own and before != NONE and before != state.waited[own, other, d]:
                state.waits[state.counts[1], 0], state.waits[state.counts[1], 1] = x, before
                state.counts[1] += 1
                state.waited[own, other, d] = before


@_without_reference_counts
def _end(costs: StageCosts, state: State, d: int, stream: int) -> None:
    """Settle the end of the op that runs on a stream."""
    stages, microbatches = state.held.shape
    x = state.running[stream, d]
    state.running[stream, d] = NONE
    row, s, i = x // (stages * microbatches), x // microbatches % stages, x % microbatches
    state.level_bytes[d] += costs.change_bytes[row, s] - costs.need_bytes[row, s]
    if costs.frees[row, s]:
        state.released[stream, d] = x
    if row == OUT:
        state.held[s, i] = OFFLOADED
    elif row == BACK:
        state.held[s, i] = RELOADED


@_without_reference_counts
def _choose(costs: StageCosts, state: State, rules: Rules, shares: Floats, d: int, now: float) -> tuple[int, int]:
    """Row and stage of what a free device runs now; the row is NONE where it waits."""
    microbatches = state.held.shape[1]
    own_stages = costs.stages[costs.first[d] : costs.first[d + 1]]
    rank, chosen, next_us = (microbatches, 0), (NONE, 0), np.inf
    for s in own_stages:
        i, comes_us = state.placed[B, s], _gradient_us(costs, state, s)
        if np.isnan(comes_us):
            continue
        held = state.held[s, i]
        if held == RELOADING:
            comes_us = max(comes_us, state.free_us[RELOAD if costs.duplex else OFFLOAD, d])
        if comes_us > now:
            next_us = min(next_us, comes_us)
        elif (i, -s) < rank and held not in (OFFLOADING, OFFLOADED, RELOADING):
            row = B if held != DROPPED else INSIDE if costs.inside[s] else MAKE
            if _has_room(costs, state, d, row, s, 0):
                rank, chosen = (i, -s), (row, s)
    if chosen[0] == NONE and rules.ahead != WITH_GRADIENT:
        for s in own_stages:
            i = state.placed[B, s]
            if i == microbatches or (i, -s) > rank or state.held[s, i] != DROPPED:
                continue
            if _gradient_us(costs, state, s) > now and _has_room(costs, state, d, MAKE, s, 0):
                rank, chosen = (i, -s), (MAKE, s)
    lacks_room = False
    below_stock = rules.stock > 0 and _in_flight(costs, state, own_stages) < rules.stock * costs.at_speed[d]
    backward = rank, chosen
    if below_stock:
        rank, chosen = (microbatches, 0), (NONE, 0)
    if chosen[0] == NONE and next_us >= now + rules.hold * costs.us[F, own_stages[0]]:
        for s in own_stages:
            i, comes_us = state.placed[F, s], _forward_us(costs, state, s, rules.in_flight)
            if np.isnan(comes_us):
                continue
            if comes_us > now:
                next_us = min(next_us, comes_us)
            elif (i, -s) < rank:
                row, spare_bytes = F, costs.forward_bytes[s] + _spare_bytes(costs, state, d, s, KEPT)
                planned = len(shares) > 0
                early = i * len(shares) < rules.warm_up * (len(shares) - s)
                drops = planned and (early or i * GOLDEN % 1 < shares[s])
                if drops or not _has_room(costs, state, d, F, s, spare_bytes + costs.more_bytes[s]):
                    row, spare_bytes = DROP, costs.forward_bytes[s] + _spare_bytes(costs, state, d, s, DROPPED)
                    may_drop = costs.recomputes[s] and (drops or not planned)
                    if not may_drop or not _has_room(costs, state, d, DROP, s, spare_bytes):
                        lacks_room = True
                        continue
                rank, chosen = (i, -s), (row, s)
    if below_stock and chosen[0] != F and backward[1][0] != NONE:
        rank, chosen = backward
    pending = state.left[1, d] - state.left[0, d]
    if pending:
        s = state.pending[d, state.left[0, d]]
        # A gap is long if the oldest W is done before the next input comes.
        fills_gap = chosen[0] == NONE and (lacks_room or now + costs.us[W, s] <= next_us)
        makes_room = chosen[0] == DROP and pending > LEFT_BEFORE_DROP
        late = pending > rules.late_weights and state.placed[F, own_stages[0]] < microbatches - rules.tail
        if late or fills_gap or makes_room:
            return W, s
    if chosen[0] == NONE and rules.ahead == WHEN_IDLE:
        for s in own_stages:
            i = state.placed[B, s]
            if i == state.placed[F, s] or (i, -s) > rank or state.held[s, i] != DROPPED:
                continue
            if now + costs.us[MAKE, s] <= next_us and _has_room(costs, state, d, MAKE, s, 0):
                rank, chosen = (i, -s), (MAKE, s)
    return chosen


@_without_reference_counts
def _in_flight(costs: StageCosts, state: State, stages: Ints) -> int:
    """Activations of a device between their F and their B."""
    number = 0
    for s in stages:
        if costs.trained[s]:
            number += state.placed[F, s] - state.placed[B, s]
    return number


@_without_reference_counts
def _spare_bytes(costs: StageCosts, state: State, d: int, s: int, held: int) -> int:
    """Bytes that an F must leave free so that the next backward of its device can run; `held`: its own state then.

    With one stage a device it is known which backward that is. Where its activation is on the device, the backward
    needs only its own workspace, and what it and its W free can be taken by the one after it.
    """
    if costs.first[d + 1] - costs.first[d] > 1:
        return int(costs.backward_bytes[s])
    i = state.placed[B, s]
    first = state.held[s, i] if i < state.placed[F, s] else held
    if first in (DROPPED, OFFLOADING, OFFLOADED):
        return int(costs.backward_bytes[s])
    freed_bytes = -costs.change_bytes[B, s] - costs.change_bytes[W, s]
    return int(max(costs.need_bytes[B, s], costs.backward_bytes[s] - freed_bytes, 0))


@_without_reference_counts
def _next_out(costs: StageCosts, state: State, d: int, now: float) -> int:
    """The stage whose next activation to offload is needed last, or NONE."""
    furthest, chosen = NONE, NONE
    for s in costs.stages[costs.first[d] : costs.first[d + 1]]:
        if not costs.leaves[s]:
            continue
        i, ended = state.next_out[s], state.placed[F, s]
        x = state.running[COMPUTE, d]
        if x != NONE and ended and x // state.held.shape[1] in (F * len(state.held) + s, DROP * len(state.held) + s):
            ended -= 1  # its F still runs
        back_us = now + costs.us[OUT, s] + costs.us[BACK, s] - costs.way_us[s]
        while i < ended and (
            state.held[s, i] != KEPT
            or (i - state.placed[B, s] < costs.soon[s] and (i < state.placed[B, s] or state.end_us[F, s, i] < back_us))
        ):
            i += 1
        state.next_out[s] = i
        if i < ended and i - state.placed[B, s] > furthest:
            furthest, chosen = i - state.placed[B, s], s
    return chosen


@_without_reference_counts
def _next_away(state: State, s: int) -> int:
    """The first microbatch of a stage that is on the host; the next one to offload if none is."""
    i = max(state.placed[BACK, s], state.placed[B, s])
    while i < state.next_out[s] and state.held[s, i] != OFFLOADED:
        i += 1
    return int(i)


@_without_reference_counts
def _next_back(costs: StageCosts, state: State, rules: Rules, d: int) -> int:
    """The stage whose next activation should be reloaded now, and fits, or NONE."""
    stages, microbatches = state.held.shape
    rank, chosen = (microbatches, 0), NONE
    for s in costs.stages[costs.first[d] : costs.first[d + 1]]:
        if not costs.leaves[s] or state.placed[OUT, s] == state.placed[BACK, s]:
            continue
        i, first = _next_away(state, s), state.placed[B, s]
        if i >= state.next_out[s] or (i, -s) > rank:
            continue
        known = i < (state.placed[F, s] if s + 1 == stages else state.placed[B, s + 1])
        if not known and i - first >= rules.early:
            continue
        spare_bytes = max(costs.need_bytes[B, s], 0)
        if i > first and state.held[s, first] == DROPPED:
            spare_bytes = costs.backward_bytes[s]
        if _has_room(costs, state, d, BACK, s, spare_bytes):
            rank, chosen = (i, -s), s
    return chosen


@_without_reference_counts
def _has_room(costs: StageCosts, state: State, d: int, row: int, s: int, spare_bytes: int) -> bool:
    return bool(state.level_bytes[d] + costs.need_bytes[row, s] + spare_bytes <= costs.budget_bytes[d])


@_without_reference_counts
def _gradient_us(costs: StageCosts, state: State, s: int) -> float:
    """Arrival of the input of the next B of a stage; NaN where that is not placed, or no B is left."""
    stages, microbatches = state.held.shape
    i = state.placed[B, s]
    kind, near = (F, s) if s + 1 == stages else (B, s + 1)
    if i == microbatches or i >= state.placed[kind, near] or not costs.trained[s]:
        return np.nan
    return float(state.end_us[kind, near, i] + costs.delay_us[B, s])


@_without_reference_counts
def _forward_us(costs: StageCosts, state: State, s: int, in_flight: int) -> float:
    """Arrival of the input of the next F of a stage; NaN where that is not placed, or no F is left.

    On the first stage a microbatch waits for the last B of one in flight, on the lowest stage that has one.
    """
    microbatches = state.held.shape[1]
    i = state.placed[F, s]
    if i == microbatches:
        return np.nan
    if s:
        return float(state.end_us[F, s - 1, i] + costs.delay_us[F, s]) if i < state.placed[F, s - 1] else np.nan
    if i < in_flight:
        return 0.0
    first = costs.first_trained
    return float(state.end_us[B, first, i - in_flight]) if i - in_flight < state.placed[B, first] else np.nan
