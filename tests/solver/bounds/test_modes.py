"""Bounds with activation modes: never above a schedule or an optimum, and by hand."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from instances import HALF, instance, uniform
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us, modes
from solver.bounds.modes import mode_bounds_us
from solver.bounds.rounds import round_bounds_us
from solver.bounds.units import memory_time_bounds_us
from solver.build import peak_budgets
from solver.exact.cp_sat.model import solve_cp_sat
from solver.limits import Limits
from solver.serial import serial_orders
from tests.recomputing import FULL, random_pipeline, random_recomputing, recomputing
from tests.sample import RARELY, some
from tests.solutions import serial_start


def test_of_many_devices_those_around_the_largest_bound_are_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it falls from each device to the next, so nothing is lost where every other one is left out."""
    problem = recomputing(9, 24, budget=30)
    every = mode_bounds_us(problem)
    monkeypatch.setattr(modes, "MOST_DEVICES", 3)
    some = mode_bounds_us(problem)
    assert 0 < sum(map(bool, some)) < len(every)
    assert all(own in (0.0, bound) for own, bound in zip(some, every, strict=True))
    assert max(some) == max(every)


@pytest.mark.parametrize("first", some(range(0, 300, 15), RARELY))
def test_no_random_schedule_is_below_it(first: int) -> None:
    for seed in range(first, first + 15):
        problem, orders = random_recomputing(Random(seed))
        budgets = [{"memory_bytes": size} for size in peak_budgets(problem, orders)]
        for objective in ("makespan", "device_span"):
            tight = problem.from_data(problem.to_data() | {"devices": budgets, "objective": objective})
            assert lower_bound_us(tight) <= simulate(tight, orders).value_us * (1 + 1e-9), seed


@pytest.mark.parametrize(
    "more",
    [{}, {"offload": HALF}, {"offload": HALF, "copy_channels": {"duplex": False}}],
    ids=["kept", "half", "channel"],
)
@pytest.mark.parametrize("objective", ["makespan", "device_span"])
def test_without_modes_it_is_the_bound_by_byte_time(objective: str, more: dict[str, Any]) -> None:
    """On the first device, where memory for two microbatches asks for more time than work does.

    In ramps without steps 30 byte-us less are unused, of 4 bytes.
    """
    problem = uniform(4, 12, budget=4, backward_weight_bytes=2, objective=objective, **more)
    assert mode_bounds_us(problem)[0] == pytest.approx(memory_time_bounds_us(problem)[0] - 30 / 4, rel=1e-6)


def first_device_us(microbatches: int, kept_bytes: int, budget: int = 20) -> float:
    """The bound from the first of four devices of unit times; 10 bytes, or so many by recomputing for 1 us."""
    mode = {"name": "full", "kept_bytes": kept_bytes, "recompute_us": 1}
    problem = recomputing(4, microbatches, [mode], budget, backward_weight_bytes=10)
    return mode_bounds_us(problem.from_data(problem.to_data() | {"objective": "device_span"}))[0]


@pytest.mark.parametrize(
    ("budget", "bound_us"),
    [(None, 11 * 36), (408, 11 * 36), (407, 11 * 48), (120, 11 * 48)],
    ids=["none", "one kept", "none kept", "as few as may be"],
)
def test_what_cannot_be_kept_is_recomputed_inside_every_backward(budget: int | None, bound_us: float) -> None:
    """Whole backwards of 12 F and 24, eight times and three more; with no room for the 408, 12 more in each."""
    groups = [
        {"name": f"group-{g}", "kept_bytes": 24 // g, "recompute_us": 12, "segment_bytes": 34 * g - 2} for g in (1, 2)
    ]
    modes = [group | {"forward_workspace_bytes": 32} for group in groups]
    times = {"forward_us": 12, "backward_input_us": 12, "backward_weight_us": 12, "activation_bytes": 408}
    problem = recomputing(4, 8, modes, budget, **times, backward_weight_bytes=272, split_backward=False)
    assert lower_bound_us(problem) >= bound_us
    if budget in (None, 120):
        assert lower_bound_us(problem) == bound_us


@pytest.mark.parametrize(("budget", "us"), [(20, 3), (19, 4), (14, 4), (13, 5)])
def test_what_cannot_be_kept_on_all_stages_of_a_device_is_recomputed(budget: int, us: float) -> None:
    """One device along a V of two stages of 10 bytes, or 4 for 1 us and 3 for 2 us: those of stage 0 wait."""
    ahead = [{"name": f"keeps {kept}", "kept_bytes": kept, "recompute_us": us} for kept, us in ((4, 1), (3, 2))]
    inside = [mode | {"segment_bytes": 10 - mode["kept_bytes"]} for mode in ahead]
    data = recomputing(2, 5, inside, budget).to_data()
    stages = [stage | {"device": 0} for stage in data["stages"]]
    problem = Problem.from_data(data | {"stages": stages, "devices": data["devices"][:1]})
    assert lower_bound_us(problem) == pytest.approx(5 * (3 + us))


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_times_so_short_that_a_solver_leaves_them_out(devices: int) -> None:
    """A bound is at most the value of the serial order, and 10^-9 of that of the same problem in us."""
    names = ("forward_us", "backward_input_us", "backward_weight_us")
    tiny = recomputing(devices, 3, [FULL | {"recompute_us": 1e-9}], budget=21, **dict.fromkeys(names, 1e-9))
    assert max(mode_bounds_us(tiny)) <= lower_bound_us(recomputing(devices, 3, budget=21)) * 1.000001e-9
    assert lower_bound_us(tiny) <= simulate(tiny, serial_orders(tiny)).value_us * 1.000001


def test_recomputing_saves_byte_time_for_compute() -> None:
    """Each microbatch more asks for its share of memory.

    Kept one takes 10 bytes for 8 us, F, the way of 6, B, and 10 for W's; recomputed 1 for 8 us, 9 for the 2 us of C and
    B, and 10 for W.
    """
    kept, recomputed = 10 * 8 + 10, 8 + 9 * 2 + 10
    # 20 T = kept (1 - x) + recomputed x and T = 3 + x for the time T and the share x recomputed of one more.
    share = (kept - 20 * 3) / (20 + kept - recomputed)
    assert first_device_us(1000, 1) - first_device_us(999, 1) == pytest.approx(3 + share)


def test_what_is_recomputed_fills_the_windows() -> None:
    """Two kept F take 2 of the 7 us of warm-up; whether the rest is idle or recomputed later, it costs 5 us.

    Beside the last microbatch one is kept in the cool-down of 6 us, and offers B and W; three more us of C, B and W are
    worth an idle us of the 4 that are left.
    """
    assert first_device_us(12, 0) == pytest.approx(12 * 3 + 5 + 4 / 3)


def test_in_few_microbatches_each_fills_both_windows() -> None:
    """All four begin in the warm-up and end in the cool-down: the two that do not fit are recomputed once."""
    assert first_device_us(4, 0) == pytest.approx(4 * 3 + 3 + 2)


def test_rounds_leave_out_what_is_recomputed() -> None:
    """One kept microbatch at a time, each for 9 us; six of ten recomputed make 36 us of both."""
    mode = {"name": "full", "kept_bytes": 1, "recompute_us": 1}
    problem = recomputing(4, 10, [mode], 19, backward_weight_bytes=10)
    assert round_bounds_us(problem.from_data(problem.to_data() | {"objective": "device_span"}))[0] == 36


def test_rounds_count_what_every_mode_leaves() -> None:
    """Two of 10 bytes, of which one mode keeps 8: still one at a time."""
    mode = {"name": "part", "kept_bytes": 8, "recompute_us": 100}
    problem = recomputing(4, 10, [mode], 17, backward_weight_bytes=10)
    assert round_bounds_us(problem.from_data(problem.to_data() | {"objective": "device_span"}))[0] == 90


def test_it_sees_both_windows_of_a_measured_profile() -> None:
    """By byte-time alone it is 3.4 %."""
    problem = instance("r-14.6b-p16-m48-mem0.75")
    assert 1 - max(problem.work_us) / lower_bound_us(problem) > 0.155


@pytest.mark.parametrize("seed", some(range(30), RARELY))
def test_no_optimum_is_below_it(seed: int) -> None:
    """CP-SAT is not told the bounds; what it finds, mostly an optimum, is never below."""
    problem = random_pipeline(Random(seed))
    start = serial_start(problem)
    assert start is not None
    found = solve_cp_sat(problem, Limits(workers=1, deterministic_limit=0.15), start, lambda _: None)
    assert lower_bound_us(problem) <= found.value_us * (1 + 1e-9)
