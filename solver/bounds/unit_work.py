"""Work of a device with one stage between two of its ops: what memory requires to have run (docs/math/bounds.md)."""

from __future__ import annotations

import numpy as np

from optpipe.problem import Floats, Ints
from solver.bounds.device import Knapsack
from solver.bounds.unit_costs import UnitCosts

MOST_BEFORE = 128
"""Number of the last backwards before an F from each of which on the work of its device is counted."""

MOST_MORE = 64
"""Most backwards beyond those that memory requires that are tried; with more, W count as free."""


class OneStage:
    """Work of a device with the one stage s between two of its ops.

    `backward_starts`: heads of the backwards in their order, as far as known.
    """

    def __init__(self, costs: UnitCosts, s: int, budget: float, released: Ints) -> None:
        back = costs.backward_order
        self.count, self.released = costs.problem.slice_count, released
        self.forward_us = sums(costs.forward[s])
        self.backward_us, self.weight_us = sums(costs.backward[s, back]), sums(costs.weight[s, back])
        self.held, self.freed = sums(costs.staying[s]), sums(costs.staying[s, back])
        self.room = budget - costs.whole[s] - costs.beside[s]
        self.backward_starts = np.zeros(len(back))
        self.pending = Knapsack(costs.weight[s], costs.left[s])
        self.has_weights = bool(costs.weight[s].any())

    def head_us(self, x: int, begins_us: float) -> float:
        """The earliest start of F of unit x by the work that the device must have done since it began, or since a B.

        When F(x) starts, at least `released[x]` backwards have ended. If `done` have, all their W have run except those
        that fit with what is in flight. Since B(j) started, all backwards from it on have run, the F that wait for
        it, and all of these W but those of the j backwards before it, which can have run earlier.
        """
        least = int(self.released[x])
        first = x - x % self.count  # no backward of this microbatch, or of later ones, has ended
        most = min(first, least + MOST_MORE) if self.has_weights else least
        done = np.arange(least, most + 1)
        needed_us = np.zeros(len(done))
        if self.has_weights:
            room = self.room[x] - (self.held[x] - self.freed[done])
            needed_us = self.weight_us[done] - self.pending.most_us(room)
            if most < first:
                needed_us[-1] = 0.0
        from_start_us = float((self.backward_us[done] + np.maximum(0.0, needed_us)).min())
        head_us = begins_us + float(self.forward_us[x]) + from_start_us
        if not least:
            return head_us
        since = np.arange(max(0, least - MOST_BEFORE), least)
        weights_us = np.maximum(0.0, needed_us[:, None] - self.weight_us[since])
        work_us = (self.backward_us[done][:, None] - self.backward_us[since] + weights_us).min(axis=0)
        waiting = np.searchsorted(self.released[:x], since, side="right")
        between_us = self.forward_us[x] - self.forward_us[waiting]
        return max(head_us, float((self.backward_starts[since] + work_us + between_us).max()))

    def backward_head_us(self, place: int, begun: int, begins_us: float) -> float:
        """The earliest start of the backward at a place: after all F of its microbatch and all backwards before it."""
        return begins_us + float(self.forward_us[begun] + self.backward_us[place])

    def backward_tail_us(self, place: int) -> float:
        """Work that follows a backward: F that wait for it, all later backwards, and W of these and its own."""
        waiting = int(np.searchsorted(self.released, place, side="right"))
        forward_us = self.forward_us[-1] - self.forward_us[waiting]
        backward_us = self.backward_us[-1] - self.backward_us[place + 1]
        return float(forward_us + backward_us + self.weight_us[-1] - self.weight_us[place])

    def forward_tail_us(self, x: int, first: int) -> float:
        """Work that follows F of unit x: later F, and backwards and W from unit `first`, of its microbatch, on."""
        later_us = self.backward_us[-1] - self.backward_us[first] + self.weight_us[-1] - self.weight_us[first]
        return float(self.forward_us[-1] - self.forward_us[x + 1] + later_us)


def sums(values: Floats) -> Floats:
    """Sums of all prefixes, the empty one first."""
    sums: Floats = np.concatenate([[0.0], np.cumsum(values)])
    return sums
