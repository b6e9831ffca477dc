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
from solver.plan_player import PassCosts, pass_costs
from solver.published.transfers import TransferPlanner, TransferRequest


@dataclass(frozen=True)
class Passes(PassCosts):
    """The passes of as many microbatches (`lanes`, mostly one) as a round of a pattern runs.

    Lane l of stage s counts as stage ``l * S + s``, so that there are ``lanes * S`` = `stages` of them. The first 2/3
    of `chain` are F and B in the order in which each microbatch takes them, the rest is W. `stage_bytes` and
    `weight_bytes` are held after F and after B.
    """

    lanes: int
    chain: Ints
    stage_bytes: Ints
    weight_bytes: Ints

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
        """The passes of a problem, for rounds of `lanes` microbatches."""
        single, count = pass_costs(problem), len(problem.stages)
        backward = 2 * count - 1 - np.arange(count)
        chain = np.concatenate([np.arange(count), backward])

        def tiled(values: NDArray[np.generic]) -> NDArray[Any]:
            return np.tile(values.reshape(-1, count), (1, lanes)).ravel()

        def laned(passes: Ints, lane: int) -> Ints:
            kind, stage = np.divmod(passes, count)
            return np.where(passes < 0, -1, kind * lanes * count + lane * count + stage)

        needed = np.stack([laned(single.before, lane) for lane in range(lanes)]).reshape(lanes, 3, count)
        chains = [laned(chain, lane) for lane in range(lanes)]
        weights = [laned(backward + count, lane) for lane in range(lanes)]
        return Passes(
            stages=lanes * count,
            devices=single.devices,
            duration_us=tiled(single.duration_us),
            device=tiled(single.device),
            before=needed.transpose(1, 0, 2).ravel(),
            delay_us=tiled(single.delay_us),
            at_start=tiled(single.at_start),
            at_end=tiled(single.at_end),
            lanes=lanes,
            chain=np.concatenate(chains + weights),
            stage_bytes=np.tile([stage.activation_bytes for stage in problem.stages], lanes),
            weight_bytes=np.tile([stage.backward_weight_bytes for stage in problem.stages], lanes),
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
        return [passes[np.lexsort((passes, place_us[passes]))] for passes in of_devices]

    @cached_property
    def key(self) -> bytes:
        """The period, and what decides the orders: equal for patterns that differ in nothing else."""
        parts = [np.array([self.period_us, self.passes.lanes]), self.round, *self.sequences]
        return b"".join(part.tobytes() for part in parts)

    @cached_property
    def keeps_order(self) -> bool:
        """True if microbatches keep their order: each lane of a pass within a round after the last."""
        lanes = self.start_us.reshape(3, self.passes.lanes, -1)
        last = lanes[:, -1] < lanes[:, 0] + self.round_us
        return bool((np.diff(lanes, axis=1) > 0).all() and last.all())

    @cached_property
    def peak_bytes(self) -> Ints:
        """For each device the peak of its memory once the block repeats.

        It depends on the order alone: at the begin of a round a microbatch holds its activation once for each round
        between its F and its B, and what W needs once for each round between B and W; within the round the level
        changes in the order of the passes.
        """
        passes, count = self.passes, self.passes.stages
        peaks = []
        for sequence in self.sequences:
            stages = sequence[sequence < count]
            in_flight = self.round[stages + count] - self.round[stages]
            pending = self.round[stages + 2 * count] - self.round[stages + count]
            level = int((in_flight * passes.stage_bytes[stages] + pending * passes.weight_bytes[stages]).sum())
            changes = np.stack([passes.at_start[sequence], passes.at_end[sequence]], axis=1).ravel()
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


def orders_from_pattern(problem: Problem, compute: Iterable[tuple[Ints, Ints]]) -> Orders:
    """Orders of compute ops given for each device as passes and microbatches."""
    count = len(problem.stages)
    return Orders.of_compute(OpArray(passes // count, passes % count, which) for passes, which in compute)


@njit(cache=True)
def unwrapped(place: Floats, period: float, chain: Ints, before: Ints, lag: Floats, tolerance: float) -> Floats:
    """Starts of one round's passes that run at `place` modulo the period, each as early as its input allows."""
    start = np.empty(len(place))
    for p in chain:
        ready = start[before[p]] + lag[p] if before[p] >= 0 else 0.0
        wait = (place[p] - ready) % period
        if wait > period - tolerance:  # a rounding error before `ready`, not a whole period after it
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


LEADS = (1.0, 3.0)
"""Lead of a reload before its B, in reload times."""


@dataclass(frozen=True)
class OffloadRelaxation:
    """Every activation that may leave does; room for the largest of a device is reserved `margin` times for copies."""

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
