"""CP-SAT on slices, unequal microbatches and free orders: optima against every schedule there is, and known ones."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from ortools.sat.python import cp_model

from optpipe.errors import InfeasibleError
from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us
from solver.build import peak_budgets
from solver.exact.cp_sat.model import add_hint, build_model
from solver.exact.ticks import TimeGrid
from solver.limits import Limits
from solver.scale import horizon_us
from solver.solve import solve
from tests import mode_oracle, unit_oracle
from tests.sample import some
from tests.unequal import random_orders, random_unequal, times, unequal

CAUSAL = {"count": 2, "factors": {"forward": [1, 2], "backward_input": [2, 3], "bytes": [1, 0.75]}}
WORK = {"B": 1, "W": 2, "BW": 2}

FAMILIES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "slices of one device": (1, 1, {"slices": CAUSAL, "slice_gradient_bytes": 2, "workspace_bytes": WORK}),
    "slices of two devices": (2, 2, {"slices": CAUSAL, "slice_gradient_bytes": 1, "split_backward": False}),
    "slices and transfers": (2, 1, {"slices": CAUSAL, "transfer_us": {"forward": 0.5, "backward": 1}}),
    "unequal weights": (1, 2, {"microbatch_factors": [{"time": 1, "bytes": 2}, {"time": 3}]}),
    "free": (2, 3, {"microbatch_factors": times(1, 3, 1), "microbatch_order": "free", "split_backward": False}),
    "free span": (
        2,
        2,
        {
            "microbatch_factors": [{"time": 3, "bytes": 0.5}, {}],
            "microbatch_order": "free",
            "objective": "device_span",
        },
    ),
}  # fmt: skip


def schedules(problem: Problem) -> dict[tuple[int, ...], float]:
    """The least value of every schedule with the same peaks; without copies a timing decides on no peak."""
    data = problem.to_data()
    values: dict[tuple[int, ...], float] = {}
    for microbatch_order, case in unit_oracle.every_case(data):
        streams = [stream for device in case.streams for stream in device]
        costs = unit_oracle.costs_of(data, case.modes, [op for ops in streams for op in ops])
        start = mode_oracle.earliest(costs, streams, unit_oracle.edges(data, set(costs)))
        if start is None:
            continue
        peaks = tuple(mode_oracle.worst_peak(costs, device, {}) for device in case.streams)
        value = max(start[op] + costs[op].us for op in costs)
        if data.get("objective") == "device_span":  # the least span of given orders is for tests of `simulate`
            devices = [DeviceOrders(*([Op(*op) for op in stream] for stream in own)) for own in case.streams]
            value = simulate(problem, Orders(devices, microbatch_order=list(microbatch_order))).value_us
        values[peaks] = min(values.get(peaks, value), value)
    return values


@pytest.mark.parametrize("name", FAMILIES)
def test_optima_are_those_of_every_schedule(name: str) -> None:
    devices, microbatches, fields = FAMILIES[name]
    values = schedules(unequal(devices, microbatches, **fields))

    def best_within(budget: int) -> float | None:
        return min((value for peaks, value in values.items() if max(peaks) <= budget), default=None)

    steps = [size for size in {max(peaks) for peaks in values} if best_within(size) != best_within(size - 1)]
    assert steps
    for budget in sorted({size - less for size in steps for less in (0, 1)}):
        problem = unequal(devices, microbatches, budget, **fields)
        try:
            schedule = solve(problem, "cp-sat", Limits(120, workers=1))
        except InfeasibleError:
            assert best_within(budget) is None
            continue
        assert (schedule.status, schedule.value_us) == ("optimal", best_within(budget)), budget
        if problem.microbatch_order == "free":
            assert sorted(schedule.microbatch_order or []) == list(range(microbatches))


@pytest.mark.parametrize("seed", some(range(60)))
def test_the_model_has_every_schedule(seed: int) -> None:
    """Random orders within their own peaks are a point of the model: with the hint fixed it is feasible."""
    rng = Random(seed)
    problem = Problem.from_data(random_unequal(rng))
    orders, _, _ = random_orders(problem, rng)
    budgets = [{"memory_bytes": budget} for budget in peak_budgets(problem, orders)]
    problem = problem.from_data(problem.to_data() | {"devices": budgets})
    value_us = simulate(problem, orders).value_us
    reach_us = horizon_us(problem, value_us)
    grid = TimeGrid.of(problem, reach_us)
    assert grid.exact
    variables = build_model(problem, grid, reach_us, lower_bound_us(problem))
    add_hint(variables, orders)
    solver = cp_model.CpSolver()
    solver.parameters.fix_variables_to_their_hinted_value = True
    solver.parameters.num_workers = 1
    assert solver.solve(variables.model) == cp_model.OPTIMAL
    assert variables.grid.us(solver.objective_value) == pytest.approx(value_us, rel=1e-12)


def test_an_activation_that_stays_holds_back_no_reload() -> None:
    """The third, whose copies would be three times as long, stays: the reload of the second may end as late as it can.

    HiGHS proves the same value by another model.
    """
    offload = {"bytes": 2, "offload_us": 1, "reload_us": 10}
    stage = {"activation_bytes": 2, "backward_weight_bytes": 0, "offload": offload, "forward_us": 3}
    stages = [stage | {"device": d, "backward_input_us": 2 - d, "backward_weight_us": 1} for d in (0, 1)]
    data = unequal(2, 3).to_data() | {"stages": stages, "transfer_us": 2, "copy_channels": {"duplex": True}}
    data |= {"devices": [{"memory_bytes": 9}, {"memory_bytes": 10}], "objective": "makespan"}
    problem = Problem.from_data(data | {"microbatch_factors": [{}, {}, {"bytes": 3, "transfer": 3}]})
    for method in ("cp-sat", "milp"):
        schedule = solve(problem, method, Limits(120, workers=1))
        assert (schedule.status, schedule.value_us) == ("optimal", 29)


def causal(budget: int) -> Problem:
    """Four causal slices of four microbatches on four devices, attention half of F, backwards in one op."""
    growing = {name: [15, 21, 27, 33] for name in ("forward", "backward_input", "backward_weight")}
    return unequal(
        4, 4, budget, slices={"count": 4, "factors": growing}, activation_bytes=1, backward_weight_bytes=0,
        split_backward=False,
    )  # fmt: skip


@pytest.mark.parametrize(("budget", "value_us", "bubble"), some([(8, 1497, 0.230), (10, 1449, 0.205)]))
def test_one_slice_more_than_seq1f1b_holds_saves_a_third_of_its_bubble(
    budget: int, value_us: float, bubble: float
) -> None:
    """Seq1F1B wastes 35.0 % and holds seven slices. With one worker the proofs take 7 s and 2 s in every run."""
    schedule = solve(causal(budget), "cp-sat", Limits(600, workers=1))
    assert (schedule.status, schedule.value_us, round(schedule.bubble, 3)) == ("optimal", value_us, bubble)


def test_fewer_slices_than_a_microbatch_has_fit_nothing() -> None:
    with pytest.raises(InfeasibleError):
        solve(causal(3), "cp-sat", Limits(60, workers=1))
