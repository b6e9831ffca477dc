"""V-Min, V-Half and V-ZB: schedules with controllable memory along a V (arXiv 2405.15362, sections 3 and 4).

A building block says when each pass of one microbatch runs, with F, B and W of a chunk one unit of time long. It is
repeated every six units, in which a device runs F, B and W of both its chunks. Along the devices every leg is a
straight line: a leg away from device 0 takes `out` units a device and a leg towards it `back` units,

    F going out: out * d,  F coming back: c1 - back * d,  B going out: c2 + out * d,  B coming back: c3 - back * d.

The two chunks of a device then live for 2 (out + back) (p - 1) units together, and some for turning round. So every
device holds about (out + back) p / 6 microbatches: a third of 1F1B's memory for V-Min, half for V-Half, all for V-ZB.

What repetition leaves idle at both ends is then filled: a device that would wait takes a later pass if that keeps its
peak, and once its forwards are done it takes B before W. The costs are the problem's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

import numpy as np

from optpipe.ops import OpArray, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import over_budget, peak_budgets
from solver.plan_player import PlanPlayer, pass_costs
from solver.published.passes import require_v_shape

PERIOD = 6

Block = tuple[dict[tuple[str, int], int], ...]
"""For each device, the start of each of its passes, by kind and stage."""


def v_min(problem: Problem) -> Orders:
    """V-Min, the least memory: (p + 4) // 3 microbatches. Its block fits unit costs alone. Raises MethodError."""
    return _best(problem, "v-min", [(1, 1)])


def v_half(problem: Problem) -> Orders:
    """V-Half: (p + 2) // 2 microbatches, and no bubble that repeats for measured costs. Raises MethodError."""
    return _best(problem, "v-half", [(2, 1), (1, 2)])


def v_zb(problem: Problem, fill: bool = True) -> Orders:
    """V-ZB: p microbatches, as 1F1B, and next to no bubble. Raises MethodError on placement.

    `fill`: False leaves idle what repetition leaves idle at both ends, and needs no kernel.
    """
    return _best(problem, "v-zb", [(3, 3)], fill)


def _best(problem: Problem, method: str, slopes: list[tuple[int, int]], fill: bool = True) -> Orders:
    """The best of the blocks with these slopes, as they are, and with their ends filled at unit or real costs.

    Filling takes most of the time and keeps the peak: what exceeds a budget is not filled.
    """
    require_v_shape(problem, method)
    plans = [_repeated(problem, building_block(len(problem.devices), out, back)) for out, back in slopes]
    unfilled = [Orders.of_compute(plan) for plan in plans]
    fitting = [k for k, orders in enumerate(unfilled) if not over_budget(problem, orders)]
    candidates = [unfilled[k] for k in fitting] or unfilled
    if fill:
        candidates += [_filled(problem, plans[k], unit_costs) for k in fitting for unit_costs in (True, False)]
    return min(candidates, key=lambda orders: simulate(problem, orders).value_us)


def _filled(problem: Problem, plan: Sequence[OpArray], unit_costs: bool) -> Orders:
    """A plan whose devices take later passes while the planned one has to wait, as far as the peak of the plan allows.

    Every pass takes one unit of time and transfers none if `unit_costs`, else what the problem says.
    """
    passes, stages = pass_costs(problem), len(problem.stages)
    if (
        unit_costs
    ):  # the paper's blocks are made for these; for other costs sometimes the one fills better, or the other
        passes = replace(passes, duration_us=np.ones_like(passes.duration_us), delay_us=np.zeros_like(passes.delay_us))
    plans = [(ops.kind * stages + ops.stage, ops.microbatch, np.zeros(len(ops), np.int64)) for ops in plan]
    peaks = np.array(peak_budgets(problem, Orders.of_compute(plan)), np.int64)
    player = PlanPlayer(passes, plans, problem.units, peaks)
    # With all in one round nothing is too far ahead; B go before W once a device has no forwards left.
    nowhere, at_once = np.zeros((2, passes.size), np.int64), 1.0
    player.play(nowhere, 0, at_once, np.zeros(passes.devices, np.int64), by_span=False)
    return Orders.of_compute(OpArray(*np.divmod(codes, stages), which) for codes, which in player.played())


@lru_cache(maxsize=64)
def building_block(p: int, out: int, back: int) -> Block:
    """The block of these slopes that holds the least memory, and of these the shortest.

    Where a leg ends and the next begins the microbatch may pause. Pauses of up to a period are tried: some are needed
    so that no device has two passes at a time.
    """
    blocks = [(sum(pauses), _block(p, out, back, pauses)) for pauses in product(range(PERIOD), repeat=3)]
    free_of_collisions = [(chunks_held(block), pause, k) for k, (pause, block) in enumerate(blocks) if block]
    return blocks[min(free_of_collisions)[2]][1]


def _block(p: int, out: int, back: int, pauses: tuple[int, ...]) -> Block:
    """The block with these pauses at the three turns; empty where two passes of a device collide."""
    first_back = (p - 1) * (out + back) + 1 + pauses[0]
    first_out = first_back + 1 + pauses[1]
    last_back = first_out + (p - 1) * (out + back) + 1 + pauses[2]
    devices = []
    for d in range(p):
        low, high = d, 2 * p - 1 - d
        starts = {
            ("F", low): out * d,
            ("F", high): first_back - back * d,
            ("B", high): first_out + out * d,
            ("B", low): last_back - back * d,
        }
        free = sorted(set(range(PERIOD)) - {start % PERIOD for start in starts.values()})
        if len(free) != 2:
            return ()
        # Both W in the two slots of the period that are left, as early as possible after their B: of the two ways the
        # one with less waiting, since a pending W holds memory.
        waits = []
        for slot_low, slot_high in (free, free[::-1]):
            after_low = 1 + (slot_low - starts["B", low] - 1) % PERIOD
            waits.append((after_low, 1 + (slot_high - starts["B", high] - 1) % PERIOD))
        after_low, after_high = min(waits, key=sum)
        starts["W", low], starts["W", high] = starts["B", low] + after_low, starts["B", high] + after_high
        devices.append(starts)
    return tuple(devices)


def chunks_held(block: Block) -> int:
    """The most chunks that a device holds at any time once the block repeats, from the start of F to the end of W."""
    most = 0
    for starts in block:
        lives = [(start, starts["W", stage] + 1) for (kind, stage), start in starts.items() if kind == "F"]
        for now, _ in lives:
            held = sum((now - begin) // PERIOD - (now - end) // PERIOD for begin, end in lives)
            most = max(most, held)
    return most


def _repeated(problem: Problem, block: Block) -> list[OpArray]:
    """The block once for each microbatch: the passes of each device in the order of their starts."""
    microbatches = np.arange(problem.units)
    orders = []
    for starts in block:
        kind, stage = np.array([("FBW".index(kind), stage) for kind, stage in starts]).T
        at = np.array(list(starts.values()))[:, None] + PERIOD * microbatches
        order = np.argsort(at, axis=None)
        row, microbatch = np.divmod(order, len(microbatches))
        orders.append(OpArray(kind[row], stage[row], microbatch))
    return orders
