"""Idle time of a device before its first backward and after its last forward.

Zero Bubble's bound is the first of the two for linear placement. The second is its mirror image: once a device has
run its last F it has only the backwards that its memory still holds to run, until the last of them comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from optpipe.ops import Bools
from optpipe.problem import Floats, Problem
from solver.bounds.device import Knapsack, OnDevice, are_equal, most_held_us


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
    last backward and its W come after the window. The most work of such a backlog is a knapsack; the rest of the window
    is idle. Signed releases and fused backwards change nothing: only the level at one moment counts.

    A longer window idles no less than the shortest. The work that fits is concave in the room, so in the window's
    length, and not negative at length 0: where a longer window gains more work than time, the shortest is full already.
    (In whole F: the last F of a window starts one F before its end, so the first F more gains nothing; each further one
    waits for the copy of its bytes, which takes longer than an F, or else F fill the shortest window.)

    In both windows what never leaves must fit without the channel's help, with the whole activation of the last F.

    The windows are disjoint if a backward precedes the last F. If none does, all m microbatches are in flight together
    when the last F starts, which the bytes that never leave mostly rule out. If it can be, the larger of the two idle
    times counts, or the second and what the device idles up to the end of its last F: what does not fit has left by
    then, copied after the end of the first F.

    Around. The device of stage 0 begins before d does, by F of the stages before `low`, and after d's last backward the
    gradient still passes these, and W of stage 0. All that is within the span of that device, so both objectives are at
    least that long. W of d may run while its gradient returns. Those that run before d's last backward ends are, at
    least, the ones that are neither in flight nor pending when the last F starts; where the cool-down idles, all but
    one; and the ones that are not pending when the last backward starts, with its activation, which is whole again by
    then. For the makespan, d's own span begins after that head as well.

    Units (microbatches, or slices of them) that differ are asked for by name: in the given order those before B are
    prefixes of one order, or suffixes of another; in a free order the choice with the least bound counts.

    Here a longer window may well be shorter on the whole: with copies quicker than B it brings back more work without
    any idle time, and so leaves more W for later. So the first count leaves the channel out where there are copies: it
    asks only that what never leaves fits. The second holds where the shortest window idles, since a longer one idles
    more. The third does not look at the window at all.
    """
    return [device.bound_us for device in Windows.each(problem)]


class _CoolDown(NamedTuple):
    """The cool-down with some microbatch as the last.

    `idle_us`: its idle time, negative where the backlog of work exceeds it. `weights_us`: time of W alone before the
    end of the last backward, whatever the windows; `before_us`: of W, and of idling in the cool-down.
    """

    idle_us: float
    weights_us: float
    before_us: float


class Windows(OnDevice):
    """Both windows of a device."""

    @property
    def bound_us(self) -> float:
        """From the idle time of both."""
        ends, warm_up_us = self._cool_downs, self._warm_up_idle_us
        return self._value_us(
            self._together_us(warm_up_us, max(0.0, min(end.idle_us for end in ends))),
            self._together_us(warm_up_us, max(0.0, min(end.before_us for end in ends))),
        )

    @property
    def without_warm_up_us(self) -> float:
        """As `bound_us`, without the idle time of the warm-up: each us of that adds as much to the value."""
        ends = self._cool_downs
        if self._are_apart:
            return self._value_us(
                max(0.0, min(end.idle_us for end in ends)), max(0.0, min(end.before_us for end in ends))
            )
        return self._value_us(0.0, max(0.0, min(end.weights_us for end in ends)))

    def _value_us(self, idle_us: float, before_us: float) -> float:
        """The bound with so much idle time, and so much besides F and B before the end of the last backward."""
        through_us = float((self.forward + self.backward).sum())
        return self.value_us(through_us + float(self.weight.sum()) + idle_us, through_us + before_us)

    @property
    def warm_up_us(self) -> float:
        """The least time from the first op to the first backward."""
        return self.to_first_backward_us(self)

    def to_first_backward_us(self, other: Windows) -> float:
        """The least time from the first op of this device to the first backward of that or another one."""
        up_us = self.costs.by_slice(self.costs.to_top)[self.low, :, 0]
        down_us = self.costs.by_slice(self.costs.from_top)[other.high, :, -1]
        return float((up_us + down_us).min() if self.problem.has_free_order else up_us[0] + down_us[0])

    @property
    def room_for_forwards(self) -> float:
        """Bytes that activations can take when an F starts, that of the F included."""
        return self.budget - float(self.costs.beside[list(self.numbers)].min())

    @cached_property
    def _warm_up_idle_us(self) -> float:
        """Time between the first op and the first backward that the F which fit do not fill."""
        window_us, room = self.warm_up_us, self.room_for_forwards
        # With the channel's help whole activations; without it what never leaves of them, with the whole last one.
        fits_us = self._most_forwards_us(
            self.whole, room + _moved_bytes(self.out_rate, window_us), in_parts=self.copies
        )
        if self.copies:
            least_moved = float((self.whole - self.staying).min())
            fits_us = min(fits_us, self._most_forwards_us(self.staying, room - least_moved))
        return max(0.0, window_us - fits_us)

    def _most_forwards_us(self, sizes: Floats, room: float, *, in_parts: bool = False) -> float:
        """The most time of F that fit: of the first units of each stage, or of any where the order is free.

        In whole units where all are alike, and on a single stage unless `in_parts`; the upper hull of prefixes, or all
        pieces, otherwise.
        """
        if self.problem.has_free_order or (are_equal(self.forward) and are_equal(sizes)):
            nothing = np.zeros_like(sizes)
            return most_held_us(self.forward, nothing, sizes, nothing, room)
        if len(self.numbers) == 1 and not in_parts:
            fitting = int(np.searchsorted(np.cumsum(sizes[0]), room, side="right"))
            return float(self.forward[0, :fitting].sum())
        hulls = [prefix_hull(times, size) for times, size in zip(self.forward, sizes, strict=True)]
        times_us, bytes_ = (np.concatenate(parts) for parts in zip(*hulls, strict=True))
        return float(Knapsack(times_us, bytes_).most_us(room))

    @cached_property
    def _cool_downs(self) -> Sequence[_CoolDown]:
        """For each microbatch that may be the last, one of those that are alike."""
        last = [self.problem.microbatches - 1]
        if self.problem.has_free_order:
            _, firsts = np.unique(self.problem.unit_class[:: self.problem.slice_count], return_index=True)
            last = firsts.tolist()
        return [self._cool_down(i) for i in last]

    def _cool_down(self, last: int) -> _CoolDown:
        costs, n = self.costs, self.problem.slice_count
        first, end = last * n, last * n + n - 1
        own, forward_us = slice(first, end + 1), float(costs.forward[self.high, end])
        window_us = costs.turnaround_us(self.high, self.low, last)
        room = self.budget - float(costs.beside[self.high, end])
        others = np.ones(self.problem.units, bool)
        others[own] = False
        whole_last = float(self.whole[:, own].sum())
        staying_last = float(self.staying[:, own].sum() + (costs.whole - costs.staying)[self.high, end])
        # A window of no length must have room for what is counted in every window.
        has_room = room + _moved_bytes(self.in_rate, forward_us) >= whole_last
        moved = _moved_bytes(self.in_rate, forward_us + window_us)
        whole_room = room + moved - (whole_last if has_room else 0.0)

        def backlog_us(times_us: Floats, rests_us: Floats, wholes: Floats, rests: Floats, *, stays: bool) -> float:
            """The most work of the microbatches in flight when the last F starts, other than the last one.

            It is that of the shortest cool-down, as a longer one may bring back more; or that of any, where only what
            never leaves counts.
            """
            times_us, rests_us, wholes, rests = (values[:, others] for values in (times_us, rests_us, wholes, rests))
            free = room - staying_last if stays else whole_room
            return most_held_us(times_us, rests_us, wholes, rests, free, in_parts=moved > 0 and not stays)

        both_us, nothing = self.backward + self.weight, np.zeros_like(self.weight)
        most_us = backlog_us(both_us, self.weight, self.whole, self.left, stays=False)
        if self.copies:
            most_us = min(most_us, backlog_us(both_us, self.weight, self.staying, self.left, stays=True))
        elif len(self.numbers) == 1 and not (self.problem.has_free_order or self.problem.has_equal_microbatches):
            most_us = min(most_us, self._suffix_backlog_us(others, whole_room))
        own_us = float(both_us[:, own].sum() - costs.backward[self.low, first] - costs.weight[self.low, first])
        idle_us = window_us - own_us - most_us
        # The three counts of docs/math/bounds.md ("Both, and the way back").
        # 1. W that are neither in the backlog of the last F nor of the last microbatch. A longer window may bring back
        # more where there are copies: then only what never leaves is counted, which no window changes.
        stayed = np.minimum(self.staying, self.left)
        late_us = backlog_us(self.weight, nothing, stayed, nothing, stays=self.copies)
        # 2. All but one W, less those that fit with the activation of the last backward when it starts.
        all_but_last_us = float(self.weight.sum() - costs.weight[self.low, first])
        last_room = self.budget - float(costs.whole[self.low, first])
        fitting_us = most_held_us(self.weight, nothing, self.left, nothing, last_room)
        weights_us = max(
            float(self.weight[:, others].sum()) - late_us, all_but_last_us - fitting_us + self._last_two_backwards_us
        )
        # 3. All but one W and the idle time of the cool-down; with copies only where the shortest window idles.
        counts = idle_us >= 0 or not self.copies
        return _CoolDown(idle_us, weights_us, max(weights_us, all_but_last_us + idle_us) if counts else weights_us)

    def _suffix_backlog_us(self, others: Bools, room: float) -> float:
        """The most work in a backlog whose units before B are the last of their order, and any with W left."""
        order = self.costs.backward_order
        units = order[others[order]][::-1]
        times_us = np.concatenate([[0.0], np.cumsum((self.backward + self.weight)[0, units])])
        sizes = np.concatenate([[0.0], np.cumsum(self.whole[0, units])])
        fitting = sizes <= room
        if not fitting.any():
            return 0.0
        weights_us = Knapsack(self.weight[0, units], self.left[0, units]).most_us(room - sizes[fitting])
        return float((times_us[fitting] + weights_us).max())

    @cached_property
    def _last_two_backwards_us(self) -> float:
        """Time that the second count lacks because of the backward before the last one; 0 where none is implied.

        As many W as ever fit cannot be pending at the starts of both without a pause, in which the last activation
        comes back, or a longer path back for the first of them (docs/math/bounds.md, "The last two backwards"). For
        equal microbatches.
        """
        costs, low, units = self.costs, self.low, self.problem.units
        weight_us, left, whole = self.weight[0, 0], self.left[0, 0], costs.whole[low, 0]
        like = are_equal(self.weight) and are_equal(self.left) and self.problem.has_equal_microbatches
        if not like or not 0 < left <= self.whole.min() or self.budget == float("inf"):
            return 0.0
        most = (self.budget - whole) // left
        if self.problem.microbatches < 2 or not 0 <= most < units * len(self.numbers) - 1:
            return 0.0
        lacking_us = [weight_us, costs.backward[0, 0] + costs.weight[0, 0] - costs.backward[low, 0]]
        if self.stages[0].offload and (most + 1) * left + costs.staying[low, 0] <= self.budget:
            lacking_us.append(costs.reload[low, 0])
        if len(self.numbers) == 1:
            lacking_us.append(costs.turnaround_us(low, low))
        else:
            following = self.numbers[1]
            back_us = costs.from_top[low, 0] - costs.from_top[following, 0] - costs.backward[following, 0]
            lacking_us.append(back_us - (self.budget // left - most) * weight_us)
        return max(0.0, float(min(lacking_us)))

    def _together_us(self, warm_up_us: float, cool_down_us: float) -> float:
        """Idle time of both windows, whether or not a backward precedes the last F."""
        if self._are_apart:
            return warm_up_us + cool_down_us
        return min(warm_up_us + cool_down_us, max(warm_up_us, self._copies_idle_us + cool_down_us))

    @property
    def _are_apart(self) -> bool:
        """True if a backward precedes the last F: not all units can be in flight at once."""
        return float(self.staying.sum()) > self.budget

    @property
    def _copies_idle_us(self) -> float:
        """Idle time before the end of the last F if all F come first, since what does not fit has to leave by then."""
        leaving = float(self.whole.sum()) - self.budget
        if leaving <= 0 or not self.out_rate:
            return 0.0
        ends_us = float(self.forward[0].min() + self.forward[-1].min()) + leaving / self.out_rate
        return max(0.0, ends_us - float(self.forward.sum()))


def _moved_bytes(rate: float, window_us: float) -> float:
    """Bytes that copies at this rate move in a window; copies that take no time move all."""
    return rate if rate == float("inf") else rate * window_us


def prefix_hull(times_us: Floats, sizes: Floats) -> tuple[Floats, Floats]:
    """Times and sizes of the pieces of the upper concave hull of the prefixes of an order."""
    points = [(0.0, 0.0)]
    for x, y in zip(np.cumsum(sizes).tolist(), np.cumsum(times_us).tolist(), strict=True):
        if x == points[-1][0]:
            points[-1] = (x, y)
            # What has no size lifts the point itself, so that those before it may no longer be on the hull.
        else:
            points.append((x, y))
        while len(points) > 2:
            (x0, y0), (x1, y1), (x2, y2) = points[-3:]
            if (y1 - y0) * (x2 - x1) > (y2 - y1) * (x1 - x0):
                break
            del points[-2]
    bytes_, time = np.array(points).T
    lift = [time[0]] if time[0] else []  # at no size
    return np.append(lift, np.diff(time)), np.append([0.0] * len(lift), np.diff(bytes_))
