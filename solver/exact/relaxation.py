"""Bounds from exact solutions of parts of the pipeline, a relaxation of the whole problem (docs/math/bounds.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.problem import MAX_TIME_US, Problem
from optpipe.simulate import simulate
from solver.bounds.device import split_backward_suffices
from solver.bounds.lower_bound import device_bounds_us, lower_bound_us
from solver.exact.cp_sat.model import solve_cp_sat
from solver.limits import Limits
from solver.solution import INFEASIBLE, OnSolution, Solution


def relaxation_bound(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """A better bound from the exact solution of ever larger parts of the problem.

    Begins with the device that bounds most, then spreads over the pipeline, and ends before the whole or with the
    first part that is not solved in half of the time left. Reports each better bound; the orders of `start` come back.
    Where no schedule of a part keeps the budgets, none of the whole does.
    """
    answer = replace(start, bound_us=max(start.bound_us, lower_bound_us(problem)))
    if not split_backward_suffices(problem):
        return answer
    proved: dict[frozenset[int], float] = {}
    for number, kept in enumerate(_parts(problem), 1):
        if limits.cancel.requested or limits.reached(answer.value_us, answer.bound_us):
            break
        part = projected(problem, kept)
        # Only bounds of parts of this part count here, not that of the whole: on the part's grid of time a bound is
        # raised to the next value that its own schedules can have, and those of the whole problem may lie below it.
        inside_us = max((bound_us for inner, bound_us in proved.items() if inner <= {*kept}), default=0.0)
        orders = restricted(start.orders, kept) if start.orders else None
        value_us = simulate(part, orders).value_us if orders else float("inf")
        solved = Solution(orders, value_us, max(inside_us, lower_bound_us(part)))
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


def projected(problem: Problem, kept: Sequence[int]) -> Problem:
    """The problem of the stages `kept` (ascending, the first and the last among them), the others only as delays.

    No schedule of the whole problem is shorter than the best of this one: leaving out the ops of a stage frees its
    device, its channel and its memory, and its F and B remain as time between those of the stages around it. Between
    two stages of one device another must be kept, since stages of one device hand over without delay.
    """
    data = problem.to_data()
    data["stages"] = [data["stages"][s] for s in kept]
    data["transfer_us"] = [_delay(problem, before, after) for before, after in pairwise(kept)]
    return Problem.from_data(data)


def restricted(orders: Orders, kept: Sequence[int]) -> Orders:
    """Orders of the whole problem for the part with the stages `kept`, which they serve no later."""
    number = {stage: k for k, stage in enumerate(kept)}

    def part(ops: Sequence[Op]) -> list[Op]:
        return [op._replace(stage=number[op.stage]) for op in ops if op.stage in number]

    devices = [DeviceOrders(*(part(stream) for stream in device.streams())) for device in orders.devices]
    waits = {op: part(before) for waiting, before in orders.waits.items() for op in part([waiting])}
    return Orders(devices, waits, [part(channel) for channel in orders.channels])


def _delay(problem: Problem, before: int, after: int) -> dict[str, float]:
    """Delays between two stages and times of the ops of the stages between them, forward and backward."""
    between = problem.stages[before + 1 : after]
    activations = [*problem.forward_delay_us[before:after], *(stage.forward_us for stage in between)]
    gradients = [*problem.backward_delay_us[before:after], *(stage.backward_input_us for stage in between)]
    return {"forward": _sum_us(activations), "backward": _sum_us(gradients)}


def _sum_us(times: Sequence[float]) -> float:
    """The sum as written in decimals, so that grids of time stay exact."""
    return float(sum((Fraction(str(time)) for time in times), Fraction(0)))


def _parts(problem: Problem) -> Iterator[Sequence[int]]:
    """Ever more stages: of the device that bounds most, then of devices spread over the pipeline as well.

    Parts in which the stages left out would be a longer delay than a problem may have are skipped.
    """
    devices = [d for d, stages in enumerate(problem.stages_of) if stages]
    bounds = device_bounds_us(problem)
    first = devices[bounds.index(max(bounds))]
    before: Sequence[int] = []
    for number in range(1, len(devices)):
        spread = [devices[k * (len(devices) - 1) // max(1, number - 1)] for k in range(number)] if number > 1 else []
        kept = _connected(problem, {first, *spread})
        if before != kept and len(kept) < len(problem.stages):
            delays_us = (delay_us for pair in pairwise(kept) for delay_us in _delay(problem, *pair).values())
            if max(delays_us, default=0.0) <= MAX_TIME_US:
                yield kept
        before = kept


def _connected(problem: Problem, devices: Collection[int]) -> Sequence[int]:
    """The stages of `devices`, both ends of the pipeline, and one stage wherever two of one device would meet."""
    stages = problem.stages
    wanted = [s for s, stage in enumerate(stages) if stage.device in devices]
    kept = sorted({0, *wanted, len(stages) - 1})
    for before, after in list(pairwise(kept)):
        if after > before + 1 and stages[before].device == stages[after].device:
            # The stage that would be most delay: the least of the bound is lost where that is kept.
            kept.append(max(range(before + 1, after), key=lambda s: stages[s].forward_us + stages[s].backward_input_us))
    return sorted(kept)
