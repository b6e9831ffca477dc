"""Host buffers: offloaded activations share few slabs of planned size, so that pinned memory is allocated once.

An activation needs its host buffer from the start of its O to the end of its R. Whichever two do not overlap in the
plan may use one slab; the later O then waits for the earlier R, which has ended by its start in the plan and so costs
nothing there. The waits are taken from planned times alone, so they contradict neither the orders nor one another.

The slabs are a colouring of the interval graph of each device. Activations are taken one after another, each into the
smallest slab that fits and is free all the while (of equal ones into the one free for longest, which leaves a late
reload most room), else the largest free one grows, else a new one is made. This is done by falling size (after
Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference") and by start, and the smaller total is
taken. Where all sizes are equal, there are then as few slabs as activations are on the host at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from optpipe.compile.actions import Slab
from optpipe.memory import host_effect
from optpipe.orders import Op
from optpipe.problem import Problem
from optpipe.waits import Times

Moment = tuple[float, bool]
"""A time in us, and at equal times a reload that takes no time after the offload that takes none."""


class _Stay(NamedTuple):
    """One activation on the host, from the start of its O until the end of its R."""

    size_bytes: int
    begin: Moment
    end: Moment
    stage: int
    microbatch: int


@dataclass
class _Users:
    """The stays in one slab, in order of time, disjoint."""

    size_bytes: int = 0
    stays: list[_Stay] = field(default_factory=list)
    begins: list[Moment] = field(default_factory=list)

    def free_since(self, stay: _Stay) -> Moment | None:
        """When the slab became free for this stay; None if it is not free all the while."""
        place = len(self.begins) if self.begins[-1] <= stay.begin else bisect_left(self.begins, stay.end)
        if not place:
            return (float("-inf"), False)
        before = self.stays[place - 1]
        return before.end if before.end <= stay.begin else None

    def add(self, stay: _Stay) -> None:
        place = bisect_left(self.begins, stay.begin)
        self.size_bytes = max(self.size_bytes, stay.size_bytes)
        self.stays.insert(place, stay)
        self.begins.insert(place, stay.begin)


@dataclass(frozen=True)
class HostPlan:
    """The slabs of each device, the slab of each offloaded (stage, microbatch), and the reload each O waits for."""

    slabs: tuple[tuple[Slab, ...], ...]
    slab_of: Mapping[tuple[int, int], int]
    waits: Mapping[Op, Op]


def plan_slabs(problem: Problem, planned: Times) -> HostPlan:
    """Give every offloaded activation a slab. `planned` holds the times of every O and R."""
    stays: list[list[_Stay]] = [[] for _ in problem.devices]
    for stay in _stays(problem, planned):
        stays[problem.stages[stay.stage].device].append(stay)
    coloured = [_coloured(mine) for mine in stays]
    slab_of = {
        (stay.stage, stay.microbatch): number
        for slabs in coloured
        for number, slab in enumerate(slabs)
        for stay in slab.stays
    }
    waits = {
        Op("O", after.stage, after.microbatch): Op("R", before.stage, before.microbatch)
        for slabs in coloured
        for slab in slabs
        for before, after in pairwise(slab.stays)
    }
    return HostPlan(tuple(tuple(map(_slab, slabs)) for slabs in coloured), slab_of, waits)


def _stays(problem: Problem, planned: Times) -> Iterator[_Stay]:
    for op, (start_us, end_us) in planned.items():
        if op.kind == "O":
            back_us, done_us = planned[Op("R", op.stage, op.microbatch)]
            size_bytes = host_effect(problem.stages[op.stage], "O").at_start
            # An O and an R without length at one instant may stand in any order: they never share a slab.
            yield _Stay(size_bytes, (start_us, start_us < end_us), (done_us, back_us == done_us), *op[1:])


def _coloured(stays: Sequence[_Stay]) -> list[_Users]:
    by_size = _colour(sorted(stays, key=lambda stay: (-stay.size_bytes, *stay[1:])))
    if len({stay.size_bytes for stay in stays}) < 2:
        return by_size
    by_start = _colour(sorted(stays, key=lambda stay: stay[1:]))
    return min(by_size, by_start, key=lambda slabs: sum(slab.size_bytes for slab in slabs))


def _colour(stays: Sequence[_Stay]) -> list[_Users]:
    """Slabs for stays in the order in which they choose."""
    slabs: list[_Users] = []
    for stay in stays:
        chosen = min(
            (
                (slab.size_bytes < stay.size_bytes, abs(slab.size_bytes - stay.size_bytes), since, k)
                for k, slab in enumerate(slabs)
                if (since := slab.free_since(stay))
            ),
            default=None,
        )
        if chosen is None:
            slabs.append(_Users())
        slabs[chosen[-1] if chosen else -1].add(stay)
    return slabs


def _slab(users: _Users) -> Slab:
    return Slab(users.size_bytes, tuple(sorted({stay.stage for stay in users.stays})))
