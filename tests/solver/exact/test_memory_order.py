"""Orders that memory forces on ops are kept by every schedule within the budgets, and prove more."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from instances import WHOLE, instance, uniform
from optpipe.ops import Op
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us
from solver.build import peak_budgets
from solver.exact.cp_sat.model import Options, build_model, configured_solver, solve_cp_sat
from solver.exact.memory_order import memory_precedences
from solver.exact.ticks import TimeGrid
from solver.limits import Limits
from solver.scale import horizon_us
from solver.serial import serial_orders
from solver.solution import Solution
from tests.problems import problems
from tests.random_plans import random_plan
from tests.recomputing import random_recomputing, recomputing
from tests.sample import examples, some
from tests.solver.exact.test_rules import within_its_peaks
from tests.unequal import random_orders, random_pipeline, random_unequal, unequal


@settings(max_examples=examples(150))
@given(problems(max_microbatches=4), st.randoms(use_true_random=False))
def test_random_schedules_are_not_ruled_out(problem: Problem, rng: Random) -> None:
    data = problem.to_data() | {"host_memory_bytes": None}
    for stage in data["stages"]:  # whole ticks, and no two ops at one instant that have no order
        stage |= {kind: round(stage[kind]) + 1 for kind in ("forward_us", "backward_input_us", "backward_weight_us")}
        if stage.get("offload"):
            stage["offload"] |= {kind: round(stage["offload"][kind]) + 1 for kind in ("offload_us", "reload_us")}
    plan = random_plan(Problem.from_data(data), rng)
    assume(all(op.kind != "BW" for op in plan))
    problem = within_its_peaks(Problem.from_data(data), plan)

    for before, after in memory_precedences(problem):
        assert plan[before][1] <= plan[after][0]

    begin = min(start for start, _ in plan.values())
    horizon_us = max(end for _, end in plan.values()) - begin
    grid = TimeGrid.of(problem, horizon_us)
    variables = build_model(problem, grid, horizon_us, 0.0, Options(weight_order=False))
    for (s, i), leaves in variables.leaves.items():
        variables.model.add(leaves == (Op("O", s, i) in plan))
    for op, task in variables.tasks.items():
        if op in plan:
            variables.model.add(task.start == grid.ticks(plan[op][0] - begin))
    assert configured_solver(Limits(60, workers=1)).solve(variables.model) == cp_model.OPTIMAL


@settings(max_examples=examples(40))
@given(problems())
def test_optima_are_the_same_without_it(problem: Problem) -> None:
    orders = serial_orders(problem)
    start = Solution(orders, simulate(problem, orders).value_us, 0.0) if orders else Solution(None, inf, 0.0)
    limits = Limits(60, workers=1)
    plain = solve_cp_sat(problem, limits, start, lambda _: None, Options(precedences=False, memory_order=False))
    solved = solve_cp_sat(problem, limits, start, lambda _: None)
    assert (solved.value_us, solved.infeasible) == (plain.value_us, plain.infeasible)


def test_rounds_of_a_stage_follow_one_another() -> None:
    pairs = set(memory_precedences(uniform(4, 8, budget=4, activation_bytes=2, backward_weight_bytes=2)))
    assert (Op("B", 0, 0), Op("F", 0, 2)) in pairs
    assert (Op("W", 0, 5), Op("F", 0, 7)) in pairs
    assert (Op("B", 0, 1), Op("F", 0, 2)) not in pairs


def test_what_may_leave_forces_nothing() -> None:
    pairs = list(memory_precedences(uniform(4, 8, budget=4, offload=WHOLE)))
    assert {op.stage for pair in pairs for op in pair} == {3}, "the last stage keeps its activation"


def test_a_stage_waits_for_the_later_ones_of_its_device() -> None:
    """V, two devices, room for three chunks: while stage 3 holds two, stage 0 has one more at most."""
    pairs = set(memory_precedences(uniform(2, 6, budget=6, activation_bytes=2, v_shape=True)))
    assert (Op("B", 3, 0), Op("F", 3, 1)) in pairs
    assert (Op("F", 3, 0), Op("F", 0, 2)) in pairs
    assert (Op("F", 3, 0), Op("F", 0, 1)) not in pairs


def test_what_modes_leave_takes_room() -> None:
    """In 20 bytes there are three that wait with 6, the last with 8 during its F; or one beside a whole one."""
    mode = {"name": "part", "kept_bytes": 6, "recompute_us": 1, "forward_workspace_bytes": 2}
    ahead, inside = (
        set(memory_precedences(recomputing(2, 6, [mode | form], 20, backward_weight_bytes=10)))
        for form in ({}, {"segment_bytes": 1})
    )
    for pairs in (ahead, inside):
        assert (Op("B", 0, 0), Op("F", 0, 3)) in pairs
    assert (Op("W", 0, 0), Op("F", 0, 3)) in ahead
    assert (Op("B", 0, 0), Op("F", 0, 2)) in ahead, "while that B runs, its activation is whole"
    assert (Op("B", 0, 0), Op("F", 0, 2)) not in inside


@pytest.mark.parametrize("first", some(range(0, 200, 20)))
def test_random_schedules_with_modes_keep_them(first: int) -> None:
    for seed in range(first, first + 20):
        problem, orders = random_recomputing(Random(seed))
        budgets = [{"memory_bytes": size} for size in peak_budgets(problem, orders)]
        simulation = simulate(problem, orders)
        ends = dict(zip(simulation.ops, zip(simulation.start_us, simulation.end_us, strict=True), strict=True))
        times = {}  # a backward in another form has its B, and W, at its end
        for (kind, s, i), (start_us, end_us) in ends.items():
            stage = problem.stages[s]
            backward_us = stage.backward_input_us + (stage.backward_weight_us if kind.endswith("BW") else 0)
            if "B" in kind:
                begins_us = end_us - backward_us
                times[Op("B", s, i)] = begins_us, begins_us + stage.backward_input_us
                if kind.endswith("BW"):
                    times[Op("W", s, i)] = end_us - stage.backward_weight_us, end_us
            else:
                times[Op(kind, s, i)] = start_us, end_us
        for before, after in memory_precedences(problem.from_data(problem.to_data() | {"devices": budgets})):
            assert times[before][1] <= times[after][0] + 1e-9, (seed, before, after)


PROVED_US = {"a-p16-m32-c0-b1o2-linear-make": 155_000, "a-p8-m16-c0-b1o3-linear-span": 145_000}
"""Optima of instances whose parts on a few devices alone have less, by name."""


@pytest.mark.parametrize("name", some(list(PROVED_US)))
def test_nothing_is_better_than_what_memory_lets_pass(name: str) -> None:
    problem, value_us = instance(name), PROVED_US[name]
    grid = TimeGrid.of(problem, horizon_us(problem, value_us))
    grid = TimeGrid.of(problem, horizon_us(problem, value_us), grid.refinement_for(value_us))
    variables = build_model(problem, grid, horizon_us(problem, value_us), lower_bound_us(problem))
    variables.model.add(variables.objective < grid.bound_ticks(value_us))
    variables.model.clear_objective()
    solver = configured_solver(Limits(workers=1, deterministic_limit=5))
    solver.parameters.linearization_level = 0
    solver.parameters.cp_model_presolve = False
    assert solver.solve(variables.model) == cp_model.INFEASIBLE


@pytest.mark.parametrize("first", some([40, 160, 200]))
def test_every_schedule_of_slices_and_unequal_microbatches_keeps_the_precedences(first: int) -> None:
    """Random orders within their own peaks; a fused backward is a B, and its W ends with it."""
    judged = 0
    for seed in range(first, first + 20):
        rng = Random(seed)
        problem = random_pipeline(rng) if seed % 2 else Problem.from_data(random_unequal(rng))
        problem = problem.from_data(problem.to_data() | {"microbatch_order": "given"})
        candidates = [random_orders(problem, rng)[0] for _ in range(6)]
        orders = min(candidates, key=lambda orders: sum(peak_budgets(problem, orders)))
        budgets = [{"memory_bytes": size} for size in peak_budgets(problem, orders)]
        problem = problem.from_data(problem.to_data() | {"devices": budgets})
        if not problem.has_factors and problem.slice_count == 1:
            continue
        places = {op: place for device in orders.devices for place, op in enumerate(device.compute)}
        for before, after in memory_precedences(problem):
            fused = ("BW", "CB", "CBW") if before.kind == "B" else ("BW", "CBW")
            done = next(op for kind in (before.kind, *fused) if (op := before._replace(kind=kind)) in places)
            assert places[done] < places[after], seed
            judged += 1
    assert judged >= 5


def test_slices_wait_by_their_own_sizes() -> None:
    """Slices of 1 and 3 bytes, room for 4: the second microbatch begins beside a slice of the first and ends alone."""
    problem = unequal(1, 2, 4, slices={"count": 2, "factors": {"bytes": [0.25, 0.75]}}, backward_weight_bytes=0)
    assert list(memory_precedences(problem)) == [(Op("B", 0, 1), Op("F", 0, 2)), (Op("B", 0, 0), Op("F", 0, 3))]
    free = {"microbatch_factors": [{"bytes": 1}, {"bytes": 2}], "microbatch_order": "free"}
    assert list(memory_precedences(unequal(1, 2, 8, **free))) == []
