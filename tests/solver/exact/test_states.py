"""Bounds from states of progress: optima where nothing can leave, never above one, and schedules read off the path."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from instances.four_by_eight import four_by_eight
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us
from solver.exact import states
from solver.exact.progress import NEVER, States
from solver.exact.state_bound import state_bound
from solver.limits import Limits
from solver.scale import handles_states
from solver.solution import Solution
from tests.recomputing import recomputing
from tests.sample import some
from tests.solutions import best_found
from tests.solver.bounds.test_unit_order import random_pipeline
from tests.unequal import unequal


def bounded(problem: Problem, value_us: float = float("inf"), work: float = 5.0) -> Solution:
    """The answer to a start of this value without orders, with so many units of work."""
    start = Solution(None, value_us, lower_bound_us(problem))
    return state_bound(problem, Limits(workers=1, deterministic_limit=work), start, lambda _: None)


def pipeline(p: int, m: int, budget: int, along_v: bool, **more: Any) -> Problem:
    """F, B and W of 1 us, activations of 1 byte, all held until W has ended."""
    times = dict.fromkeys(("forward_us", "backward_input_us", "backward_weight_us"), 1)
    devices = [*range(p), *reversed(range(p))] if along_v else range(p)
    stage = times | {"activation_bytes": 1, "backward_weight_bytes": 1} | more
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": m,
            "devices": [{"memory_bytes": budget}] * p,
            "stages": [stage | {"device": device} for device in devices],
        }
    )


@pytest.mark.parametrize(
    ("p", "m", "budget", "along_v", "optimum"),
    [(3, 8, 3, True, 68), (4, 8, 3, True, 86), (3, 6, 2, True, 63), (4, 8, 2, True, 101), (4, 8, 2, False, 41)],
)
def test_is_the_optimum_and_has_its_schedule(p: int, m: int, budget: int, along_v: bool, optimum: int) -> None:
    """CP-SAT finds the same; chains of memory say 62, 80, 63, 101 and 39."""
    answer = bounded(pipeline(p, m, budget, along_v))
    assert answer.bound_us == answer.value_us == optimum


def test_orders_of_the_path_reach_what_is_proved() -> None:
    """Four stages a device, each with times of its own, and room for one and a half microbatches."""
    problem = Problem.from_data(four_by_eight(9).to_data() | {"microbatches": 4})
    answer = bounded(problem)
    assert answer.orders is not None
    assert simulate(problem, answer.orders).value_us == answer.value_us == answer.bound_us == 3153


@pytest.mark.parametrize("first", some(range(0, 24, 12)))
def test_no_schedule_is_below(first: int) -> None:
    met, more = 0, 0
    for seed in range(first, first + 12):
        problem = random_pipeline(Random(seed))
        best = best_found(problem, 0.05)
        if best is None:
            continue
        answer = bounded(problem, work=0.5)
        assert answer.bound_us <= best.value_us + 1e-9, seed
        assert answer.value_us >= best.bound_us - 1e-9, seed
        met += answer.bound_us >= best.value_us - 1e-9
        more += answer.bound_us > lower_bound_us(problem) + 1e-9
    assert met >= 3
    assert more >= 2


def test_gives_up_where_too_many_states_are_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "MOST_STATES", 3)
    problem = pipeline(4, 8, 3, along_v=True)
    assert lower_bound_us(problem) <= bounded(problem).bound_us < 86


def test_leaves_alone_what_it_has_no_states_for() -> None:
    """Modes and unequal microbatches."""
    for problem in (recomputing(2, 4), unequal(2, 4, slices={"count": 2})):
        assert not handles_states(problem)
        assert bounded(problem) == Solution(bound_us=lower_bound_us(problem))


def test_stops_when_it_is_told_to() -> None:
    limits = Limits(workers=1)
    limits.cancel.request()
    problem = four_by_eight(9)
    start = Solution(None, 6180.0, 5016.0)
    assert state_bound(problem, limits, start, lambda _: None) == start


def test_threads_find_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "LEAST_SHARE", 2)
    problem = pipeline(3, 8, 3, along_v=True)
    start = Solution(None, bound_us=62.0)
    answer = state_bound(problem, Limits(workers=3, deterministic_limit=5.0), start, lambda _: None)
    assert answer.bound_us == answer.value_us == 68


def test_threads_leave_out_no_state_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread has states with a single successor, the other those with many: all of them are found."""
    monkeypatch.setattr(states, "LEAST_SHARE", 1)
    problem = pipeline(1, 6, 100, along_v=True)

    def successors(layer: States, workers: int) -> States:
        dolls = states.Dolls(problem, Limits(workers=workers))
        dolls.least = [0] * 6
        ends = dolls._ends(6)
        assert ends is not None
        return dolls._step(layer, ends, 1000, NEVER)[0]

    first = States(*(np.zeros((1, size), np.int64) for size in (6, 6, 1, 1)))
    later = first
    for _ in range(8):
        later = States(*(values[-1:] for values in successors(later, 1)))
    few, many = (len(successors(one, 1).done) for one in (first, later))
    assert many > few
    monkeypatch.setattr(states, "MOST_STATES", (few + many) * 10 // 8 + 1)
    layer = States(*(np.repeat(np.concatenate(pair), 10, axis=0) for pair in zip(first, later, strict=True)))
    assert len(successors(layer, 2).done) == 10 * (few + many)


def test_factors_of_1_say_nothing() -> None:
    plain = pipeline(3, 6, 2, along_v=True)
    stated = Problem.from_data(plain.to_data() | {"microbatch_factors": [{"time": 1}] * 6})
    assert bounded(stated).value_us == bounded(plain).value_us == 63
