"""The bound of every problem: never above an optimum, and reached where the published schedules are optimal."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings

from instances import REFERENCE, instance, uniform
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us, split_backward_suffices
from solver.limits import Limits
from solver.published.zb_auto import zb_auto
from solver.solve import solve
from tests.problems import KNOWN_OPTIMA, problems
from tests.sample import examples, some
from tests.solutions import best_found

PROVED = {name: entry["proved_optimum_us"] for name, entry in REFERENCE.items() if "proved_optimum_us" in entry}
ZERO_BUBBLE = {name: entry["lower_bound_us"] for name, entry in REFERENCE.items() if "lower_bound_us" in entry}
ZB_AUTO_IS_OPTIMAL = [
    *sorted(name for name in ZERO_BUBBLE if name.endswith("-mem1")),
    *("zb-1.5b-p8-m24-mem2", "zb-6.2b-p8-m24-mem1.5", "zb-14.6b-p16-m48-mem1.5", "zb-28.3b-p32-m96-mem1.5"),
]


@pytest.mark.parametrize("name", some(sorted(ZERO_BUBBLE), 4))
def test_is_at_least_the_zero_bubble_bound(name: str) -> None:
    assert lower_bound_us(instance(name)) >= ZERO_BUBBLE[name]


@pytest.mark.parametrize("name", some(ZB_AUTO_IS_OPTIMAL, 4))
def test_proves_zb_auto_optimal(name: str) -> None:
    problem = instance(name)
    assert lower_bound_us(problem) == simulate(problem, zb_auto(problem)).value_us


@pytest.mark.parametrize("name", some(sorted(PROVED), 4))
def test_is_never_above_a_proved_optimum(name: str) -> None:
    assert lower_bound_us(instance(name)) <= PROVED[name]


@pytest.mark.parametrize("objective", sorted(KNOWN_OPTIMA))
def test_is_never_above_a_known_optimum(objective: str) -> None:
    problem, optimum_us = KNOWN_OPTIMA[objective]
    assert lower_bound_us(problem) <= optimum_us


@pytest.mark.parametrize("name", ["a-p4-m8-c0-b1o2-vshape-make", "d-p4-m8-o1-mo1-b1o2-vshape-make"])
def test_is_an_optimum_along_a_v(name: str) -> None:
    assert lower_bound_us(instance(name)) == PROVED[name]


@settings(max_examples=examples(40))
@given(problems(max_microbatches=5))
def test_no_schedule_is_below(problem: Problem) -> None:
    assume(split_backward_suffices(problem))
    best = best_found(problem, 0.1)
    assume(best is not None)
    assert best is not None
    assert lower_bound_us(problem) <= best.value_us + 1e-9


def test_one_microbatch_takes_the_whole_way() -> None:
    assert lower_bound_us(uniform(4, 1)) == 4 * 10 + 4 * 10 + 6 * 1 + 10


@pytest.mark.parametrize(("host_bytes", "has_room"), [(0, False), (1, False), (2, True)])
def test_an_offload_for_which_the_host_has_no_room_is_none(host_bytes: int, has_room: bool) -> None:
    """Two bytes of each activation may leave. Without them the bound is the optimum, which `auto` proves at once."""
    offload = {"bytes": 2, "offload_us": 1, "reload_us": 1}
    problem = uniform(2, 4, budget=3, offload=offload, host_memory_bytes=host_bytes)
    kept = uniform(2, 4, budget=3)
    assert (lower_bound_us(problem) < lower_bound_us(kept)) == has_room
    modes = [{"name": "leave", "kept_bytes": 2, "offload": offload}]
    stages = [stage.to_data() | {"offload": None, "modes": modes} for stage in problem.stages]
    with_modes = Problem.from_data(problem.to_data() | {"stages": stages})
    assert (lower_bound_us(with_modes) < lower_bound_us(kept)) == has_room
    if not has_room:
        schedule = solve(problem, limits=Limits(time_limit_s=5))
        assert (schedule.value_us, schedule.bound_us) == (lower_bound_us(kept),) * 2
