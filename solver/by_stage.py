"""One variant for each stage: a problem with activation modes as problems without, and their orders as orders of it.

Where all microbatches of a stage are held alike, recomputation is a longer backward with a workspace, and the
rest a smaller activation. So whatever makes or improves schedules without modes serves problems with them: published
schedules and list schedules for a choice of variants. What is chosen for every microbatch by itself is for searches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numba import njit

from optpipe.errors import DeadlockError
from optpipe.kinds import CODE, COPIES, KINDS, PLAIN_BACKWARD, RECOMPUTATIONS, codes
from optpipe.ops import Bools, DeviceOrders, Ints, Op, OpArray, Orders, WaitArray
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.stage import Mode, Offload, Stage
from optpipe.task_graph import lower
from solver.build import within_budgets
from solver.scale import count_ops
from solver.variants import Variant, variants

IN_FLIGHT = (2.0, 1.5, 1.0, 0.75, 0.5, 0.25)
"""Microbatches in flight that a choice makes room for, as a share of the stages from a stage to the last (1F1B's)."""

_C = CODE["C"]
_INSIDE = np.arange(len(KINDS))
_INSIDE[[*codes(PLAIN_BACKWARD.values())]] = codes(PLAIN_BACKWARD)
"""The kind that each kind is where the backward recomputes."""
_PLAIN = np.array([CODE[PLAIN_BACKWARD.get(kind, kind)] for kind in KINDS])


@dataclass(frozen=True)
class ByStage:
    """A problem with modes and the variant of each stage; `plain` is what it is without modes."""

    problem: Problem
    chosen: Sequence[Variant]

    @cached_property
    def plain(self) -> Problem:
        """The problem without modes; each copy of a variant is optional in it, as `offload` is."""
        return self.plain_at([1.0] * len(self.chosen))

    def plain_at(self, shares: Sequence[float]) -> Problem:
        """The plain problem with backwards that take a share of their recomputation, by stage: its time on average."""
        stages = zip(self.problem.stages, self.chosen, shares, strict=True)
        return self.problem.replaced(stages=[_plain_stage(*entry) for entry in stages])

    def with_modes(self, orders: Orders, recomputed: Bools | None = None) -> Orders | None:
        """Orders of the plain problem as orders of the problem; None where no mode does without a copy as they do.

        `recomputed`, of shape (stages, units): units for which a variant that recomputes does so, of those that do not
        leave; the others are kept. None: all.
        """
        size = len(self.problem.stages), self.problem.units
        again = np.ones(size, bool) if recomputed is None else recomputed
        ahead, inside = (flags[:, None] & again for flags in (self._ahead, self._inside))
        leaves = np.zeros(size, bool)
        for device in orders.devices:
            for _, s, i in device.offload:
                leaves[s, i] = True
        modes = np.zeros(size, np.int64)
        for s, (stage, variant) in enumerate(zip(self.problem.stages, self.chosen, strict=True)):
            for left in np.unique(leaves[s]).tolist():
                choice = _choice(stage, variant, left)
                if choice is None:
                    return None
                modes[s, leaves[s] == left] = choice
            if variant.mode.recomputes:
                modes[s, ~again[s]] = 0
        devices = [
            replace(device, compute=_with_recomputation(OpArray.of(device.compute), ahead, inside))
            for device in orders.devices
        ]
        waits = WaitArray.of(orders.waits)
        # A backward waits, or is waited for, as C and backward do together: C is first, the backward last.
        named = WaitArray(_begin(waits.op, ahead, inside), _end(waits.before, inside))
        return Orders(devices, named, orders.channels, modes)

    @cached_property
    def _ahead(self) -> Bools:
        return np.array([variant.ahead for variant in self.chosen])

    @cached_property
    def _inside(self) -> Bools:
        return np.array([variant.inside for variant in self.chosen])


def _with_recomputation(ops: OpArray, ahead: Bools, inside: Bools) -> OpArray:
    """Compute ops of the plain problem as ops of the problem: a backward that recomputes is C and itself, or CB.

    `ahead` and `inside`: which units do so, of shape (stages, units), here and below.
    """
    last = _end(ops, inside)
    twice = np.flatnonzero(np.isin(ops.kind, codes(PLAIN_BACKWARD.values())) & ahead[ops.stage, ops.microbatch])
    kind = np.insert(last.kind, twice, _C)
    stage, microbatch = (np.insert(column, twice, column[twice]) for column in (ops.stage, ops.microbatch))
    return OpArray(kind, stage, microbatch)


def _begin(ops: OpArray, ahead: Bools, inside: Bools) -> OpArray:
    """The first of the ops that each op of the plain problem is."""
    twice = np.isin(ops.kind, codes(PLAIN_BACKWARD.values())) & ahead[ops.stage, ops.microbatch]
    return OpArray(np.where(twice, _C, _end(ops, inside).kind), ops.stage, ops.microbatch)


def _end(ops: OpArray, inside: Bools) -> OpArray:
    """The last of the ops that each op of the plain problem is."""
    again = inside[ops.stage, ops.microbatch]
    return OpArray(np.where(again, _INSIDE[ops.kind], ops.kind), ops.stage, ops.microbatch)


def _plain_stage(stage: Stage, variant: Variant, share: float) -> Stage:
    mode, work = variant.mode, stage.workspace_bytes
    if not mode.recomputes:
        return stage.replaced(modes=[], offload=mode.offload if variant.choice else stage.offload)
    segment = variant.backward_bytes - mode.kept_bytes
    made = 0 if variant.inside else mode.workspace_bytes
    return stage.replaced(
        modes=[],
        offload=mode.offload,
        activation_bytes=mode.kept_bytes,
        backward_input_us=stage.backward_input_us + (mode.recompute_us if share == 1 else share * mode.recompute_us),
        workspace_bytes=work.replaced(
            F=work.F + mode.forward_workspace_bytes,
            B=segment + max(made, work.B),
            BW=segment + max(made, work.BW),
        ),
    )


def _choice(stage: Stage, variant: Variant, leaves: bool) -> int | None:
    """The number of the mode that is as the variant's, but with a copy only if the microbatch leaves."""
    copy = variant.mode.offload or (stage.offload if variant.choice == 0 else None)
    return _like(stage, variant.mode, copy if leaves else None)


def choices(problem: Problem) -> Iterator[ByStage]:
    """Choices of one variant for each stage: the same kind everywhere, and those that leave room for so many in flight.

    A stage takes the variant of least recomputation with which as many microbatches fit as are asked for: 1F1B's
    number, more or fewer. Devices with several stages share their budget by what these hold.
    """
    stages = problem.stages
    every = [variants(stage) for stage in stages]
    seen = set()
    for number in range(max(map(len, every))):
        seen.add(chosen := tuple(of_stage[min(number, len(of_stage) - 1)] for of_stage in every))
        yield ByStage(problem, chosen)
    for share in IN_FLIGHT:
        chosen = tuple(_roomy(problem, s, of_stage, share * (len(stages) - s)) for s, of_stage in enumerate(every))
        if chosen not in seen:
            seen.add(chosen)
            yield ByStage(problem, chosen)


def _roomy(problem: Problem, s: int, of_stage: Sequence[Variant], in_flight: float) -> Variant:
    stage = problem.stages[s]
    budget = problem.devices[stage.device].memory_bytes
    if budget is None:
        return of_stage[0]
    device = [problem.stages[t] for t in problem.stages_of[stage.device]]
    room = budget * stage.activation_bytes / max(sum(other.activation_bytes for other in device), 1)
    by_time = sorted(of_stage, key=lambda variant: (variant.mode.recompute_us, variant.moved_bytes, variant.inside))
    in_flight = min(in_flight, problem.units)
    fitting = (
        variant for variant in by_time if (in_flight - 1) * variant.waiting_bytes + variant.backward_bytes <= room
    )
    return next(fitting, min(of_stage, key=lambda variant: variant.waiting_bytes))


def keep_what_fits(problem: Problem, orders: Orders) -> Orders:
    """Orders without the recomputations that memory does not ask for, microbatch by microbatch.

    Compute ops stay in order. A microbatch is kept where what it then holds more, from its F to its recomputation, fits
    at each op between; those whose recomputation comes first are taken first, which for equal sizes leaves the fewest
    recomputed (intervals on machines; Carlisle and Lloyd 1995). Devices that move copies are left as they are: what is
    there during an op depends on their timing. Nothing gets later, since only ops go.
    """
    if orders.modes is None:
        return orders
    modes = orders.modes.copy()
    graph, devices = lower(problem), []
    for device, entry in zip(orders.devices, problem.devices, strict=True):
        if device.offload or entry.memory_bytes is None:
            devices.append(device)
            continue
        ops = OpArray.of(device.compute)
        changes = graph.device_bytes[graph.types(ops, orders.modes)]
        after = np.cumsum(changes.sum(axis=1))
        forward = np.flatnonzero(ops.kind == CODE["F"])
        first = np.zeros(modes.shape, np.int64)
        first[ops.stage[forward], ops.microbatch[forward]] = forward
        recomputations = np.flatnonzero(np.isin(ops.kind, codes(RECOMPUTATIONS)))
        again = ops[recomputations]
        unit_class, mode = problem.unit_class[again.microbatch], modes[again.stage, again.microbatch]
        more, workspace, segment = (
            graph.sizes_bytes[name][again.stage, mode, unit_class]
            for name in ("recomputed", "forward_workspace", "segment")
        )
        inside = np.where(again.kind == _C, 0, np.maximum(more - segment, 0))
        at = first[again.stage, again.microbatch]
        kept = _kept(recomputations, at, more, inside, workspace, after - changes[:, 1], after, entry.memory_bytes)
        modes[again.stage[kept], again.microbatch[kept]] = 0
        kind, stays = ops.kind.copy(), np.ones(len(ops), bool)
        kind[recomputations[kept]] = _PLAIN[again.kind[kept]]
        stays[recomputations[kept]] = again.kind[kept] != _C
        devices.append(DeviceOrders(OpArray(kind, ops.stage, ops.microbatch)[np.flatnonzero(stays)]))
    return Orders(devices, orders.waits, orders.channels, modes, orders.microbatch_order)


MOST_TIMED_OPS = 300_000
"""Ops that are timed to find copies and recomputations without which a schedule is as good: within a second."""


def drop_needless(problem: Problem, orders: Orders) -> Orders:
    """Orders without copies and recomputations that gain nothing: the value is no larger, the budgets are kept.

    All of them at once if that is so, else by halves. A copy of what is recomputed may go alone. Of many ops, not every
    half is tried (`MOST_TIMED_OPS`).
    """
    value_us = simulate(problem, orders).value_us
    left = MOST_TIMED_OPS // count_ops(problem) + 1

    def tried(units: Bools, targets: Ints) -> None:
        nonlocal orders, left
        if left <= 0 or not units.any():
            return
        left -= 1
        other = _with_modes(orders, units, targets)
        with suppress(DeadlockError):
            simulation = simulate(problem, other)
            if simulation.value_us <= value_us and within_budgets(problem, other, simulation):
                orders = other
                return
        where = np.flatnonzero(units)
        for half in np.array_split(where, 2) if len(where) > 1 else []:
            chosen = np.zeros(units.size, bool)
            chosen[half] = True
            tried(chosen.reshape(units.shape), targets)

    kept = np.zeros((len(problem.stages), problem.units), np.int64)
    tried(_done_to(orders, kept.shape, [*COPIES, *RECOMPUTATIONS]), kept)
    if orders.modes is not None:
        stays = [[_like(stage, mode, None) for mode in stage.choices] for stage in problem.stages]
        numbers = [[stays[s][k] for k in row] for s, row in enumerate(orders.modes.tolist())]
        targets = np.array([[-1 if k is None else k for k in row] for row in numbers], np.int64)
        tried(_done_to(orders, kept.shape, COPIES) & (targets > 0), targets)
    return orders


def _done_to(orders: Orders, shape: tuple[int, ...], kinds: Collection[str]) -> Bools:
    """The units, of shape (stages, units), that have ops of these kinds."""
    found, numbers = np.zeros(shape, bool), codes(kinds)
    for device in orders.devices:
        for stream in map(OpArray.of, device.streams()):
            there = np.isin(stream.kind, numbers)
            found[stream.stage[there], stream.microbatch[there]] = True
    return found


def _like(stage: Stage, mode: Mode, copy: Offload | None) -> int | None:
    """The number of the mode that is as this one, but with this copy, or without."""
    alike = mode._replace(name="", offload=copy)
    return next((k for k, other in enumerate(stage.choices) if other._replace(name="") == alike), None)


def _with_modes(orders: Orders, units: Bools, targets: Ints) -> Orders:
    """Orders in which some units are in other modes, which move nothing and recompute as before or not at all."""

    def changed(ops: OpArray) -> tuple[OpArray, Bools]:
        at = np.where(ops.spread, 0, ops.stage), ops.microbatch  # the stage of a spread pass is a device
        chosen = units[at] & ~ops.spread
        whole = chosen & (targets[at] == 0)
        gone = chosen & np.isin(ops.kind, codes(COPIES)) | whole & (ops.kind == _C)
        kind = np.where(whole, _PLAIN[np.where(ops.spread, 0, ops.kind)], ops.kind)
        return OpArray(kind, ops.stage, ops.microbatch, ops.passes), ~gone

    def left(ops: Sequence[Op]) -> OpArray:
        other, stays = changed(OpArray.of(ops))
        return other[np.flatnonzero(stays)]

    waits = WaitArray.of(orders.waits)
    (op, waiting), (before, awaited) = changed(waits.op), changed(waits.before)
    both = np.flatnonzero(waiting & awaited)
    modes = None if orders.modes is None else np.where(units, targets, orders.modes)
    devices = [DeviceOrders(*map(left, device.streams())) for device in orders.devices]
    channels = [channel for channel in map(left, orders.channels) if len(channel)]
    return Orders(devices, WaitArray(op[both], before[both]), channels, modes, orders.microbatch_order)


@njit(cache=True)
def _kept(
    at: Ints, first: Ints, more: Ints, inside: Ints, workspace: Ints, during: Ints, after: Ints, budget: int
) -> Bools:
    """Which recomputations may go, at positions `at` with their F at `first`; `during` and `after` become what is held.

    Without one, `more` bytes are held from its F on, and in a backward that it was inside of the rest, `inside`.
    """
    kept = np.zeros(len(at), np.bool_)
    extra = np.zeros(len(during), np.int64)
    for k in range(len(at)):
        begin, end = first[k], at[k]
        level = max(during[begin] - workspace[k], after[begin])
        for n in range(begin + 1, end):
            level = max(level, during[n] + extra[n], after[n] + extra[n])
        if level + more[k] > budget or max(during[end], after[end]) + extra[end] + inside[k] > budget:
            continue
        kept[k] = True
        during[begin:end] += more[k]
        after[begin:end] += more[k]
        extra[end] += inside[k]
    return kept
