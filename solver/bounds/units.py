"""Bounds where units (microbatches, or slices of them) have costs of their own, or are in another order (docs/math).

The arguments are those for equal microbatches: two windows of a device, byte-time, and what memory orders. Here each
asks which units it is about. In the given order these are known, prefixes of one order or suffixes of another; where
the order of microbatches is free, the choice of units with the least bound counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from optpipe.ops import Bools
from optpipe.problem import Floats, Problem
from solver.bounds.device import Knapsack, most_held_by_units_us, usable_bytes
from solver.bounds.free_order import free_order_bound_us
from solver.bounds.unit_costs import LARGEST_SUM, UnitCosts
from solver.bounds.unit_order import ordered_bounds_us


def unit_bounds_us(problem: Problem) -> dict[str, float]:
    """One microbatch alone, the work and memory of each device, and what the given order and memory chain together."""
    costs = UnitCosts.of(problem)
    bounds = {"chain": costs.longest_microbatch_us, "unit-device": max(_device_bounds_us(costs))}
    if problem.has_free_order:
        return bounds | {"free-order": free_order_bound_us(costs)}
    return bounds | {"release-order": max(ordered_bounds_us(costs), default=0.0)}


def unit_device_bounds_us(problem: Problem) -> Sequence[float]:
    """The work and memory of each device that has stages."""
    return _device_bounds_us(UnitCosts.of(problem))


def memory_time_bounds_us(problem: Problem) -> Sequence[float]:
    """A bound from each device with stages and a budget: the byte-time its microbatches need over the budget.

    It is Little's law (1961) with its ends: what is held on average is what comes in a time times how long it stays.
    It rules where memory is too tight for a period without idle time, however many microbatches there are
    (docs/math/bounds.md, "Byte-time").
    """
    costs = UnitCosts.of(problem)
    return [UnitsOnDevice(costs, numbers).byte_time_us for numbers in problem.stages_of if numbers]


def _device_bounds_us(costs: UnitCosts) -> Sequence[float]:
    return [UnitsOnDevice(costs, numbers).bound_us for numbers in costs.problem.stages_of if numbers]


class UnitsOnDevice:
    """The bound of the device that holds the stages `numbers`: its windows, as in `warmup_cooldown`, and byte-time."""

    def __init__(self, costs: UnitCosts, numbers: Sequence[int]) -> None:
        self.costs, self.numbers, self.problem = costs, numbers, costs.problem
        self.low, self.high = numbers[0], numbers[-1]
        own = list(numbers)
        self.forward, self.backward, self.weight = (us[own] for us in (costs.forward, costs.backward, costs.weight))
        self.whole, self.staying, self.left = (size[own] for size in (costs.whole, costs.staying, costs.left))
        self.gradients = costs.gradients[own]
        self.budget = usable_bytes(self.problem, self.problem.stages[self.low].device)
        if float((self.whole + self.left + self.gradients).sum()) + self.budget >= LARGEST_SUM:
            self.budget = float("inf")
        copies = self.whole > self.staying
        self.copies = bool(copies.any())
        rates = []
        for copy_us in (costs.offload[own], costs.reload[own]):
            with np.errstate(divide="ignore"):
                rates.append(float(((self.whole - self.staying)[copies] / copy_us[copies]).max(initial=0.0)))
        self.out_rate, self.in_rate = rates

    @cached_property
    def bound_us(self) -> float:
        """The largest of all bounds of this device."""
        work_us = float((self.forward + self.backward + self.weight).sum())
        through_us = float((self.forward + self.backward).sum())
        bounds = [self.value_us(work_us, through_us)]
        if 0 < self.budget < float("inf"):
            bounds += [self._windows_us, self.byte_time_us]
        return max(bounds)

    def value_us(self, span_us: float, to_last_backward_us: float) -> float:
        """Lower bound on the objective from bounds on the device's span, and on that up to its last backward.

        As `OnDevice.value_us`. In a free order the first and the last microbatch may be any.
        """
        heads_us, tails_us = self.costs.heads_us[self.low], self.costs.tails_us[self.low]
        head_us, tail_us = (
            (float(heads_us.min()), float(tails_us.min()))
            if self.problem.has_free_order
            else (float(heads_us[0]), float(tails_us[-1]))
        )
        through_us = head_us + to_last_backward_us + tail_us
        return max(through_us, span_us + (head_us if self.problem.objective == "makespan" else 0.0))

    @cached_property
    def _windows_us(self) -> float:
        """Work, and idle time before the first backward and after the last F (`warmup_cooldown`)."""
        warm_up_us = self._warm_up_idle_us
        last = [self.problem.microbatches - 1]
        if self.problem.has_free_order:
            _, firsts = np.unique(self.problem.unit_class[:: self.problem.slice_count], return_index=True)
            last = firsts.tolist()
        cool_downs_us, weights_us = zip(*(self._cool_down(i) for i in last), strict=True)
        span_us = float((self.forward + self.backward + self.weight).sum())
        span_us += self._together_us(warm_up_us, max(0.0, min(cool_downs_us)))
        through_us = float((self.forward + self.backward).sum())
        through_us += self._together_us(warm_up_us, max(0.0, min(weights_us)))
        return self.value_us(span_us, through_us)

    def _together_us(self, warm_up_us: float, cool_down_us: float) -> float:
        """Idle time of both windows, which have no time in common where not all units can be in flight at once."""
        apart = float(self.staying.sum()) > self.budget
        return warm_up_us + cool_down_us if apart else max(warm_up_us, cool_down_us)

    @cached_property
    def _warm_up_idle_us(self) -> float:
        """Time between the first op and the first backward that the F which fit do not fill."""
        up_us = self.costs.by_slice(self.costs.to_top)[self.low, :, 0]
        down_us = self.costs.by_slice(self.costs.from_top)[self.high, :, -1]
        window_us = float((up_us + down_us).min() if self.problem.has_free_order else up_us[0] + down_us[0])
        room = self.budget - float(self.costs.beside[list(self.numbers)].min())
        moved = _moved_bytes(self.out_rate, window_us)
        fits_us = self._most_forwards_us(self.whole, room + moved, in_parts=self.copies)
        if self.copies:
            least_moved = float((self.whole - self.staying).min())
            fits_us = min(fits_us, self._most_forwards_us(self.staying, room - least_moved))
        return max(0.0, window_us - fits_us)

    def _most_forwards_us(self, sizes: Floats, room: float, in_parts: bool = False) -> float:
        """The most time of F that fit: of the first units of each stage, or of any where the order is free.

        In whole units on a single stage, unless `in_parts`; the upper hull of prefixes, or all pieces, otherwise.
        """
        if self.problem.has_free_order:
            return float(Knapsack(self.forward.ravel(), sizes.ravel()).most_us(room))
        if len(self.numbers) == 1 and not in_parts:
            fitting = int(np.searchsorted(np.cumsum(sizes[0]), room, side="right"))
            return float(self.forward[0, :fitting].sum())
        hulls = [prefix_hull(times, size) for times, size in zip(self.forward, sizes, strict=True)]
        times_us, bytes_ = (np.concatenate(parts) for parts in zip(*hulls, strict=True))
        return float(Knapsack(times_us, bytes_).most_us(room))

    def _cool_down(self, last: int) -> tuple[float, float]:
        """With microbatch `last` as the last: the idle time of the cool-down, negative where its stock exceeds it.

        And the time that W, and idling in the cool-down, take before the end of the last backward.
        """
        costs, n = self.costs, self.problem.slice_count
        first, end = last * n, last * n + n - 1
        forward_us = float(costs.forward[self.high, end])
        window_us = float(costs.to_top[self.high, end] - forward_us + costs.from_top[self.low, first])
        own = slice(first, end + 1)
        final_us = float(costs.backward[self.low, first] + costs.weight[self.low, first])
        own_us = float((self.backward + self.weight)[:, own].sum()) - final_us
        room = self.budget - float(costs.beside[self.high, end])
        others = np.ones(self.problem.units, bool)
        others[own] = False
        whole_last = float(self.whole[:, own].sum())
        staying_last = float(self.staying[:, own].sum() + (costs.whole - costs.staying)[self.high, end])
        moved = _moved_bytes(self.in_rate, forward_us + window_us)
        least_moved = _moved_bytes(self.in_rate, forward_us)
        # A window of no length must have room for what is counted in every window.
        whole_room = room + moved - (whole_last if room + least_moved >= whole_last else 0.0)

        def stock_us(times_us: Floats, rests_us: Floats, wholes: Floats, rests: Floats, free: float) -> float:
            pieces = [values[:, others].ravel() for values in (times_us, rests_us, wholes, rests)]
            return most_held_by_units_us(*pieces, room=free)

        both_us = self.backward + self.weight
        stock = stock_us(both_us, self.weight, self.whole, self.left, whole_room)
        if not self.problem.has_free_order and len(self.numbers) == 1 and not self.copies:
            stock = min(stock, self._suffix_stock_us(others, whole_room))
        weights, nothing = self.weight, np.zeros_like(self.weight)
        stayed = np.minimum(self.staying, self.left)
        if self.copies:
            stock = min(stock, stock_us(both_us, self.weight, self.staying, self.left, room - staying_last))
            late_us = stock_us(weights, nothing, stayed, nothing, room - staying_last)
        else:
            late_us = stock_us(weights, nothing, stayed, nothing, whole_room)
        idle_us = window_us - own_us - stock
        # The three counts of docs/math/bounds.md ("Both, and the way back").
        before_us = [float(self.weight[:, others].sum()) - late_us]
        all_but_last_us = float(self.weight.sum()) - float(costs.weight[self.low, first])
        beside = self.budget - float(costs.whole[self.low, first])
        before_us.append(all_but_last_us - float(Knapsack(self.weight.ravel(), self.left.ravel()).most_us(beside)))
        if idle_us >= 0 or not self.copies:
            before_us.append(all_but_last_us + idle_us)
        return idle_us, max(before_us)

    def _suffix_stock_us(self, others: Bools, room: float) -> float:
        """The most work in a stock whose units before B are the last of their order, beside any with W left."""
        order = self.problem.units_in_order("B")
        units = order[others[order]][::-1]
        times_us = np.concatenate([[0.0], np.cumsum((self.backward + self.weight)[0, units])])
        sizes = np.concatenate([[0.0], np.cumsum(self.whole[0, units])])
        fitting = sizes <= room
        if not fitting.any():
            return 0.0
        weights_us = Knapsack(self.weight[0, units], self.left[0, units]).most_us(room - sizes[fitting])
        return float((times_us[fitting] + weights_us).max())

    @cached_property
    def byte_time_us(self) -> float:
        """The byte-time that the units need over the budget (`memory_time_bounds_us`); 0 where no budget counts."""
        if self.budget in (0, float("inf")):
            return 0.0
        late = np.minimum(self.whole, self.left)
        weights = float((late * self.weight).sum())
        # W after the last backward held what they need by then: the budget together, each for its own length.
        later = min(self.budget * float(self.weight.max()), weights)
        both_us, most = self.backward + self.weight, float(late.max())
        span_us = self._least_time_us(self.budget, 0.0, both_us, most)
        bound_us = self.value_us(span_us, self._least_time_us(self.budget, later, self.backward, most))
        # Activations alone, within the part of the budget that sums of their sizes reach.
        sizes = np.concatenate([self.whole, self.staying, self.gradients]).astype(np.int64)
        if divisor := int(np.gcd.reduce(sizes, axis=None)):
            through_us = self._least_time_us(self.budget // divisor * divisor, weights, self.backward, 0.0)
            bound_us = max(bound_us, self.value_us(through_us + float(self.weight[0].min()), through_us))
        return bound_us

    def _least_time_us(self, budget: float, less: float, backward: Floats, weights: float) -> float:
        """The least time in which a budget has the byte-time needed, `less` so much, and ramps at both ends.

        `weights`: the most bytes that a W needs.
        """
        if not budget:
            return 0.0
        own = list(self.numbers)
        offload_us, reload_us = self.costs.offload[own], self.costs.reload[own]
        away_us = np.maximum(0.0, self._way_us - offload_us - reload_us)
        saved = ((self.whole - self.staying) * away_us).ravel()
        needed = self._needed_byte_us - less + self._unused_byte_us(budget, backward, weights)
        directions = [offload_us, reload_us] if self.problem.copy_channels.duplex else [offload_us + reload_us]
        return max(_with_copies_us(budget, needed, saved, copy_us.ravel()) for copy_us in directions)

    @cached_property
    def _way_us(self) -> Floats:
        """The least time from the end of F to the start of B of each unit."""
        way_us: Floats = (self.costs.to_top + self.costs.from_top)[list(self.numbers)] - self.forward
        return way_us

    @cached_property
    def _needed_byte_us(self) -> float:
        """Byte-time of all units, none of which leaves."""
        held_us = self.forward + self._way_us + self.backward
        weights = np.minimum(self.whole, self.left) * self.weight
        # From the start of the backward of a microbatch's last slice to the end of that of each earlier one.
        by_slice = self.costs.by_slice(self.backward)
        from_last_us = np.cumsum(by_slice[:, :, ::-1], axis=2)[:, :, ::-1].reshape(self.whole.shape)
        return float((self.whole * held_us + weights + self.gradients * from_last_us).sum())

    def _unused_byte_us(self, budget: float, backward: Floats, weights: float) -> float:
        """Byte-time that cannot be used near the ends of the span, where F take memory and backwards free it.

        Ramps that overlapped would count the same byte-time twice; then only the larger one counts.
        """
        sizes = self.whole + self.gradients
        if self.problem.has_free_order or len(self.numbers) > 1:
            ramps = [_steady_ramp(us.ravel(), sizes.ravel(), budget) for us in (self.forward, backward)]
        else:
            units = self.problem.units_in_order("B")[::-1]
            begun = np.cumsum(sizes[0])
            # Beside those of which all is left, one runs: the backward of the one before them, or W of any.
            undone = np.cumsum(sizes[0, units]) - sizes[0, units] + np.maximum(sizes[0, units], weights)
            ramps = [_ramp(self.forward[0], begun, budget), _ramp(backward[0, units], undone, budget)]
        (first, first_us), (last, last_us) = ramps
        return first + last if first_us + last_us <= float((self.forward + backward).sum()) else max(first, last)


def _with_copies_us(budget: float, needed: float, saved: Floats, copy_us: Floats) -> float:
    """The least L with the budget times L, and what copies save in L, no less than the byte-time needed.

    Copies of a direction follow one another, so those of L take at most L: those that save most a time come first.
    """
    needed -= float(saved[copy_us == 0].sum())
    timed = (copy_us > 0) & (saved > 0)
    saved, copy_us = saved[timed], copy_us[timed]
    order = np.argsort(-saved / copy_us)
    given = np.concatenate([[0.0], np.cumsum(budget * copy_us[order] + saved[order])])
    spent_us = np.concatenate([[0.0], np.cumsum(copy_us[order])])
    if needed <= 0:
        return 0.0
    done = int(np.searchsorted(given, needed, side="left"))
    if done < len(given):  # within copy number `done` - 1, where 0 < needed <= given[done]
        share = (needed - given[done - 1]) / (given[done] - given[done - 1])
        return float(spent_us[done - 1] + share * (spent_us[done] - spent_us[done - 1]))
    return float(spent_us[-1] + (needed - given[-1]) / budget)


def _moved_bytes(rate: float, window_us: float) -> float:
    """Bytes that copies at this rate move in a window; copies that take no time move all."""
    return rate if rate == float("inf") else rate * window_us


def _ramp(times_us: Floats, levels: Floats, budget: float) -> tuple[float, float]:
    """Byte-time below the budget, and its length, where at most `levels` are used for these times one after another."""
    free = np.maximum(0.0, budget - levels)
    return float((times_us * free).sum()), float(times_us[free > 0].sum())


def _steady_ramp(times_us: Floats, sizes: Floats, budget: float) -> tuple[float, float]:
    """The same where units come in any order: one at once, the others as fast as the quickest take memory."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = np.where(sizes > 0, sizes / times_us, 0.0)
    order = np.argsort(-rates, kind="stable")
    room = max(0.0, budget - float(sizes.max()))
    before = np.concatenate([[0.0], np.cumsum(sizes[order])])
    free = np.maximum(0.0, room - before)
    # Over each unit what is free falls from one value to the next; the last one may reach the budget within.
    share = np.ones(len(order))
    falling = sizes[order] > free[:-1]
    share[falling] = free[:-1][falling] / sizes[order][falling]
    lengths = times_us[order] * np.where(free[:-1] > 0, share, 0.0)
    return float((lengths * (free[:-1] + np.maximum(0.0, free[:-1] - sizes[order])) / 2).sum()), float(lengths.sum())


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
