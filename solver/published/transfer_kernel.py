"""Playing compute orders and transfers event by event within the budgets, compiled.

A discrete-event simulation by the rules of `solver.published.transfers`: what starts when, which copy a channel serves,
and what each op waits for.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from numba import njit

from optpipe.ops import Floats, Ints
from solver.timeline import BW, NONE, B, F, O, R, W

Events = list[tuple[float, int]]
"""A heap of times with the op that ends then, or with -1 - d where device d may go on."""

COMPUTE, OFFLOAD, RELOAD = range(3)

STAYS = -1
"""In place of a due place: the activation never leaves."""

KIND, STAGE, MICROBATCH = range(3)
FIRST, FIRST_STAGE, FIRST_MEMBER, MEMBER, GROUP = range(5)
DEVICE, LISTED = range(2)
CHANGE, MOST, AT_END, DELAY = 0, 6, 12, 6
"""Rows of the arrays of Course."""
ROOM, HOST, NEXT, BUSY, TOUCHED, RELEASED, WAITED = 0, 1, 2, 3, 4, 5, 8
DUE, SENT_AS, GONE = range(3)
FORWARDS, HEAD, SENT, BACK = range(4)
SERVED, LAST_DEVICE, LAST_KIND = range(3)
"""Rows of the arrays of State. Structured records in their place made a plan take 1.4 times as long (docs/adr/0014)."""


class Course(NamedTuple):
    """Ops, costs and devices that are played; few arrays, since each costs time to compile and to hand on.

    Compute ops are numbered device by device in their order, then come all offloads and all reloads.

    - `op[:, x]`: KIND, STAGE and MICROBATCH of op x; `backward[s, i]`: the number of a B.
    - `device[:, d]`: its FIRST op, its FIRST_STAGE in the row LISTED, and the GROUP behind one switch that it is in.
      Group g has the devices of row MEMBER from FIRST_MEMBER of g to that of g + 1.
    - `stage`: the DEVICE of each stage, and the stages LISTED device by device.
    - `us[kind, s]`: durations; from DELAY on the time from the end of an F or B of stage s to its neighbour.
    - `bytes[. + kind, s]`: the CHANGE of memory in all, the MOST taken at any time, and the change AT_END.
    """

    op: Ints
    backward: Ints
    device: Ints
    stage: Ints
    us: Floats
    bytes: Ints
    duplex: bool
    host_limited: bool


class State(NamedTuple):
    """State of all devices and channels so far.

    - `device[:, d]`: ROOM and HOST room in bytes, the NEXT compute op, whether it is BUSY, whether it was TOUCHED at
      this time; from RELEASED on for each stream the last op that freed memory; from WAITED on for each stream, and
      each that it waits for, the last op waited for.
    - `activation[:, s, i]`: the place from which on a reload is DUE, the microbatches of stage s in the order in which
      they were SENT_AS, and whether it is GONE: away or on a copy.
    - `tally[:, s]`: FORWARDS that ended, HEAD, the first microbatch that may still leave, and how many offloads were
      SENT and came BACK.
    - `input_us[kind, s, i]`: from when on each F and B has its input.
    - `channel[:, c]`: the copy SERVED, and LAST_DEVICE and LAST_KIND. Group g has channels 2 g and 2 g + 1, the latter
      for reloads, if duplex.
    - `copies`: in the order of their starts. `waits[x]`: at most two ops that op x waits for.
    """

    device: Ints
    activation: Ints
    tally: Ints
    input_us: Floats
    channel: Ints
    copies: Ints
    waits: Ints


@njit(cache=True)
def play(course: Course, state: State) -> int:
    """Play until nothing goes on; returns the number of copies."""
    devices, copies = course.device.shape[1] - 1, 0
    events = [(0.0, -1 - d) for d in range(devices)]
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            x = heappop(events)[1]
            if x < 0:
                state.device[TOUCHED, -1 - x] = 1
            else:
                _end(course, state, events, x, now)
        # Compute first: a reload may take room that a compute op could use now.
        for d in range(devices):
            if state.device[TOUCHED, d]:
                x = _next_compute(course, state, d, now)
                if x != NONE:
                    _start(course, state, events, x, now)
        for d in range(devices):
            if state.device[TOUCHED, d]:
                state.device[TOUCHED, d] = 0
                channel = 2 * course.device[GROUP, d]
                for each in range(channel, channel + 1 + course.duplex):
                    x = _next_copy(course, state, each)
                    if x != NONE:
                        state.copies[copies] = x
                        copies += 1
                        _start(course, state, events, x, now)
    return copies


@njit(cache=True)
def _start(course: Course, state: State, events: Events, x: int, now: float) -> None:
    """Start an op; what takes memory waits for what freed some, unless an earlier op of its stream did."""
    kind, s, i = course.op[KIND, x], course.op[STAGE, x], course.op[MICROBATCH, x]
    d = course.stage[DEVICE, s]
    state.device[ROOM, d] -= course.bytes[MOST + kind, s]
    heappush(events, (now + course.us[kind, s], x))
    if kind < O:
        state.device[NEXT, d] += 1
        state.device[BUSY, d] = 1
        if kind == B:
            state.tally[HEAD, s] = max(state.tally[HEAD, s], i + 1)
    else:
        channel = 2 * course.device[GROUP, d] + (course.duplex and kind == R)
        state.channel[SERVED, channel] = x
        state.channel[LAST_DEVICE, channel], state.channel[LAST_KIND, channel] = d, kind
        if kind == O:
            state.tally[HEAD, s] = i + 1
            state.activation[GONE, s, i] = 1
            state.device[HOST, d] += course.bytes[CHANGE + O, s]
        else:
            state.tally[BACK, s] += 1
    _wait(course, state, x, d)


@njit(cache=True)
def _wait(course: Course, state: State, x: int, d: int) -> None:
    """Let an op that takes memory wait for the last release on each other stream, unless its stream already did.

    With these waits the level of the plan is kept under any timing (docs/math/any-timing.md). An offload takes memory
    of the host, which reloads release.
    """
    kind, s = course.op[KIND, x], course.op[STAGE, x]
    stream = max(kind - BW, 0)
    waits = 0
    for other in (OFFLOAD, COMPUTE, RELOAD):
        takes = course.bytes[CHANGE + O, s] < 0 and kind == O if other == RELOAD else course.bytes[MOST + kind, s] > 0
        before = state.device[RELEASED + other, d]
        if other != stream and takes and before != state.device[WAITED + 3 * stream + other, d]:
            state.waits[x, waits] = before
            state.device[WAITED + 3 * stream + other, d] = before
            waits += 1


@njit(cache=True)
def _end(course: Course, state: State, events: Events, x: int, now: float) -> None:
    """Record the end of an op, and which devices may go on."""
    kind, s, i = course.op[KIND, x], course.op[STAGE, x], course.op[MICROBATCH, x]
    d = course.stage[DEVICE, s]
    state.device[TOUCHED, d] = 1
    state.device[ROOM, d] += course.bytes[MOST + kind, s] - course.bytes[CHANGE + kind, s]
    if course.bytes[AT_END + kind, s] < 0:
        state.device[RELEASED + max(kind - BW, 0), d] = x
    if kind >= O:
        _end_copy(course, state, x, d)
        return
    state.device[BUSY, d] = 0
    if kind == F:
        state.tally[FORWARDS, s] += 1
    near = s + 1 if kind == F else s - 1
    if kind != W and 0 <= near < len(course.backward):
        state.input_us[kind, near, i] = now + course.us[DELAY + kind, s]
        heappush(events, (state.input_us[kind, near, i], -1 - course.stage[DEVICE, near]))


@njit(cache=True)
def _end_copy(course: Course, state: State, x: int, d: int) -> None:
    kind, s, i = course.op[KIND, x], course.op[STAGE, x], course.op[MICROBATCH, x]
    group = course.device[GROUP, d]
    state.channel[SERVED, 2 * group + (course.duplex and kind == R)] = NONE
    for member in range(course.device[FIRST_MEMBER, group], course.device[FIRST_MEMBER, group + 1]):
        state.device[TOUCHED, course.device[MEMBER, member]] = 1
    if kind == O:
        state.activation[SENT_AS, s, state.tally[SENT, s]] = i
        state.tally[SENT, s] += 1
        return
    state.activation[GONE, s, i] = 0
    state.device[HOST, d] += course.bytes[CHANGE + R, s]
    if course.host_limited and course.bytes[CHANGE + R, s]:
        state.device[RELEASED + RELOAD, d] = x


@njit(cache=True)
def _next_compute(course: Course, state: State, d: int, now: float) -> int:
    """The compute op that a device can start now, or NONE."""
    x = state.device[NEXT, d]
    if state.device[BUSY, d] or x == course.device[FIRST, d + 1] or _lacks_room(course, state, d):
        return NONE
    kind, s, i = course.op[KIND, x], course.op[STAGE, x], course.op[MICROBATCH, x]
    if kind == B and state.activation[GONE, s, i]:
        return NONE
    first = kind == W or (kind == F and s == 0) or (kind == B and s == len(course.backward) - 1)
    return x if first or (kind != BW and state.input_us[kind, s, i] <= now) else NONE


@njit(cache=True)
def _lacks_room(course: Course, state: State, d: int) -> bool:
    """True if a device has a next compute op, but no room for it."""
    x = state.device[NEXT, d]
    needed = course.bytes[MOST + course.op[KIND, x], course.op[STAGE, x]]
    return bool(x < course.device[FIRST, d + 1] and 0 < needed > state.device[ROOM, d])


@njit(cache=True)
def _next_copy(course: Course, state: State, channel: int) -> int:
    """The copy that a channel should serve now, or NONE.

    Urgent ones first: an offload whose device lacks room for its next op, a reload whose B is the next op. Then the
    other direction than the last, so that neither starves; the other device behind a switch; and what is best for its
    own device: the offload that is needed last, the reload that is needed first.
    """
    best = (2, 0, 0, 0, NONE)
    if state.channel[SERVED, channel] != NONE:
        return NONE
    group = channel // 2
    for member in range(course.device[FIRST_MEMBER, group], course.device[FIRST_MEMBER, group + 1]):
        d = course.device[MEMBER, member]
        for kind in (O, R):
            if course.duplex and (kind == R) != (channel % 2 == 1):
                continue
            x = _next_offload(course, state, d) if kind == O else _next_reload(course, state, d)
            if x == NONE:
                continue
            b = course.backward[course.op[STAGE, x], course.op[MICROBATCH, x]]
            urgent = _lacks_room(course, state, d) if kind == O else b == state.device[NEXT, d]
            same_kind = state.channel[LAST_KIND, channel] == kind
            same_device = state.channel[LAST_DEVICE, channel] == d
            place = b - course.device[FIRST, d]
            rank = (int(not urgent), int(same_kind), int(same_device), -place if kind == O else place, x)
            if rank < best:
                best = rank
    return best[-1]


@njit(cache=True)
def _next_offload(course: Course, state: State, d: int) -> int:
    """The resident activation whose B is furthest away (PipeOffload: it frees its bytes longest), or NONE.

    One that is due back already leaves only if the device lacks room for its next op.
    """
    urgent = _lacks_room(course, state, d)
    furthest, chosen = NONE, NONE
    for k in range(course.device[FIRST_STAGE, d], course.device[FIRST_STAGE, d + 1]):
        s = course.stage[LISTED, k]
        i = state.tally[HEAD, s]
        while i < state.tally[FORWARDS, s] and state.activation[DUE, s, i] == STAYS:
            i += 1
        state.tally[HEAD, s] = i
        if i >= state.tally[FORWARDS, s] or -course.bytes[CHANGE + O, s] > state.device[HOST, d]:
            continue
        if course.backward[s, i] > furthest and (urgent or state.device[NEXT, d] < state.activation[DUE, s, i]):
            furthest, chosen = course.backward[s, i], _copy(course, O, s, i)
    return chosen


@njit(cache=True)
def _next_reload(course: Course, state: State, d: int) -> int:
    """The activation away whose B comes first, if it is due and has room, or NONE."""
    nearest, chosen = course.device[FIRST, d + 1], NONE
    for k in range(course.device[FIRST_STAGE, d], course.device[FIRST_STAGE, d + 1]):
        s = course.stage[LISTED, k]
        if state.tally[BACK, s] < state.tally[SENT, s]:
            i = state.activation[SENT_AS, s, state.tally[BACK, s]]
            if course.backward[s, i] < nearest:
                nearest, chosen = course.backward[s, i], _copy(course, R, s, i)
    if (
        chosen == NONE
        or state.device[NEXT, d] < state.activation[DUE, course.op[STAGE, chosen], course.op[MICROBATCH, chosen]]
    ):
        return NONE
    return chosen if _leaves_room(course, state, d, course.op[STAGE, chosen], nearest) else NONE


@njit(cache=True)
def _copy(course: Course, kind: int, s: int, i: int) -> int:
    """The number of an offload or reload."""
    stages, microbatches = course.backward.shape
    return int(course.device[FIRST, -1] + ((kind - O) * stages + s) * microbatches + i)


@njit(cache=True)
def _leaves_room(course: Course, state: State, d: int, s: int, b: int) -> bool:
    """True if all ops up to a B would fit beside its activation if nothing else left.

    Without this a reload could take the room of an op before its B, and the device would wait for itself.
    """
    room = state.device[ROOM, d] - course.bytes[MOST + R, s]
    if room < 0:
        return False
    for x in range(state.device[NEXT, d], b + 1):
        kind, stage = course.op[KIND, x], course.op[STAGE, x]
        if course.bytes[MOST + kind, stage] > room:
            return False
        room -= course.bytes[CHANGE + kind, stage]
    return True
