"""V-Min, V-Half and V-ZB: published peaks and bubbles, sound blocks, and any costs and number of microbatches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instances import REFERENCE, instance, uniform
from optpipe.errors import MethodError
from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import build_schedule, over_budget, peak_budgets
from solver.published.v_family import PERIOD, building_block, chunks_held, v_half, v_min, v_zb
from tests.sample import examples
from tests.solver.published.unequal import unequal

Method = Callable[[Problem], Orders]
MICROBATCHES_HELD: dict[Method, Callable[[int], int]] = {
    v_zb: lambda p: p,
    v_half: lambda p: (p + 2) // 2,
    v_min: lambda p: (p + 4) // 3,
}
SLOPES = [(3, 3, v_zb), (2, 1, v_half), (1, 2, v_half), (1, 1, v_min)]


def bubble(problem: Problem, orders: Orders) -> float:
    return 1 - max(problem.work_us) / simulate(problem, orders).value_us


@pytest.mark.parametrize("p", [4, 8, 16, 24, 32])
@pytest.mark.parametrize("method", MICROBATCHES_HELD)
def test_published_peaks(method: Method, p: int) -> None:
    """Controllable Memory, section 3, with nothing freed before W; m = 2p microbatches reach the steady state."""
    problem = uniform(p, 2 * p, v_shape=True, backward_weight_bytes=2)
    microbatch = 2 * problem.stages[0].activation_bytes
    assert max(peak_budgets(problem, method(problem))) == MICROBATCHES_HELD[method](p) * microbatch


@pytest.mark.parametrize("p", range(1, 41))
@pytest.mark.parametrize(("out", "back", "method"), SLOPES)
def test_blocks_repeat_without_collision(out: int, back: int, method: Method, p: int) -> None:
    """Every pass comes after what it waits for, and the six of a device take the six slots of the period."""
    block = building_block(p, out, back)
    last = 2 * p - 1
    start = {key: at for starts in block for key, at in starts.items()}
    assert all(sorted(at % PERIOD for at in starts.values()) == list(range(PERIOD)) for starts in block)
    assert all(start["F", s] < start["F", s + 1] and start["B", s + 1] < start["B", s] for s in range(last))
    assert start["F", last] < start["B", last]
    assert all(start["B", s] < start["W", s] for s in range(last + 1))
    assert chunks_held(block) == 2 * MICROBATCHES_HELD[method](p)


@pytest.mark.parametrize(("method", "name"), [(v_half, "v-half"), (v_min, "v-min")])
def test_no_worse_than_the_public_schedules(method: Method, name: str) -> None:
    """The budgets are the peaks of the public schedules, whose bubbles are .1847 and .3300."""
    short = name.replace("-", "")
    problem = instance(f"zbv-6.2b-p16-m48-{short}")
    orders = method(problem)
    assert over_budget(problem, orders) == []
    assert round(bubble(problem, orders), 4) <= REFERENCE[problem.name]["public_bubble"][name]


@pytest.mark.parametrize(("m", "half", "least"), [(48, 0.1817, 0.33), (64, 0.1428, 0.3006), (128, 0.0769, 0.2511)])
def test_bubbles_of_the_measured_profile(m: int, half: float, least: float) -> None:
    """V-Half idles in warm-up and cool-down, so its bubble halves as m doubles; V-Min idles in every period."""
    problem = Problem.from_data(instance("zbv-6.2b-p16-m48-mem1").to_data() | {"microbatches": m})
    assert round(bubble(problem, v_half(problem)), 4) == half
    assert round(bubble(problem, v_min(problem)), 4) == least


def test_v_zb_is_next_to_zero_bubble_at_the_memory_of_1f1b() -> None:
    problem = instance("zbv-6.2b-p16-m48-mem1")
    orders = v_zb(problem)
    assert over_budget(problem, orders) == []
    assert bubble(problem, orders) < 0.073


@settings(max_examples=examples(100))
@given(st.data(), st.sampled_from(list(MICROBATCHES_HELD)))
def test_any_costs_and_microbatches(data: st.DataObject, method: Method) -> None:
    p = data.draw(st.integers(1, 5))
    problem = data.draw(unequal([*range(p), *reversed(range(p))]))
    build_schedule(problem, method(problem), 0, method.__name__, 0)


@pytest.mark.parametrize("method", MICROBATCHES_HELD)
def test_refuses_other_placements(method: Method) -> None:
    with pytest.raises(MethodError, match="from device 0 to 2 and back, but there are 3 stages"):
        method(uniform(3, 4))
