"""One variant for each stage: a problem with activation modes as problems without, and their orders as orders of it.

Where all microbatches of a stage are held in the same way, recomputation is a longer backward with a workspace, and the
rest a smaller activation. So whatever makes or improves schedules without modes serves problems with them: published
schedules for a choice of variants, and searches from orders that keep to one. What is chosen for every microbatch by
itself is for `solver.exact.cp_sat` to find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from optpipe.costs import Costs
from optpipe.ops import DeviceOrders, Op, OpArray, Orders
from optpipe.problem import Problem, Stage
from optpipe.simulate import simulate
from solver.build import within_budgets
from solver.limits import Limits
from solver.solution import OnSolution, Solution
from solver.variants import Variant, variants

Search = Callable[[Problem, Limits, Solution, OnSolution], Solution]

IN_FLIGHT = (2.0, 1.5, 1.0, 0.75, 0.5, 0.25)
"""Microbatches in flight that a choice makes room for, as a share of the stages from a stage to the last (1F1B's)."""


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
        data = self.problem.to_data()
        data["stages"] = [
            _plain_stage(entry, stage, variant, share)
            for entry, stage, variant, share in zip(
                data["stages"], self.problem.stages, self.chosen, shares, strict=True
            )
        ]
        return Problem.from_data(data)

    def with_modes(self, orders: Orders) -> Orders | None:
        """Orders of the plain problem as orders of the problem; None where no mode does without a copy as they do."""
        size = len(self.problem.stages), self.problem.units
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
        devices = [
            DeviceOrders([part for op in device.compute for part in self._parts(op)], device.offload, device.reload)
            for device in orders.devices
        ]
        waits = {
            self._parts(op)[0]: [self._parts(other)[-1] for other in others] for op, others in orders.waits.items()
        }
        return Orders(devices, waits, orders.channels, modes)

    def _parts(self, op: Op) -> Sequence[Op]:
        """An op of the plain problem as ops of the problem: a backward that recomputes is C and the backward, or CB."""
        variant = self.chosen[op.stage]
        if op.kind not in ("B", "BW") or not variant.mode.recomputes:
            return [op]
        return [op._replace(kind=f"C{op.kind}")] if variant.inside else [op._replace(kind="C"), op]

    def without_modes(self, orders: Orders) -> Orders | None:
        """Orders of the problem as orders of the plain one, in which all microbatches of a stage are in its variant.

        None where a C is not right before its backward, or what moves copies is in another mode.
        """
        devices = []
        for device in orders.devices:
            compute: list[Op] = []
            ops = iter(device.compute)
            for op in ops:
                if op.kind == "C":
                    following = next(ops, None)
                    if following is None or following[1:] != op[1:]:
                        return None
                    op = following
                compute.append(op._replace(kind=op.kind.removeprefix("C")))
            devices.append(DeviceOrders(compute, device.offload, device.reload))
        names = {part: op for device in devices for op in device.compute for part in self._parts(op)}
        waits = {
            names.get(op, op): [names.get(other, other) for other in others] for op, others in orders.waits.items()
        }
        plain = Orders(devices, waits, orders.channels)
        back = self.with_modes(plain)
        if back is None or back.modes is None:
            return None
        others = orders.modes is not None and (orders.modes != back.modes) & (orders.modes != 0)
        return None if np.any(others) else plain


def _plain_stage(entry: dict[str, Any], stage: Stage, variant: Variant, share: float) -> dict[str, Any]:
    mode, work = variant.mode, stage.workspace_bytes
    plain = {name: value for name, value in entry.items() if name != "modes"}
    if not mode.recomputes:
        if variant.choice:
            plain["offload"] = mode.offload and mode.offload.to_data()
        return plain
    beside = variant.backward_bytes - mode.kept_bytes
    made = 0 if variant.inside else mode.workspace_bytes
    return plain | {
        "activation_bytes": mode.kept_bytes,
        "backward_input_us": stage.backward_input_us + (mode.recompute_us if share == 1 else share * mode.recompute_us),
        "workspace_bytes": {
            "F": work.F + mode.forward_workspace_bytes,
            "B": beside + max(made, work.B),
            "W": work.W,
            "BW": beside + max(made, work.BW),
        },
        "offload": mode.offload and mode.offload.to_data(),
    }


def _choice(stage: Stage, variant: Variant, leaves: bool) -> int | None:
    """The number of the mode that is as the variant's, but with a copy only if the microbatch leaves."""
    mode = variant.mode
    if not mode.recomputes and not leaves:
        return 0
    for number, other in enumerate(stage.choices):
        wanted = mode.offload or (stage.offload if variant.choice == 0 else None)
        if other._replace(name="") == mode._replace(name="", offload=wanted if leaves else None):
            return number
    return None


def choices(problem: Problem) -> Iterator[ByStage]:
    """Choices of one variant for each stage: the same kind everywhere, and those that leave room for so many in flight.

    A stage takes the variant of least recomputation with which as many microbatches fit as are asked for: 1F1B's
    number, more or fewer. Devices with several stages share their budget by what these hold.
    """
    stages = problem.stages
    every = [variants(stage) for stage in stages]
    seen = set()
    for number in range(max(map(len, every))):
        seen.add(chosen := tuple(ways[min(number, len(ways) - 1)] for ways in every))
        yield ByStage(problem, chosen)
    for share in IN_FLIGHT:
        chosen = tuple(_roomy(problem, s, ways, share * (len(stages) - s)) for s, ways in enumerate(every))
        if chosen not in seen:
            seen.add(chosen)
            yield ByStage(problem, chosen)


def _roomy(problem: Problem, s: int, ways: Sequence[Variant], in_flight: float) -> Variant:
    stage = problem.stages[s]
    budget = problem.devices[stage.device].memory_bytes
    if budget is None:
        return ways[0]
    device = [problem.stages[t] for t in problem.stages_of[stage.device]]
    room = budget * stage.activation_bytes / max(sum(other.activation_bytes for other in device), 1)
    by_time = sorted(ways, key=lambda way: (way.mode.recompute_us, way.moved_bytes, way.inside))
    in_flight = min(in_flight, problem.units)
    fitting = (way for way in by_time if (in_flight - 1) * way.waiting_bytes + way.backward_bytes <= room)
    return next(fitting, min(ways, key=lambda way: way.waiting_bytes))


def chosen_in(problem: Problem, orders: Orders) -> ByStage | None:
    """The variant of each stage that orders use beside to keep; None where some stage uses two."""
    inside = {op[1:] for device in orders.devices for op in device.compute if op.kind in ("CB", "CBW")}
    chosen = []
    for s, stage in enumerate(problem.stages):
        modes = [] if orders.modes is None else orders.modes[s].tolist()
        used = {(mode, (s, i) in inside) for i, mode in enumerate(modes) if mode}
        ways = [way for way in variants(stage) if (way.choice, way.inside) in (used or {(0, False)})]
        if len(used) > 1 or not ways:
            return None
        chosen.append(ways[0])
    return ByStage(problem, chosen)


def keep_what_fits(problem: Problem, orders: Orders) -> Orders:
    """Orders without the recomputations that memory does not ask for, microbatch by microbatch.

    Compute ops stay in order. A microbatch is kept where what it then holds more, from its F to its recomputation, fits
    at each op between; those whose recomputation comes first are taken first, which for equal sizes leaves the fewest
    recomputed (intervals on machines; Carlisle and Lloyd 1995). Devices that move copies are left as they are: what is
    there beside an op depends on their timing. Nothing gets later, since only ops go.
    """
    if orders.modes is None:
        return orders
    modes = orders.modes.copy()
    costs, devices = Costs(problem, orders.modes), []
    for device, entry in zip(orders.devices, problem.devices, strict=True):
        if device.offload or entry.memory_bytes is None:
            devices.append(device)
            continue
        ops = OpArray.of(device.compute)
        changes = costs.device_effects(ops)
        after = np.cumsum(changes.sum(axis=1))
        during = after - changes[:, 1]
        room = entry.memory_bytes - np.maximum(during, after)
        at = {op: n for n, op in enumerate(ops)}
        kept: dict[Op, Op | None] = {}
        for n, op in enumerate(ops):
            if not op.kind.startswith("C"):
                continue
            mode = problem.stages[op.stage].choices[modes[op.stage, op.microbatch]]
            first, more = at[Op("F", op.stage, op.microbatch)], mode.recomputed_bytes
            started = entry.memory_bytes - during[first] + mode.forward_workspace_bytes
            inside = 0 if op.kind == "C" else max(more - (mode.segment_bytes or 0), 0)
            between = room[first + 1 : n].min(initial=more)
            if min(started, entry.memory_bytes - after[first], between) < more or room[n] < inside:
                continue
            for level, change in ((room, -1), (during, 1), (after, 1)):
                level[first:n] += change * more
            room[n] -= inside
            kept[op] = None if op.kind == "C" else op._replace(kind=op.kind[1:])
            modes[op.stage, op.microbatch] = 0
        compute = [kept.get(op, op) for op in device.compute]
        devices.append(DeviceOrders([op for op in compute if op is not None]))
    return Orders(devices, orders.waits, orders.channels, modes)


def search_by_stage(
    search: Search, problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution
) -> Solution:
    """Let a search that knows no modes improve orders that use one variant for each stage, beside to keep.

    It is asked about orders with that variant everywhere, and in what it answers all is kept that fits. Its bounds hold
    for the choice alone, so they are dropped. A start with other orders comes back as it is.
    """
    by_stage = chosen_in(problem, start.orders) if start.orders is not None else None
    plain = by_stage.without_modes(start.orders) if by_stage and start.orders is not None else None
    if by_stage is None or plain is None:
        return start
    best = start

    def offer(solution: Solution) -> None:
        nonlocal best
        orders = by_stage.with_modes(solution.orders) if solution.orders is not None else None
        if orders is None:
            return
        orders = keep_what_fits(problem, orders)
        simulation = simulate(problem, orders)  # C need not wait for the gradient, as its backward does
        if simulation.value_us < best.value_us and within_budgets(problem, orders, simulation):
            best = replace(start, orders=orders, value_us=simulation.value_us)
            on_solution(best)

    value_us = simulate(by_stage.plain, plain).value_us
    offer(search(by_stage.plain, limits, Solution(plain, value_us, start.bound_us), offer))
    return best
