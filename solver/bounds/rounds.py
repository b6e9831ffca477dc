"""Rounds of a device that holds only a few microbatches at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from optpipe.problem import Problem
from optpipe.stage import Stage
from solver.bounds.device import OnDevice, usable_bytes
from solver.variants import Variant, fitting_variants


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
    return [_round_bound_us(device) if len(device.numbers) == 1 else 0.0 for device in OnDevice.each(problem)]


MOST_SHARES = 64
"""Numbers of recomputed microbatches that are looked at; with more microbatches, one for all up to the next."""


def _round_bound_us(device: OnDevice) -> float:
    stage, microbatches = device.stages[0], device.problem.units
    choices = fitting_variants(device.problem, device.numbers[0])
    bound_us = _of_rounds_us(device, choices, microbatches)
    recompute_us = min((variant.mode.recompute_us for variant in choices if variant.mode.recomputes), default=0)
    if not recompute_us:
        return bound_us
    others = [variant for variant in choices if not variant.mode.recomputes]
    numbers = np.unique(np.linspace(0, microbatches, MOST_SHARES + 1).astype(int)).tolist()
    least_us = float("inf")
    for first, last in pairwise([-1, *numbers]):  # recomputed are from first + 1 to last
        through_us = microbatches * (stage.forward_us + stage.backward_input_us) + (first + 1) * recompute_us
        work_us = through_us + microbatches * stage.backward_weight_us
        rounds_us = _of_rounds_us(device, others, microbatches - last)
        least_us = min(least_us, max(device.value_us(work_us, through_us), rounds_us))
    return max(bound_us, least_us)


def _of_rounds_us(device: OnDevice, choices: Sequence[Variant], microbatches: int) -> float:
    """The bound from a device with one stage of so many microbatches, each in one of these variants."""
    if not choices:
        return 0.0  # every mode that fits recomputes: no microbatch is left
    stage, s = device.stages[0], device.numbers[0]
    size = min(variant.waiting_bytes for variant in choices)
    started = (
        min(variant.mode.kept_bytes + variant.mode.forward_workspace_bytes for variant in choices)
        + stage.workspace_bytes.F
    )
    room = usable_bytes(device.problem, stage.device) - (started - size)  # exact, however large
    if not 0 < size <= room < microbatches * size:
        return 0.0
    turnaround_us = stage.forward_us + device.costs.turnaround_us(s, s)
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
        return self._least_us(self.stage.backward_input_us + self.stage.backward_weight_us)

    @property
    def to_last_backward_us(self) -> float:
        """From the first op to the end of the last B."""
        return self._least_us(self.stage.backward_input_us)

    @property
    def _in_flight(self) -> int:
        return self.room_bytes // self.size_bytes

    @cached_property
    def _last_forward_us(self) -> float:
        """The earliest start of the last F."""
        rounds, more = divmod(self.microbatches - 1, self._in_flight)
        return (rounds - 1) * self._round_us + self._step_us(more)

    def _least_us(self, backward_us: float) -> float:
        """The earliest end of all B, or all B and W: from the step after which most is left, or of the last one."""
        steps_us = [
            step * self._round_us + left * backward_us + max(0, left - self._in_flight) * self.stage.forward_us
            for step, left in enumerate(range(self.microbatches, 0, -self._in_flight))
        ]
        return self.turnaround_us + max(*steps_us, self._last_forward_us + backward_us)

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
