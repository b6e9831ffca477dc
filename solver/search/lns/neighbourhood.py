"""A window of a schedule, and what lies before and after it as times and paths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optpipe.orders import Op
from solver.search.windows_surroundings import NEVER, Ints, Surroundings

BEFORE, INSIDE, AFTER = range(3)


@dataclass(frozen=True)
class Window:
    """Ops that start from `begin` to before `end` (ticks). Of these the ops in `free` may change places.

    `free` is by number of the op. Compute ops that are not free keep their order among one another; which activations
    leave for the host is decided anew only for stages and microbatches whose F is free.
    """

    begin: int
    end: int
    free: NDArray[np.bool_]


class Frame:
    """Where every op lies (`where`, by number), and for those in the window what surrounds them.

    `heads`: earliest starts, when all that they need from before the window is there. `tails`, row d: the time from
    their end to the end of device d, through ops after the window. `limits`: the end that each device has if the window
    stays as it is. `running`: ops before the window that end in it. Times in ticks.
    """

    def __init__(self, around: Surroundings, window: Window) -> None:
        self.around, self.window = around, window
        self.numbering = around.numbering
        self.problem = self.numbering.problem
        self.where = np.where(around.start < window.begin, BEFORE, np.where(around.start < window.end, INSIDE, AFTER))
        self.inside = np.flatnonzero((self.where == INSIDE) & around.present)
        self.running = np.flatnonzero((self.where == BEFORE) & (around.end > window.begin) & around.present)
        self.last_end = int(around.end[around.present].max())
        self.far = 4 * self.last_end + 1  # after everything that a window can delay
        self.heads = self._heads()
        self.tails = self._tails()
        self.limits = self._limits()

    def _heads(self) -> Ints:
        around, (source, target, delay) = self.around, self._rules(BEFORE, INSIDE)
        heads = np.zeros(len(around.start), np.int64)
        np.maximum.at(heads, target, around.end[source] + delay)
        for ops in self._sequences():
            before = ops[self.where[ops] == BEFORE]
            inside = ops[self.where[ops] == INSIDE]
            if len(before):
                heads[inside] = np.maximum(heads[inside], around.end[before[-1]])
        return heads

    def _tails(self) -> Ints:
        around, (source, target, delay) = self.around, self._rules(INSIDE, AFTER)
        tails = np.full_like(around.tails, NEVER)
        for row, all_tails in zip(tails, around.tails, strict=True):
            np.maximum.at(row, source, delay + all_tails[target])
        for ops in self._sequences():
            after = ops[self.where[ops] == AFTER]
            inside = ops[self.where[ops] == INSIDE]
            if len(after):
                tails[:, inside] = np.maximum(tails[:, inside], around.tails[:, after[:1]])
        for d, (compute, *_) in enumerate(around.streams):
            mine = compute[self.where[compute] == INSIDE]
            tails[d, mine] = np.maximum(tails[d, mine], 0)
        return tails

    def _rules(self, here: int, there: int) -> Ints:
        rules = self.around.present_rules
        chosen = (self.where[rules[:, 0]] == here) & (self.where[rules[:, 1]] == there)
        edges: Ints = rules[chosen].T
        return edges

    def _sequences(self) -> Iterator[Ints]:
        for device in self.around.streams:
            yield from device
        yield from self.around.channels

    def _limits(self) -> Ints:
        """For each device the end that the schedule has when its window stays as it is."""
        ends = self.around.end[self.inside]
        limits: Ints = (ends + self.tails[:, self.inside]).max(axis=1, initial=0)
        if self.problem.objective == "makespan":
            return np.full_like(limits, limits.max())
        return limits

    def latest_end(self, k: int) -> int:
        """The time by which an op of the window must end for the value not to grow (a makespan's only)."""
        latest = 2 * self.last_end
        if self.problem.objective == "makespan":
            latest = min(latest, int((self.limits - self.tails[:, k]).min()))
        return latest

    def may_leave(self, s: int, i: int) -> bool:
        """Whether copies in the window would keep the order of the microbatches."""
        index, present, where = self.numbering.index, self.around.present, self.where
        for kind in "OR":
            numbers = np.array([index[Op(kind, s, j)] for j in range(self.problem.microbatches)])
            there = present[numbers]
            if (there[:i] & (where[numbers[:i]] == AFTER)).any() or (there[i:] & (where[numbers[i:]] == BEFORE)).any():
                return False
        return True

    def copy_head(self, k: int) -> int:
        """When the channel of a new copy is free of what lies before, and its activation is computed."""
        op = self.numbering.ops[k]
        ready = self.around.end[self.numbering.index[Op("F", *op[1:])]]
        channel = self._channel_of(k)
        before = channel[self.where[channel] == BEFORE]
        ends = self.around.end[before]
        inside = self.where[self.numbering.index[Op("F", *op[1:])]] == INSIDE
        return max(self.window.begin, 0 if inside else int(ready), int(ends.max(initial=0)))

    def copy_tails(self, k: int) -> Ints:
        """The tails of a new copy: its channel's next, and the B that a reload serves."""
        op = self.numbering.ops[k]
        after = [c for c in self._channel_of(k).tolist() if self.where[c] == AFTER][:1]
        if op.kind == "R" and self.where[self.numbering.index[Op("B", *op[1:])]] == AFTER:
            after.append(self.numbering.index[Op("B", *op[1:])])
        tails: Ints = self.around.tails[:, after].max(axis=1, initial=NEVER)
        return tails

    def _channel_of(self, k: int) -> Ints:
        """The copies in the schedule that share a channel with op k, in order."""
        present, start = self.around.present, self.around.start
        mates = np.array([c for c in self._copies_beside(k) if present[c]], np.int64)
        return mates[np.argsort(start[mates], kind="stable")]

    def _copies_beside(self, k: int) -> Iterator[int]:
        op = self.numbering.ops[k]
        device = self.problem.stages[op.stage].device
        group = next(group for group in self.problem.channel_groups if device in group)
        kinds = op.kind if self.problem.copy_channels.duplex else "OR"
        for d in group:
            for s in self.problem.stages_of[d]:
                if self.problem.stages[s].offload:
                    for kind in kinds:
                        for i in range(self.problem.microbatches):
                            yield self.numbering.index[Op(kind, s, i)]
