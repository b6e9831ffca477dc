"""Idle time of a device before its first backward and after its last forward.

Zero Bubble's bound is the first of the two for linear placement. The second is its mirror image: once a device has
run its last F it has only the backwards that its memory still holds to run, until the last of them comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from optpipe.problem import Problem
from optpipe.stage import Stage
from solver.bounds.device import Held, OnDevice, Piece, most_held_us


def warmup_cooldown_bounds_us(problem: Problem) -> Sequence[float]:
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

    In both windows what never leaves must fit without the channel's help, beside the whole activation of the last F.

    The windows are disjoint if a backward precedes the last F. If none does, all m microbatches are in flight together
    when the last F starts, which the bytes that never leave mostly rule out. If it can be, the larger of the two idle
    times counts, or the second and what the device idles up to the end of its last F: what does not fit has left by
    then, copied after the end of the first F.

    Around. The device of stage 0 begins before d does, by F of the stages before `low`, and after d's last backward the
    gradient still passes these, and W of stage 0. All that is within the span of that device, so both objectives are at
    least that long. W of d may hide behind the way back. Those that run before d's last backward ends are, at least,
    the ones that are neither in flight nor pending when the last F starts; where the cool-down idles, all but one; and
    the ones that are not pending when the last backward starts, beside its activation, which is whole again by then.
    For the makespan, d's own span begins after that head as well.

    Here a longer window may well be shorter on the whole: with copies quicker than B it brings back more work without
    any idle time, and so leaves more W for later. So the first count leaves the channel out where there are copies: it
    asks only that what never leaves fits. The second holds where the shortest window idles, since a longer one idles
    more. The third does not look at the window at all.
    """
    return [device.bound_us for device in Windows.each(problem)]


class Windows(OnDevice):
    """Both windows of a device."""

    @property
    def bound_us(self) -> float:
        """From the idle time of both."""
        warm_up_us, cool_down_us = self._warm_up_idle_us, self._cool_down_idle_us
        span_us = self._work_us("FBW") + self._together_us(warm_up_us, max(0.0, cool_down_us))
        weights_us = self._weights_before_last_backward_us
        to_last_backward_us = self._work_us("FB") + self._together_us(warm_up_us, weights_us)
        return self.value_us(span_us, to_last_backward_us)

    @property
    def without_warm_up_us(self) -> float:
        """As `bound_us`, without the idle time of the warm-up: each us of that adds as much to the value."""
        apart = self._are_apart
        span_us = self._work_us("FBW") + (max(0.0, self._cool_down_idle_us) if apart else 0.0)
        weights_us = self._weights_before_last_backward_us if apart else self._weights_run_before_us
        return self.value_us(span_us, self._work_us("FB") + weights_us)

    @property
    def warm_up_us(self) -> float:
        """The least time from the first op to the first backward."""
        return self.to_first_backward_us(self)

    def to_first_backward_us(self, other: Windows) -> float:
        """The least time from the first op of this device to the first backward of that or another one."""
        return self.stages[0].forward_us + self.paths.turnaround_us(self._low, other._high)

    @property
    def room_for_forwards(self) -> float:
        """Bytes that activations can take when an F starts, that of the F included."""
        return self.budget - min(stage.workspace_bytes.F for stage in self.stages)

    @property
    def _low(self) -> int:
        return self.numbers[0]

    @property
    def _high(self) -> int:
        return self.numbers[-1]

    def _one_of_each_us(self, kinds: str) -> float:
        """The ops of these kinds of one microbatch on all the device's stages."""
        return sum(stage.duration_us(kind) for stage in self.stages for kind in kinds)

    def _work_us(self, kinds: str) -> float:
        return self.problem.units * self._one_of_each_us(kinds)

    @cached_property
    def _cool_down_us(self) -> float:
        """From the end of the last F to the start of the last backward."""
        return self.paths.turnaround_us(self._high, self._low)

    @cached_property
    def _warm_up_idle_us(self) -> float:
        window_us, room = self.warm_up_us, self.room_for_forwards
        least_moved = min(stage.activation_bytes - _staying_bytes(stage) for stage in self.stages)

        def most_forwards_us(size_bytes: Callable[[Stage], int], room_bytes: float) -> float:
            forwards = [Held(Piece(stage.forward_us, size_bytes(stage))) for stage in self.stages]
            return most_held_us(forwards, self.problem.units, room_bytes)

        # With the channel's help whole activations; without it what never leaves of them, beside the whole last one.
        fits_us = min(
            most_forwards_us(_activation_bytes, room + self.moved_bytes("O", window_us)),
            most_forwards_us(_staying_bytes, room - least_moved),
        )
        return max(0.0, window_us - fits_us)

    @cached_property
    def _cool_down_idle_us(self) -> float:
        """Negative where the stock of work exceeds the window."""

        def pending(stage: Stage, size_bytes: int) -> Held:
            rest = Piece(stage.backward_weight_us, stage.backward_weight_bytes)
            return Held(Piece(stage.duration_us("BW"), size_bytes), rest)

        last_microbatch_us = self._one_of_each_us("BW") - self.stages[0].duration_us("BW")
        return self._cool_down_us - last_microbatch_us - self._most_in_stock_us(pending)

    @cached_property
    def _weights_before_last_backward_us(self) -> float:
        """Time that W, and idling in the cool-down, take before the end of the last backward."""
        # The third count of docs/math/bounds.md ("Both, and the way back"): all but one W and the idle time of the
        # cool-down; with copies only where the shortest window idles.
        if self._cool_down_idle_us >= 0 or not self._has_copies:
            return max(self._weights_run_before_us, self._all_weights_but_last_us + self._cool_down_idle_us)
        return self._weights_run_before_us

    @cached_property
    def _weights_run_before_us(self) -> float:
        """Time of W alone before the end of the last backward, whatever the windows."""

        def pending(stage: Stage, size_bytes: int) -> Held:
            return Held(Piece(stage.backward_weight_us, min(size_bytes, stage.backward_weight_bytes)))

        # The first two counts of docs/math/bounds.md ("Both, and the way back").
        # 1. W that are neither in the stock of the last F nor of the last microbatch. A longer window may bring back
        # more where there are copies: then only what never leaves is counted, which no window changes.
        stock_us = self._most_staying_us(pending) if self._has_copies else self._most_in_stock_us(pending)
        before_us = [(self.problem.units - 1) * self._one_of_each_us("W") - stock_us]
        # 2. All but one W, less those that fit beside the activation of the last backward when it starts.
        weights = [Held(Piece(stage.backward_weight_us, stage.backward_weight_bytes)) for stage in self.stages]
        room = self.budget - self.stages[0].activation_bytes
        most_us = most_held_us(weights, self.problem.units, room)
        before_us.append(self._all_weights_but_last_us - most_us + self._last_two_backwards_us)
        return max(0.0, *before_us)

    @cached_property
    def _last_two_backwards_us(self) -> float:
        """Time that the second count lacks because of the backward before the last one; 0 where none is implied.

        As many W as ever fit cannot be pending at the starts of both without a pause, in which the last activation
        comes back, or a longer way back for the first of them (docs/math/bounds.md, "The last two backwards").
        """
        low, first = self.stages[0], self.problem.stages[0]
        weight_us, weight_bytes = low.backward_weight_us, low.backward_weight_bytes
        like = {(stage.backward_weight_us, stage.backward_weight_bytes) for stage in self.stages}
        if len(like) > 1 or not 0 < weight_bytes <= min(stage.activation_bytes for stage in self.stages):
            return 0.0
        most, backwards = (self.budget - low.activation_bytes) // weight_bytes, self.problem.units * len(self.stages)
        if self.problem.microbatches < 2 or not 0 <= most < backwards - 1:
            return 0.0
        lacking_us = [weight_us, first.duration_us("BW") - low.backward_input_us]
        if low.offload and (most + 1) * weight_bytes + _staying_bytes(low) <= self.budget:
            lacking_us.append(low.offload.reload_us)
        if len(self.stages) == 1:
            lacking_us.append(self.paths.turnaround_us(self._low, self._low))
        else:
            next_stage, paths = self.numbers[1], self.paths
            backward_us = paths.backward_from[self._low + 1] - paths.backward_from[next_stage]
            gradient_us = paths.gradients_from[self._low] - paths.gradients_from[next_stage]
            spare = self.budget // weight_bytes - most
            lacking_us.append(backward_us + gradient_us - spare * weight_us)
        return max(0.0, min(lacking_us))

    @property
    def _all_weights_but_last_us(self) -> float:
        return self._work_us("W") - self.stages[0].backward_weight_us

    @property
    def _has_copies(self) -> bool:
        return self.moved_bytes("R", 1.0) > 0

    def _most_in_stock_us(self, pending: Callable[[Stage, int], Held]) -> float:
        """The most work of the microbatches in flight when the last F starts, beside the last microbatch.

        It is that of the shortest cool-down: a longer one may bring back more.
        """
        high = self.stages[-1]
        last_bytes = sum(stage.activation_bytes for stage in self.stages)
        if self._room_at_last_forward + self.moved_bytes("R", high.forward_us) < last_bytes:
            last_bytes = 0  # a window of no length must have room for what is counted in every window
        whole = [pending(stage, stage.activation_bytes) for stage in self.stages]
        moved_bytes = self.moved_bytes("R", high.forward_us + self._cool_down_us)
        room = self._room_at_last_forward + moved_bytes - last_bytes
        most_us = most_held_us(whole, self.problem.units - 1, room, in_parts=moved_bytes > 0)
        return min(most_us, self._most_staying_us(pending)) if moved_bytes else most_us

    def _most_staying_us(self, pending: Callable[[Stage, int], Held]) -> float:
        """The most pending work if only bytes that never leave count: as much as any cool-down has."""
        staying = [pending(stage, _staying_bytes(stage)) for stage in self.stages]
        last_bytes = self.stages[-1].activation_bytes + sum(_staying_bytes(stage) for stage in self.stages[:-1])
        return most_held_us(staying, self.problem.units - 1, self._room_at_last_forward - last_bytes)

    @property
    def _room_at_last_forward(self) -> float:
        return self.budget - self.stages[-1].workspace_bytes.F

    def moved_bytes(self, kind: str, window_us: float) -> float:
        """Bytes that O can free, or R bring back, in a window."""
        moved_bytes = 0.0
        for stage in self.stages:
            if stage.offload and stage.offload.bytes:
                copy_us = stage.duration_us(kind)
                moved_bytes = max(moved_bytes, window_us * stage.offload.bytes / copy_us if copy_us else float("inf"))
        return moved_bytes

    def _together_us(self, warm_up_us: float, cool_down_us: float) -> float:
        """Idle time of both windows, whether or not a backward precedes the last F."""
        if self._are_apart:
            return warm_up_us + cool_down_us
        return min(warm_up_us + cool_down_us, max(warm_up_us, self._copies_idle_us + cool_down_us))

    @property
    def _are_apart(self) -> bool:
        """True if a backward precedes the last F: not all microbatches can be in flight at once."""
        return self.problem.units * sum(map(_staying_bytes, self.stages)) > self.budget

    @property
    def _copies_idle_us(self) -> float:
        """Idle time before the end of the last F if all F come first, since what does not fit has to leave by then."""
        leaving_bytes = self.problem.units * sum(map(_activation_bytes, self.stages)) - self.budget
        rate = self.moved_bytes("O", 1.0)
        if leaving_bytes <= 0 or not rate:
            return 0.0
        last_forward_ends_us = self.stages[0].forward_us + leaving_bytes / rate + self.stages[-1].forward_us
        return max(0.0, last_forward_ends_us - self._work_us("F"))


def _activation_bytes(stage: Stage) -> int:
    return stage.activation_bytes


def _staying_bytes(stage: Stage) -> int:
    """Bytes of an activation that never leave."""
    return stage.activation_bytes - (stage.offload.bytes if stage.offload else 0)
