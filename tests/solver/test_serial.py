"""The floor: one microbatch at a time, within any budget that can do."""

from __future__ import annotations

from itertools import accumulate, product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings

from instances import HALF, uniform
from optpipe.errors import InputError, MethodError
from optpipe.fields import MAX_BYTES
from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import build_schedule, over_budget
from solver.limits import Limits
from solver.serial import impossible_budgets, known_budgets_bytes, serial_orders
from solver.solve import solve
from tests import mode_oracle as oracle
from tests.problems import problems
from tests.recomputing import random_problem, recomputing
from tests.sample import examples, some


def test_offloads_only_where_the_budget_asks_for_it() -> None:
    free, tight = uniform(2, 2, v_shape=True, offload=HALF), uniform(2, 2, v_shape=True, offload=HALF, budget=3)
    assert [len(device.offload) for device in serial_orders(free).devices] == [0, 0]  # type: ignore[union-attr]
    orders = serial_orders(tight)
    assert orders is not None
    assert [len(device.offload) for device in orders.devices] == [2, 2]
    assert over_budget(tight, orders) == []


def test_known_budgets_do() -> None:
    problem = uniform(2, 2, v_shape=True, offload=HALF, budget=1)
    known = known_budgets_bytes(problem)
    assert known == [3, 3]
    raised = Problem.from_data(problem.to_data() | {"devices": [{"memory_bytes": bytes_} for bytes_ in known]})
    orders = serial_orders(raised)
    assert orders is not None
    assert over_budget(raised, orders) == []


def with_known_budgets(problem: Problem) -> Problem:
    budgets = [{"memory_bytes": size_bytes} for size_bytes in known_budgets_bytes(problem)]
    return Problem.from_data(problem.to_data() | {"devices": budgets})


def test_known_budgets_do_where_the_host_has_no_room_for_the_first() -> None:
    """Stage 0 would leave first, but only 1 byte of stage 1 fits on the host."""
    problem = on_one_host([(0, 4, 4), (0, 3, 1), (0, 2, 0)], host_bytes=1)
    raised = with_known_budgets(problem)
    assert [device.memory_bytes for device in raised.devices] == [8]
    orders = serial_orders(raised)
    assert orders is not None
    assert [[op.stage for op in device.offload] for device in orders.devices] == [[1, 1]]


def test_known_budgets_do_together_where_devices_share_the_host() -> None:
    """Activations that leave when they are in the way first take the room on the host from those that leave at once."""
    problem = on_one_host([(1, 4, 1), (0, 4, 4), (0, 4, 1), (0, 5, 0), (1, 3, 1)], host_bytes=4)
    raised = with_known_budgets(problem)
    assert [device.memory_bytes for device in raised.devices] == [12, 6]
    orders = serial_orders(raised)
    assert orders is not None
    assert over_budget(raised, orders) == []


def on_one_host(stages: list[tuple[int, int, int]], host_bytes: int) -> Problem:
    """Stages by device, bytes of their activation, and how many of these may leave."""
    data = uniform(max(device for device, _, _ in stages) + 1, 2).to_data() | {"host_memory_bytes": host_bytes}
    data |= {"transfer_us": 1, "stages": [data["stages"][0] | _stage(*stage) for stage in stages]}
    return Problem.from_data(data)


def _stage(device: int, size_bytes: int, moved_bytes: int) -> dict[str, Any]:
    offload = {"bytes": moved_bytes, "offload_us": 1, "reload_us": 1} if moved_bytes else None
    return {"device": device, "activation_bytes": size_bytes, "backward_weight_bytes": 1, "offload": offload}


def test_fuses_a_backward_that_would_grow_beyond_the_budget() -> None:
    problem = uniform(2, 2, activation_bytes=1, backward_weight_bytes=4, budget=2)
    orders = serial_orders(problem)
    assert orders is not None
    assert {op.kind for op in orders.devices[0].compute} == {"F", "BW"}
    assert over_budget(problem, orders) == []


def test_impossible_budgets_are_named() -> None:
    assert impossible_budgets(uniform(2, 2, budget=1)) == [(0, 2, 1), (1, 2, 1)]
    assert impossible_budgets(uniform(2, 2, budget=2)) == []


def test_a_budget_in_which_slices_free_all_before_a_large_weight_pass_is_possible() -> None:
    stage = {
        "device": 0,
        "forward_us": 1,
        "backward_input_us": 1,
        "backward_weight_us": 1,
        "activation_bytes": 1,
        "backward_weight_bytes": 0,
        "workspace_bytes": {"W": 10, "BW": 20},
    }
    data = {"format": "optpipe.problem/1", "microbatches": 1, "stages": [stage], "slices": {"count": 2}}
    problem, less = (Problem.from_data(data | {"devices": [{"memory_bytes": size}]}) for size in (10, 9))
    # F F B B W W: both activations are gone when the first W takes its workspace.
    orders = Orders.of_compute([[Op(kind, 0, unit) for kind, unit in zip("FFBBWW", (0, 1, 1, 0, 1, 0), strict=True)]])
    assert over_budget(problem, orders) == []
    assert impossible_budgets(problem) == []
    assert solve(problem, "cp-sat", Limits(workers=1)).value_us == 6
    assert impossible_budgets(less) == [(0, 10, 9)]


@settings(max_examples=examples(150))
@given(problems(max_microbatches=5))
def test_is_valid_wherever_it_answers(problem: Problem) -> None:
    orders = serial_orders(problem)
    if orders is None:
        return
    assert over_budget(problem, orders) == []
    assert not impossible_budgets(problem)
    build_schedule(problem, orders, 0.0, "floor", 0.0)
    assert simulate(problem, orders).value_us >= 0


def test_recomputes_where_nothing_else_does() -> None:
    """The first of two stages on a device keeps its input of 1 beside all the 10 of the second."""
    problem = Problem.from_data(
        recomputing(2, 3).to_data() | {"devices": [{"memory_bytes": 11}] * 2} | {"stages": one_device()}
    )
    assert known_budgets_bytes(problem) == [11, 0]
    orders = serial_orders(problem)
    assert orders is not None
    assert orders.modes is not None
    assert orders.modes[0].tolist() == [1] * 3
    less, least = (
        Problem.from_data(problem.to_data() | {"devices": [{"memory_bytes": budget}] * 2}) for budget in (10, 9)
    )
    assert serial_orders(less) is None
    assert impossible_budgets(less) == []  # one stage alone needs 10
    assert impossible_budgets(least) == [(0, 10, 9)]


def one_device() -> list[dict[str, Any]]:
    return [stage.to_data() | {"device": 0} for stage in recomputing(2, 3).stages]


@pytest.mark.parametrize("first", some([0, 100]))
def test_the_floor_of_random_problems_with_modes(first: int) -> None:
    """The budgets known to do are as small as any choice of ways allows, one microbatch at a time."""
    for seed in range(first, first + 100):
        data = random_problem(Random(seed))
        problem = Problem.from_data(data)
        if not problem.has_modes:
            continue
        known = with_known_budgets(problem)
        orders = serial_orders(known)
        assert orders is not None
        assert over_budget(known, orders) == []
        assert build_schedule(known, orders, 0.0, "floor", 0.0).problem is known
        assert not impossible_budgets(known)
        assert [device.memory_bytes for device in known.devices] == least_peaks(data)


def least_peaks(data: dict[str, Any]) -> list[int]:
    """The least peak of each device over every way to hold each stage's activation, by the contract alone."""
    peaks = []
    for d in range(len(data["devices"])):
        stages = [stage for stage in data["stages"] if stage["device"] == d]
        choices = [
            [(name, way) for name in oracle.mode_names(stage) for way in oracle.ways(stage, name)] for stage in stages
        ]
        peaks.append(min(serial_peak(stages, chosen) for chosen in product(*choices)))
    return peaks


def serial_peak(stages: list[dict[str, Any]], chosen: tuple[tuple[str, tuple[str, ...]], ...]) -> int:
    """The peak when each stage in order runs F and O, and in reverse order all that is left of its ops."""
    passes = list(zip(stages, chosen, strict=True))
    there = [(stage, name, kind) for stage, (name, way) in passes for kind in ("F", *(k for k in way if k == "O"))]
    back = [(stage, name, kind) for stage, (name, way) in reversed(passes) for kind in way if kind != "O"]
    costs = [oracle.cost(stage, name, kind) for stage, name, kind in there + back]
    return max(accumulate((change for cost in costs for change in (cost.start, cost.end)), initial=0))


@pytest.mark.parametrize("method", ["zb-auto", "auto", "cp-sat", "search", "pattern"])
def test_peaks_stay_within_what_a_schedule_can_state_though_a_device_has_no_budget(method: str) -> None:
    """Two activations are one byte more than the largest peak of a document, so one and a rest of W are there."""
    problem = uniform(2, 3, activation_bytes=2**52, backward_weight_bytes=2**50)
    schedule = solve(problem, method, Limits(workers=1, deterministic_limit=0.2))
    assert schedule.problem == problem
    assert (schedule.status, schedule.value_us) == ("optimal", 136)
    with pytest.raises(MethodError, match="1f1b needs 8,192 TiB on device 0, but a schedule states at most"):
        solve(problem, "1f1b")


def test_a_microbatch_beyond_what_a_schedule_can_state_is_refused() -> None:
    problem = recomputing(1, 2, [], activation_bytes=MAX_BYTES, workspace_bytes={"B": 5, "BW": 5})
    with pytest.raises(
        InputError, match=rf"devices\[0\]\.memory_bytes is null, but .* {MAX_BYTES + 5} bytes, and a .*"
    ):
        solve(problem, "auto")
