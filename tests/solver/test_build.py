"""Orders made of times, and what is judged where schedules are built."""

from __future__ import annotations

import pytest

from instances import uniform
from optpipe.errors import InfeasibleError, VerificationError
from optpipe.ops import DeviceOrders, Op, OpArray, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.verify import verify
from solver.build import build_schedule, orders_from_times, over_budget, peak_budgets, snapped_bound, within_budgets
from solver.limits import Limits
from solver.solve import solve

OFFLOAD = {"bytes": 2, "offload_us": 10, "reload_us": 10}


def two_at_once(**more: object) -> tuple[Problem, Orders]:
    """Both microbatches of a stage away on the host at one time, without a wait."""
    data = uniform(1, 2).to_data() | more
    data["stages"][0]["offload"] = OFFLOAD
    lists = ("F0.0 F0.1 B0.0 W0.0 B0.1 W0.1", "O0.0 O0.1", "R0.0 R0.1")
    return Problem.from_data(data), Orders([DeviceOrders(*map(OpArray.parse, lists))])


def test_a_bound_that_differs_from_the_value_by_rounding_is_the_value() -> None:
    for step_us in (10, float("inf")):
        assert snapped_bound(100.0, 100 - 1e-8, step_us) == 100
        assert snapped_bound(100.0, 100 + 1e-8, step_us) == 100
        assert snapped_bound(100.0, 99.9, step_us) == 99.9
        assert snapped_bound(100.0, 100.1, step_us) == 100.1, "a contradiction is not hidden"


def test_the_host_counts_where_it_is_limited() -> None:
    for limit, fits in ((None, True), (4, True), (3, False)):
        problem, orders = two_at_once(host_memory_bytes=limit)
        assert within_budgets(problem, orders, simulate(problem, orders)) is fits


def test_what_leaves_and_comes_back_at_one_instant_is_on_the_host() -> None:
    """Simulator, verifier and exact methods agree that no room is none; two that are there one after another need 2."""
    instant = {"forward_us": 0, "backward_input_us": 0, "backward_weight_us": 0}
    copy = {"bytes": 2, "offload_us": 0, "reload_us": 0}
    own = {**instant, "activation_bytes": 2, "backward_weight_bytes": 0}
    for limit, fits in ((0, False), (1, False), (2, True), (None, True)):
        data = uniform(1, 1, budget=2, host_memory_bytes=limit).to_data()
        data["stages"] = [{"device": 0, **own, "offload": copy}, {"device": 0, **own}]
        problem = Problem.from_data(data)
        compute = OpArray.parse("F0.0 F1.0 B1.0 W1.0 B0.0 W0.0")
        waits = {Op("F", 1, 0): [Op("O", 0, 0)], Op("R", 0, 0): [Op("W", 1, 0)]}
        orders = Orders([DeviceOrders(compute, [Op("O", 0, 0)], [Op("R", 0, 0)])], waits)
        simulation = simulate(problem, orders)
        assert (simulation.host_memory().peak_bytes, within_budgets(problem, orders, simulation)) == (2, fits)
        if fits:
            schedule = build_schedule(problem, orders, 0.0, "by hand", 0.0)
            assert verify(schedule).host_peak_bytes == 2
        else:
            with pytest.raises(VerificationError, match=f"host at 0 µs: holds 2 B of {limit} B"):
                build_schedule(problem, orders, 0.0, "by hand", 0.0)
        for method in ("cp-sat", "milp"):
            if fits:
                assert solve(problem, method, Limits(float("inf"), workers=1)).value_us == 0
            else:
                with pytest.raises(InfeasibleError):
                    solve(problem, method, Limits(float("inf"), workers=1))


def test_a_budget_holds_under_any_timing() -> None:
    """F0.1 begins when O0.0 has not ended, and a slow O0.0 may last until both are back."""
    problem, orders = two_at_once(devices=[{"memory_bytes": 3}])
    assert over_budget(problem, orders) == [(0, 4, 3)]
    assert peak_budgets(problem, orders) == [4]
    assert not within_budgets(problem, orders, simulate(problem, orders))
    with pytest.raises(VerificationError, match=r"by hand answered with an invalid schedule: .* 4 B of 3 B"):
        build_schedule(problem, orders, 0.0, "by hand", 0.0)


def test_a_bound_above_the_value_is_refused() -> None:
    problem = uniform(1, 1)
    orders = Orders.of_compute([OpArray.parse("F0.0 B0.0 W0.0")])
    assert build_schedule(problem, orders, 30.0, "by hand", 0.0).status == "optimal"
    with pytest.raises(VerificationError, match="bound_us"):
        build_schedule(problem, orders, 31.0, "by hand", 0.0)


def test_ops_without_length_at_one_instant_follow_the_microbatch() -> None:
    problem = uniform(1, 2)
    names = ("W0.0", "B0.1", "F0.1", "B0.0", "F0.0", "W0.1")
    orders = orders_from_times(problem, {Op.parse(name): (5.0, 5.0) for name in names})
    assert OpArray.of(orders.devices[0].compute).names == "F0.0 F0.1 B0.0 B0.1 W0.0 W0.1"


def test_a_shared_channel_runs_its_copies_in_the_order_of_their_times() -> None:
    data = uniform(1, 2).to_data() | {"copy_channels": {"duplex": False}}
    data["stages"][0]["offload"] = OFFLOAD
    times = {"F0.0": 0, "F0.1": 10, "O0.0": 20, "R0.0": 30, "O0.1": 40, "R0.1": 50, "B0.0": 60, "W0.0": 70}
    times |= {"B0.1": 80, "W0.1": 90}
    planned = {Op.parse(name): (float(begin), begin + 10.0) for name, begin in times.items()}
    orders = orders_from_times(Problem.from_data(data), planned)
    assert [OpArray.of(channel).names for channel in orders.channels] == ["O0.0 R0.0 O0.1 R0.1"]
