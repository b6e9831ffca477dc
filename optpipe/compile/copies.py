"""Where memory is given back and taken on the compute stream for a copy: RELEASE and PREPARE.

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

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from optpipe.compile.actions import Action
from optpipe.orders import DeviceOrders, Op, Orders
from optpipe.waits import Times


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
