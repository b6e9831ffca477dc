"""Building and solving the constraint model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ortools.sat.python import cp_model

from optpipe.orders import Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.exact.cp_sat.constraints import Constraints
from solver.exact.cp_sat.objective import add_objective
from solver.exact.cp_sat.parameters import configured_solver
from solver.exact.cp_sat.variables import Moment, Variables
from solver.exact.grid import Grid
from solver.finish import within_budgets
from solver.limits import Answer, Limits, Start
from solver.plan import orders_of_plan


def build(problem: Problem, grid: Grid, horizon_us: float, bound_us: float) -> Variables:
    """The whole model. No op ends later than `horizon_us`; no value is below `bound_us`."""
    variables = Variables(problem, grid, grid.horizon(horizon_us))
    Constraints(variables).add_all()
    add_objective(variables, grid.ticks(bound_us))
    return variables


def solve_cp_sat(problem: Problem, limits: Limits, start: Start, on_answer: Callable[[Answer], None]) -> Answer:
    """Search with CP-SAT from the best start known, reporting every better answer.

    Returns the last answer: its bound holds whether or not the search ended. See `Answer` for infeasibility.
    """
    grid = Grid.of(problem, start.horizon_us)
    variables = build(problem, grid, start.horizon_us, start.bound_us)
    if start.orders is not None:
        _add_hint(variables, start.orders)
    solver = configured_solver(limits)
    callback = _Callback(variables, start, on_answer)
    with limits.cancel.calling(solver.stop_search):
        status = solver.solve(variables.model, callback)
    return callback.final(status, solver.best_objective_bound)


def _add_hint(variables: Variables, orders: Orders) -> None:
    """Give the solver a known schedule to begin with, whole, so that it need not search for the rest."""
    model, starts = variables.model, _hinted_starts(variables, orders)
    for op, task in variables.tasks.items():
        model.add_hint(task.start, starts.get(op, 0))
    for (s, i), leaves in variables.leaves.items():
        model.add_hint(leaves, Op("O", s, i) in starts)
    for length, first, last in variables.lengths:
        if first.task.op in starts and last.task.op in starts:
            model.add_hint(length, _between(first, last, starts))
    value = max(_between(begin, end, starts) for begin, end in variables.measured)
    model.add_hint(variables.objective, value)


def _between(first: Moment, last: Moment, starts: dict[Op, int]) -> int:
    return last.at(starts[last.task.op]) - first.at(starts[first.task.op])


def _hinted_starts(variables: Variables, orders: Orders) -> dict[Op, int]:
    """Start in ticks of each op of known orders; a fused backward is split."""
    simulation = simulate(variables.problem, orders)
    origin_us = float(simulation.start_us.min())
    starts = {}
    for op, k in simulation.index.items():
        at = variables.grid.ticks_up(float(simulation.start_us[k]) - origin_us)
        if op.kind == "BW":
            starts[Op("B", *op[1:])] = at
            starts[Op("W", *op[1:])] = at + variables.task("B", *op[1:]).ticks
        else:
            starts[op] = at
    return starts


@dataclass
class _Best:
    orders: Orders | None
    value_us: float
    bound_us: float


class _Callback(cp_model.CpSolverSolutionCallback):
    """Turns each solution into orders as it comes."""

    def __init__(self, variables: Variables, start: Start, on_answer: Callable[[Answer], None]) -> None:
        super().__init__()
        self.variables = variables
        self.problem = variables.problem
        self.best = _Best(start.orders, start.value_us, start.bound_us)
        self.on_answer = on_answer

    def on_solution_callback(self) -> None:
        planned = {}
        for op, task in self.variables.tasks.items():
            if op.kind in "OR" and not self.value(self.variables.leaves[op.stage, op.microbatch]):
                continue
            at = self.value(task.start)
            planned[op] = (at, at + task.ticks)
        orders = orders_of_plan(self.problem, planned)
        simulation = simulate(self.problem, orders)
        value = simulation.value_us
        self._raise_bound(self.best_objective_bound, min(value, self.best.value_us))
        if value < self.best.value_us and within_budgets(self.problem, orders, simulation):
            self.best.orders, self.best.value_us = orders, value
            self.on_answer(Answer(orders, value, self.best.bound_us))

    def _raise_bound(self, bound_ticks: float, value_us: float) -> None:
        proved = self.variables.grid.bound_us(self.problem, bound_ticks, value_us)
        self.best.bound_us = max(self.best.bound_us, min(proved, value_us))

    def final(self, status: cp_model.CpSolverStatus, bound_ticks: float) -> Answer:
        """The answer at the end of the search."""
        if status == cp_model.INFEASIBLE and self.best.orders is None:
            return Answer(None, float("inf"), float("inf"), infeasible=True)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            self._raise_bound(bound_ticks, self.best.value_us)
        return Answer(self.best.orders, self.best.value_us, self.best.bound_us)
