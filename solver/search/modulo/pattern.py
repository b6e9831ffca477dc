"""Patterns: the passes of one block and the schedule its repetition gives; offload relaxation (docs/math/pattern.md).

With offload an activation that may leave counts while its F runs and again from the start of its B, not in between.
Copies take time, so some room of each device is reserved for activations that are being copied. The transfers
themselves follow from the compute orders (`solver.published.transfers`), which keep the real budgets and channels, and
wait where the reserved room is too small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optpipe.ops import Floats, Ints, Op, OpArray, Orders
from optpipe.problem import Problem
from optpipe.stage import Stage
from solver.plan_player import PassCosts, pass_costs
from solver.published.transfers import TransferPlanner, TransferRequest


@dataclass(frozen=True)
class Passes(PassCosts):
    """The passes of as many units (`lanes`, mostly one) as a round of a pattern runs: microbatches, or their slices.

    Lane l of stage s counts as stage ``l * S + s``, so that there are ``lanes * S`` = `stages` of them. The first 2/3
    of `chain` are F and B in the order in which each unit takes them, the rest is W. `rank` numbers passes; where lanes
    are `ordered`, each after those of its round that it needs or follows. `stage_bytes` and `weight_bytes` are held
    after F and after B. Lanes of equal costs may be exchanged, so that none follows another.
    """

    lanes: int
    chain: Ints
    rank: Ints
    stage_bytes: Ints
    weight_bytes: Ints

    @cached_property
    def ordered(self) -> bool:
        """True if lanes have costs of their own, so that they keep their order."""
        return bool((self.follows[:, 0] >= 0).any())

    @cached_property
    def lag_us(self) -> Floats:
        """The least time from the start of the pass that each needs to its own; 0 where it needs none."""
        return np.where(self.before >= 0, self.duration_us[self.before] + self.delay_us, 0.0)

    @property
    def model_stages(self) -> int:
        """The stages of the problem, S."""
        return self.stages // self.lanes

    def of_device(self, device: int) -> Ints:
        """The passes of a device: F and B of its stages, then their W."""
        return np.flatnonzero(self.device == device)

    def work_us(self) -> Floats:
        """For each device, the time of one round's passes."""
        return np.bincount(self.device, self.duration_us, self.devices).astype(np.float64)

    def alone_us(self) -> Floats:
        """Starts of a microbatch's passes that never wait: how one microbatch runs alone, with each W after its B."""
        start = np.zeros(self.size)
        for p in self.chain.tolist():
            if self.before[p] >= 0:
                start[p] = start[self.before[p]] + self.lag_us[p]
        return start

    @staticmethod
    def of(problem: Problem, lanes: int = 1) -> Passes:
        """The passes of a problem, for rounds of `lanes` units: alike, or the first ones where they differ."""
        if problem.has_equal_microbatches:
            return Passes.of_lanes([pass_costs(problem)] * lanes, [problem.stages] * lanes)
        stages = [[problem.stage_of(s, unit) for s in range(len(problem.stages))] for unit in range(lanes)]
        backwards = problem.units_in_order("B")
        return Passes.of_lanes(
            [pass_costs(problem, unit) for unit in range(lanes)], stages, backwards[backwards < lanes].tolist()
        )

    @staticmethod
    def of_lanes(
        costs: Sequence[PassCosts], stages: Sequence[Sequence[Stage]], backwards: Sequence[int] | None = None
    ) -> Passes:
        """The passes of lanes with these costs. `backwards`: the order of their backwards; None where lanes are alike.

        Forwards are in the order of lanes.
        """
        lanes, count = len(costs), costs[0].stages
        last = 2 * count - 1 - np.arange(count)
        chain = np.concatenate([np.arange(count), last])

        def joined(values: Sequence[NDArray[np.generic]]) -> NDArray[Any]:
            return np.stack([of_lane.reshape(3, count) for of_lane in values], axis=1).ravel()

        def laned(passes: Ints, lane: int) -> Ints:
            kind, stage = np.divmod(passes, count)
            return np.where(passes < 0, -1, kind * lanes * count + lane * count + stage)

        chains = [laned(chain, lane) for lane in range(lanes)]
        weights = [laned(last + count, lane) for lane in range(lanes)]
        numbers = np.arange(3 * lanes * count).reshape(3, lanes, count)
        rank, follows = numbers.ravel().copy(), np.tile([-1, 0], (numbers.size, 1))
        if backwards is not None and lanes > 1:
            for kind, order in enumerate([range(lanes), backwards, backwards]):
                of_kind = numbers[kind, list(order)]
                follows[of_kind, 0] = np.roll(of_kind, 1, axis=0)
                follows[of_kind[0], 1] = 1
                rank[of_kind if kind == 0 else of_kind[:, ::-1]] = numbers[kind]
        return Passes(
            stages=lanes * count,
            devices=costs[0].devices,
            duration_us=joined([of_lane.duration_us for of_lane in costs]),
            device=joined([of_lane.device for of_lane in costs]),
            before=joined([laned(of_lane.before, lane) for lane, of_lane in enumerate(costs)]),
            delay_us=joined([of_lane.delay_us for of_lane in costs]),
            follows=follows,
            at_start=joined([of_lane.at_start for of_lane in costs]),
            at_end=joined([of_lane.at_end for of_lane in costs]),
            lanes=lanes,
            chain=np.concatenate(chains + weights),
            rank=rank,
            stage_bytes=np.array([stage.activation_bytes for of_lane in stages for stage in of_lane], np.int64),
            weight_bytes=np.array([stage.backward_weight_bytes for of_lane in stages for stage in of_lane], np.int64),
        )


TOLERANCE = 1e-7
"""Times that differ by less than this share of the period are equal."""


@dataclass(frozen=True)
class Pattern:
    """One round's passes at `start_us`, repeated every `round_us`: one microbatch, or several in lanes."""

    passes: Passes
    round_us: float
    start_us: Floats

    @property
    def period_us(self) -> float:
        """Time per microbatch (the initiation interval), for any number of microbatches."""
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
        """For each pass the number of rounds after its microbatch's first in which it runs (its stage number)."""
        return np.floor(self.start_us / self.round_us + TOLERANCE).astype(np.int64)

    @cached_property
    def sequences(self) -> list[Ints]:
        """For each device its passes in the order in which every round runs them."""
        place_us = self.start_us - self.round * self.round_us
        of_devices = map(self.passes.of_device, range(self.passes.devices))
        return [passes[np.lexsort((self.passes.rank[passes], place_us[passes]))] for passes in of_devices]

    @cached_property
    def key(self) -> bytes:
        """The period, and what decides the orders: equal for patterns that differ in nothing else."""
        parts = [np.array([self.period_us, self.passes.lanes]), self.round, *self.sequences]
        return b"".join(part.tobytes() for part in parts)

    @cached_property
    def keeps_order(self) -> bool:
        """True if units keep their order: each lane of a pass within a round after the last."""
        if self.passes.ordered:
            return self._follows_in_order()
        lanes = self.start_us.reshape(3, self.passes.lanes, -1)
        last = lanes[:, -1] < lanes[:, 0] + self.round_us
        return bool((np.diff(lanes, axis=1) > 0).all() and last.all())

    def _follows_in_order(self) -> bool:
        """True if every pass runs after the one that it follows, in the order of rounds and places."""
        place = np.empty(self.passes.size, np.int64)
        for sequence in self.sequences:
            place[sequence] = np.arange(len(sequence))
        first, earlier = self.passes.follows.T
        rounds = self.round - (self.round[first] - earlier)
        return bool(((rounds > 0) | ((rounds == 0) & (place > place[first]))).all())

    @cached_property
    def peak_bytes(self) -> Ints:
        """For each device the peak of its memory once the block repeats.

        It depends on the order alone. When a round begins, a pass of round r has run r times less often than one of
        round 0; since all passes of a microbatch together change nothing, the level at that time is minus the sum of
        each pass's change times its r. Within the round it changes in the order of the passes.
        """
        passes, peaks = self.passes, []
        for sequence in self.sequences:
            changes = np.stack([passes.at_start[sequence], passes.at_end[sequence]], axis=1)
            level = -int((self.round[sequence] * changes.sum(axis=1)).sum())
            peaks.append(level + int(np.cumsum(changes).max(initial=0)))
        return np.array(peaks, np.int64)

    def stretched(self, at: int, rounds: int, over: int = 1) -> Pattern:
        """Lengthen the block at the same places: all passes of a microbatch from `at` on come some rounds later.

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
        """Move all W of a device up to `most` rounds later, as many as its budget (bytes) allows."""
        passes = self.passes
        weights = np.arange(2 * passes.stages, passes.size)
        bytes_per_round = np.bincount(passes.device[weights], passes.weight_bytes, passes.devices)
        room = np.floor((budgets - self.peak_bytes) / np.maximum(bytes_per_round, 1))
        start = self.start_us.copy()
        start[weights] += self.round_us * np.clip(room, 0, most)[passes.device[weights]]
        return replace(self, start_us=start)

    def plan(self, units: int) -> list[Plan]:
        """For each device all its ops in order, for any number of units.

        Where lanes are alike they are passes of a single lane and units; where they are ordered, passes of their lanes
        and the rounds in which the units begin.
        """
        lanes, count = self.passes.lanes, self.passes.model_stages
        begins = -(-units // lanes)
        plans = []
        for sequence in self.sequences:
            passes = np.tile(sequence, begins)
            kind, stage = np.divmod(passes, self.passes.stages)
            turn = np.repeat(np.arange(begins), len(sequence))
            unit = turn * lanes + stage // count
            late = turn + np.tile(self.round[sequence], begins)
            order = np.lexsort((np.tile(np.arange(len(sequence)), begins), late))
            order = order[unit[order] < units]
            if self.passes.ordered:
                plans.append(Plan(passes[order], turn[order], late[order]))
            else:
                plans.append(Plan((kind * count + stage % count)[order], unit[order], late[order]))
        return plans


class Plan(NamedTuple):
    """The ops of one device in order: passes, microbatches (or rounds of units), and the rounds in which they run."""

    passes: Ints
    microbatches: Ints
    rounds: Ints


def orders_from_pattern(problem: Problem, compute: Iterable[tuple[Ints, Ints]]) -> Orders:
    """Orders of compute ops given for each device as passes and microbatches."""
    count = len(problem.stages)
    return Orders.of_compute(OpArray(passes // count, passes % count, which) for passes, which in compute)


SWEEPS = 16
"""Sweeps over a round after which starts that do not settle count as impossible."""


@njit(cache=True)
def unwrapped(
    place: Floats, period: float, chain: Ints, before: Ints, lag: Floats, follows: Ints, duration: Floats,
    sweeps: int, tolerance: float,
) -> Floats:  # fmt: skip
    """Starts of one round's passes that run at `place` modulo the period, each as early as its input allows.

    A pass also comes after the one that it `follows`. That may be one of the round before, whose start is known only
    when all are: so this is done in several `sweeps`. Where they do not settle the starts, some pass is not in order.
    """
    start = np.full(len(place), -np.inf)
    for _ in range(sweeps):
        changed = False
        for p in chain:
            ready = start[before[p]] + lag[p] if before[p] >= 0 else 0.0
            first = follows[p, 0]
            if first >= 0:
                ready = max(ready, start[first] + duration[first] - follows[p, 1] * period)
            wait = (place[p] - ready) % period
            if wait > period - tolerance:  # a rounding error before `ready`, not a whole period after it
                wait = 0.0
            if ready + wait > start[p] + tolerance:
                start[p] = ready + wait
                changed = True
        if not changed:
            break
    return start


def pattern_at(passes: Passes, place: Floats, round_us: float) -> Pattern:
    """The pattern whose passes run at `place` modulo the round: the shortest block with these places."""
    turned = (place - place[passes.chain[0]]) % round_us
    tolerance = TOLERANCE * round_us
    turned[turned > round_us - tolerance] = 0.0
    start = unwrapped(
        turned, round_us, np.argsort(passes.rank) if passes.ordered else passes.chain, passes.before, passes.lag_us,
        passes.follows, passes.duration_us, SWEEPS if passes.ordered else 1, tolerance,
    )  # fmt: skip
    return Pattern(passes, round_us, start)


LEADS = (1.0, 3.0)
"""Lead of a reload before its B, in reload times."""


@dataclass(frozen=True)
class OffloadRelaxation:
    """Offload of every activation that may leave; `margin` times the largest of a device is reserved for copies."""

    margin: int

    def passes(self, problem: Problem, passes: Passes) -> Passes:
        """The passes with the memory of activations that are on the host between F and B."""
        moved = np.tile(_moved_bytes(problem), passes.lanes)
        nothing = np.zeros_like(moved)
        return replace(
            passes,
            stage_bytes=passes.stage_bytes - moved,
            at_start=passes.at_start + np.concatenate([nothing, moved, nothing]),
            at_end=passes.at_end - np.concatenate([moved, nothing, nothing]),
        )

    def budgets_bytes(self, problem: Problem, budgets: Ints) -> Ints:
        """The budgets without the reserved room."""
        moved = _moved_bytes(problem)
        largest = [max((int(moved[s]) for s in stages), default=0) for stages in problem.stages_of]
        return budgets - self.margin * np.array(largest, np.int64)

    def orders(self, problem: Problem, compute: Sequence[Sequence[Op]]) -> Iterator[Orders]:
        """Add transfers to the compute orders, one result for each lead with which they can be played."""
        leaving = {
            (s, i)
            for (s, stage), i in product(enumerate(problem.stages), range(problem.units))
            if stage.offload and stage.offload.bytes
        }
        budgets = [device.memory_bytes for device in problem.devices]
        planner = TransferPlanner(problem, compute)
        for lead in LEADS:
            orders = planner.plan(TransferRequest(leaving, lead), budgets)
            if orders is not None:
                yield orders


def _moved_bytes(problem: Problem) -> Ints:
    return np.array([stage.offload.bytes if stage.offload else 0 for stage in problem.stages], np.int64)
