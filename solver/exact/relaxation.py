"""Bounds from exact solutions of parts of the pipeline, a relaxation of the whole problem (docs/math/bounds.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from math import floor

import numpy as np

from optpipe.fields import MAX_FACTOR
from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.problem import DirectedTransfer, MicrobatchFactors, Problem
from optpipe.simulate import Simulation, simulate
from optpipe.stage import exact
from optpipe.task_graph import lower
from solver.bounds.lower_bound import device_bounds_us, lower_bound_us
from solver.bounds.unit_costs import UnitCosts
from solver.bounds.unit_order import preemptive_us
from solver.build import snapped_bound
from solver.exact.cp_sat.model import ask_for_better, solve_cp_sat
from solver.exact.memory_order import memory_precedences
from solver.limits import Cancel, Limits
from solver.scale import value_step_us
from solver.solution import INFEASIBLE, OnSolution, Solution


def relaxation_bound(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """A better bound from the exact solution of ever larger parts of the problem.

    Begins with the device that bounds most, then spreads over the pipeline, and ends before the whole or with the
    first part that is not solved in half of the time left. Reports each better bound; the orders of `start` come back.
    Where no schedule of a part keeps the budgets, none of the whole does.
    """
    answer = replace(start, bound_us=max(start.bound_us, lower_bound_us(problem, limits.without)))
    proved: dict[frozenset[int], float] = {}
    for number, kept in enumerate(parts(problem, _devices_by_bound(problem)[0]), 1):
        if limits.cancel.requested or limits.reached(answer.value_us, answer.bound_us):
            break
        part = projected(problem, kept)
        # Only bounds of parts of this part count here, not that of the whole: on the part's grid of time a bound is
        # raised to the next value that its own schedules can have, and those of the whole problem may lie below it.
        # With factors its delays may be shorter than those of a part of it, so what that proves need not hold for it.
        inner_parts = () if problem.has_factors else proved.items()
        inside_us = max((bound_us for inner, bound_us in inner_parts if inner <= {*kept}), default=0.0)
        orders = restricted(start.orders, kept) if start.orders else None
        value_us = simulate(part, orders).value_us if orders else float("inf")
        solved = Solution(orders, value_us, max(inside_us, lower_bound_us(part, limits.without)))
        if value_us > max(answer.bound_us, solved.bound_us):
            # Half of the time left; of work, which is not given back, a half, a quarter and so on.
            share = 0.5 if limits.deterministic_limit is None else 0.5**number
            solved = solve_cp_sat(part, limits.part(share), solved, lambda _: None)
        if solved.infeasible:
            return INFEASIBLE
        proved[frozenset(kept)] = solved.bound_us
        if solved.bound_us > answer.bound_us:
            answer = replace(answer, bound_us=solved.bound_us)
            on_solution(answer)
        if solved.bound_us < solved.value_us and answer.bound_us < solved.value_us:
            break
    return answer


def proof_by_parts(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """Ask whether a part of the problem has a schedule better than the start's, of one device, then of ever more.

    Where a part has none the start is proved optimal. Where it has one, its times show which device outside the part
    would be late, and that device is added. The last part is the whole problem: its answer is a better schedule or a
    proof. Returns the start where the limits end the search first. With several workers each begins with a device of
    its own, and the first to have an answer ends the others.
    """
    answer = replace(start, bound_us=max(start.bound_us, lower_bound_us(problem, limits.without)))
    if limits.cancel.requested or answer.value_us == float("inf") or limits.reached(answer.value_us, answer.bound_us):
        return answer
    firsts = _devices_by_bound(problem)[: limits.workers if limits.deterministic_limit is None else 1]
    ended, asked = Cancel(), dict[Sequence[int], int]()
    own = replace(limits, workers=1, cancel=ended)

    def follow(first: int) -> Solution:
        found = _proof_by_parts_from(first, problem, own, answer, on_solution, asked)
        if found.orders is not answer.orders or found.bound_us >= found.value_us:
            ended.request()
        return found

    with limits.cancel.calling(ended.request), ThreadPoolExecutor(len(firsts)) as pool:
        answers = list(pool.map(follow, firsts))
    best = min(answers, key=lambda found: found.value_us)
    return replace(best, bound_us=max(found.bound_us for found in answers))


def _proof_by_parts_from(
    first: int,
    problem: Problem,
    limits: Limits,
    start: Solution,
    on_solution: OnSolution,
    asked: dict[Sequence[int], int],
) -> Solution:
    """`proof_by_parts` from one device on; ends where it comes to a part that is `asked` about from another one."""
    devices, number = {first}, 0
    while not limits.cancel.requested:
        kept = tuple(_connected(problem, devices))
        whole = len(kept) == len(problem.stages)
        if asked.setdefault(kept, first) != first:
            break
        part = problem if whole else projected(problem, kept)
        orders = restricted(start.orders, kept) if start.orders and not whole else None
        if orders is None or simulate(part, orders).value_us >= start.value_us:
            number += 1
            question = limits.part(0.5**number) if limits.deterministic_limit is not None else limits
            begun = Solution(None, start.value_us, lower_bound_us(part, limits.without))
            found = ask_for_better(part, question, begun, on_solution if whole else lambda _: None)
            if found.orders is None or whole:
                answer = replace(start if found.orders is None else found, bound_us=start.bound_us)
                bound_us = snapped_bound(answer.value_us, found.bound_us, value_step_us(problem))
                return replace(answer, bound_us=max(answer.bound_us, bound_us))
            orders = found.orders
        devices.add(_latest_device(problem, kept, simulate(part, orders), start.value_us))
    return start


def projected(problem: Problem, kept: Sequence[int]) -> Problem:
    """The problem of the stages `kept` (ascending, the first and the last among them), the others only as delays.

    No schedule of the whole problem is shorter than the best of this one: leaving out the ops of a stage frees its
    device, its channel and its memory, and its F and B remain as time between those of the stages around it. Between
    two stages of one device another must be kept, since stages of one device hand over without delay.
    """
    if problem.has_factors:
        return _projected_units(problem, kept)
    delays = [_transfer(_delay(problem, before, after)) for before, after in pairwise(kept)]
    return problem.replaced(stages=[problem.stages[s] for s in kept], transfer_us=delays)


def _transfer(delays_us: Mapping[str, float]) -> DirectedTransfer:
    return DirectedTransfer.model_construct(forward=delays_us["forward"], backward=delays_us["backward"])


def _projected_units(problem: Problem, kept: Sequence[int]) -> Problem:
    """The projected problem with delays that are no longer than those of any unit, and as long where they can be.

    A problem gives a delay as a base times a factor of the microbatch, the same on all boundaries, times a factor of
    the slice, that of the sending stage. The first factor is that of the microbatch's times. The second is set by the
    forwards, the least of any microbatch; the base of gradients is then the least of any slice. All are exact where
    transfers take no time and F and B of a slice are longer than those of others in the same proportion.
    """
    boundaries = list(pairwise(kept))
    least = {name: [_least_delays(problem, *pair, name) for pair in boundaries] for name in ("forward", "backward")}
    shapes: list[Sequence[Fraction]] = [[Fraction(1)] * problem.slice_count for _ in kept]
    stages = [problem.stages[s] for s in kept]
    if problem.slices is not None:
        for k, stage in enumerate(stages):
            sends = [least["forward"][k]] if k < len(boundaries) else []
            sends += [least["backward"][k - 1]] if k else []
            shape = next((delays for delays in sends if any(delays)), shapes[k])
            while max(shape) > MAX_FACTOR:
                shape = [share / 1000 for share in shape]
            shapes[k] = shape
            factors = problem.slices.factors if stage.slice_factors is None else stage.slice_factors
            transfer = [_rounded_down(share) for share in shape]
            stages[k] = stage.replaced(slice_factors=factors.replaced(transfer=transfer))
    delays = [
        _transfer(
            {name: _base(least[name][k], shapes[sender]) for name, sender in (("forward", k), ("backward", k + 1))}
        )
        for k in range(len(boundaries))
    ]
    own = problem.microbatch_factors
    return problem.replaced(
        stages=stages,
        transfer_us=delays,
        microbatch_factors=own and [entry.replaced(transfer=_forward_factor(entry)) for entry in own],
    )


def _forward_factor(entry: MicrobatchFactors) -> float:
    return entry.time if entry.forward is None else entry.forward


def _base(delays: Sequence[Fraction], shape: Sequence[Fraction]) -> float:
    """The largest base that makes no delay longer."""
    ratios = (delay / share for delay, share in zip(delays, shape, strict=True) if share)
    return _rounded_down(min(ratios, default=Fraction(0)))


def _least_delays(problem: Problem, before: int, after: int, direction: str) -> Sequence[Fraction]:
    """The delay between two stages of each slice, divided by its microbatch's factor of forwards: the least of any."""
    delays_us, between = problem.unit_delays_us[direction], range(before + 1, after)
    own = problem.microbatch_factors or [MicrobatchFactors()] * problem.microbatches
    least: list[Fraction | None] = [None] * problem.slice_count
    for unit in problem.class_units:
        i, q = divmod(unit, problem.slice_count)
        time = exact(_forward_factor(own[i]))
        if time:
            sums = [exact(float(delays_us[s, unit])) for s in range(before, after)]
            sums += [exact(_passing_us(problem, s, unit, direction)) for s in between]
            delay, known = sum(sums, Fraction(0)) / time, least[q]
            least[q] = delay if known is None else min(delay, known)
    return [delay or Fraction(0) for delay in least]


def _passing_us(problem: Problem, s: int, unit: int, direction: str) -> float:
    """The least time that an activation, or a gradient, takes to pass a stage; 0 if none does."""
    graph = lower(problem)
    kind = graph.kind_with("F" if direction == "forward" else "B", s).name
    return float(np.nan_to_num(graph.duration_us[graph.type_of(kind, s, 0, unit)]))


def _rounded_down(value: Fraction) -> float:
    """The value as a float; rounded down to millionths, or to an integer, where that float is larger."""
    for number in (float(value), float(Decimal(floor(value * 10**6)).scaleb(-6))):
        if value - Fraction(1, 10**6) < exact(number) <= value:
            return number
    return float(floor(value))


def restricted(orders: Orders, kept: Sequence[int]) -> Orders:
    """Orders of the whole problem for the part with the stages `kept`, which they serve no later."""
    number = {stage: k for k, stage in enumerate(kept)}

    def part(ops: Sequence[Op]) -> list[Op]:
        return [op._replace(stage=number[op.stage]) for op in ops if op.stage in number]

    devices = [DeviceOrders(*(part(stream) for stream in device.streams())) for device in orders.devices]
    waits = {op: part(before) for waiting, before in orders.waits.items() for op in part([waiting])}
    modes = None if orders.modes is None else orders.modes[list(kept)]
    return Orders(devices, waits, [part(channel) for channel in orders.channels], modes, orders.microbatch_order)


def _delay(problem: Problem, before: int, after: int) -> dict[str, float]:
    """Delays between two stages and times of the ops of the stages between them, forward and backward."""
    between = range(before + 1, after)
    activations = [*problem.forward_delay_us[before:after], *(_passing_us(problem, s, 0, "forward") for s in between)]
    gradients = [*problem.backward_delay_us[before:after], *(_passing_us(problem, s, 0, "backward") for s in between)]
    return {"forward": _sum_us(activations), "backward": _sum_us(gradients)}


def _sum_us(times: Sequence[float]) -> float:
    """The sum of decimals without rounding errors, so that time grids stay exact."""
    return float(sum(map(exact, times), Fraction(0)))


def parts(problem: Problem, first: int) -> Iterator[Sequence[int]]:
    """Ever more stages: of the device `first`, then of devices spread over the pipeline as well."""
    devices = [d for d, stages in enumerate(problem.stages_of) if stages]
    before: Sequence[int] = []
    for number in range(1, len(devices)):
        spread = [devices[k * (len(devices) - 1) // max(1, number - 1)] for k in range(number)] if number > 1 else []
        kept = _connected(problem, {first, *spread})
        if before != kept and len(kept) < len(problem.stages):
            yield kept
        before = kept


def _devices_by_bound(problem: Problem) -> Sequence[int]:
    """The devices with stages, the one that bounds most first."""
    devices = (d for d, stages in enumerate(problem.stages_of) if stages)
    bounded = sorted(zip(device_bounds_us(problem), devices, strict=True), key=lambda pair: -pair[0])
    return [d for _, d in bounded]


def _latest_device(problem: Problem, kept: Sequence[int], times: Simulation, value_us: float) -> int:
    """The device with stages outside a part that would be latest if the part's ops ran at these times.

    Its F and B have heads and tails from those of the kept stages before and behind, and its W from the order that
    memory forces; it may interrupt them (Jackson's preemptive schedule).
    """
    costs = UnitCosts.of(problem)
    durations_us = np.stack([costs.forward, costs.backward, costs.weight])
    starts_us = np.zeros_like(durations_us)
    for kind, names in enumerate([{"F"}, {"B", "BW", "CBW"}]):
        for k, (name, s, i) in enumerate(times.ops):
            if name in names:
                starts_us[kind, kept[s], i] = times.start_us[k]
    up_us, down_us = np.zeros_like(costs.forward), np.zeros_like(costs.forward)  # the way from stage 0, and back to it
    np.cumsum(costs.forward[:-1] + problem.unit_delays_us["forward"], axis=0, out=up_us[1:])
    np.cumsum(costs.backward[1:] + problem.unit_delays_us["backward"], axis=0, out=down_us[1:])
    stages = range(len(problem.stages))
    below, above = [max(k for k in kept if k <= s) for s in stages], [min(k for k in kept if k >= s) for s in stages]
    heads_us = np.full_like(durations_us, -np.inf)
    heads_us[0] = starts_us[0, below] + up_us - up_us[below]
    heads_us[1] = starts_us[1, above] + down_us[above] - down_us
    heads_us[2] = heads_us[1] + costs.backward
    latest_us = np.full_like(durations_us, 2 * value_us)
    latest_us[0] = starts_us[0, above] - (up_us[above] - up_us)
    latest_us[1] = starts_us[1, below] - (down_us - down_us[below])
    for before, after in memory_precedences(problem):
        one, other = (("FBW".index(op.kind), op.stage, op.microbatch) for op in (before, after))
        latest_us[one] = min(latest_us[one], latest_us[other] - durations_us[one])
        heads_us[other] = max(heads_us[other], heads_us[one] + durations_us[one])
    late_us = {}
    tails_us = -(latest_us + durations_us)
    for d, numbers in enumerate(problem.stages_of):
        if not {*numbers} <= {*kept}:
            ops = (us[:, numbers].ravel().tolist() for us in (heads_us, durations_us, tails_us + 4 * value_us))
            late_us[d] = preemptive_us(list(zip(*ops, strict=True)))
    return max(late_us, key=lambda d: late_us[d])


def _connected(problem: Problem, devices: Collection[int]) -> Sequence[int]:
    """The stages of `devices`, both ends of the pipeline, and one stage wherever two of one device would meet."""
    device = lower(problem).device.tolist()
    wanted = [s for s, own in enumerate(device) if own in devices]
    kept = sorted({0, *wanted, len(device) - 1})
    passing_us = [
        sum(_passing_us(problem, s, 0, direction) for direction in ("forward", "backward")) for s in range(len(device))
    ]
    for before, after in list(pairwise(kept)):
        if after > before + 1 and device[before] == device[after]:
            # The longest of the stages between: kept instead of turned into delay, it loses the least of the bound.
            kept.append(max(range(before + 1, after), key=passing_us.__getitem__))
    return sorted(kept)
