"""HiGHS: proved optima, incumbents, limits, and agreement with CP-SAT on every rule of the model."""

from __future__ import annotations

from importlib import import_module
from threading import Timer
from typing import Any

import pytest
from hypothesis import given, settings

from instances import HALF, REFERENCE, WHOLE, instance, uniform
from optpipe.errors import InfeasibleError, MethodError, NoSolutionError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from solver.bounds import lower_bound_us
from solver.build import build_schedule
from solver.exact.milp.model import solve_milp
from solver.limits import Cancel, Limits
from solver.serial import serial_orders
from solver.solution import INFEASIBLE, Progress, Solution
from solver.solve import solve
from tests.problems import problems
from tests.sample import examples, some


def solved(problem: Problem, method: str = "milp", **limits: Any) -> Schedule:
    return solve(problem, method, Limits(**({"time_limit_s": 60, "workers": 1} | limits)))


@pytest.mark.parametrize(("devices", "budget", "host", "value_us"), some([(3, 5, 2, 158), (2, 4, 4, 131)]))
def test_what_is_away_is_on_the_host_until_its_reload_ends(
    devices: int, budget: int, host: int, value_us: float
) -> None:
    """And no longer: the second problem uses the room that reloads have left."""
    problem = uniform(devices, 4, budget=budget, offload=WHOLE, host_memory_bytes=host)
    schedules = [solved(problem, method) for method in ("milp", "cp-sat")]
    assert [(one.status, one.value_us) for one in schedules] == [("optimal", value_us)] * 2


def test_proves_a_reference_optimum() -> None:
    name = "a-p4-m8-c0-b1o2-linear-make"
    schedule = solved(instance(name))
    assert (schedule.status, schedule.value_us) == ("optimal", REFERENCE[name]["proved_optimum_us"])


@pytest.mark.parametrize(("objective", "microbatches"), some([("makespan", 4), ("device_span", 4)]))
@pytest.mark.parametrize("channels", [{}, {"duplex": False, "shared_by": [[0, 1, 2]]}], ids=["own", "one"])
def test_offload_at_a_tight_budget_as_cp_sat(objective: str, microbatches: int, channels: dict[str, Any]) -> None:
    problem = uniform(3, microbatches, budget=3, offload=HALF, objective=objective, copy_channels=channels)
    schedule, other = solved(problem), solved(problem, "cp-sat")
    assert schedule.status == other.status == "optimal"
    assert schedule.value_us == other.value_us
    assert sum(len(device.offload) for device in schedule.devices) > 0


@settings(max_examples=examples(60))
@given(problems(max_stages=3))
def test_agrees_with_cp_sat(problem: Problem) -> None:
    """Neither proves what the other refutes; a method that runs out of time has proved nothing."""

    def known(method: str) -> tuple[float, float]:
        """A value that can be had, and a bound that holds."""
        try:
            schedule = solved(problem, method, time_limit_s=5)
        except InfeasibleError:
            return float("inf"), float("inf")
        except NoSolutionError:
            return float("inf"), 0.0
        return schedule.value_us, schedule.bound_us

    mine, other = known("milp"), known("cp-sat")
    assert mine[1] <= other[0] * (1 + 1e-9)
    assert other[1] <= mine[0] * (1 + 1e-9)


Three = tuple[int, int, int]


def _stage(device: int, times_us: Three, held: int, kept: int, workspace: Three, offload: Three) -> dict[str, Any]:
    return {
        "device": device,
        **dict(zip(("forward_us", "backward_input_us", "backward_weight_us"), times_us, strict=True)),
        "activation_bytes": held,
        "backward_weight_bytes": kept,
        "workspace_bytes": dict(zip(("F", "B", "W", "BW"), (*workspace, workspace[1]), strict=True)),
        "offload": dict(zip(("bytes", "offload_us", "reload_us"), offload, strict=True)),
    }


def uneven(objective: str, first_budget: int | None = 7, **more: Any) -> Problem:
    """Three uneven devices; on the first a microbatch holds more after B than before. Fusing saves no memory."""
    stages = [
        _stage(0, (5, 7, 5), 2, 3, (1, 3, 1), (2, 3, 1)),
        _stage(1, (7, 5, 6), 4, 2, (2, 0, 0), (2, 1, 4)),
        _stage(2, (1, 9, 8), 5, 0, (2, 1, 2), (3, 2, 8)),
    ]
    data = uniform(3, 3, objective=objective).to_data() | {"stages": stages, **more}
    data["devices"] = [{"memory_bytes": budget} for budget in (first_budget, 11, 10)]
    return Problem.from_data(data)


def test_an_incumbent_that_ends_the_search_counts() -> None:
    """HiGHS reports no last incumbent here: it proves 71 and announces 72."""
    problem = uneven("makespan", first_budget=None)
    answer = solve_milp(problem, Limits(60, workers=1), Solution(bound_us=lower_bound_us(problem)), lambda answer: None)
    assert (answer.value_us, answer.bound_us) == (71, 71)


@pytest.mark.parametrize("objective", ["makespan", "device_span"])
@pytest.mark.parametrize(
    "more", some([{}, {"host_memory_bytes": 3}, {"copy_channels": {"duplex": False, "shared_by": [[0, 2]]}}])
)
def test_without_a_start_as_cp_sat(objective: str, more: dict[str, Any]) -> None:
    problem = uneven(objective, **more)
    start, limits = Solution(bound_us=lower_bound_us(problem)), Limits(60, workers=1)
    answer = solve_milp(problem, limits, start, lambda answer: None)
    assert answer.orders is not None
    schedule = build_schedule(problem, answer.orders, answer.bound_us, "milp", 0.0)
    assert schedule.status == "optimal"
    assert schedule.value_us == solved(problem, "cp-sat").value_us


def test_reports_incumbents_in_order() -> None:
    seen: list[Progress] = []
    limits = Limits(60, workers=1, gap=0.05)
    schedule = solve(uniform(3, 5, budget=4, offload=HALF), "milp", limits, seen.append)
    values = [progress.solution.value_us for progress in seen]
    assert len(set(values)) > 3
    assert values == sorted(values, reverse=True)
    assert values[-1] == schedule.value_us
    assert all(progress.solution.bound_us <= schedule.value_us for progress in seen)


def test_a_budget_that_is_too_small_is_proved_infeasible() -> None:
    problem = uniform(2, 2, v_shape=True, budget=3)
    answer = solve_milp(problem, Limits(60, workers=1), Solution(), lambda answer: None)
    assert answer == INFEASIBLE
    with pytest.raises(InfeasibleError):
        solved(problem)
    assert solved(uniform(2, 2, v_shape=True, budget=4)).status == "optimal"


@pytest.mark.parametrize("delay_s", [None, 0.5], ids=["before", "during"])
def test_cancel_keeps_the_best(delay_s: float | None) -> None:
    problem = uniform(4, 24, budget=4, offload=HALF)
    orders = serial_orders(problem)
    assert orders is not None
    limits = Limits(600, workers=1, cancel=Cancel())
    if delay_s is None:
        limits.cancel.request()
    else:
        Timer(delay_s, limits.cancel.request).start()
    answer = solve_milp(problem, limits, Solution(orders, 10_000.0, 100.0), lambda answer: None)
    assert limits.seconds < 30
    assert answer.orders is not None
    assert 100.0 <= answer.bound_us <= answer.value_us <= 10_000.0


def test_refuses_a_model_that_is_too_large_before_it_is_built() -> None:
    problem = instance("po-10.5b-4k-d8-v5-m64-mem0.25")
    with pytest.raises(MethodError, match=r"a model of 12,800 ops, and its limit is 3,000.*Maybe use auto"):
        solve_milp(problem, Limits(60), Solution(), lambda answer: None)


def test_stops_at_the_gap_asked_for() -> None:
    schedule = solved(uniform(4, 8, budget=4, offload=HALF), gap=0.3)
    assert schedule.status == "feasible"
    assert 0 < schedule.gap <= 0.3


def test_threads_may_change_from_solve_to_solve() -> None:
    problem = uniform(3, 4, budget=4, offload=HALF)
    values = {solved(problem, workers=workers, seed=seed).value_us for seed, workers in enumerate((1, 2, 1))}
    assert len(values) == 1


def test_times_of_any_size_and_no_whole_numbers() -> None:
    data = uniform(2, 3, budget=4).to_data()
    for scale in (1e-3, 1.0, 1e6):
        for stage in data["stages"]:
            stage |= {"forward_us": 0.1 * scale, "backward_weight_us": 10 / 3 * scale}
        schedule = solved(Problem.from_data(data))
        other = solved(Problem.from_data(data), "cp-sat")
        assert schedule.value_us == pytest.approx(other.value_us, rel=1e-6)
        assert schedule.value_us - schedule.bound_us <= 1e-6 * schedule.value_us


def test_sizes_in_bytes_are_kept_to_the_byte() -> None:
    """A budget one byte short of what fits costs as much as one that is short by half."""

    def value(budget: int) -> float:
        size = 1_234_567_890
        return solved(uniform(3, 4, budget=budget, activation_bytes=size, backward_weight_bytes=size // 2)).value_us

    size = 1_234_567_890
    assert value(3 * size) < value(3 * size - 1) == value(5 * size // 2 + 1)


def test_is_refused_before_any_start_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a start was made")

    monkeypatch.setattr(import_module("solver.solve"), "offer_published", never)
    with pytest.raises(MethodError, match=r"its limit is 3,000.*Maybe use auto"):
        solved(instance("po-10.5b-4k-d8-v5-m64-mem0.25"))
