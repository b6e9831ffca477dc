"""CP-SAT: proved optima, offload decisions, and every rule of the model."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import pytest
from ortools.sat.python import cp_model

from instances import HALF, REFERENCE, WHOLE, instance, uniform
from optpipe.errors import InfeasibleError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us
from solver.bounds.unit_costs import UnitCosts
from solver.exact.cp_sat import model as module
from solver.exact.cp_sat.model import Options, build_model, configured_solver, solve_cp_sat, solve_unless_cancelled
from solver.exact.cp_sat.variables import Variables
from solver.exact.ticks import TimeGrid
from solver.limits import Cancel, Limits
from solver.serial import serial_orders
from solver.solution import Progress, Solution
from solver.solve import solve
from tests.problems import KNOWN_OPTIMA
from tests.reference_model import reference_optimum_us


def solved(problem: Problem, **limits: Any) -> Schedule:
    return solve(problem, "cp-sat", Limits(**({"time_limit_s": 120} | limits)))


@cache
def known(name: str) -> tuple[Schedule, list[Progress]]:
    """A problem of KNOWN_OPTIMA solved, and what was reported on the way."""
    seen: list[Progress] = []
    return solve(KNOWN_OPTIMA[name][0], "cp-sat", Limits(120), seen.append), seen


@pytest.mark.parametrize("name", KNOWN_OPTIMA)
def test_proves_known_optima(name: str) -> None:
    schedule, value_us = known(name)[0], KNOWN_OPTIMA[name][1]
    assert (schedule.status, schedule.value_us, schedule.bound_us) == ("optimal", value_us, value_us)
    assert schedule.method == "cp-sat"


def test_round_trips_of_a_thousand_stages() -> None:
    problem = uniform(1200, 1, budget=4)
    round_trips = Variables(problem, TimeGrid.of(problem, 1e6), 10**6).round_trips
    turnaround_us = UnitCosts.of(problem).turnaround_us
    expected = [stage.forward_us + turnaround_us(s, s) for s, stage in enumerate(problem.stages)]
    assert round_trips == [[trip] * problem.units for trip in expected]


def test_proves_a_reference_optimum() -> None:
    name = "a-p4-m8-c0-b1o2-linear-make"
    schedule = solved(instance(name))
    assert (schedule.status, schedule.value_us) == ("optimal", REFERENCE[name]["proved_optimum_us"])


def test_offload_lowers_the_optimum_at_half_the_memory() -> None:
    """research: linear p = 4, m = 8 at half of 1F1B's peak: 410 without offload, 290 with."""
    common: dict[str, Any] = {"budget": 4, "backward_weight_bytes": 2, "transfer_us": 0}
    assert solved(uniform(4, 8, **common)).value_us == 410
    schedule = solved(uniform(4, 8, **common, offload=WHOLE))
    assert (schedule.status, schedule.value_us) == ("optimal", 290)
    assert sum(len(device.offload) for device in schedule.devices) > 0
    assert all(device.peak_bytes_any_timing <= 4 for device in schedule.devices)


def test_channels_that_are_shared_cost_time() -> None:
    def value(copy_channels: dict[str, Any]) -> float:
        problem = uniform(4, 6, budget=4, backward_weight_bytes=2, offload=WHOLE, copy_channels=copy_channels)
        schedule = solved(problem)
        assert schedule.status == "optimal"
        return schedule.value_us

    own = value({})
    shared = value({"duplex": False, "shared_by": [[0, 1, 2, 3]]})
    assert own < shared


def test_a_host_budget_limits_offload() -> None:
    def value(host_memory_bytes: int | None) -> float:
        problem = uniform(3, 5, budget=4, offload=HALF, host_memory_bytes=host_memory_bytes)
        return solved(problem).value_us

    assert value(None) < value(1) < value(0)


def test_reports_incumbents_in_order() -> None:
    schedule, seen = known("offload")
    values = [progress.solution.value_us for progress in seen]
    assert len(set(values)) > 3
    assert values == sorted(values, reverse=True)
    assert values[-1] == schedule.value_us
    assert all(progress.solution.bound_us <= schedule.value_us for progress in seen)


def test_improves_the_measured_profile_at_the_bound_that_is_known() -> None:
    problem = instance("zb-1.5b-p8-m24-mem1.5")
    schedule = solve(problem, "auto", Limits(60))
    assert (schedule.status, schedule.value_us, schedule.method) == ("optimal", 1163608, "zb-auto")


def test_proves_that_a_budget_is_too_small() -> None:
    problem = uniform(2, 2, v_shape=True, budget=3)
    with pytest.raises(InfeasibleError) as caught:
        solved(problem)
    assert caught.value.budgets_bytes == (4, 4)
    assert solved(uniform(2, 2, v_shape=True, budget=4)).status == "optimal"


def test_proves_optima_that_only_fused_backwards_reach() -> None:
    """BW needs no workspace here and 1F1B keeps the budget, but B needs one byte more than there is."""
    data = uniform(2, 3, budget=4).to_data()
    for stage in data["stages"]:
        stage["workspace_bytes"] = {"B": 3}
    problem = Problem.from_data(data)
    tight = Problem.from_data(data | {"devices": [{"memory_bytes": 3}, {"memory_bytes": 3}]})
    for schedule in (solved(problem), solved(tight)):
        assert (schedule.status, schedule.value_us) == ("optimal", reference_optimum_us(schedule.problem))
        assert "BW" in {op.op for device in schedule.devices for op in device.compute}


def test_times_that_are_no_whole_numbers() -> None:
    data = uniform(2, 3, budget=4).to_data()
    data["stages"][0]["forward_us"] = 0.1
    data["stages"][1]["backward_weight_us"] = 10 / 3
    schedule = solved(Problem.from_data(data))
    assert schedule.value_us - schedule.bound_us <= 1e-6 * schedule.value_us


def test_copies_that_outlast_every_schedule_and_times_of_many_digits_do_no_harm() -> None:
    """In ticks these copies exceed 64 bits; bound and floor lie eighty million ticks apart."""
    endless = {"bytes": 1, "offload_us": 1e12, "reload_us": 1e12}
    problem = uniform(2, 4, budget=4, transfer_us=0.1234567, offload=endless)
    orders = serial_orders(problem)
    assert orders is not None
    value_us = simulate(problem, orders).value_us
    start = Solution(orders, value_us, lower_bound_us(problem))
    answer = solve_cp_sat(problem, Limits(workers=1, deterministic_limit=0.2), start, lambda _: None)
    assert answer.value_us < value_us


@pytest.mark.parametrize("objective", ["makespan", "device_span"])
def test_climb_asks_nothing_twice_where_ticks_have_more_digits_than_bounds(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question is refuted at no cost: with no progress of its own the climb would ask the first one for ever."""
    data = uniform(2, 2, objective=objective, transfer_us=2042652752.39).to_data()
    for stage in data["stages"]:
        stage |= {"forward_us": 1571626773.394, "backward_input_us": 689602980.316, "backward_weight_us": 0.001}
    problem = Problem.from_data(data)
    orders = serial_orders(problem)
    assert orders is not None
    asked_us: list[float] = []

    def build(problem: Problem, grid: TimeGrid, reach_us: float, bound_us: float, options: Options) -> Variables:
        variables = build_model(problem, grid, reach_us, bound_us, options)
        add = variables.model.add

        def noted(constraint: cp_model.BoundedLinearExpression) -> cp_model.Constraint:
            asked_us.append(grid.us(constraint.bounds.max() - grid.step + 1))
            assert len(asked_us) < 1000
            return add(constraint)

        monkeypatch.setattr(variables.model, "add", noted)
        return variables

    monkeypatch.setattr(module, "build_model", build)
    monkeypatch.setattr(module, "solve_unless_cancelled", lambda *_: (cp_model.INFEASIBLE, 0.0))
    start = Solution(orders, simulate(problem, orders).value_us, lower_bound_us(problem))
    limits = Limits(float("inf"), workers=1, deterministic_limit=1.0)
    solve_cp_sat(problem, limits, start, lambda _: None)
    assert asked_us == sorted({*asked_us})


def test_a_cancel_that_comes_while_the_model_is_built() -> None:
    model, cancel = cp_model.CpModel(), Cancel()
    model.maximize(model.new_int_var(0, 7, "x"))
    status, _ = solve_unless_cancelled(configured_solver(Limits(workers=1)), model, cancel)
    assert status == cp_model.OPTIMAL
    cancel.request()
    status, work = solve_unless_cancelled(configured_solver(Limits(workers=1)), model, cancel)
    assert (status, work) == (cp_model.UNKNOWN, 0.0)


def test_heads_and_tails_refute_what_order_and_memory_exclude_without_a_search() -> None:
    """Two stages a device along a V, all of 10 us, room for two activations: 1,010 us is the optimum."""
    stage = dict.fromkeys(("forward_us", "backward_input_us", "backward_weight_us"), 10)
    stage |= {"activation_bytes": 1, "backward_weight_bytes": 1}
    devices = [0, 1, 2, 3, 3, 2, 1, 0]
    problem = Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": 8,
            "devices": [{"memory_bytes": 2}] * 4,
            "stages": [stage | {"device": device} for device in devices],
        }
    )
    variables = build_model(problem, TimeGrid.of(problem, 1000), 1000, 0.0)
    solver = configured_solver(Limits(workers=1, deterministic_limit=1.0))
    solver.parameters.cp_model_presolve = False
    assert solver.solve(variables.model) == cp_model.INFEASIBLE
    assert solver.num_branches == 0


@pytest.mark.parametrize("seed", range(7))
def test_heads_and_tails_cut_off_no_optimum(seed: int) -> None:
    """Copies, one or two stages a device, both objectives: the optimum is the same with them and without."""
    rng = Random(seed)
    activation = rng.randint(1, 3)
    times = ("forward_us", "backward_input_us", "backward_weight_us")
    copy = {"bytes": activation, "offload_us": rng.randint(0, 4), "reload_us": rng.randint(0, 4)}
    stages = [
        {name: rng.randint(1, 3) for name in times}
        | {"device": device, "activation_bytes": activation, "backward_weight_bytes": 1, "offload": copy}
        for device in rng.choice([[0, 1], [0, 1, 1, 0], [0, 1, 0, 1]])
    ]
    problem = Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": 3,
            "objective": rng.choice(["makespan", "device_span"]),
            "devices": [{"memory_bytes": rng.randint(3, 2 * activation + 2)}] * 2,
            "stages": stages,
            "copy_channels": {"duplex": rng.random() < 0.5},
        }
    )
    orders = serial_orders(problem)
    if orders is None:
        return
    known = Solution(orders, simulate(problem, orders).value_us, 0.0)
    limits = Limits(workers=1, deterministic_limit=20.0)
    with_heads, without = (
        solve_cp_sat(problem, limits, known, lambda _: None, Options(climb=False, heads=heads))
        for heads in (True, False)
    )
    assert without.value_us == without.bound_us
    assert (with_heads.value_us, with_heads.bound_us) == (without.value_us, without.value_us)
