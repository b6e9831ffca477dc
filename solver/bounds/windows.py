"""What a device must idle before its first backward and after its last forward.

Zero Bubble's bound is the first of the two for linear placement. The second is its mirror image: once a device has
run its last F it lives on the backwards that its memory still holds, until the last of them comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add

from optpipe.problem import Problem, Stage
from solver.bounds.budgets import usable_bytes
from solver.bounds.knapsack import Held, Piece, most_held_us
from solver.bounds.paths import Paths


def window_bounds_us(problem: Problem) -> Sequence[float]:
    """A bound from each device that has stages: its work, and the idle time of its two windows.

    With linear placement, equal costs and no offload the first device gives
    ``m (tF + tB + tW) + max(0, (p - 1)(tB + 2 tC) + (p - k) tF) + max(0, (p - 1)(tF + tB + 2 tC) - c)`` with
    ``k = floor(budget / mF)``, and c the most work of k - 1 pending microbatches: ``(k - 1)(tB + tW)`` where what
    they hold counts for more before B than after. Zero Bubble's bound is the first two terms.

    Proof. Let device d hold the stages from `low` to `high` (and perhaps others between).

    Warm-up. Its first op is an F of `low`. Any backward of d follows, for the same microbatch, F from `low` to the last
    stage and B from there to the one after `high`; so the first backward starts at least that turnaround after d's
    first op. Until then d runs only F, and no byte of their activations is freed except by offload. So the F that fit
    are limited by the budget plus what the channel can carry, and the rest of the window is idle.

    Cool-down. The last F of d is the one of `high` and the last microbatch m - 1. From there that microbatch passes F
    of the stages after `high` and B back to the one after `low`, so d's last backward, which is one of `low`, starts at
    least that turnaround later. In between d runs no F, only what was in flight when its last F started: microbatches
    before B (work B + W, holding the activation) and with W left (work W, holding what W needs), all within the budget
    plus what the channel can bring back until the window ends. Of each stage microbatch m - 1 is before B, and the
    last backward and its W come after the window. The most work of such a stock is a knapsack; the rest of the window
    is idle. Signed releases and fused backwards change nothing: only the level at one moment counts.

    A longer window idles no less than the shortest. The work that fits is concave in the room, so in the window's
    length, and not negative at length 0: where a longer window gains more work than time, the shortest is full already.
    (In whole F: the last F of a window starts one F before its end, so the first F more gains nothing; each further one
    waits for the copy of its bytes, which takes longer than an F, or else F fill the shortest window.)

    The windows are disjoint if a backward precedes the last F. If none does, all m microbatches are in flight together
    when the last F starts, and the larger of the two idle times counts alone. Memory mostly rules that out.

    Around. The device of stage 0 begins before d does, by F of the stages before `low`, and after d's last backward the
    gradient still passes these, and W of stage 0. All that is within the span of that device, so both objectives are at
    least that long. W of d may hide behind the way back. Those that run before d's last backward ends are, at least,
    the ones that are neither in flight nor pending when the last F starts; and where the cool-down idles, all but one.
    For the makespan, d's own span begins after that head as well.
    """
    paths = Paths.of(problem)
    return [_Windows(problem, paths, stages).bound_us for stages in problem.stages_of if stages]


@dataclass(frozen=True)
class _Windows:
    """Both windows of the device that holds the stages `numbers`."""

    problem: Problem
    paths: Paths
    numbers: Sequence[int]

    @property
    def bound_us(self) -> float:
        """The larger of the device's own span and of the way from stage 0 through this device and back."""
        warm_up_us, cool_down_us = self._warm_up_idle_us, self._cool_down_idle_us
        together: Callable[[float, float], float] = max if self._forwards_may_all_come_first else add
        span_us = self._work_us("FBW") + together(warm_up_us, max(0.0, cool_down_us))
        to_last_backward_us = self._work_us("FB") + together(warm_up_us, self._weights_before_last_backward_us)
        head_us, tail_us = self.paths.forward_before[self._low], self.paths.backward_before[self._low]
        through_us = head_us + to_last_backward_us + tail_us + self.problem.stages[0].backward_weight_us
        return max(through_us, span_us + (head_us if self.problem.objective == "makespan" else 0))

    @property
    def _low(self) -> int:
        return self.numbers[0]

    @property
    def _high(self) -> int:
        return self.numbers[-1]

    @cached_property
    def _stages(self) -> Sequence[Stage]:
        return [self.problem.stages[s] for s in self.numbers]

    def _one_of_each_us(self, kinds: str) -> float:
        """The ops of these kinds of one microbatch on all the device's stages."""
        return sum(stage.duration_us(kind) for stage in self._stages for kind in kinds)

    def _work_us(self, kinds: str) -> float:
        return self.problem.microbatches * self._one_of_each_us(kinds)

    @cached_property
    def _cool_down_us(self) -> float:
        """From the end of the last F to the start of the last backward."""
        return self.paths.turnaround_us(self._high, self._low)

    @cached_property
    def _warm_up_idle_us(self) -> float:
        window_us = self._stages[0].forward_us + self.paths.turnaround_us(self._low, self._high)
        forwards = [Held(Piece(stage.forward_us, stage.activation_bytes)) for stage in self._stages]
        room = self._room_bytes("O", window_us) - min(stage.workspace_bytes.F for stage in self._stages)
        return max(0.0, window_us - most_held_us(forwards, self.problem.microbatches, room))

    @cached_property
    def _cool_down_idle_us(self) -> float:
        """Below 0 by what the stock of work exceeds the window."""
        held = [
            Held(
                Piece(stage.duration_us("BW"), stage.activation_bytes),
                Piece(stage.backward_weight_us, stage.backward_weight_bytes),
            )
            for stage in self._stages
        ]
        last_microbatch_us = self._one_of_each_us("BW") - self._stages[0].duration_us("BW")
        return self._cool_down_us - last_microbatch_us - self._most_in_stock_us(held)

    @cached_property
    def _weights_before_last_backward_us(self) -> float:
        """Time that W, and idling in the cool-down, take before the end of the last backward."""
        held = [
            Held(Piece(stage.backward_weight_us, min(stage.activation_bytes, stage.backward_weight_bytes)))
            for stage in self._stages
        ]
        before_stock_us = (self.problem.microbatches - 1) * self._one_of_each_us("W") - self._most_in_stock_us(held)
        all_but_last_us = self._work_us("W") - self._stages[0].backward_weight_us
        return max(0.0, before_stock_us, all_but_last_us + self._cool_down_idle_us)

    def _most_in_stock_us(self, held: Sequence[Held]) -> float:
        """The most work of the microbatches in flight when the last F starts, beside the last microbatch."""
        high = self._stages[-1]
        last_bytes = sum(stage.activation_bytes for stage in self._stages)
        room = self._room_bytes("R", high.forward_us + self._cool_down_us) - high.workspace_bytes.F
        moves = any(stage.offload for stage in self._stages)
        if moves and self._room_bytes("R", high.forward_us) - high.workspace_bytes.F < last_bytes:
            last_bytes = 0  # a window of no length must have room for what is counted in every window
        return most_held_us(held, self.problem.microbatches - 1, room - last_bytes, in_parts=moves)

    def _room_bytes(self, kind: str, window_us: float) -> float:
        """The budget and what O can free, or R bring back, in a window."""
        moved_bytes = 0.0
        for stage in self._stages:
            if stage.offload and stage.offload.bytes:
                copy_us = stage.duration_us(kind)
                moved_bytes = max(moved_bytes, window_us * stage.offload.bytes / copy_us if copy_us else float("inf"))
        return usable_bytes(self.problem, self._stages[0].device) + moved_bytes

    @property
    def _forwards_may_all_come_first(self) -> bool:
        """Whether the bytes that cannot leave fit at once, all microbatches together."""
        stay = sum(stage.activation_bytes - (stage.offload.bytes if stage.offload else 0) for stage in self._stages)
        return self.problem.microbatches * stay <= usable_bytes(self.problem, self._stages[0].device)
