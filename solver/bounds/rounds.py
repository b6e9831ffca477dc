"""What a device with one stage takes where only a few microbatches fit: rounds that wait for one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from optpipe.problem import Problem, Stage
from solver.bounds.on_device import OnDevice


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
    """
    return [_bound_us(device) if len(device.numbers) == 1 else 0.0 for device in OnDevice.each(problem)]


def _bound_us(device: OnDevice) -> float:
    [s], [stage], microbatches = device.numbers, device.stages, device.problem.microbatches
    moved = stage.offload.bytes if stage.offload else 0
    room, size = device.budget - stage.workspace_bytes.F - moved, stage.activation_bytes - moved
    if not 0 < size <= room < microbatches * size:
        return 0.0
    rounds = _Rounds(microbatches, int(room), size, stage, stage.forward_us + device.paths.turnaround_us(s, s))
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
        asked_us = (more + 1) * self.stage.backward_input_us + more * self.stage.forward_us
        return self.turnaround_us + asked_us + min(self._extra_us(more))

    def _extra_us(self, more: int) -> Iterator[float]:
        """W that must run in a step of k + `more`, and B beyond those asked for, by how many of these run."""
        kept = self.stage.backward_weight_bytes
        for extra in range(self._in_flight):
            free = self.room_bytes - (self._in_flight - extra) * self.size_bytes
            weights = max(0, more + 1 + extra - free // kept) if kept else 0
            yield extra * self.stage.backward_input_us + weights * self.stage.backward_weight_us
            if not weights:
                break
