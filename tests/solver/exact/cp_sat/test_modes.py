"""CP-SAT decides on activation modes: optima against every schedule there is, and against known ones."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

import pytest
from ortools.sat.python import cp_model

from optpipe.errors import InfeasibleError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us
from solver.build import peak_budgets
from solver.exact.cp_sat.model import add_hint, build_model
from solver.exact.ticks import TimeGrid
from solver.limits import Limits
from solver.scale import horizon_us
from solver.solve import solve
from tests import mode_oracle as oracle
from tests.recomputing import FULL, random_recomputing, recomputing
from tests.sample import RARELY, some

LIGHT = {"name": "light", "kept_bytes": 2, "recompute_us": 1, "forward_workspace_bytes": 1, "workspace_bytes": 1}
SEGMENTS = {"name": "segments", "kept_bytes": 4, "recompute_us": 1, "segment_bytes": 2}

FAMILIES: dict[str, tuple[int, int, list[dict[str, Any]], dict[str, Any]]] = {
    "one device": (1, 3, [LIGHT], {"backward_weight_bytes": 3, "workspace_bytes": {"F": 1, "B": 2, "W": 1, "BW": 1}}),
    "both forms": (1, 2, [SEGMENTS, FULL], {"backward_weight_bytes": 7, "workspace_bytes": {"B": 1, "W": 2, "BW": 3}}),
    "two devices, ahead": (2, 2, [LIGHT], {"split_backward": False}),
    "two devices, inside": (2, 2, [SEGMENTS], {"split_backward": False}),
    "grows": (1, 2, [SEGMENTS], {"backward_weight_bytes": 12}),
}


def schedules(problem: Problem) -> dict[tuple[int, ...], float]:
    """The least makespan of every schedule with the same peaks; without copies a timing decides on no peak."""
    data = problem.to_data()
    values: dict[tuple[int, ...], float] = {}
    for case in oracle.every_case(data):
        streams = [stream for device in case.streams for stream in device]
        costs = {
            op: oracle.cost(data["stages"][op[1]], case.modes[op[1]][op[2]], op[0]) for ops in streams for op in ops
        }
        start = oracle.earliest(costs, streams)
        if start is None:
            continue
        # A backward that holds more at its end takes that from its start on, as the solvers have it.
        peaks = tuple(oracle.worst_peak(costs, device, {}) for device in case.streams)
        makespan = max(start[op] + costs[op].us for op in costs) - min(start.values())
        values[peaks] = min(values.get(peaks, makespan), makespan)
    return values


def optimum(problem: Problem) -> Schedule | None:
    """Optimum by CP-SAT; None where it proves that nothing fits."""
    try:
        schedule = solve(problem, "cp-sat", Limits(120, workers=1))
    except InfeasibleError:
        return None
    assert schedule.status == "optimal"
    return schedule


@pytest.mark.parametrize("name", some(list(FAMILIES)))
def test_optima_are_those_of_every_schedule(name: str) -> None:
    devices, microbatches, modes, fields = FAMILIES[name]
    problem = recomputing(devices, microbatches, modes, **fields)
    values = schedules(problem)
    used = set()

    def best_within(budget: int) -> float | None:
        return min((value for peaks, value in values.items() if max(peaks) <= budget), default=None)

    steps = [size for size in {max(peaks) for peaks in values} if best_within(size) != best_within(size - 1)]
    for budget in sorted({size - less for size in steps for less in (0, 1)}):
        best = best_within(budget)
        schedule = optimum(recomputing(devices, microbatches, modes, budget, **fields))
        assert (schedule and schedule.value_us) == best, budget
        used |= {op.op for device in schedule.devices for op in device.compute} if schedule else set()
    if devices > 1:  # alone, a device may as well keep one microbatch after the other
        assert used & {"C", "CBW"}, "no budget asked for recomputation"


HALF = {"name": "half", "kept_bytes": 6, "recompute_us": 1, "segment_bytes": 2}
HALF |= {"offload": {"bytes": 4, "offload_us": 2, "reload_us": 1}}

COPIES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "of what is kept": ([HALF], {}),
    "of the whole": ([LIGHT], {"offload": {"bytes": 7, "offload_us": 1, "reload_us": 1}}),
}


@pytest.mark.parametrize(
    ("name", "duplex", "budget"), some([*product(COPIES, (True, False), (11, 14, 16, 18))], RARELY)
)
def test_optima_with_copies_are_those_of_every_schedule(name: str, duplex: bool, budget: int) -> None:
    """Copies in time: what is there beside an op depends on when they run."""
    modes, fields = COPIES[name]
    problem = recomputing(2, 2, modes, budget, split_backward=False, **fields)
    problem = problem.from_data(problem.to_data() | {"copy_channels": {"duplex": duplex}})
    schedule = optimum(problem)
    assert schedule is not None
    assert schedule.value_us == oracle.least_makespan(problem.to_data())
    used = {op.op for device in schedule.devices for op in (*device.compute, *device.offload)}
    assert used & {"O", "C", "CBW"} or budget == 11


@pytest.mark.parametrize("seed", some(range(40)))
def test_the_model_has_every_schedule(seed: int) -> None:
    """Random orders within their own peaks are a point of the model: with the hint fixed it is feasible."""
    problem, orders = random_recomputing(Random(seed))
    problem = problem.from_data(
        problem.to_data() | {"devices": [{"memory_bytes": b} for b in peak_budgets(problem, orders)]}
    )
    value_us = simulate(problem, orders).value_us
    reach_us = horizon_us(problem, value_us)
    variables = build_model(problem, TimeGrid.of(problem, reach_us), reach_us, lower_bound_us(problem))
    add_hint(variables, orders)
    solver = cp_model.CpSolver()
    solver.parameters.fix_variables_to_their_hinted_value = True
    solver.parameters.num_workers = 1
    assert solver.solve(variables.model) == cp_model.OPTIMAL
    assert variables.grid.us(solver.objective_value) == value_us
