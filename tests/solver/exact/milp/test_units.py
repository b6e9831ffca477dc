"""The mixed-integer program on slices, unequal microbatches and free orders: all schedules are points, optima right."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from optpipe.errors import MethodError
from optpipe.ops import DeviceOrders, Op, OpArray, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import build_schedule, peak_budgets
from solver.exact.cp_sat.model import solve_cp_sat
from solver.exact.milp.model import build_program, point_from_orders, solve_milp
from solver.exact.milp.variables import has_every_schedule
from solver.limits import Limits
from solver.model_export import export_model
from solver.scale import horizon_us
from solver.solution import INFEASIBLE, Solution
from solver.solve import solve
from tests.sample import some
from tests.solver.exact.cp_sat.test_units import CAUSAL, schedules
from tests.solver.exact.milp.evidence import assert_another_solver_finds_the_optimum, assert_is_a_point
from tests.unequal import random_orders, random_pipeline, random_unequal, times, unequal


def tight(seed: int) -> tuple[Problem, Orders]:
    """A random problem, and orders of it with split backwards that need all of its budgets."""
    rng = Random(seed)
    data = random_unequal(rng)
    data["stages"] = [stage | {"split_backward": True} for stage in data["stages"]]
    problem = Problem.from_data(data)
    orders, _, _ = random_orders(problem, rng, split=True)
    budgets = [{"memory_bytes": size} for size in peak_budgets(problem, orders)]
    return problem.from_data(problem.to_data() | {"devices": budgets}), orders


def test_rounding_sets_no_ops_without_length_apart_that_share_an_instant() -> None:
    """The W of a slice came before that of the next one by 1e-12 of a unit, or the F of a microbatch before another."""
    copies = unequal(
        1,
        3,
        microbatch_factors=[{"bytes": 2}, {}, {}],
        forward_us=0,
        backward_input_us=0,
        backward_weight_us=0,
        activation_bytes=39,
        backward_weight_bytes=12,
        offload={"bytes": 39, "offload_us": 123457, "reload_us": 123457},
    ).to_data()
    copies |= {"devices": [{"memory_bytes": 117}], "copy_channels": {"duplex": False}, "slices": {"count": 2}}
    both_ways = unequal(6, 2, microbatch_factors=[{}, {"transfer": 1.5}], activation_bytes=1).to_data()
    both_ways |= {"microbatch_order": "free", "devices": [{"memory_bytes": size} for size in (3, 6, 3)]}
    times_us = (0, 0.003, 0), (0, 0, 0), (0.003, 0, 0.001), (0, 0.003, 0.003), (0.002, 0.001, 0), (0, 0.001, 0)
    for stage, device, us, left in zip(
        both_ways["stages"], (0, 1, 2, 2, 1, 0), times_us, (1, 1, 1, 0, 2, 2), strict=True
    ):
        names = ("forward_us", "backward_input_us", "backward_weight_us")
        stage |= {"device": device, "backward_weight_bytes": left, **dict(zip(names, us, strict=True))}
    for data, seed, optimum_us in ((copies, 0, 493828), (both_ways, 1, 0.021)):
        schedule = solve(Problem.from_data(data), "milp", Limits(time_limit_s=120, workers=1, seed=seed))
        assert schedule.value_us == pytest.approx(optimum_us)


@pytest.mark.parametrize("first", some(range(0, 60, 30)))
def test_the_model_has_every_schedule(first: int) -> None:
    free = 0
    for seed in range(first, first + 30, 2):
        problem, orders = tight(seed)
        free += problem.has_free_order
        assert_is_a_point(problem, orders, seed)
    assert free >= 3


def without_copies(seed: int) -> tuple[Problem, Orders]:
    """A small random problem of stages that fuse backwards or need not, and tight orders of it."""
    rng = Random(seed)
    while True:
        data = random_pipeline(rng).to_data()
        data["stages"] = [{name: stage[name] for name in stage if name != "offload"} for stage in data["stages"]]
        problem = Problem.from_data(data)
        if problem.units * len(problem.stages) <= 9 and all(stage.forward_us for stage in problem.stages):
            break
    candidates = [random_orders(problem, rng)[0] for _ in range(4)]
    orders = min(candidates, key=lambda orders: sum(peak_budgets(problem, orders)))
    budgets = [{"memory_bytes": size} for size in peak_budgets(problem, orders)]
    return problem.from_data(data | {"devices": budgets}), orders


@pytest.mark.parametrize("first", some(range(0, 30, 15)))
def test_the_model_has_every_fused_backward(first: int) -> None:
    fused = 0
    for seed in range(first, first + 15):
        problem, orders = without_copies(seed)
        assert has_every_schedule(problem)
        program, again = assert_is_a_point(problem, orders, seed)
        fused += len(program.variables.fused) > 0 and any(op.kind == "BW" for op in again.ops())
    assert fused >= 3


def test_optima_with_fused_backwards_are_those_of_cp_sat() -> None:
    """Without a start, and proved by both."""
    for seed in range(40, 48):
        problem, _ = without_copies(seed)
        answer = solve_milp(problem, Limits(60, workers=1), Solution(), lambda _: None)
        other = solve(problem, "cp-sat", Limits(60, workers=1))
        assert other.status == "optimal"
        assert answer.value_us == answer.bound_us == pytest.approx(other.value_us, rel=1e-9), seed


@pytest.mark.parametrize("order", ["given", "free"])
def test_no_backward_without_length_stands_within_a_fused_one(order: str) -> None:
    """It would come before an earlier one of its stage, which no schedule may."""
    problem = unequal(
        1, 2, 16, microbatch_factors=times(2, 3), microbatch_order=order, slices={"count": 2}, forward_us=2,
        backward_input_us=0, backward_weight_bytes=4, workspace_bytes={"W": 4},
    )  # fmt: skip
    answer = solve_milp(problem, Limits(60, workers=1), Solution(), lambda _: None)
    assert answer.value_us == answer.bound_us == 30


FREE = {"microbatch_order": "free"}

FAMILIES = {
    "slices": (1, 1, {"slices": CAUSAL, "slice_gradient_bytes": 2, "workspace_bytes": {"B": 1, "W": 2, "BW": 4}}),
    "slices of two devices": (2, 1, {"slices": CAUSAL, "slice_gradient_bytes": 1, "transfer_us": 0.5}),
    "unequal": (1, 2, {"microbatch_factors": [{"time": 2}, {"time": 3, "bytes": 0.5}]}),
    "span": (2, 2, {"microbatch_factors": times(3, 1), "split_backward": False, "objective": "device_span"}),
    "free": (1, 2, {"microbatch_factors": [{"time": 2}, {"bytes": 0.5}], **FREE}),
    "free span": (2, 2, {"microbatch_factors": times(3, 1), "objective": "device_span", **FREE}),
    "equal ones in a free order": (2, 3, {"microbatch_factors": times(1, 3, 1), "split_backward": False, **FREE}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_optima_are_those_of_every_schedule(name: str) -> None:
    devices, microbatches, fields = FAMILIES[name]
    values = schedules(unequal(devices, microbatches, backward_weight_bytes=0, **fields))
    for budget in sorted({max(peaks) for peaks in values}):
        problem = unequal(devices, microbatches, budget, backward_weight_bytes=0, **fields)
        optimum = min(value for peaks, value in values.items() if max(peaks) <= budget)
        answer = solve_milp(problem, Limits(60, workers=1), Solution(), lambda _: None)
        assert answer.value_us == pytest.approx(optimum, rel=1e-9), budget
        assert answer.bound_us == pytest.approx(optimum, rel=1e-9)
    too_small = unequal(
        devices, microbatches, min(max(peaks) for peaks in values) - 1, backward_weight_bytes=0, **fields
    )
    assert solve_milp(too_small, Limits(60, workers=1), Solution(), lambda _: None) == INFEASIBLE


@pytest.mark.parametrize("first", some(range(100, 106, 2)))
def test_agrees_with_cp_sat(first: int) -> None:
    """Neither proves what the other refutes, with modes and every kind of copy, from no schedule at all."""
    for seed in range(first, first + 2):
        problem, orders = tight(seed)
        other = solve_cp_sat(
            problem,
            Limits(workers=1, deterministic_limit=0.5),
            Solution(orders, simulate(problem, orders).value_us, 0.0),
            lambda _: None,
        )
        answer = solve_milp(problem, Limits(1, workers=1), Solution(), lambda _: None)
        assert answer.bound_us <= other.value_us * (1 + 1e-9), seed
        assert other.bound_us <= answer.value_us * (1 + 1e-9), seed
        if answer.orders is not None:
            build_schedule(problem, answer.orders, answer.bound_us, "milp", 0.0)  # which verifies it


def test_an_absent_reload_holds_no_other_back() -> None:
    """Slice 0 leaves and comes back before F of slice 1, which stays: reloads of later slices come first otherwise."""
    copies = {"bytes": 4, "offload_us": 1, "reload_us": 1}
    longer = {"count": 2, "factors": {"forward": [1, 5]}}
    problem = unequal(1, 2, 12, slices=longer, offload=copies, backward_weight_bytes=0)
    ops = "F0.0 F0.1 B0.1 B0.0 W0.1 W0.0 F0.2 F0.3 B0.3 B0.2 W0.3 W0.2"
    device = DeviceOrders(*(OpArray.of([Op.parse(op) for op in text.split()]) for text in (ops, "O0.2", "R0.2")))
    orders = Orders([device])
    simulation = simulate(problem, orders)
    assert simulation.end_us[simulation.index[Op("R", 0, 2)]] < simulation.end_us[simulation.index[Op("F", 0, 3)]]
    program = build_program(problem, horizon_us(problem, simulation.value_us), 0.0, simulation.value_us)
    point = point_from_orders(program.variables, orders)
    assert (program.row_lower - program.matrix @ point).max() <= 1e-6


WRITTEN = {
    "slices": unequal(2, 2, 9, slices=CAUSAL, backward_weight_bytes=0),
    "free order": unequal(2, 3, 9, microbatch_factors=times(3, 1, 2), backward_weight_bytes=0, **FREE),
    "slices in a free order": unequal(
        1, 2, 9, slices=CAUSAL, microbatch_factors=times(2, 1), objective="device_span", split_backward=False, **FREE
    ),
}


@pytest.mark.parametrize("form", ["lp", "mps"])
@pytest.mark.parametrize("problem", WRITTEN.values(), ids=WRITTEN.keys())
def test_the_written_model_has_the_optimum(problem: Problem, form: str, tmp_path: Path) -> None:
    assert_another_solver_finds_the_optimum(problem, tmp_path / f"model.{form}")


def test_backwards_in_one_piece_beside_copies_are_refused_by_name() -> None:
    """Without a budget nothing leaves, and they are fused like any others."""
    copies = {"bytes": 4, "offload_us": 1, "reload_us": 1}
    with pytest.raises(MethodError, match=r"^milp splits backwards .*stages\[0\]\.split_backward .*cp-sat"):
        solve(unequal(2, 2, 8, split_backward=False, offload=copies), "milp")
    assert solve(unequal(2, 2, split_backward=False, offload=copies), "milp", Limits(30)).status == "optimal"


def test_a_free_order_has_a_column_for_each_two_microbatches_that_differ() -> None:
    """Microbatches 0 and 2 are equal, and run in this order."""
    problem = unequal(2, 3, microbatch_factors=times(3, 1, 3), **FREE)
    text = export_model(problem).to_text("lp")
    assert {name for name in text.split() if name.startswith("before_")} == {"before_0_1", "before_1_2"}
    assert "precedence_F0_0_F0_2:" in text
    assert "begin_F1_1:" in text
