"""Offload in a program: pinned host slabs of planned size, and the allocation of device memory around copies.

An activation needs its host buffer from the start of its O to the end of its R. Two activations that do not overlap in
the plan may share a slab; the later O then waits for the earlier R, which has ended by then in the plan, so the wait
costs nothing there. These waits follow planned times, so they contradict neither the orders nor one another.

The slabs are a colouring of the interval graph of each device. Each activation takes the smallest slab that fits and is
free throughout (of equal ones, the one free for longest, which gives a late reload the most slack), else the largest
free slab grows, else a new one is added. Two orders are tried, decreasing size (Pisarchyk and Lee, "Efficient Memory
Management for Deep Neural Net Inference") and start time, and the smaller total is kept. If all sizes are equal, the
number of slabs is the largest number of activations on the host at one time, which is optimal.

Device memory is allocated and freed on the compute stream only, so the list determines the memory in use after any
number of its actions: F, C, PREPARE and workspaces allocate, RELEASE, W and backwards free. A slow copy can stall
RELEASE, and all compute behind it, but it cannot change the memory in use there.

**The list never holds more than `peak_bytes_any_timing`.** That peak is the largest level over all closed sets of
events (starts and ends of ops): sets that contain, with each event, all its predecessors by orders, rules and waits.
Take the compute-stream actions up to any point of a device's list, and read RELEASE as the end of its O and PREPARE as
the start of its R, the two moments at which a copy changes the level. Their closure adds only

* compute ops of the device, which precede them in the list because lowering puts nothing before its predecessors;
* starts of O and ends of R, which change nothing;
* ends of O and starts of R. Every action that needs the end of an O (its own R, an op or a reload that waits for it, a
  later O, whose RELEASE comes later) has that RELEASE before it: `insert_releases` puts it there. Every action that
  needs the end of an R (its B or C, an op that waits for it, a later R, an O that waits for it) has the R, and so its
  PREPARE, before it.

So the level at that point is the level of a closed set, and at most the peak. RELEASE is as late as that allows, right
before the first action that needs it, since it stalls compute until the copy has ended: the memory of an offload
without waits is freed only for its own reload.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from optpipe.compile.program import Action, Slab
from optpipe.kinds import BACKWARDS
from optpipe.memory import Times
from optpipe.ops import DeviceOrders, Ints, Op, OpArray, Orders
from optpipe.problem import Problem
from optpipe.task_graph import lower

Moment = tuple[float, bool]
"""Sort key of an instant: time in us; at equal times a zero-length offload comes before a zero-length reload."""


class _Stay(NamedTuple):
    """Interval of one activation on the host, from the start of its O to the end of its R."""

    size_bytes: int
    begin: Moment
    end: Moment
    stage: int
    microbatch: int


@dataclass
class _Users:
    """Disjoint stays of one slab, by time."""

    size_bytes: int = 0
    stays: list[_Stay] = field(default_factory=list)
    begins: list[Moment] = field(default_factory=list)

    def free_since(self, stay: _Stay) -> Moment | None:
        """Time since which the slab is free for this stay; None if it is not free throughout."""
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
    """Slabs of each device, slab of each offloaded (stage, microbatch), and the reload that each O waits for."""

    slabs: tuple[tuple[Slab, ...], ...]
    slab_of: Mapping[tuple[int, int], int]
    waits: Mapping[Op, Op]


def plan_slabs(problem: Problem, planned: Times, modes: Ints | None = None) -> HostPlan:
    """Assign a slab to every offload. `planned` holds the times of every O and R, `modes` are those of `Orders`."""
    stays: list[list[_Stay]] = [[] for _ in problem.devices]
    offloads = [op for op in planned if op.kind == "O"]
    graph = lower(problem)
    sizes_bytes = graph.host_bytes[graph.types(OpArray.of(offloads), modes), 0].tolist()
    for op, size_bytes in zip(offloads, sizes_bytes, strict=True):
        start_us, end_us = planned[op]
        reload_us, back_us = planned[Op("R", op.stage, op.microbatch)]
        # A zero-length O and a zero-length R at one instant may run in either order: they never share a slab.
        stay = _Stay(size_bytes, (start_us, start_us < end_us), (back_us, reload_us == back_us), *op[1:])
        stays[problem.stages[op.stage].device].append(stay)
    coloured: list[list[_Users]] = []
    for of_device in stays:
        colourings = [_colour(sorted(of_device, key=lambda stay: (-stay.size_bytes, *stay[1:])))]
        if len({stay.size_bytes for stay in of_device}) > 1:  # else both orders are the same
            colourings.append(_colour(sorted(of_device, key=lambda stay: stay[1:])))
        coloured.append(min(colourings, key=lambda slabs: sum(slab.size_bytes for slab in slabs)))
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
    slabs_of_devices = tuple(
        tuple(Slab(slab.size_bytes, tuple(sorted({stay.stage for stay in slab.stays}))) for slab in slabs)
        for slabs in coloured
    )
    return HostPlan(slabs_of_devices, slab_of, waits)


def _colour(stays: Sequence[_Stay]) -> list[_Users]:
    """Assign slabs greedily to stays in the given order."""
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


def insert_releases(devices: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Insert a RELEASE for every O into each list, in the order of the offload stream and as late as possible.

    `waits` must still be those of the plan: they tell which actions need the end of an O.
    """
    lists = []
    for actions in devices:
        result: list[Action] = []
        offloads: list[Action] = []
        number: dict[tuple[int, int], int] = {}
        released = 0
        for action in actions:
            needs = [wait[1:] for wait in action.waits if wait.kind == "O"]
            if action.kind == "PREPARE":
                needs.append((action.stage, action.microbatch))
            last = max((number[key] for key in needs), default=-1)
            result += [Action("RELEASE", o.stage, o.microbatch) for o in offloads[released : last + 1]]
            released = max(released, last + 1)
            if action.kind == "O":
                number[action.stage, action.microbatch] = len(offloads)
                offloads.append(action)
            result.append(action)
        lists.append(tuple(result))
    return tuple(lists)


def reload_begins_us(orders: Orders, planned: Times) -> dict[Op, float]:
    """Start times of the reloads that should start later than planned: at the end of the concurrent compute op.

    A reload is planned to start while a compute op X runs, so its PREPARE belongs before X. If it also needs an offload
    that ends while X runs, that RELEASE would be before X too and stall it. Then either X waits for the offload, or the
    reload for the end of X: whichever costs less by planned times.
    """
    begins: dict[Op, float] = {}
    for device in orders.devices:
        ends = [planned[op][1] for op in device.compute]
        latest_us = _latest_begins_us(device, planned)
        begin_us = 0.0
        for reload in device.reload:
            start_us = planned[reload][0]
            index = bisect_right(ends, start_us)
            if index < len(ends):
                compute_start_us, compute_end_us = planned[device.compute[index]]
                offloads = [Op("O", *reload[1:]), *(op for op in orders.waits.get(reload, ()) if op.kind == "O")]
                stall_us = max(planned[op][1] for op in offloads) - compute_start_us
                if stall_us > 0 and compute_end_us - latest_us[reload] < stall_us:
                    begin_us = compute_end_us
            if begin_us > start_us:  # also a reload behind a postponed one
                begins[reload] = begin_us
    return begins


def _latest_begins_us(device: DeviceOrders, planned: Times) -> dict[Op, float]:
    """Latest start of each reload with which it and all later ones end before the ops that need them start."""
    user = {op[1:]: op for op in reversed(device.compute) if op.kind == "C" or op.kind in BACKWARDS}
    latest: dict[Op, float] = {}
    next_us = float("inf")
    for reload in reversed(device.reload):
        start_us, end_us = planned[reload]
        next_us = min(next_us, planned[user[reload[1:]]][0]) - (end_us - start_us)
        latest[reload] = next_us
    return latest
