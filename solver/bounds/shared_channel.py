"""Idle time in the warm-up of devices that share a channel to the host, which carries the bytes of one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from optpipe.problem import Problem
from solver.bounds.warmup_cooldown import Windows


def shared_channel_bounds_us(problem: Problem) -> Sequence[float]:
    """A bound from each device that has stages: that of the group whose channel it shares, 0 where it has its own.

    In its warm-up a device runs F alone, as many as fit in its budget and in what has left. What a group's channel
    carries meanwhile, all its devices share: so they idle together, at least (docs/math/bounds.md).
    """
    devices = {device.stages[0].device: device for device in Windows.each(problem)}
    bounds = dict.fromkeys(devices, 0.0)
    for group in problem.channel_groups:
        members = [devices[d] for d in group if d in devices]
        if len(members) > 1:
            bounds.update(dict.fromkeys((device.stages[0].device for device in members), _group_bound_us(members)))
    return [bounds[d] for d in devices]


def _group_bound_us(members: Sequence[Windows]) -> float:
    """The least value at which the group's idle time in warm-up finds room on its devices."""
    without_us = [device.without_warm_up_us for device in members]
    return max(0.0, (_idle_us(members) + sum(without_us)) / len(members))


def _idle_us(members: Sequence[Windows]) -> float:
    """Idle time that all devices together have before their first backwards; negative where F fill more than that."""
    stages = [stage for device in members for stage in device.stages]
    if not all(stage.activation_bytes for stage in stages) or any(device.budget == float("inf") for device in members):
        return 0.0
    byte_us = max(stage.forward_us / stage.activation_bytes for stage in stages)
    copied_us = byte_us * max(device.out_rate for device in members)  # of F that a us of copying allows
    if copied_us > 1:
        return 0.0  # the longer a window, the more could F fill
    # The channel works from the end of some device's first F to the start of the last F before a first backward.
    windows_us = [device.warm_up_us for device in members]
    longest_us = max(windows_us)
    for first, last in permutations(members, 2):
        longest_us = max(longest_us, first.warm_up_us + last.warm_up_us - last.to_first_backward_us(first))
    channel_us = max(0.0, longest_us - 2 * min(stage.forward_us for stage in stages))
    room_us = byte_us * sum(device.room_for_forwards for device in members)
    return sum(windows_us) - room_us - copied_us * channel_us
