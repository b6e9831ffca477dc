"""Exact searches begin with the best published schedule: it is a whole and valid point of their models."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import highspy
import numpy as np
import pytest
from hypothesis import given, settings
from ortools.sat.python import cp_model

from instances import WHOLE, uniform
from optpipe.errors import MethodError
from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import split_backward_suffices
from solver.exact.cp_sat.model import add_hint
from solver.exact.cp_sat.model import build_model as build_cp_sat
from solver.exact.milp.model import build_program as build_milp
from solver.exact.milp.model import load_program, point_from_orders
from solver.exact.ticks import TimeGrid
from solver.limits import Limits
from solver.methods import METHODS, published_orders
from solver.scale import horizon_us
from solver.solution import Solution
from solver.strategy import SharedIncumbent
from solver.warm_starts import offer_published
from tests.placed_problems import placed_problems
from tests.problems import KNOWN_OPTIMA
from tests.sample import examples

FEASIBLE = 1e-6
"""Feasibility tolerance of a row in HiGHS."""

PROBLEMS = [problem for problem, _ in KNOWN_OPTIMA.values()]


@dataclass(frozen=True)
class Known:
    """A problem with the start that `solver.solve.solve` lets a search of it begin from."""

    problem: Problem
    start: Solution
    orders: Orders

    @classmethod
    def of(cls, problem: Problem) -> Known | None:
        """None where no published schedule keeps the budgets."""
        shared = SharedIncumbent(problem, Limits(workers=1), None)
        offer_published(problem, shared)
        start = shared.best
        return cls(problem, start, start.orders) if start.orders is not None else None


KNOWN = placed_problems(most_microbatches=3).filter(split_backward_suffices).map(Known.of).filter(bool)


@settings(max_examples=examples(30))
@given(KNOWN)
def test_a_point_of_the_mixed_integer_program(known: Known) -> None:
    start = known.start
    program = build_milp(known.problem, horizon_us(known.problem, start.value_us), start.bound_us, start.value_us)
    point = point_from_orders(program.variables, known.orders)
    assert (program.matrix @ point >= program.row_lower - FEASIBLE).all()
    assert (program.lower - FEASIBLE <= point).all()
    assert (point <= program.upper + FEASIBLE).all()
    assert point[program.variables.objective] * program.variables.unit_us == pytest.approx(start.value_us)


@settings(max_examples=examples(30))
@given(KNOWN)
def test_a_point_of_the_constraint_model(known: Known) -> None:
    """Nothing but the hint itself is left to CP-SAT."""
    reach_us = horizon_us(known.problem, known.start.value_us)
    grid = TimeGrid.of(known.problem, reach_us)
    variables = build_cp_sat(known.problem, grid, reach_us, known.start.bound_us)
    add_hint(variables, known.orders)
    solver = cp_model.CpSolver()
    solver.parameters.fix_variables_to_their_hinted_value = True
    solver.parameters.num_workers = 1
    assert solver.solve(variables.model) == cp_model.OPTIMAL
    slack_us = grid.us(2 * grid.step)  # ops without length take a tick each, all of them less than a step
    assert grid.us(int(solver.objective_value)) == pytest.approx(known.start.value_us, abs=slack_us)


def test_the_hint_names_every_variable_once() -> None:
    """The literals by which memory orders ops included; CP-SAT would have to search for what a hint leaves out."""
    known = Known.of(KNOWN_OPTIMA["offload"][0])
    assert known is not None
    reach_us = horizon_us(known.problem, known.start.value_us)
    variables = build_cp_sat(known.problem, TimeGrid.of(known.problem, reach_us), reach_us, 0.0)
    add_hint(variables, known.orders)
    model = variables.model.proto
    hinted = sorted(model.solution_hint.vars)
    names = [model.variables[k].name for k in hinted]
    assert any("first" in name for name in names)
    assert any("away" in name for name in names)
    assert hinted == [k for k, variable in enumerate(model.variables) if len(set(variable.domain)) > 1]


@pytest.mark.parametrize("v_shape", [False, True])
def test_ops_without_length_that_share_an_instant_keep_the_order_of_their_device(v_shape: bool) -> None:
    kinds = ("forward_us", "backward_input_us", "backward_weight_us")
    for devices, lengths in product((1, 2), product((0, 1), repeat=3)):
        data = uniform(devices, 3, v_shape=v_shape, budget=4, offload=WHOLE).to_data()
        for stage in data["stages"]:
            stage |= dict(zip(kinds, lengths, strict=True))
        problem = Problem.from_data(data)
        for method in ("zb-v", "ada-offload") if v_shape else ("1f1b", "zb-auto", "ada-offload"):
            try:
                orders = published_orders(METHODS[method], problem)
            except MethodError:  # a budget that it does not keep
                continue
            value_us = simulate(problem, orders).value_us
            program = build_milp(problem, horizon_us(problem, value_us), 0.0, value_us)
            point = point_from_orders(program.variables, orders)
            assert (program.matrix @ point >= program.row_lower - FEASIBLE).all(), (method, devices, lengths)


def test_a_fused_backward_that_overtook_a_weight_pass_is_a_point_of_both_models() -> None:
    """BW counts as B and not as W (docs/adr/0006): where it is split, the W of the stage are put in order."""
    problem = uniform(2, 3)
    lists = ("F0.0 F0.1 F0.2 B0.0 BW0.1 W0.0 B0.2 W0.2", "F1.0 F1.1 B1.0 F1.2 BW1.1 W1.0 BW1.2")
    orders = Orders.of_compute([[Op.parse(name) for name in names.split()] for names in lists])
    value_us = simulate(problem, orders).value_us
    program = build_milp(problem, value_us, 0.0, value_us)
    point = point_from_orders(program.variables, orders)
    assert (program.matrix @ point >= program.row_lower - FEASIBLE).all()
    variables = build_cp_sat(problem, TimeGrid.of(problem, value_us), value_us, 0.0)
    add_hint(variables, orders)
    solver = cp_model.CpSolver()
    solver.parameters.fix_variables_to_their_hinted_value = True
    solver.parameters.num_workers = 1
    assert solver.solve(variables.model) == cp_model.OPTIMAL
    assert solver.objective_value * float(1 / variables.grid.ticks_per_us) == value_us


@pytest.mark.parametrize("problem", PROBLEMS)
def test_highs_takes_it_before_it_searches(problem: Problem) -> None:
    known = Known.of(problem)
    assert known is not None
    program = build_milp(problem, horizon_us(problem, known.start.value_us), 0.0, known.start.value_us)
    highs = load_program(program)
    for option in ("mip_heuristic_effort", "mip_max_nodes", "time_limit"):
        highs.setOptionValue(option, 0)
    solution = highspy.HighsSolution()
    solution.col_value = point_from_orders(program.variables, known.orders)
    highs.setSolution(solution)
    highs.run()
    assert highs.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    found = np.array(highs.getSolution().col_value)[program.variables.objective] * program.variables.unit_us
    assert found == pytest.approx(known.start.value_us)
