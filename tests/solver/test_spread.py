"""Searches, bounds and published schedules with spread passes: pins, and brute force over all orders."""

from __future__ import annotations

from itertools import product
from math import factorial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instances import uniform
from optpipe.errors import DeadlockError, MethodError, OrderError
from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.verify import verify
from solver.bounds import lower_bound_us
from solver.build import within_budgets
from solver.limits import Limits
from solver.search.spread_lists import spread_lists
from solver.serial import serial_orders
from solver.solve import solve
from tests.optpipe.test_spread import Data, random_problem, vocabulary
from tests.sample import examples
from tests.solver.published.test_dualpipe_v import v_blocks


def limited(data: Data, budgets: list[int] | None, *, fused: bool = False) -> Problem:
    """The problem with these budgets, and with backwards in one piece."""
    if budgets:
        data["devices"] = [{"memory_bytes": size} for size in budgets]
    if fused:
        data["stages"] = [stage | {"split_backward": False} for stage in data["stages"]]
    return Problem.from_data(data)


def whole_head() -> Problem:
    """The same work with the vocabulary layer in the last stage: 4 us of each op for 12 of all passes."""
    data = uniform(4, 8, transfer_us=0, activation_bytes=2, backward_weight_bytes=1).to_data()
    for s, stage in enumerate(data["stages"]):
        times = dict.fromkeys(("forward_us", "backward_input_us", "backward_weight_us"), 7 if s == 3 else 3)
        stage.update(times, split_backward=False)
    return Problem.from_data(data)


@pytest.mark.parametrize(
    ("barriers", "budgets", "fused", "least_us"),
    [
        (1, [10, 8, 6, 4], True, 115),
        (1, [8] * 4, True, 120),
        (1, [10, 8, 6, 4], False, 105),
        (1, [8] * 4, False, 105),
        (1, [8, 6, 4, 2], False, 106),
        (2, [12, 10, 8, 6], True, 123),
    ],
)
def test_pins_are_proved(barriers: int, budgets: list[int], fused: bool, least_us: float) -> None:
    problem = limited(vocabulary(4, 8, barriers=barriers), budgets, fused=fused)
    schedule = solve(problem, "auto", Limits(120, workers=1))
    assert (schedule.value_us, schedule.bound_us) == (least_us, least_us)


def test_without_a_spread_head_the_last_stage_is_the_longest() -> None:
    assert solve(whole_head(), "auto", Limits(60, workers=1)).value_us == 195


def tiny(barriers: int, budget: int) -> Problem:
    """Two devices and microbatches, F = B = W = 2, every message and collective 1."""
    data = vocabulary(2, 2, barriers=barriers, lag_us=1)
    for stage in data["stages"]:
        stage.update(forward_us=2, backward_input_us=2, backward_weight_us=2)
    data["spread"][0]["kept_bytes"] = [1, 1]
    return limited(data, [budget] * 2, fused=True)


@pytest.mark.parametrize(("barriers", "budget", "least_us"), [(1, 6, 24), (1, 5, 25), (1, 3, 36), (2, 6, 26)])
def test_tiny_pins_are_proved(barriers: int, budget: int, least_us: float) -> None:
    schedule = solve(tiny(barriers, budget), "cp-sat", Limits(60, workers=1))
    assert (schedule.value_us, schedule.bound_us) == (least_us, least_us)


@pytest.mark.parametrize("devices", [2, 4, 5, 8])
@pytest.mark.parametrize("times", [(2, 1), (4, 2), (5, 4)])
def test_the_papers_orders_take_their_closed_forms(devices: int, times: tuple[int, int]) -> None:
    """Time of 1F1B without the passes, and their work; memory of one microbatch more a barrier."""
    for m in (devices + 3, 3 * devices):
        for barriers, method in ((2, "vocab-1"), (1, "vocab-2")):
            problem = limited(vocabulary(devices, m, barriers=barriers, times=times), None)
            schedule = solve(problem, method)
            late_us = times[1] if barriers == 1 else 0
            assert schedule.value_us == m * (9 + sum(times)) + (devices - 1) * 9 - late_us
            in_flight = [min(devices - d + barriers, m) for d in range(devices)]
            assert [device.peak_bytes for device in schedule.devices] == [2 * held for held in in_flight]


@pytest.mark.parametrize(("barriers", "with_lags_us", "without_us"), [(1, 137, 122), (2, 133, 123)])
def test_the_papers_orders_with_messages(barriers: int, with_lags_us: float, without_us: float) -> None:
    for lag_us, value_us in ((1, with_lags_us), (0, without_us)):
        problem = limited(vocabulary(4, 8, barriers=barriers, lag_us=lag_us), None, fused=True)
        assert solve(problem, f"vocab-{3 - barriers}").value_us == value_us


def test_other_passes_and_gates_are_refused() -> None:
    with pytest.raises(MethodError, match="gates let ops wait for it"):
        solve(limited(vocabulary(2, 4, barriers=2), None), "vocab-2")
    with pytest.raises(MethodError, match="the problem's are: none"):
        solve(uniform(2, 4), "vocab-1")
    with pytest.raises(MethodError, match="1f1b knows no spread passes, but the problem has S, T"):
        solve(limited(vocabulary(2, 4), None), "1f1b")


def least_value_us(problem: Problem) -> float:
    """The least value over all orders with fused backwards that keep the budgets, device by device."""
    lists = []
    for d, stages in enumerate(problem.stages_of):
        rows = [(kind, s) for s in stages for kind in ("F", "BW")]
        rows += [(one.name, d) for one in problem.spread or () if one.us[d]]
        lists.append(list(merged([[Op(*row, i) for i in range(problem.units)] for row in rows])))
    best = float("inf")
    for compute in product(*lists):
        orders = Orders.of_compute(compute)
        try:
            simulation = simulate(problem, orders)
        except (DeadlockError, OrderError):
            continue
        if simulation.value_us < best and within_budgets(problem, orders, simulation):
            best = simulation.value_us
    return best


def merged(rows: list[list[Op]]) -> list[tuple[Op, ...]]:
    """Every sequence of the ops of all rows that keeps the order within each, and a backward behind its forward."""
    if not any(rows):
        return [()]
    found = []
    for n, row in enumerate(rows):
        forward = Op("F", *row[0][1:]) if row and row[0].kind == "BW" else None
        if row and not any(forward in other for other in rows):
            found += [(row[0], *rest) for rest in merged([*rows[:n], row[1:], *rows[n + 1 :]])]
    return found


def count_orders(problem: Problem) -> int:
    """Most orders that `least_value_us` tries."""
    count = 1
    for d, stages in enumerate(problem.stages_of):
        kinds = 2 * len(stages) + sum(one.us[d] > 0 for one in problem.spread or ())
        count *= factorial(kinds * problem.units) // factorial(problem.units) ** kinds // 2 ** len(stages)
    return count


@settings(max_examples=examples(15))
@given(st.integers(0, 10**6))
def test_least_values_are_those_of_brute_force(seed: int) -> None:
    rng = Random(seed)
    problem = random_problem(rng, microbatches=1 if rng.random() < 0.5 else 2)
    while count_orders(problem) > 3_000:
        problem = random_problem(rng, microbatches=1 if rng.random() < 0.5 else 2)
    problem = problem.replaced(
        objective="makespan",
        stages=[stage.replaced(split_backward=False) for stage in problem.stages],
    )
    least = least_value_us(problem)
    assert lower_bound_us(problem) <= least * (1 + 1e-9)
    schedule = solve(problem, "cp-sat", Limits(30, workers=1))
    assert (schedule.value_us, schedule.bound_us) == (pytest.approx(least), pytest.approx(least))


@settings(max_examples=examples(50))
@given(st.integers(0, 10**6))
def test_no_bound_exceeds_a_schedule(seed: int) -> None:
    problem = random_problem(Random(seed))
    orders = serial_orders(problem)
    assert orders is not None
    assert lower_bound_us(problem) <= simulate(problem, orders).value_us * (1 + 1e-9)


@pytest.mark.parametrize(("spare", "least_us"), [(1, 1574), (0, 1825)])
def test_lists_in_the_memory_of_vocab_2_and_of_1f1b(spare: int, least_us: float) -> None:
    """Figures of docs/concepts/spread.md: vocab-2 takes 1598 us, and no schedule less than 1557."""
    problem = limited(vocabulary(8, 128), [2 * (8 - d + spare) for d in range(8)])
    assert lower_bound_us(problem) == 1557
    assert min(simulate(problem, make()).value_us for make in spread_lists(problem)) == least_us


def test_lists_of_stages_along_a_v_in_memory_of_few_microbatches() -> None:
    """A microbatch enters a device where there is room for all of its forwards there, so no list gets stuck."""
    data = uniform(4, 6, v_shape=True, activation_bytes=2, backward_weight_bytes=1, budget=12).to_data()
    data["spread"] = [
        {"name": "E", "us": [1] * 4},
        {"name": "S", "us": [4, 4, 4, 0], "kept_bytes": [1, 1, 1, 0], "after": [{"op": "F", "stage": 7}]},
        {"name": "T", "us": [2, 2, 2, 0], "frees": "S", "after": [{"pass": "S", "us": 1}]},
    ]
    data["gates"] = [
        {"op": "F", "stage": 0, "after": [{"pass": "E"}]},
        {"op": "B", "stage": 7, "after": [{"pass": "S", "us": 1}]},
    ]
    problem = Problem.from_data(data)
    floor = serial_orders(problem)
    assert floor is not None
    for make in spread_lists(problem):
        orders = make()
        simulation = simulate(problem, orders)
        assert within_budgets(problem, orders, simulation)
        assert simulation.value_us < simulate(problem, floor).value_us


def test_blocks_stand_with_passes() -> None:
    """Blocks of stages that no gate delays are joined in orders with passes, and no bound exceeds what they save."""
    data = v_blocks(2, 4, 2.0).to_data()
    data["overlaps"] = [pair for pair in data["overlaps"] if 3 not in pair.values()]
    data |= {"spread": [{"name": "S", "us": [1, 1], "after": [{"op": "F", "stage": 3}]}]}
    data["gates"] = [{"op": "B", "stage": 3, "after": [{"pass": "S"}]}]
    problem = Problem.from_data(data)
    schedule = solve(problem, "auto", Limits(6, workers=1))
    assert verify(schedule).ok
    assert schedule.value_us <= solve(Problem.from_data(data | {"overlaps": []}), "auto", Limits(6, workers=1)).value_us


def test_a_schedule_passes_between_processes() -> None:
    from solver.process import solve_in_child

    result = solve_in_child(limited(vocabulary(2, 4), None), "auto", Limits(5, workers=1))
    assert result.schedule is not None
    assert verify(result.schedule).ok
