"""Room on a device by what can have left it: releases by backwards and W, and copies to the host, one at a time.

Units hold their whole activation from F to B except what is offloaded to the host. When an F starts, what is offloaded
of another unit was copied since that unit's F; when a B starts, it is reloaded before that unit's B. So the bytes that
can be offloaded grow no faster than the channel carries them (docs/math/bounds.md, "What the channel can carry").
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple


class Waiting(NamedTuple):
    """A unit that holds its activation on a device, unless it is offloaded or released.

    `moved`: bytes that a copy offloads, which can run from `ready_us` on. `frees`: times and bytes of what is
    released without a copy.
    """

    moved: float
    ready_us: float
    frees: Sequence[tuple[float, float]] = ()


def room_us(waiting: Sequence[Waiting], excess: float, copy_us: float, since_us: float) -> float:
    """The earliest time from `since_us` on by which `excess` bytes can have been released or offloaded.

    Copies take at least `copy_us` each and run one at a time. `since_us` itself if there is no such time.
    """
    at_us = since_us
    while at_us < inf:
        freed, following, gains, ready = 0.0, inf, [], []
        for unit in waiting:
            released = 0.0
            for free_us, size in unit.frees:
                if free_us <= at_us:
                    released += size
                else:
                    following = min(following, free_us)
            freed += released
            if unit.moved > released:
                gains.append(unit.moved - released)
                ready.append(unit.ready_us)
        copies, next_us = copies_by(at_us, ready, copy_us)
        if freed + sum(sorted(gains, reverse=True)[:copies]) >= excess:
            return at_us
        at_us = min(following, next_us)
    return since_us


def copies_by(at_us: float, ready_us: Sequence[float], copy_us: float) -> tuple[int, float]:
    """Number of copies of equal length that can have ended by a time, in order of `ready_us`, and the end of the next.

    The end is infinite where there is no next one.
    """
    ended_us = -inf
    for number, begin_us in enumerate(sorted(ready_us)):
        ended_us = max(ended_us, begin_us) + copy_us
        if ended_us > at_us:
            return number, ended_us
    return len(ready_us), inf


class InFlight(NamedTuple):
    """A unit that is in flight on a stage when B of an earlier one starts there, or whose F comes after that.

    `size`: bytes of the activation; `moved` of them can be offloaded. `forward_us`: from the start of F to the end of
    all (inf where F surely comes before); `back_us`: from the start of its B to the end of all.
    """

    size: float
    moved: float
    forward_us: float
    back_us: float


def tail_room_us(units: Sequence[InFlight], excess: float, copy_us: float, own_us: float, since_us: float) -> float:
    """The least time, `since_us` or more, from the end of a B of `own_us` to the end of all by which all units fit.

    `excess`: bytes by which the budget would be exceeded if all units were in flight and none offloaded (negative:
    room). A unit whose F does not fit in what follows the B is in flight when the B starts. What is offloaded then is
    reloaded later, in at least `copy_us` each, before its own B. `since_us` itself if there is no such time.
    """
    begin_us = since_us + own_us  # from the start of the B
    while begin_us < inf:
        above, following, gains, ready = excess, inf, [], []
        for unit in units:
            if unit.forward_us + own_us <= begin_us:
                above -= unit.size
            else:
                following = min(following, unit.forward_us + own_us)
                if unit.moved:
                    gains.append(unit.moved)
                    ready.append(unit.back_us)
        copies, next_us = copies_by(begin_us, ready, copy_us)
        if sum(sorted(gains, reverse=True)[:copies]) >= above:
            return max(since_us, begin_us - own_us)
        begin_us = min(following, next_us)
    return since_us
