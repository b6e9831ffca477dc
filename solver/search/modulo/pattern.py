"""A pattern: the passes of one round, and what they mean when the round is repeated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numba import njit

from optpipe.orders import OpArray, Orders
from optpipe.problem import Problem
from solver.search.pattern.passes import Floats, Ints, Passes

TOLERANCE = 1e-7
"""Times that differ by less than this share of the period are equal."""


@dataclass(frozen=True)
class Pattern:
    """One round's passes at `start_us`, repeated every `round_us`: mostly one microbatch, a few with several lanes."""

    passes: Passes
    round_us: float
    start_us: Floats

    @property
    def period_us(self) -> float:
        """Time a microbatch: a statement on throughput, which holds for as many microbatches as one likes."""
        return self.round_us / self.passes.lanes

    @property
    def block_us(self) -> float:
        """From the first start to the last end of one round's microbatches."""
        return float((self.start_us + self.passes.duration_us).max() - self.start_us.min())

    @property
    def in_flight(self) -> int:
        """Microbatches between their first start and their last end at any time, at most."""
        return int(np.ceil(self.block_us / self.round_us)) * self.passes.lanes

    @cached_property
    def round(self) -> Ints:
        """For each pass how many rounds after its microbatch's first it runs."""
        return np.floor(self.start_us / self.round_us + TOLERANCE).astype(np.int64)

    @cached_property
    def sequences(self) -> list[Ints]:
        """For each device its passes in the order in which every round runs them."""
        place = self.start_us - self.round * self.round_us
        return [
            mine[np.lexsort((mine, place[mine]))] for mine in map(self.passes.of_device, range(self.passes.devices))
        ]

    @cached_property
    def key(self) -> bytes:
        """The period, and what decides the orders: equal for patterns that differ in nothing else."""
        parts = [np.array([self.period_us, self.passes.lanes]), self.round, *self.sequences]
        return b"".join(part.tobytes() for part in parts)

    @cached_property
    def keeps_order(self) -> bool:
        """Whether microbatches keep their order within every pass: a lane is behind the lane before it, and less
        than a round behind."""
        lanes = self.start_us.reshape(3, self.passes.lanes, -1)
        last = lanes[:, -1] < lanes[:, 0] + self.round_us
        return bool((np.diff(lanes, axis=1) > 0).all() and last.all())

    @cached_property
    def peak_bytes(self) -> Ints:
        """For each device the peak of its memory once the block repeats: it depends on the order alone."""
        return np.array([self._peak_bytes(sequence) for sequence in self.sequences], np.int64)

    def _peak_bytes(self, sequence: Ints) -> int:
        passes, count = self.passes, self.passes.stages
        here = sequence[sequence < count]
        flying = self.round[here + count] - self.round[here]
        kept = self.round[here + 2 * count] - self.round[here + count]
        level = int((flying * passes.stage_bytes[here] + kept * passes.weight_bytes[here]).sum())
        changes = np.stack([passes.at_start[sequence], passes.at_end[sequence]], axis=1).ravel()
        return level + int(np.cumsum(changes).max(initial=0))

    def stretched(self, at: int, rounds: int, over: int = 1) -> Pattern:
        """The same rounds with a longer block: whatever a microbatch does from `at` on comes some rounds later.

        `at` counts F and B along the chain; W goes with its B, or alone where `at` is behind the last B. The rounds are
        spread evenly `over` so many passes up to there. It takes more memory, and gives more for the devices to do
        while they wait for the first B: at the turn it gives all devices as much, spread over the chain it gives the
        first devices more, which wait for longer.
        """
        passes = self.passes
        chained = passes.chain[: 2 * passes.stages].reshape(passes.lanes, -1)
        position = np.arange(chained.shape[1])
        later = np.zeros(passes.size)
        later[chained] = np.round(rounds * np.clip((position - at) / over + 1, 0, 1))
        later[2 * passes.stages :] = rounds if at == len(position) else later[passes.stages : 2 * passes.stages]
        return replace(self, start_us=self.start_us + later * self.round_us)

    def with_late_weights(self, budgets: Ints, most: int) -> Pattern:
        """The same rounds with all W of a device up to `most` rounds later, as many as its budget (bytes) allows."""
        passes = self.passes
        weights = np.arange(2 * passes.stages, passes.size)
        a_round = np.bincount(passes.device[weights], passes.weight_bytes, passes.devices)
        room = np.floor((budgets - self.peak_bytes) / np.maximum(a_round, 1))
        start = self.start_us.copy()
        start[weights] += self.round_us * np.clip(room, 0, most)[passes.device[weights]]
        return replace(self, start_us=start)

    def plan(self, microbatches: int) -> list[Plan]:
        """For each device all its ops in order, for any number of microbatches."""
        lanes, count = self.passes.lanes, self.passes.model_stages
        rounds = -(-microbatches // lanes)
        plans = []
        for sequence in self.sequences:
            kind, stage = np.divmod(np.tile(sequence, rounds), self.passes.stages)
            turn = np.repeat(np.arange(rounds), len(sequence))
            microbatch = turn * lanes + stage // count
            turn = turn + np.tile(self.round[sequence], rounds)
            order = np.lexsort((np.tile(np.arange(len(sequence)), rounds), turn))
            order = order[microbatch[order] < microbatches]
            plans.append(Plan((kind * count + stage % count)[order], microbatch[order], turn[order]))
        return plans


class Plan(NamedTuple):
    """The ops of one device in order: passes of a single lane, microbatches, and the rounds in which they run."""

    passes: Ints
    microbatches: Ints
    rounds: Ints


def orders_of(problem: Problem, compute: Iterable[tuple[Ints, Ints]]) -> Orders:
    """Orders of compute ops given for each device as passes and microbatches."""
    count = len(problem.stages)
    return Orders.of_compute(OpArray(passes // count, passes % count, which) for passes, which in compute)


@njit(cache=True)
def unwrapped(place: Floats, period: float, chain: Ints, before: Ints, lag: Floats, tolerance: float) -> Floats:
    """Starts of one round's passes that run at `place` modulo the period, each as soon as it may."""
    start = np.empty(len(place))
    for p in chain:
        ready = start[before[p]] + lag[p] if before[p] >= 0 else 0.0
        wait = (place[p] - ready) % period
        if wait > period - tolerance:
            wait = 0.0
        start[p] = ready + wait
    return start


def pattern_at(passes: Passes, place: Floats, round_us: float) -> Pattern:
    """The pattern whose passes run at `place` modulo the round: the shortest block with these places."""
    turned = (place - place[passes.chain[0]]) % round_us
    tolerance = TOLERANCE * round_us
    turned[turned > round_us - tolerance] = 0.0
    start = unwrapped(turned, round_us, passes.chain, passes.before, passes.lag_us, tolerance)
    return Pattern(passes, round_us, start)
