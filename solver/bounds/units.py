"""Byte-time of a device: what its units need of its memory for how long, over what the budget offers (docs/math)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from optpipe.problem import Floats, Problem
from solver.bounds.device import OnDevice


def memory_time_bounds_us(problem: Problem) -> Sequence[float]:
    """A bound from each device with stages and a budget: the byte-time its units need over the budget.

    It is Little's law (1961) with its ends: what is held on average is what comes in a time times how long it stays.
    It rules where memory is too tight for a period without idle time, however many microbatches there are
    (docs/math/bounds.md, "Byte-time").
    """
    return [device.byte_time_us for device in ByteTime.each(problem)]


class ByteTime(OnDevice):
    """The byte-time of a device."""

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
        offloaded_us = np.maximum(0.0, self._turnaround_us - self.offload - self.reload)
        saved = ((self.whole - self.staying) * offloaded_us).ravel()
        needed = self._needed_byte_us - less + self._unused_byte_us(budget, backward, weights)
        directions = [self.offload, self.reload]
        if not self.problem.copy_channels.duplex:
            directions = [self.offload + self.reload]
        return max(_with_copies_us(budget, needed, saved, copy_us.ravel()) for copy_us in directions)

    @cached_property
    def _turnaround_us(self) -> Floats:
        """The least time from the end of F to the start of B of each unit."""
        turnaround_us: Floats = (self.costs.to_top + self.costs.from_top)[list(self.numbers)] - self.forward
        return turnaround_us

    @cached_property
    def _needed_byte_us(self) -> float:
        """Byte-time of all units, none of which leaves."""
        held_us = self.forward + self._turnaround_us + self.backward
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
            units = self.costs.backward_order[::-1]
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
