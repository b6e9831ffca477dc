"""One variant for each stage: plain problems and their orders, there and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random

import numpy as np
import pytest

from instances import HALF, uniform
from optpipe.errors import MethodError
from optpipe.fields import MAX_TIME_US
from optpipe.ops import DeviceOrders, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.verify import verify
from solver.build import build_schedule, peak_budgets
from solver.by_stage import ByStage, choices, drop_needless, keep_what_fits
from solver.limits import Limits
from solver.published.ada_offload import ada_offload
from solver.serial import serial_orders
from solver.solve import solve
from tests.recomputing import FULL, LEAVES, ops, random_problem, random_recomputing, recomputing
from tests.sample import some
from tests.unequal import random_orders, random_unequal


def plain_orders(by_stage: ByStage) -> list[Orders]:
    """Orders of the plain problem, with copies and without."""
    found = [make(by_stage.plain) for make in (serial_orders, ada_offload)]
    return [orders for orders in found if orders is not None]


@pytest.mark.parametrize("first", some(range(0, 40, 4)))
def test_orders_of_every_choice_are_valid_in_no_more_memory_and_time(first: int) -> None:
    for seed in range(first, first + 4):
        rng = Random(seed)
        data = random_problem(rng)
        data["stages"] = [stage | {"split_backward": True} for stage in data["stages"]]
        problem = Problem.from_data(data)
        for by_stage in choices(problem):
            for plain in plain_orders(by_stage):
                orders = by_stage.with_modes(plain)
                if orders is None:
                    assert any(way.mode.recomputes and way.mode.offload for way in by_stage.chosen)
                    continue
                schedule = build_schedule(problem, orders, 0.0, "by stage", 0.0)  # which verifies it
                assert schedule.value_us <= simulate(by_stage.plain, plain).value_us + 1e-9
                assert peak_budgets(problem, orders) == peak_budgets(by_stage.plain, plain)


def test_a_backward_with_its_recomputation_may_be_longer_than_an_op_of_a_problem() -> None:
    long_us = 0.6 * MAX_TIME_US
    mode = {"name": "full", "kept_bytes": 1, "recompute_us": long_us}
    problem = recomputing(2, 2, [mode], budget=10, backward_input_us=long_us)
    assert {by_stage.plain.stages[0].backward_input_us for by_stage in choices(problem)} == {long_us, 2 * long_us}
    assert solve(problem, "cp-sat", Limits(workers=1, deterministic_limit=1.0)).status == "optimal"
    tight = problem.replaced(devices=[device.replaced(memory_bytes=9 + 2) for device in problem.devices])
    schedule = solve(tight, "ada-offload")
    assert verify(schedule).ok
    assert any(op.op == "C" for op in schedule.devices[0].compute)


@pytest.mark.parametrize("first", some(range(0, 60, 20)))
def test_what_is_kept_besides_fits_and_makes_nothing_later(first: int) -> None:
    changed = 0
    for seed in range(first, first + 20):
        problem, orders = random_recomputing(Random(seed))
        budgets = [size + Random(seed).randrange(6) for size in peak_budgets(problem, orders)]
        tight = problem.from_data(problem.to_data() | {"devices": [{"memory_bytes": size} for size in budgets]})
        kept = keep_what_fits(tight, orders)
        assert build_schedule(tight, kept, 0.0, "kept", 0.0).value_us <= simulate(tight, orders).value_us
        changed += not np.array_equal(kept.modes, orders.modes)
    assert changed


@pytest.mark.parametrize("budget", range(11, 31))
@pytest.mark.parametrize("backward", ["C BW", "CBW", "CB W"])
def test_as_many_are_kept_as_there_can_be(budget: int, backward: str) -> None:
    """Compared with all choices of microbatches of one stage, in the order of the ops."""
    light = {"name": "light", "kept_bytes": 2, "recompute_us": 1, "forward_workspace_bytes": 1, "segment_bytes": 3}
    problem = recomputing(1, 4, [light], budget, backward_weight_bytes=2)
    order = "F0.0 F0.1 {0} F0.2 {1} F0.3 {2} {3}"

    def orders(modes: Sequence[int]) -> Orders:
        kinds = [backward if mode else backward.replace("C ", "").replace("C", "") for mode in modes]
        texts = [" ".join(f"{kind}0.{i}" for kind in text.split()) for i, text in enumerate(kinds)]
        return Orders([DeviceOrders(ops(order.format(*texts)))], modes=np.array([modes]))

    fitting = [modes for modes in product((0, 1), repeat=4) if peak_budgets(problem, orders(modes))[0] <= budget]
    if (1, 1, 1, 1) in fitting:
        kept = keep_what_fits(problem, orders((1, 1, 1, 1)))
        assert kept.modes is not None
        assert kept.modes.sum() == min(map(sum, fitting))


@pytest.mark.parametrize(("devices", "microbatches"), [(4, 8), (8, 16)])
def test_1f1b_that_recomputes_equals_its_closed_forms(devices: int, microbatches: int) -> None:
    problem = recomputing(devices, microbatches, [FULL])
    inside, ahead = (solve(problem, f"1f1b-recompute{form}") for form in ("", "-ahead"))
    assert inside.value_us == (microbatches + devices - 1) * 4
    assert ahead.value_us == microbatches * 4 + (devices - 1) * 3
    for schedule in (inside, ahead):
        assert [device.peak_bytes for device in schedule.devices] == [devices - i + 9 for i in range(devices)]


@pytest.mark.parametrize("method", ["1f1b-recompute", "1f1b-recompute-ahead"])
def test_1f1b_recomputes_where_a_backward_and_its_recomputation_are_longer_than_an_op_may_be(method: str) -> None:
    long_us = 0.6 * MAX_TIME_US
    mode = {"name": "full", "kept_bytes": 1, "recompute_us": long_us, "segment_bytes": 9}
    schedule = solve(recomputing(1, 3, [mode], backward_input_us=long_us), method)
    assert verify(schedule).ok
    assert schedule.value_us == 3 * (2 * long_us + 2)


def test_1f1b_recomputes_only_with_modes_that_do() -> None:
    copies = {**LEAVES, "segment_bytes": None}
    with pytest.raises(MethodError, match=r"stages\[0\]\.modes has none"):
        solve(recomputing(2, 2, [copies]), "1f1b-recompute")


@pytest.mark.parametrize("method", ["auto", "search", "pattern"])
def test_methods_decide_on_modes(method: str) -> None:
    """At half the memory of 1F1B: kept alone takes 41, recomputed alone 37, one choice a stage 34, freely 31."""
    strict = {"name": "recompute", "kept_bytes": 1, "recompute_us": 1}
    problem = recomputing(4, 8, [strict], 20, backward_weight_bytes=10)
    schedule = solve(problem, method, Limits(workers=1, deterministic_limit=5.0 if method == "auto" else 0.2))
    assert schedule.value_us <= 37
    assert any(op.op == "C" for device in schedule.devices for op in device.compute)
    if method == "auto":
        assert (schedule.value_us, schedule.status) == (33, "optimal")


def test_what_is_kept_besides_fits_with_the_sizes_of_each_unit() -> None:
    """Slices and microbatches of other sizes than the stage states, larger and smaller."""
    changed = 0
    for seed in range(30):
        rng = Random(seed)
        problem = Problem.from_data(random_unequal(rng))
        if not problem.has_factors or not problem.has_modes:
            continue
        orders = random_orders(problem, rng)[0]
        budgets = [size + rng.randrange(6) for size in peak_budgets(problem, orders)]
        tight = problem.from_data(problem.to_data() | {"devices": [{"memory_bytes": size} for size in budgets]})
        kept = keep_what_fits(tight, orders)
        assert build_schedule(tight, kept, 0.0, "kept", 0.0).value_us <= simulate(tight, orders).value_us
        changed += not np.array_equal(kept.modes, orders.modes)
    assert changed


@pytest.mark.parametrize("first", some(range(0, 40, 20)))
def test_copies_and_recomputations_that_gain_nothing_are_dropped(first: int) -> None:
    """With room for everything all go; with no more room than before the value and the budgets are kept."""
    dropped = 0
    for seed in range(first, first + 20):
        rng = Random(seed)
        problem, orders = random_recomputing(rng)
        if seed % 2:
            problem = Problem.from_data(random_unequal(rng))
            orders, _, _ = random_orders(problem, rng)
        value_us = simulate(problem, orders).value_us
        roomy = problem.from_data(
            problem.to_data() | {"devices": [{"memory_bytes": None}] * len(problem.devices), "host_memory_bytes": None}
        )
        bare = drop_needless(roomy, orders)
        schedule = build_schedule(roomy, bare, 0.0, "test", 0.0)
        assert schedule.value_us <= value_us
        assert drop_needless(roomy, bare) is bare
        budgets = [{"memory_bytes": size} for size in peak_budgets(problem, orders)]
        tight = roomy.from_data(roomy.to_data() | {"devices": budgets})
        least = build_schedule(tight, drop_needless(tight, orders), 0.0, "test", 0.0)
        assert least.value_us <= value_us
        before, after = ({op for op in one.ops() if op.kind in ("O", "C", "CB", "CBW")} for one in (orders, bare))
        assert len(after) <= len(before)
        dropped += len(after) < len(before)
    assert dropped > 10


def test_nothing_leaves_or_is_recomputed_where_all_fits() -> None:
    for problem in (uniform(3, 4, offload=HALF), recomputing(2, 4, [FULL, LEAVES])):
        for method in ("search", "auto"):
            schedule = solve(problem, method, Limits(float("inf"), workers=1, deterministic_limit=0.1))
            assert {op.op for device in schedule.devices for op in device.compute} <= {"F", "B", "W", "BW"}
            assert not any(device.offload for device in schedule.devices)


def test_ada_offload_copies_and_recomputes_nothing_that_gains_nothing() -> None:
    """Its lists do on these stages."""
    problem, orders = random_recomputing(Random(35))
    budgets = [{"memory_bytes": size} for size in peak_budgets(problem, orders)]
    problem = problem.from_data(problem.to_data() | {"devices": budgets})
    lists, schedule = ada_offload(problem), solve(problem, "ada-offload")
    assert drop_needless(problem, lists) is not lists
    assert drop_needless(schedule.problem, schedule.orders) is schedule.orders
