"""Byte-time bounds, and rounds on devices that hold only a few microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import gcd

import numpy as np

from optpipe.problem import Problem
from optpipe.stage import Stage
from solver.bounds.device import OnDevice
from solver.variants import Variant, variants


def memory_time_bounds_us(problem: Problem) -> Sequence[float]:
    """A bound from each device with stages and a budget: the byte-time its microbatches need over the budget.

    It is Little's law (1961) with its ends: what is held on average is what comes in a time times how long it stays.
    It rules where memory is too tight for a period without idle time, however many microbatches there are.

    Proof. On stage s every microbatch holds its activation during F, the way on to the last stage and back, and B; then
    what W needs during W (a fused backward holds the activation instead). Where it leaves to the host, that part is
    away during the way, less both copies, at most; and the copies of one direction follow one another on the channel.
    Count as used the activations before B's end, and while a W runs what it needs, at most an activation's size. That
    is within the budget at any time.
    At a time t after the device's first op at most ``1 + t / F`` forwards have begun; at a time t before the end of its
    last op at most ``1 + t / (B + W)`` backwards are not done, the one that runs included; so less than the budget is
    used near both ends. Hence ``budget * span >= byte-time needed - byte-time saved by offload in span + unused``.

    Up to the end of the last backward it is the same with B in place of B + W at the end; W that come later held what
    they need then, at most the budget, each for its length. The way from stage 0 to the device and back comes
    on top, see `warmup_cooldown_bounds_us`.
    """
    return [device.bound_us for device in _MemoryTime.each(problem)]


class _MemoryTime(OnDevice):
    """The byte-time of a device."""

    @property
    def bound_us(self) -> float:
        """The larger of the bounds by activations and W, and by activations alone; 0 where a budget does not count."""
        if self.budget in (0, float("inf")):
            return 0.0
        weights_byte_us = self.problem.units * sum(
            min(stage.activation_bytes, stage.backward_weight_bytes) * stage.backward_weight_us for stage in self.stages
        )
        # W after the last backward held what they need by then: the budget together, each for its own length.
        later_byte_us = self.budget * max(stage.backward_weight_us for stage in self.stages)
        span_us = self._least_time_us(weights_byte_us, "BW", self.budget)
        bound_us = self.value_us(span_us, self._least_time_us(weights_byte_us - later_byte_us, "B", self.budget))
        moved = [stage.offload.bytes for stage in self.stages if stage.offload]
        divisor = gcd(*moved, *(stage.activation_bytes for stage in self.stages))
        if divisor and self.budget >= divisor:
            to_last_backward_us = self._least_time_us(0, "B", self.budget // divisor * divisor)
            last_us = self.stages[0].duration_us("W")
            bound_us = max(bound_us, self.value_us(to_last_backward_us + last_us, to_last_backward_us))
        return bound_us

    @cached_property
    def _activations_byte_us(self) -> float:
        """Byte-time of the activations of all microbatches, none of which leaves."""
        return self.problem.units * sum(
            stage.activation_bytes * (stage.duration_us("F") + self.paths.turnaround_us(s, s) + stage.duration_us("B"))
            for s, stage in zip(self.numbers, self.stages, strict=True)
        )

    def _least_time_us(self, beside_byte_us: float, backward: str, budget: float) -> float:
        """The least time in which a budget has the byte-time of activations and so much more, ramps at both ends."""
        needed_byte_us = self._activations_byte_us + beside_byte_us
        needed_byte_us += unused_byte_us(self, budget, [stage.activation_bytes for stage in self.stages], backward)
        directions = ["O", "R"] if self.problem.copy_channels.duplex else ["OR"]
        return max(self._time_with_copies_us(needed_byte_us, kinds, budget) for kinds in directions)

    def _time_with_copies_us(self, needed_byte_us: float, kinds: str, budget: float) -> float:
        """The least L with ``budget * L`` and what copies of these kinds save in L no less than what is needed.

        Copies of a channel follow one another, so those of L take at most L. Savings count in the order of their rate:
        what they save in L is then concave in L, and the least L is found by going through its pieces.
        """
        savings = []
        for s, stage in zip(self.numbers, self.stages, strict=True):
            if stage.offload:
                away_us = self.paths.turnaround_us(s, s) - stage.duration_us("O") - stage.duration_us("R")
                copy_us = sum(stage.duration_us(kind) for kind in kinds)
                savings.append(_Saving(stage.offload.bytes * max(0.0, away_us), copy_us))
        time_us = 0.0
        for saving in sorted(savings, key=lambda saving: -saving.rate_bytes):
            copies_us = self.problem.units * saving.copy_us
            if not saving.copy_us:
                needed_byte_us -= self.problem.units * saving.byte_us
            elif needed_byte_us > (budget + saving.rate_bytes) * copies_us:
                needed_byte_us -= (budget + saving.rate_bytes) * copies_us
                time_us += copies_us
            else:
                return time_us + max(0.0, needed_byte_us / (budget + saving.rate_bytes))
        return time_us + max(0.0, needed_byte_us / budget)


@dataclass(frozen=True)
class _Saving:
    """Byte-time that one microbatch of a stage need not hold if it leaves, and the time of its copy."""

    byte_us: float
    copy_us: float

    @property
    def rate_bytes(self) -> float:
        return self.byte_us / self.copy_us if self.copy_us else float("inf")


def unused_byte_us(device: OnDevice, budget: float, sizes_bytes: Sequence[int], backward: str) -> float:
    """Byte-time of a budget that cannot be used near the ends of a span, `sizes_bytes` being the most of each stage.

    One activation may be there at once, and others as fast as F take or backwards free them. Ramps that overlapped
    would count the same byte-time twice; a span of at least the work excludes it.
    """
    room = max(0, budget - max(sizes_bytes))
    lengths_us = []
    for kind in ("F", backward):
        times_us = [stage.duration_us(kind) for stage in device.stages]
        rate = max(
            size / time_us if time_us else float("inf") for size, time_us in zip(sizes_bytes, times_us, strict=True)
        )
        lengths_us.append(room / rate if rate else float("inf"))
    work_us = sum(stage.duration_us(kind) for stage in device.stages for kind in ("F", backward))
    return room / 2 * sum(lengths_us) if sum(lengths_us) <= device.problem.units * work_us else 0.0


def round_bounds_us(problem: Problem) -> Sequence[float]:
    """A bound from each device with one stage, and room for fewer than all microbatches.

    With equal costs and all memory held until W, k microbatches in flight and m - 1 = q k + r, the first device gives
    ``(q + 1)((p - 1)(tF + tB + 2 tC) + tF + tB + tW) + r (tF + tB + tW)``.

    Proof. Let k activations fit when an F starts: its own whole, of the others what never leaves. Let B(j) be the j-th
    backward of the device in time, fused or not, from j = 0. Among the first j + 1 one is of a microbatch not before j,
    so B(j) starts at least a turnaround after F(j) ends. When F(i) starts, B(i - k) has ended. So for any j and n,
    F(j + k + n) starts after B(j), and between these starts the device runs B(j) to B(j + n) and F(j + k) to
    F(j + k + n - 1). It also runs W: with x more B done than asked for, k - x activations and what all pending W hold
    must fit. If P(x) pending ones fit, at least n + 1 + x - P(x) W are done since B(j) started (before that at most j
    were done). The x with the least work counts.

    The bound strings such steps together: from 0 in steps of k, the last one longer by n = r; and then the turnaround,
    B and W of the last microbatch, or from some step on all B, W and F that are left.

    With activation modes k counts what the variants leave on the device at the least. Of the x microbatches that are
    recomputed each adds its recomputation to the work, and without them the others are a schedule of their own, with
    room for as many as fit of these; the least x counts.
    """
    return [_round_bound_us(device) if len(device.stages) == 1 else 0.0 for device in OnDevice.each(problem)]


MOST_SHARES = 64
"""Numbers of recomputed microbatches that are looked at; with more microbatches, one for all up to the next."""


def _round_bound_us(device: OnDevice) -> float:
    stage, microbatches, ways = device.stages[0], device.problem.units, variants(device.stages[0])
    bound_us = _of_rounds_us(device, ways, microbatches)
    recompute_us = min((way.mode.recompute_us for way in ways if way.mode.recomputes), default=0)
    if not recompute_us:
        return bound_us
    others = [way for way in ways if not way.mode.recomputes]
    numbers = np.unique(np.linspace(0, microbatches, MOST_SHARES + 1).astype(int)).tolist()
    least_us = float("inf")
    for first, last in pairwise([-1, *numbers]):  # recomputed are from first + 1 to last
        times_us = [
            microbatches * sum(map(stage.duration_us, kinds)) + (first + 1) * recompute_us for kinds in ("FBW", "FB")
        ]
        rounds_us = _of_rounds_us(device, others, microbatches - last)
        least_us = min(least_us, max(device.value_us(*times_us), rounds_us))
    return max(bound_us, least_us)


def _of_rounds_us(device: OnDevice, ways: Sequence[Variant], microbatches: int) -> float:
    """The bound from a device with one stage of so many microbatches, each in one of these variants."""
    stage, s = device.stages[0], device.numbers[0]
    size = min(way.waiting_bytes for way in ways)
    started = min(way.mode.kept_bytes + way.mode.forward_workspace_bytes for way in ways) + stage.workspace_bytes.F
    room = device.budget - (started - size)
    if not 0 < size <= room < microbatches * size:
        return 0.0
    turnaround_us = stage.forward_us + device.paths.turnaround_us(s, s)
    rounds = _Rounds(microbatches, int(room), size, stage, turnaround_us)
    return device.value_us(rounds.span_us, rounds.to_last_backward_us)


@dataclass(frozen=True)
class _Rounds:
    """One stage alone, where fewer than all microbatches of `size_bytes` fit in `room_bytes`.

    A backward starts at least `turnaround_us` after the start of its F.
    """

    microbatches: int
    room_bytes: int
    size_bytes: int
    stage: Stage
    turnaround_us: float

    @property
    def span_us(self) -> float:
        """From the first op to the end of the last."""
        return max(self._end_us("BW"), self._last_forward_us + self.turnaround_us + self.stage.duration_us("BW"))

    @property
    def to_last_backward_us(self) -> float:
        """From the first op to the end of the last B."""
        return max(self._end_us("B"), self._last_forward_us + self.turnaround_us + self.stage.duration_us("B"))

    @property
    def _in_flight(self) -> int:
        return self.room_bytes // self.size_bytes

    @cached_property
    def _last_forward_us(self) -> float:
        """The earliest start of the last F."""
        rounds, more = divmod(self.microbatches - 1, self._in_flight)
        return (rounds - 1) * self._round_us + self._step_us(more)

    def _end_us(self, kinds: str) -> float:
        """The earliest end of all B, or all B and W, from the step after which most is left."""
        backward_us = sum(self.stage.duration_us(kind) for kind in kinds)
        return self.turnaround_us + max(
            step * self._round_us + left * backward_us + max(0, left - self._in_flight) * self.stage.forward_us
            for step, left in enumerate(range(self.microbatches, 0, -self._in_flight))
        )

    @cached_property
    def _round_us(self) -> float:
        return self._step_us(0)

    def _step_us(self, more: int) -> float:
        """From the start of F(j) to the earliest start of F(j + k + more)."""
        required_us = (more + 1) * self.stage.backward_input_us + more * self.stage.forward_us
        # Either W run in the step to make room, or more B than required do, after which more W can be pending: the
        # cheapest of all numbers of further B.
        extra, weights = np.arange(self._in_flight), 0
        if kept := self.stage.backward_weight_bytes:
            free = self.room_bytes - (self._in_flight - extra) * self.size_bytes
            weights = np.maximum(more + 1 + extra - free // kept, 0)
        least_us = (extra * self.stage.backward_input_us + weights * self.stage.backward_weight_us).min()
        return float(self.turnaround_us + required_us + least_us)
