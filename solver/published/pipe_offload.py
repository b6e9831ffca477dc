"""PipeOffload's schedules (arXiv 2503.01328): GIS, GIS-H, and PO-H and PO-F, which offload on top of GIS-H's block.

All four repeat one pattern on an interleaved placement (stage s on device s mod d, v = S/d chunks a device). Time is
cut into slots of one F, one B and one W. A chunk pass over the d devices takes at least half a slot a device each
way, so the next chunk follows g >= d/2 slots later, and device r begins its B when (v - 1) g + d - r of its F slots
are over. An activation of chunk c then lives 2 (v - 1 - c) g + d slots on device 0, one of each chunk in v slots:
the sum is the peak of g (v - 1) + d chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from math import ceil, gcd, inf

import numpy as np

from optpipe.errors import MethodError
from optpipe.kinds import KINDS
from optpipe.ops import Ints, OpArray, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.units import bytes_text
from solver.build import over_budget, peak_budgets
from solver.published.passes import require_interleaved
from solver.published.transfers import Activation, TransferPlanner, TransferRequest

Slots = Callable[[int], Ints]
"""The slots of the F of a device's chunk (counted from 0), one for each microbatch."""

HIDDEN_LOAD = 1.1
"""Copy time over compute time that still hides: PipeOffload measures under 1 % slowdown at 1.1, 3 to 7 % at 1.2."""

PLAYED_OPS = 200_000
"""Ops that a search may play in all, about a second's worth."""


def gis(problem: Problem) -> Orders:
    """GIS: groups of d microbatches; peak d v chunks, bubble (d - 1)(F + B). Raises MethodError on placement."""
    return _grouped_orders(problem, require_interleaved(problem, "gis"), len(problem.devices))


def gis_h(problem: Problem, group: int | None = None) -> Orders:
    """GIS-H: groups of g microbatches, d/2 <= g <= d; peak g (v - 1) + d chunks, (d - g)(v - 1) F more bubble.

    `group` is g; None takes the one with the best value that keeps the budgets.
    Raises MethodError on placement, on another g, or where no g keeps the budgets.
    """
    chunks = require_interleaved(problem, "gis-h")
    d = len(problem.devices)
    if group is not None and not _half(d) <= group <= d:
        raise MethodError(f"gis-h takes groups of {_half(d)} to {d} microbatches, not {group}. Maybe take {d}.")
    if group is not None:
        return _grouped_orders(problem, chunks, group)
    tried = [_grouped_orders(problem, chunks, g) for g in range(_half(d), d + 1)]
    best = min((o for o in tried if not over_budget(problem, o)), key=lambda o: _value_us(problem, o), default=None)
    if best is None:
        raise _too_large(problem, "gis-h", tried[0], "po-h or po-f, which offload")
    return best


def po_h(problem: Problem) -> Orders:
    """PO-H: the longer-lived half of a device's chunks leaves. Raises MethodError as `po_f` does."""
    chunks = require_interleaved(problem, "po-h")
    return _offloaded(problem, "po-h", chunks, ceil(chunks / 2))


def po_f(problem: Problem) -> Orders:
    """PO-F: every activation leaves that lives longer than its round trip.

    Without budgets all of them do, on the block repeated evenly, as the paper has it. Within budgets the best is
    searched over both ways to repeat the block, over how much leaves (the paper's share is then the most), and over
    how late a W may run. Raises MethodError on placement, where no stage can offload, where copies take longer than
    HIDDEN_LOAD times the compute, or where nothing tried keeps the budgets.
    """
    chunks = require_interleaved(problem, "po-f")
    return _offloaded(problem, "po-f", chunks, chunks)


def _half(devices: int) -> int:
    return ceil(devices / 2)


def _value_us(problem: Problem, orders: Orders) -> float:
    return simulate(problem, orders).value_us


def _too_large(problem: Problem, method: str, orders: Orders, instead: str) -> MethodError:
    """The error where even `orders`, the least of what was tried, exceeds a budget."""
    device, peak, budget = max(over_budget(problem, orders), key=lambda entry: entry[1] - entry[2])
    return MethodError(
        f"{method} needs {bytes_text(peak)} on device {device}, but its budget is {bytes_text(budget)}: "
        f"{bytes_text(peak - budget)} too few. "
        f"Maybe use {instead}, or raise devices[].memory_bytes to {peak_budgets(problem, orders)}."
    )


def _grouped_orders(problem: Problem, chunks: int, group: int) -> Orders:
    return Orders.of_compute(block_orders(problem, grouped(problem, chunks, group), group))


def grouped(problem: Problem, chunks: int, group: int) -> Slots:
    """A group of microbatches through one chunk, then through the next, and so on; then the next group.

    Groups are as equal as can be. One below d/2 microbatches leaves slots empty up to d/2.
    """
    half, microbatches = _half(len(problem.devices)), problem.units
    groups = ceil(microbatches / group)
    size, larger = divmod(microbatches, groups)
    sizes = [size + 1] * larger + [size] * (groups - larger)
    if size < half:  # equal groups would all leave slots empty: one is the rest
        sizes = [min(group, microbatches - done) for done in range(0, microbatches, group)]
    pitches = [max(size, half) for size in sizes]
    begins = accumulate((chunks * pitch for pitch in pitches), initial=0)
    slots = [
        (begin + k, pitch) for begin, pitch, size in zip(begins, pitches, sizes, strict=False) for k in range(size)
    ]
    begin, pitch = np.array(slots).T
    return lambda chunk: begin + chunk * pitch


def even(microbatches: int, chunks: int, gap: int) -> Slots:
    """A microbatch enters every `chunks` slots, and each chunk `gap` slots (coprime to `chunks`) after the last."""
    return lambda chunk: np.arange(microbatches) * chunks + chunk * gap


def block_orders(problem: Problem, slots: Slots, gap: int, delay: int = 0) -> list[OpArray]:
    """The compute order of each device: F by slot, B mirrored and as much later as the chunk passes take.

    Each W follows its B, or up to `delay` B later where the device has fewer F in flight than device 0 (as in ZB-H1).
    """
    return [_device_order(problem, slots, gap, r, min(delay, r)) for r in range(len(problem.devices))]


def _device_order(problem: Problem, slots: Slots, gap: int, r: int, delay: int) -> OpArray:
    stages, microbatches = problem.stages_of[r], problem.units
    last = len(stages) - 1
    first_backward = last * gap + len(problem.devices) - r
    forwards = [2 * slots(c) for c in range(len(stages))]
    backwards = [2 * (slots(last - c) + first_backward) - 1 for c in range(len(stages))]
    stage = np.tile(np.repeat(stages, microbatches), 2)
    microbatch = np.tile(np.arange(microbatches), 2 * len(stages))
    kind = np.repeat([KINDS.index("F"), KINDS.index("B")], len(stages) * microbatches)
    order = np.lexsort((microbatch, stage, np.concatenate([*forwards, *backwards])))
    passes = OpArray(kind, stage, microbatch)[order]
    at = np.flatnonzero(passes.kind == KINDS.index("B"))
    weights = OpArray(np.full(len(at), KINDS.index("W")), passes.stage[at], passes.microbatch[at])
    # Each W stands behind the B that comes `delay` later, the last ones at the end.
    behind = np.append(at[delay:] + 1, np.full(min(delay, len(at)), len(passes)))
    together = OpArray.joined([passes, weights])
    return together[np.insert(np.arange(len(passes)), behind, len(passes) + np.arange(len(at)))]


def _offloaded(problem: Problem, method: str, chunks: int, most: int) -> Orders:
    """The best found with at most the first `most` chunks of each device leaving."""
    _check_copies(problem, method, most)
    search = _Search(problem, chunks, most)
    best = search.within_budgets() if any(limit is not None for limit in search.limits) else None
    if best is None:
        best = search.published()
        if over_budget(problem, best):
            raise _too_large(problem, f"{method} as published", best, "ada-offload")
    return best


def _check_copies(problem: Problem, method: str, most: int) -> None:
    """Raise MethodError where nothing can leave, or where a device's copies take too long beside its compute."""
    d = len(problem.devices)
    if not any(stage.offload for stage in problem.stages[: most * d]):
        raise MethodError(
            f"{method} offloads stages 0 to {most * d - 1}, but stages[].offload is null in all of them. "
            "Maybe use gis-h, which does not offload."
        )
    # Round trips of the chunks that leave over forward and backward time of all (the paper's k, where all leave).
    loads = []
    for device in range(d):
        stages = [problem.stages[s] for s in problem.stages_of[device]]
        copies = sum(stage.duration_us("O") + stage.duration_us("R") for stage in stages[:most] if stage.offload)
        compute = sum(stage.duration_us("F") + stage.duration_us("BW") for stage in stages)
        loads.append(copies / compute if compute else (inf if copies else 0.0))
    if max(loads) > HIDDEN_LOAD:
        raise MethodError(
            f"{method} refuses at k = {max(loads):.3g}: with {most} of its {len(problem.stages) // d} chunks leaving, "
            f"device {loads.index(max(loads))} copies for {max(loads):.3g} times its compute time, and the paper "
            f"hides copies up to {HIDDEN_LOAD}. Maybe use {'po-h or ' if method == 'po-f' else ''}ada-offload."
        )


@dataclass(frozen=True)
class _Choice:
    """Decisions of the search.

    `group`: microbatches a group, None for the block repeated evenly. `delay`: B by which a W may run late. `share`:
    chunks that leave. `lead`: how early they may come back.
    """

    group: int | None
    delay: int
    share: float
    lead: float


class _Search:
    """Coordinate descent over a handful of choices, each played with its transfers."""

    def __init__(self, problem: Problem, chunks: int, most: int) -> None:
        self.problem = problem
        self.chunks = chunks
        self.most = most
        self.devices = len(problem.devices)
        self.limits = [device.memory_bytes for device in problem.devices]
        self.plays = max(8, PLAYED_OPS // (5 * problem.units * len(problem.stages)))
        self.planners: dict[tuple[int | None, int], TransferPlanner] = {}
        self.kept: dict[_Choice, Orders] = {}
        self.rank: dict[_Choice, tuple[float, int]] = {}

    def published(self) -> Orders:
        """The paper's share on the block repeated evenly, whatever the budgets are."""
        choices = [_Choice(None, 0, self.most, lead) for lead in (1.5, 1.0, 3.0)]
        played = [self._play(choice, [None] * self.devices) for choice in choices]
        return min(
            (orders for orders in played if orders),
            key=lambda orders: (_value_us(self.problem, orders), max(peak_budgets(self.problem, orders))),
        )

    def within_budgets(self) -> Orders | None:
        """The best orders that keep every budget; None where no choice does."""
        best, before = _Choice(None, 0, self.most, 1.5), None
        devices, half = self.devices, _half(self.devices)
        near = max(half // 4, 1)
        while best != before:
            before = best
            others = [replace(best, group=group) for group in (devices, half, (half + devices) // 2)]
            best = min([best, *others], key=self._rank)
            # Delays far apart and near the best; shares of half a chunk or a whole one less or more.
            delays = (half, half // 2, best.delay + near, best.delay - near)
            others = [replace(best, delay=delay) for delay in delays if 0 <= delay < devices]
            best = min([best, *others], key=self._rank)
            shares = (best.share - 1, best.share - 0.5, best.share + 0.5)
            others = [replace(best, share=share) for share in shares if 0 < share <= self.most]
            best = min([best, *others], key=self._rank)
            best = min([best, *(replace(best, lead=lead) for lead in (1.0, 1.5, 3.0))], key=self._rank)
        return self.kept.get(best)

    def _rank(self, choice: _Choice) -> tuple[float, int]:
        """Value, then number of copies; infinite where nothing came of it, or no plays are left."""
        if choice not in self.rank and self.plays > 0:
            self.plays -= 1
            orders = self._play(choice, self.limits)
            self.rank[choice] = (inf, 0)
            if orders:  # which a plan keeps within the budgets under any timing
                self.kept[choice] = orders
                copies = sum(len(device.offload) for device in orders.devices)
                self.rank[choice] = (_value_us(self.problem, orders), copies)
        return self.rank.get(choice, (inf, 0))

    def _play(self, choice: _Choice, budgets: Sequence[int | None]) -> Orders | None:
        key = (choice.group, choice.delay)
        if key not in self.planners:
            self.planners[key] = TransferPlanner(self.problem, self._compute(*key))
        return self.planners[key].plan(TransferRequest(self._leaving(choice.share), choice.lead), budgets)

    def _compute(self, group: int | None, delay: int) -> list[OpArray]:
        if group is None:
            gap = next(g for g in count(_half(self.devices)) if gcd(g, self.chunks) == 1)
            return block_orders(self.problem, even(self.problem.units, self.chunks, gap), gap, delay)
        return block_orders(self.problem, grouped(self.problem, self.chunks, group), group, delay)

    def _leaving(self, share: float) -> set[Activation]:
        """The activations of the first `share` chunks of each device: of a part of a chunk, every so-many-th."""
        return {
            (s, i)
            for s, stage in enumerate(self.problem.stages)
            for part in [min(max(share - s // self.devices, 0.0), 1.0)]
            for i in range(self.problem.units)
            if stage.offload and int((i + 1) * part) > int(i * part)
        }
