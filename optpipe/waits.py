"""Waits that keep memory within its planned peak whatever the timings do.

Streams run side by side, so a slow offload could let a forward begin before the memory that it counts on is free.
If every op that takes memory waits for all releases that had ended by its planned start, then at any moment, under
any durations, consider the op that was planned last among those that took memory: all releases planned before it
are done, so the level is at most the planned level there. Streams run in order, so one wait for each other stream
is enough, and none delays an op at the planned times.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from optpipe.memory import Effect, device_effect, host_effect
from optpipe.orders import KINDS, DeviceOrders, Op
from optpipe.problem import Problem, Stage

Times = Mapping[Op, tuple[float, float]]
"""Planned start and end of each op, in any unit."""

Effects = Mapping[tuple[int, str], Effect]
"""What an op of a stage and kind takes and frees."""


def derive_waits(
    problem: Problem, devices: Sequence[DeviceOrders], planned: Times, tolerance: float = 0.0
) -> dict[Op, list[Op]]:
    """The waits that make a plan safe under any timing.

    `planned` holds the start and end of every op; a release counts as ended by a start up to `tolerance` later.
    Returns for each op the ops of other streams to wait for; waits that follow from earlier ones are left out.
    """
    waits: dict[Op, list[Op]] = defaultdict(list)
    on_device, on_host = _table(problem, device_effect), _table(problem, host_effect)
    for device in devices:
        if not device.offload:
            continue
        for acquirers, releasers in (
            (device.compute, device.offload),
            (device.reload, device.offload),
            (device.reload, device.compute),
        ):
            _add(waits, on_device, acquirers, releasers, planned, tolerance)
        if problem.host_memory_bytes is not None:
            _add(waits, on_host, device.offload, device.reload, planned, tolerance)
    return dict(waits)


def planned_order(ops: Iterable[Op], planned: Times) -> list[Op]:
    """Ops of one stream in the order of their planned times (microbatches in theirs, where times are equal)."""
    return sorted(ops, key=lambda op: (*planned[op], op.microbatch))


def _add(
    waits: dict[Op, list[Op]],
    effects: Effects,
    acquirers: Sequence[Op],
    releasers: Sequence[Op],
    planned: Times,
    tolerance: float,
) -> None:
    """Let each acquiring op of one stream wait for the last release of another stream that was planned before it."""
    releases = [op for op in releasers if effects[op.stage, op.kind].releases]
    ends = [planned[op][1] for op in releases]
    waited = 0
    for op in acquirers:
        if not effects[op.stage, op.kind].acquires:
            continue
        done = bisect_right(ends, planned[op][0] + tolerance)
        while done > waited and _instant(planned[op]) and _instant(planned[releases[done - 1]]):
            done -= 1  # two ops without length at one instant could otherwise wait for each other
        if done > waited:
            waits[op].append(releases[done - 1])
            waited = done


def _instant(times: tuple[float, float]) -> bool:
    return times[0] == times[1]


def _table(problem: Problem, effect: Callable[[Stage, str], Effect]) -> Effects:
    return {(s, kind): effect(stage, kind) for s, stage in enumerate(problem.stages) for kind in KINDS}
