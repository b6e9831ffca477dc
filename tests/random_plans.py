"""Random valid orders for any problem, budgets aside, and their execution under random durations."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from optpipe.costs import device_effect
from optpipe.memory import curve
from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from solver.build import orders_from_times

Planned = dict[Op, tuple[float, float]]


def random_orders(problem: Problem, rng: Random) -> Orders:
    """Orders of a random list schedule: random priorities, random choice of BW, random offloads. Waits included."""
    return orders_from_times(problem, random_plan(problem, rng), tolerance=1e-9)


def random_plan(problem: Problem, rng: Random) -> Planned:
    """Planned times of a random list schedule without regard to budgets."""
    left = _ops(problem, rng)
    needs = {op: _needs(problem, op, set(left)) for op in left}
    planned: Planned = {}
    free: dict[object, float] = {}
    while left:
        ready = [op for op in left if all(before in planned for before, _ in needs[op])]
        op = rng.choice(ready)
        resource = _resource(problem, op)
        earliest = max((planned[before][1] + delay for before, delay in needs[op]), default=0.0)
        start = max(earliest, free.get(resource, 0.0))
        end = start + problem.stages[op.stage].duration_us(op.kind)
        planned[op] = (start, end)
        free[resource] = end
        left.remove(op)
    return planned


def _ops(problem: Problem, rng: Random) -> list[Op]:
    ops = []
    fused = rng.random() < 0.5
    for s, stage in enumerate(problem.stages):
        for i in range(problem.microbatches):
            whole = not stage.split_backward or (fused and rng.random() < 0.5)
            backward = ["BW"] if whole else ["B", "W"]
            transfers = ["O", "R"] if stage.offload and rng.random() < 0.6 else []
            ops += [Op(kind, s, i) for kind in ["F", *backward, *transfers]]
    return ops


def _resource(problem: Problem, op: Op) -> object:
    device = problem.stages[op.stage].device
    if op.kind not in "OR":
        return device
    group = next(tuple(group) for group in problem.channel_groups if device in group)
    return group, op.kind if problem.copy_channels.duplex else "OR"


def _needs(problem: Problem, op: Op, there: set[Op]) -> list[tuple[Op, float]]:
    """Every op that must end before `op` starts, with the delay, straight from the contract's rules."""
    kind, s, i = op
    last = len(problem.stages) - 1
    needs: list[tuple[Op, float]] = [(Op(kind, s, j), 0.0) for j in range(i)]
    if kind == "F" and s:
        needs.append((Op("F", s - 1, i), problem.forward_delay_us[s - 1]))
    if kind in ("B", "BW"):
        needs += [(Op("F", s, i), 0.0), (Op("R", s, i), 0.0)]
        needs += [(Op(backward, s, j), 0.0) for backward in ("B", "BW") for j in range(i)]
        if s < last:
            needs += [(Op(backward, s + 1, i), problem.backward_delay_us[s]) for backward in ("B", "BW")]
    before = {"W": "B", "O": "F", "R": "O"}.get(kind)
    if before:
        needs.append((Op(before, s, i), 0.0))
    return [(other, delay) for other, delay in needs if other in there]


def precedences(problem: Problem, orders: Orders) -> list[tuple[Op, Op, float]]:
    """All (before, after, delay) that rules, orders, channels and waits ask for, straight from the contract."""
    there = set(orders.ops())
    found = [(before, op, delay) for op in there for before, delay in _needs(problem, op, there)]
    lists = [stream for device in orders.devices for stream in device.streams()]
    found += [(*pair, 0.0) for ops in (*lists, *orders.channels) for pair in pairwise(ops)]
    return found + [(before, op, 0.0) for op, waits in orders.waits.items() for before in waits]


def execute(problem: Problem, orders: Orders, duration_us: dict[Op, float]) -> Planned:
    """Run orders and waits with any durations, as an executor would: naive relaxation, no shared code."""
    there = set(orders.ops())
    needs: dict[Op, list[tuple[Op, float]]] = {op: [] for op in there}
    for before, op, delay in precedences(problem, orders):
        needs[op].append((before, delay))
    start = dict.fromkeys(there, 0.0)
    for _ in range(len(there) + 1):
        new = {
            op: max((start[before] + duration_us[before] + delay for before, delay in needs[op]), default=0.0)
            for op in there
        }
        if new == start:
            return {op: (start[op], start[op] + duration_us[op]) for op in there}
        start = new
    raise AssertionError("the orders deadlock")


def planned_durations(problem: Problem, orders: Orders) -> dict[Op, float]:
    """The problem's own durations."""
    return {op: problem.stages[op.stage].duration_us(op.kind) for op in orders.ops()}


def peak_bytes(problem: Problem, executed: Planned, device: int) -> int:
    """The peak of a device over executed times."""
    return curve(
        (start, end, device_effect(problem.stages[op.stage], op.kind))
        for op, (start, end) in executed.items()
        if problem.stages[op.stage].device == device
    ).peak_bytes
