"""A schedule as windows see it: whole times, and how long everything takes that follows an op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optpipe.orders import STREAMS, Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import Simulation, simulate
from solver.exact.grid import Grid
from solver.exact.rules import rule_edges
from solver.exact.weight_order import in_weight_order
from solver.finish import within_budgets
from solver.plan import orders_of_plan

Ints = NDArray[np.int64]

NEVER = -(2**60)
"""The length of a path that does not exist."""


class Numbering:
    """Every op that a schedule may have, by number, with its length in ticks; and the rules between them.

    `rules`: rows of (before, after, delay).
    """

    def __init__(self, problem: Problem, grid: Grid) -> None:
        self.problem, self.grid = problem, grid
        self.ops = [op for s in range(len(problem.stages)) for op in _ops_of_stage(problem, s)]
        self.index = {op: k for k, op in enumerate(self.ops)}
        self.device = np.array([problem.stages[op.stage].device for op in self.ops])
        self.stream = np.array([STREAMS.index(op.stream) for op in self.ops])
        length, ticks = cache(grid.length), cache(grid.ticks)
        self.length = np.array([length(problem.stages[op.stage].duration_us(op.kind)) for op in self.ops])
        edges = [(edge.before, edge.after, ticks(edge.delay)) for edge in rule_edges(problem, self.index)]
        self.rules = np.array(edges, np.int64).reshape(-1, 3)


def _ops_of_stage(problem: Problem, s: int) -> Iterator[Op]:
    kinds = "FBWOR" if problem.stages[s].offload else "FBW"
    return (Op(kind, s, i) for kind in kinds for i in range(problem.microbatches))


@dataclass(frozen=True)
class Surroundings:
    """Orders whose backwards are split, and their simulated times. Arrays are by number of the op."""

    numbering: Numbering
    orders: Orders
    simulation: Simulation
    present: NDArray[np.bool_]
    start: Ints

    @classmethod
    def of(cls, numbering: Numbering, orders: Orders) -> Surroundings:
        """Time the orders; times are rounded down to ticks, which keeps every precedence."""
        simulation = simulate(numbering.problem, orders)
        numbers = np.array([numbering.index[op] for op in simulation.ops])
        present = np.zeros(len(numbering.ops), bool)
        present[numbers] = True
        start = np.zeros(len(numbering.ops), np.int64)
        since_us = simulation.start_us - simulation.start_us.min()
        start[numbers] = np.floor(since_us * float(numbering.grid.ticks_per_us) + 1e-6)
        return cls(numbering, orders, simulation, present, start)

    @property
    def value_us(self) -> float:
        """The objective."""
        return self.simulation.value_us

    @property
    def keeps_budgets(self) -> bool:
        """Whether memory is within the budgets."""
        return within_budgets(self.numbering.problem, self.orders, self.simulation)

    @cached_property
    def end(self) -> Ints:
        """End of each op in ticks."""
        end: Ints = self.start + self.numbering.length
        return end

    @cached_property
    def by_start(self) -> Ints:
        """All ops that there are, by start."""
        present = np.flatnonzero(self.present)
        by_start: Ints = present[np.argsort(self.start[present], kind="stable")]
        return by_start

    @cached_property
    def streams(self) -> Sequence[Sequence[Ints]]:
        """For each device, the ops of its three streams in order."""
        return [[self._numbers(ops) for ops in device.streams()] for device in self.orders.devices]

    @cached_property
    def channels(self) -> Sequence[Ints]:
        """The ops of each copy channel that carries any, in order."""
        shared = [self._numbers(channel) for channel in self.orders.channels]
        taken = {int(k) for channel in shared for k in channel}
        alone = [ops for device in self.streams for ops in device[1:] if len(ops) and int(ops[0]) not in taken]
        return shared + alone

    def _numbers(self, ops: Sequence[Op]) -> Ints:
        return np.array([self.numbering.index[op] for op in ops], np.int64)

    @cached_property
    def tails(self) -> Ints:
        """Row d: the time from the start of each op to the end of device d's last (NEVER where there is no path)."""
        length = self.numbering.length
        edges = np.concatenate([self.present_rules, *self._order_edges()])
        edges = edges[np.argsort(-self.start[edges[:, 0]], kind="stable")]
        tails = np.full((len(self.streams), len(length)), NEVER, np.int64)
        for d, (compute, *_) in enumerate(self.streams):
            if len(compute):
                tails[d, compute[-1]] = length[compute[-1]]
        _lengthen(tails, length, edges)
        return tails

    @cached_property
    def present_rules(self) -> Ints:
        """The rules between ops that there are: rows of (before, after, delay)."""
        rules = self.numbering.rules
        kept: Ints = rules[self.present[rules[:, 0]] & self.present[rules[:, 1]]]
        return kept

    def _order_edges(self) -> Iterator[Ints]:
        for ops in [*(ops for device in self.streams for ops in device), *self.channels]:
            yield np.stack([ops[:-1], ops[1:], np.zeros(max(len(ops) - 1, 0), np.int64)], axis=1)
        index = self.numbering.index
        waits = [(index[before], index[op], 0) for op, befores in self.orders.waits.items() for before in befores]
        yield np.array(waits, np.int64).reshape(-1, 3)


@njit(cache=True)
def _lengthen(tails: Ints, length: Ints, edges: Ints) -> None:
    """Follow edges (from, to, delay), latest start of `from` first, so that every tail is whole before it is used."""
    for e in range(len(edges)):
        before, after, delay = edges[e]
        for d in range(len(tails)):
            if tails[d, after] >= 0:
                tails[d, before] = max(tails[d, before], length[before] + delay + tails[d, after])


def with_split_backwards(problem: Problem, orders: Orders) -> Orders:
    """The orders with W right behind each B in place of both fused, and W in the order of their B."""
    simulation = simulate(problem, orders)
    planned = {}
    for op, k in simulation.index.items():
        start, end = float(simulation.start_us[k]), float(simulation.end_us[k])
        if op.kind == "BW":
            middle = start + problem.stages[op.stage].backward_input_us
            planned[Op("B", *op[1:])], planned[Op("W", *op[1:])] = (start, middle), (middle, end)
        else:
            planned[op] = (start, end)
    return orders_of_plan(problem, in_weight_order(problem, planned))
