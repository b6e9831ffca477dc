"""Offload in a program: host slabs of planned size, and when copies release and take device memory.

An activation needs its host buffer from the start of its O to the end of its R. Whichever two do not overlap in the
plan may use one slab; the later O then waits for the earlier R, which has ended by its start in the plan and so costs
nothing there. The waits are taken from planned times alone, so they contradict neither the orders nor one another.

The slabs are a colouring of the interval graph of each device. Activations are taken one after another, each into the
smallest slab that fits and is free all the while (of equal ones into the one free for longest, which leaves a late
reload most room), else the largest free one grows, else a new one is made. This is done by falling size (after
Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference") and by start, and the smaller total is
taken. Where all sizes are equal, there are then as few slabs as activations are on the host at once.

Device memory is allocated and freed on the compute stream only, so what is in use after any number of its actions is
decided by the list: F, PREPARE and workspaces take, RELEASE, B, W and BW give back. A slow copy can hold RELEASE up,
and with it all compute behind it, but it cannot change what is in use there.

**The list never holds more than `peak_bytes_any_timing`.** That peak is the largest level over all sets of events
(starts and ends of ops) which contain, with each event, all that must come before it by orders, rules and waits. Take
the compute-stream actions up to any point of a device's list, and read RELEASE as the end of its O and PREPARE as the
start of its R, the two moments at which a copy changes the level. With them, take everything that they need: it is

* compute ops of the device, which stand before them in the list because lowering puts nothing before what it needs;
* starts of O and ends of R, which change nothing;
* ends of O and starts of R. Whatever needs the end of an O (its own R, an op or a reload that waits for it, a later O,
  whose RELEASE comes later) has that RELEASE before it: `insert_releases` puts it there. Whatever needs the end of an R
  (its B, an op that waits for it, a later R, an O that waits for it) has the R, and so its PREPARE, before it.

So the level at that point is the level of such a set, and at most the peak. RELEASE stands as late as that allows,
right before the first action that needs it, since it stalls compute until the copy out is over: an offload that
nobody waits for is given back only for its own reload.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from optpipe.compile.program import Action, Slab
from optpipe.memory import Times, host_effect
from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.problem import Problem

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
        index = len(self.begins) if self.begins[-1] <= stay.begin else bisect_left(self.begins, stay.end)
        if not index:
            return (float("-inf"), False)
        before = self.stays[index - 1]
        return before.end if before.end <= stay.begin else None

    def add(self, stay: _Stay) -> None:
        index = bisect_left(self.begins, stay.begin)
        self.size_bytes = max(self.size_bytes, stay.size_bytes)
        self.stays.insert(index, stay)
        self.begins.insert(index, stay.begin)


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


def insert_releases(devices: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Each list with RELEASE for every O, in the order of the offload stream, each as late as it may come.

    `waits` must still be those of the plan: they say who needs the end of an O.
    """
    return tuple(tuple(_with_releases(actions)) for actions in devices)


def _with_releases(actions: Sequence[Action]) -> Iterator[Action]:
    copied: list[Action] = []
    number: dict[tuple[int, int], int] = {}
    released = 0
    for action in actions:
        needed = max((number[copy] for copy in _copies_needed(action)), default=-1)
        for copy in copied[released : needed + 1]:
            yield Action("RELEASE", copy.stage, copy.microbatch)
        released = max(released, needed + 1)
        if action.kind == "O":
            number[action.stage, action.microbatch] = len(copied)
            copied.append(action)
        yield action


def _copies_needed(action: Action) -> Iterator[tuple[int, int]]:
    """Stage and microbatch of the offloads whose end an action needs."""
    if action.kind == "PREPARE":
        yield action.stage, action.microbatch
    for wait in action.waits:
        if wait.kind == "O":
            yield wait.stage, wait.microbatch


def reload_begins_us(orders: Orders, planned: Times) -> dict[Op, float]:
    """The reloads that had better begin later than planned, with that time: when the op beside them is over.

    A reload is planned to begin beside a compute op X, so its PREPARE belongs before X. If it also needs an offload
    that ends while X runs, that RELEASE would stand before X too and hold X up. Then either X waits for the copy out,
    or the reload for the end of X: whichever costs less, as far as the plan's own times tell.
    """
    begins: dict[Op, float] = {}
    for device in orders.devices:
        begins |= _postponed(device, orders.waits, planned)
    return begins


def _postponed(device: DeviceOrders, waits: Mapping[Op, Sequence[Op]], planned: Times) -> Iterator[tuple[Op, float]]:
    ends = [planned[op][1] for op in device.compute]
    latest_us = _latest_begins_us(device, planned)
    begin_us = 0.0
    for reload in device.reload:
        start_us = planned[reload][0]
        place = bisect_right(ends, start_us)
        if place < len(ends):
            beside_us, over_us = planned[device.compute[place]]
            out = [Op("O", *reload[1:]), *(op for op in waits.get(reload, ()) if op.kind == "O")]
            stall_us = max(planned[op][1] for op in out) - beside_us
            if stall_us > 0 and over_us - latest_us[reload] < stall_us:
                begin_us = over_us
        if begin_us > start_us:  # also a reload behind one that begins later
            yield reload, begin_us


def _latest_begins_us(device: DeviceOrders, planned: Times) -> dict[Op, float]:
    """For each reload the latest begin with which it and all behind it are still back for their backward ops."""
    backward = {op[1:]: op for op in device.compute if op.kind in ("B", "BW")}
    latest: dict[Op, float] = {}
    next_us = float("inf")
    for reload in reversed(device.reload):
        start_us, end_us = planned[reload]
        next_us = min(next_us, planned[backward[reload[1:]]][0]) - (end_us - start_us)
        latest[reload] = next_us
    return latest
