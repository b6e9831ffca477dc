"""Whole forwards before a device's first backward, chained over devices (docs/math/bounds.md, "Whole forwards").

Before its first backward a device runs nothing but forwards, one after another. So where all of them take the same
time, each op of the first microbatch begins after a whole number of them and the time that the device idled. The
windows of `warmup_cooldown` use that for each device alone; here it is chained along the path of the first microbatch,
on which every device waits for what the next one rounds up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np

from optpipe.problem import Floats, Problem
from solver.bounds.warmup_cooldown import Windows

MOST_STAGES = 256
"""Most stages for which the chain is followed: a tenth of a second."""

HALVINGS = 50
"""Halvings of the interval in which the bound lies, before it is found exactly."""


def whole_forwards_bound_us(problem: Problem, known_us: float = 0.0) -> float:
    """The least value of at least `known_us` for which the warm-ups of all devices can be whole forwards.

    For problems whose microbatches are alike, and kept or offloaded whole. `known_us`: a bound that is known already.
    """
    if len(problem.stages) > MOST_STAGES:
        return known_us
    chain = _Chain(problem)
    below_us = max([known_us, *(device.without_us for device in chain.devices)])
    above_us = max([below_us, *(device.without_us + device.forward_us for device in chain.devices)])
    if above_us == below_us or chain.follow(below_us) is None:
        return below_us  # with so much idle time every device may wait for whatever comes
    for _ in range(HALVINGS):
        middle_us = (below_us + above_us) / 2
        if chain.follow(middle_us) is None:
            above_us = middle_us
        else:
            below_us = middle_us
    raised_us = chain.follow(below_us)
    return below_us if raised_us is None else min(raised_us, above_us)


def forwards_before_first_backward(problem: Problem) -> Sequence[int]:
    """For each stage the fewest forwards of its device before that device's first backward, at the least value above.

    Empty where there are too many stages, or no value is enough.
    """
    if len(problem.stages) > MOST_STAGES:
        return []
    chain = _Chain(problem)
    if chain.follow(whole_forwards_bound_us(problem)) is not None:
        return []
    return [chain.device_of[s].forwards for s in range(chain.count)]


class _WarmUp:
    """The warm-up of a device; the value is at least `without_us` plus its idle time.

    `forwards`: their number before the first backward in the chain that was followed last.
    """

    def __init__(self, windows: Windows) -> None:
        self.windows = windows
        self.numbers, self.without_us = windows.numbers, windows.without_warm_up_us
        stages, room = windows.stages, windows.room_for_forwards
        times_us = {stage.forward_us for stage in stages}
        self.is_whole = len(times_us) == 1
        self.forward_us = times_us.pop() if self.is_whole else 0.0
        moved = [stage.offload.bytes if stage.offload else 0 for stage in stages]
        staying = min(stage.activation_bytes - size for stage, size in zip(stages, moved, strict=True))
        most = windows.problem.units * len(stages)
        if staying and room < float("inf"):
            most = min(most, max(0, int((room - min(moved)) // staying)))
        self.counts = np.arange(most + 1)
        self.forwards = 0

    @cached_property
    def earliest_us(self) -> Floats:
        """For each number of forwards the least time in us from the first op by which all have run and have had room.

        What does not fit has been offloaded by then, at the channel's rate.
        """
        whole_us: Floats = self.counts * np.float64(self.forward_us)
        room, rate = self.windows.room_for_forwards, self.windows.out_rate
        if room == float("inf") or rate == float("inf"):
            return whole_us
        excess = self.counts * min(stage.activation_bytes for stage in self.windows.stages) - room
        with np.errstate(divide="ignore", invalid="ignore"):
            least_us: Floats = np.where(excess > 0, np.maximum(whole_us, excess / rate), whole_us)
        return least_us

    def rounded_us(self, time_us: float, idle_us: float, *, from_start: bool) -> tuple[float, float]:
        """The least time of at least `time_us` that is made up of whole forwards and idle time of at most `idle_us`.

        Times count from the device's first op, or without `from_start` from a later one, after which memory sets no
        bound. Also returns the least idle time above `idle_us` that allows another number of forwards. Both are
        infinite where there is none.
        """
        if not self.is_whole:
            return time_us, float("inf")
        whole_us = self.counts * float(self.forward_us)
        times_us = np.maximum(time_us, self.earliest_us if from_start else whole_us)
        idles_us = times_us - whole_us
        fits = idles_us <= idle_us
        more_us = float(idles_us[~fits].min(initial=float("inf")))
        if not fits.any():
            return float("inf"), more_us
        chosen = int(np.argmin(np.where(fits, times_us, float("inf"))))
        self.forwards = chosen
        return float(times_us[chosen]), more_us


class _Chain:
    """The path of the first microbatch: F of all stages and B of all back, numbered from 0, and the devices on it."""

    def __init__(self, problem: Problem) -> None:
        self.devices = [_WarmUp(windows) for windows in Windows.each(problem)]
        self.device_of = {s: device for device in self.devices for s in device.numbers}
        stages = problem.stages
        self.count = len(stages)
        steps_us = [stage.forward_us for stage in stages] + [stage.backward_input_us for stage in stages[:0:-1]]
        delays_us = [*problem.forward_delay_us, 0.0, *problem.backward_delay_us[::-1]]
        starts_us = accumulate((a + b for a, b in zip(steps_us, delays_us, strict=True)), initial=0.0)
        self.starts_us = np.array(list(starts_us))

    def follow(self, value_us: float) -> float | None:
        """None if a schedule of this value can follow the chain, else a larger value below which none can.

        `times_us[c]` are the least times from the start of op c of the chain to those of all others: by the ops and
        delays between them, and between two ops of a device before its first backward by whole forwards and idle time.
        """
        times_us: dict[int, Floats] = {}
        next_us, possible = float("inf"), True
        for s in reversed(range(self.count)):
            device = self.device_of[s]
            idle_us = value_us - device.without_us
            own_us = self.starts_us - self.starts_us[s]
            if s + 1 < self.count:
                own_us = np.maximum(own_us, own_us[s + 1] + times_us[s + 1])
            first_backward = 2 * self.count - 1 - device.numbers[-1]
            for k in [*(t for t in device.numbers if t > s), first_backward]:
                rounded_us, more_us = device.rounded_us(float(own_us[k]), idle_us, from_start=s == device.numbers[0])
                next_us = min(next_us, device.without_us + more_us)
                if rounded_us == float("inf"):
                    possible = False
                    break
                behind_us = times_us[k] if k < self.count else self.starts_us - self.starts_us[k]
                own_us[k:] = np.maximum(own_us[k:], rounded_us + behind_us[k:])
            if not possible:
                break
            times_us[s] = own_us
        return None if possible else next_us
