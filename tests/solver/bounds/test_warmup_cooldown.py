"""The two windows of a device, by hand."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from instances import HALF, instance, uniform
from optpipe.problem import Problem
from solver.bounds import lower_bound_us, warmup_cooldown_bounds_us
from solver.bounds.warmup_cooldown import Windows
from solver.exact.cp_sat.model import Options, solve_cp_sat
from solver.limits import Limits
from solver.solve import solve
from tests.sample import some
from tests.solutions import serial_start


@pytest.mark.parametrize(("budget", "warm_up_us", "cool_down_us"), [(2, 66, 66), (4, 56, 46), (8, 36, 6), (14, 6, 0)])
def test_first_device_idles_at_both_ends(budget: int, warm_up_us: float, cool_down_us: float) -> None:
    """Turnaround 3 (10 + 10 + 2) at both ends; k = budget / 2 in flight: k - 1 more F, or k - 1 stocked B and W."""
    first = warmup_cooldown_bounds_us(uniform(4, 8, budget=budget, objective="device_span"))[0]
    assert first == 8 * 30 + warm_up_us + cool_down_us


def test_all_forwards_first_idle_once() -> None:
    """Both microbatches fit: their F fill 10 of 66 us, or one B and W 20 of them; one gap can be both."""
    assert warmup_cooldown_bounds_us(uniform(4, 2, budget=4, objective="device_span"))[0] == 2 * 30 + 56
    assert warmup_cooldown_bounds_us(uniform(4, 2, budget=None, objective="device_span"))[0] == 2 * 30 + 56


def test_weights_are_stocked_where_they_need_few_bytes() -> None:
    """Room for 6 bytes beside the last microbatch: six W with 1 byte, one activation of 5 and a W, or between."""
    problem = uniform(4, 8, activation_bytes=5, budget=11, objective="device_span")
    assert warmup_cooldown_bounds_us(problem)[0] == 8 * 30 + (66 - 10) + (66 - 6 * 10)


def test_makespan_counts_what_lies_before_and_after_a_device() -> None:
    """On the last device no window is open, but three F come before and three B and a W after."""
    assert warmup_cooldown_bounds_us(uniform(4, 8))[-1] == 3 * 11 + max(8 * 30, 8 * 20 + 3 * 11 + 10)
    assert warmup_cooldown_bounds_us(uniform(4, 2, budget=2))[-1] == 3 * 11 + 2 * 20 + 10 + 3 * 11 + 10


def test_span_of_the_first_device_holds_the_way_through_the_last() -> None:
    """Three F and delays there, 24 F and B with memory for their W to wait, three B and delays back, a W."""
    problem = uniform(4, 24, budget=32, objective="device_span", backward_weight_bytes=1)
    data = problem.to_data()
    for stage in data["stages"]:
        stage["backward_weight_us"] = 2
    assert warmup_cooldown_bounds_us(Problem.from_data(data))[-1] == 3 * 11 + 24 * 20 + 3 * 11 + 2
    assert 24 * 22 < 3 * 11 + 24 * 20 + 3 * 11 + 2


def test_workspace_of_forward_takes_room_of_the_stock() -> None:
    roomy, tight = (_with_workspace(budget) for budget in (9, 8))
    assert warmup_cooldown_bounds_us(roomy)[0] == 8 * 30 + 36 + 6
    assert warmup_cooldown_bounds_us(tight)[0] == 8 * 30 + 46 + 16


def _with_workspace(budget: int) -> Problem:
    data = uniform(4, 8, budget=budget, objective="device_span").to_data()
    data["stages"][0]["workspace_bytes"] = {"F": 1}
    return Problem.from_data(data)


def test_offload_frees_and_brings_back_at_the_rate_of_the_channel() -> None:
    """A byte each 10 us. Warm-up of 76 us: 4 + 7.6 bytes are five F. Cool-down: 4 + 7.6 - 2 bytes fill 66 us."""
    slow = {"bytes": 2, "offload_us": 20, "reload_us": 20}
    assert warmup_cooldown_bounds_us(uniform(4, 8, budget=4, offload=slow, objective="device_span"))[0] == 8 * 30 + 26


def test_what_never_leaves_must_fit() -> None:
    """The last F takes 2 of 4 bytes, two others what stays of them: three F of 76 us, two B and W of 66 us."""
    assert (
        warmup_cooldown_bounds_us(uniform(4, 8, budget=4, offload=HALF, objective="device_span"))[0] == 8 * 30 + 46 + 26
    )


def test_copies_are_too_slow_for_all_forwards_to_come_first() -> None:
    """A byte each 20 us: 4 + 3.8 bytes are three F, 4 + 3.8 - 2 bytes 58 us of stock; both idle times count.

    If all F came first, twelve bytes would have left between the first and the last: 10 + 240 + 10 us for 80 of F.
    """
    slow = {"bytes": 2, "offload_us": 40, "reload_us": 40}
    problem = uniform(4, 8, budget=4, offload=slow, objective="device_span")
    assert warmup_cooldown_bounds_us(problem)[0] == pytest.approx(8 * 30 + 46 + 8)


def test_v_placement_counts_both_stages() -> None:
    """Warm-up: 8 F and 6 delays, of which 4 F fit; cool-down: 7 B and 6 delays, of which 10 + 2 (10 + 10) are there."""
    problem = uniform(4, 8, budget=8, v_shape=True, objective="device_span")
    assert warmup_cooldown_bounds_us(problem)[0] == 8 * 60 + (86 - 40) + (76 - 20 - 40)


def test_devices_without_stages_have_no_bound() -> None:
    data = uniform(4, 8).to_data()
    data["devices"].append({"memory_bytes": 1})
    assert len(warmup_cooldown_bounds_us(Problem.from_data(data))) == 4


def test_quick_copies_leave_more_weights_for_later() -> None:
    """Two activations and W of the last device hide behind the way back: no window says how many B copies feed."""
    problem = _quick_copies()
    found = solve(problem, "cp-sat", Limits(deterministic_limit=2.0, workers=1))
    assert lower_bound_us(problem) <= found.value_us < 428.4


def _quick_copies() -> Problem:
    data = uniform(2, 8, budget=20, transfer_us=0, activation_bytes=1).to_data()
    data["transfer_us"] = [{"forward": 0, "backward": 300}]
    data["devices"][0]["memory_bytes"] = None
    data["stages"][0] |= {"forward_us": 1, "backward_input_us": 1, "backward_weight_us": 1}
    data["stages"][1] |= {
        "forward_us": 0.05,
        "activation_bytes": 10,
        "workspace_bytes": {"F": 8},
        "offload": {"bytes": 10, "offload_us": 1, "reload_us": 1},
    }
    return Problem.from_data(data)


def test_weights_that_do_not_fit_beside_the_last_activation_run_before_it() -> None:
    """A V of sixteen devices with a quarter of 1F1B's memory: the best schedule known is optimal."""
    assert lower_bound_us(instance("d-p16-m32-o1-mo1-b1o4-vshape-make")) == 107_500


@pytest.mark.parametrize(
    ("name", "optimum_us"),
    [("d-p8-m16-o1-mo1-b1o4-interleaved4-make", 50_000), ("d-p8-m16-o1-mo1-b1o4-interleaved2-make", 54_000)],
)
def test_last_two_backwards_ask_for_a_weight_or_a_copy_more(name: str, optimum_us: float) -> None:
    """Both values are reached by schedules."""
    assert lower_bound_us(instance(name)) == optimum_us


@pytest.mark.parametrize(
    ("change", "lacking_us"),
    [
        ({}, 10),  # a W more
        ({"reload_us": 7}, 7),
        ({"transfer_us": 1}, 2),  # from B of the next stage two transfers and a B, less the one W that is pending then
        ({"first_weight_us": 3}, 3),  # the first stage's B and W instead of a B
        ({"reload_us": 7, "backward_weight_bytes": 3}, 10),  # two W and what stays need 7 bytes: a copy is no way out
    ],
)
def test_last_two_backwards_take_the_shortest_way_out(change: dict[str, Any], lacking_us: float) -> None:
    """The last of two devices with two stages each, and room for one W beside an activation."""
    data = uniform(4, 3, activation_bytes=3, backward_weight_bytes=2, budget=5, transfer_us=10).to_data()
    changed = dict(change)
    data["transfer_us"] = changed.pop("transfer_us", 10)
    weight_us = changed.pop("first_weight_us", 10)
    copy = {"bytes": 2, "offload_us": 1, "reload_us": changed.pop("reload_us", 30)}
    for s, stage in enumerate(data["stages"]):
        stage |= {"device": s % 2, "offload": copy, "backward_weight_us": 10 if s else weight_us, **changed}
    data["devices"] = [{"memory_bytes": 5 if not changed else 6}] * 2
    assert Windows.each(Problem.from_data(data))[1]._last_two_backwards_us == lacking_us


def random_pipeline(rng: Random) -> Problem:
    """Two or three devices, mostly with two stages each, and little memory for pending W."""
    p, chunks = rng.randint(2, 3), rng.choice([1, 2, 2])
    weight_us, left = rng.randint(1, 4), rng.choice([1, 2, 2])

    def stage() -> dict[str, Any]:
        copy = {"bytes": rng.choice([2, 2, 1]), "offload_us": rng.randint(0, 3), "reload_us": rng.randint(0, 4)}
        return {
            "forward_us": rng.randint(1, 3),
            "backward_input_us": rng.randint(1, 4),
            "backward_weight_us": weight_us,
            "activation_bytes": 2,
            "backward_weight_bytes": left,
            "offload": copy if rng.random() < 0.7 else None,
        }

    same, alike = stage(), rng.random() < 0.75
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": rng.randint(2, 4),
            "objective": rng.choice(["makespan", "device_span"]),
            "transfer_us": rng.choice([0, 0, 1]),
            "devices": [{"memory_bytes": rng.randint(2, 4) * chunks} for _ in range(p)],
            "stages": [(same if alike else stage()) | {"device": s % p} for s in range(p * chunks)],
        }
    )


SAYS_MORE = [19, 37, 43, 60, 65, 85, 116, 142, 201, 203, 230, 255, 259, 266, 272, 273, 292, 296]
"""The first seeds of problems where the last two backwards say more than the windows do without them."""


@pytest.mark.parametrize("seed", some(SAYS_MORE, 5))
def test_last_two_backwards_are_never_above_an_optimum(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """CP-SAT runs without cuts."""
    problem, again = (random_pipeline(Random(seed)) for _ in range(2))  # what was found is kept with a problem
    bound_us = max(warmup_cooldown_bounds_us(problem))
    with monkeypatch.context() as patch:
        patch.setattr(Windows, "_last_two_backwards_us", 0.0)
        assert max(warmup_cooldown_bounds_us(again)) < bound_us
    start = serial_start(problem)
    assert start is not None
    limits = Limits(workers=1, deterministic_limit=0.2)
    no_cuts = Options(work=False, heads=False, weight_order=False, precedences=False, memory_order=False, climb=False)
    assert bound_us <= solve_cp_sat(problem, limits, start, lambda _: None, no_cuts).value_us
