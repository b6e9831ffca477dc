"""Patterns of slices and unequal microbatches: order, memory and period of a round, and refusals where none repeats."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from optpipe.errors import MethodError
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us
from solver.build import build_schedule, peak_budgets
from solver.exact.cp_sat.model import solve_cp_sat
from solver.limits import Limits
from solver.methods import METHODS, refuse_unsupported
from solver.microbatch_orders import cycles
from solver.published.seq1f1b import seq1f1b
from solver.search.annealing.table import budgets_bytes
from solver.search.modulo.ends import Ends, Filler
from solver.search.modulo.pattern import Passes, Pattern, orders_from_pattern
from solver.search.modulo.search import fitting_patterns
from solver.search.modulo.units import modulo_with_units
from solver.serial import serial_orders
from solver.solution import Solution
from tests.sample import some
from tests.solutions import schedule_found
from tests.unequal import random_unequal, times, unequal

COSTS = [15, 21, 27, 33]
CAUSAL = {"count": 4, "factors": {"forward": COSTS, "backward_input": COSTS, "backward_weight": [15] * 4}}


def pattern_of(problem: Problem, share: float = 1.0, width: int = 24) -> Pattern:
    """A pattern of one cycle whose period is `share` times the least."""
    passes = Passes.of(problem, cycles(problem)[0].length * problem.slice_count)
    period = share * float(passes.work_us().max()) / passes.lanes
    patterns = fitting_patterns(passes, budgets_bytes(problem), period, width, 0.15, np.random.default_rng(0))
    assert patterns
    return patterns[0]


def followed(problem: Problem, pattern: Pattern) -> tuple[Filler, Ends]:
    """A pattern played as it is."""
    never = Ends(np.zeros((2, pattern.passes.size), np.int64), 0.0, np.zeros(pattern.passes.devices, np.int64))
    return Filler(pattern, pattern.passes, problem.units, budgets_bytes(problem), by_span=False), never


UNEQUAL = {
    "slices": unequal(4, 9, 48, slices=CAUSAL, slice_gradient_bytes=1),
    "cycle": unequal(3, 11, 28, microbatch_factors=[*times(1, 2, 3) * 3, *times(1, 2)]),
    "cycle of slices": unequal(3, 6, 36, microbatch_factors=[{"bytes": 2}, {"time": 2}] * 3, slices={"count": 2}),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_a_repeated_round_keeps_its_peak_and_takes_at_most_a_period_each_time(name: str) -> None:
    problem = UNEQUAL[name]
    pattern = pattern_of(problem)
    filler, never = followed(problem, pattern)
    value = filler.value_us(never)
    assert value <= ((filler.microbatches - 1) * pattern.round_us + pattern.block_us) * (1 + 1e-9)
    orders = orders_from_pattern(problem, filler.orders(never))
    assert all(np.array(peak_budgets(problem, orders)) <= pattern.peak_bytes)
    assert build_schedule(problem, orders, 0.0, "pattern", 0.0).value_us <= value * (1 + 1e-9)


@pytest.mark.parametrize("name", UNEQUAL)
def test_each_round_more_takes_a_period_in_the_same_memory(name: str) -> None:
    """The steady state: at the least period, in which a device is never idle."""
    problem = UNEQUAL[name]
    pattern = pattern_of(problem)
    _, never = followed(problem, pattern)
    budgets, lanes = budgets_bytes(problem), pattern.passes.lanes
    rounds = [Filler(pattern, pattern.passes, lanes * number, budgets, by_span=False) for number in range(10, 14)]
    assert np.diff([filler.value_us(never) for filler in rounds]) == pytest.approx(pattern.round_us, rel=1e-9)


def test_the_peak_counts_the_gradients_of_keys_and_values() -> None:
    """One device, three slices: the last backward takes a byte for each of the two others, beside three activations."""
    problem = unequal(1, 4, slices={"count": 3}, backward_weight_bytes=0, slice_gradient_bytes=1)
    pattern = pattern_of(problem)
    assert pattern.peak_bytes.tolist() == [3 * 4 + 2]
    filler, never = followed(problem, pattern)
    assert peak_budgets(problem, orders_from_pattern(problem, filler.orders(never))) == [14]


@pytest.mark.parametrize(("count", "held"), [(2, 4), (4, 5)])
def test_equal_slices_need_less_than_seq1f1bs_memory_for_no_repeating_bubble(count: int, held: int) -> None:
    """With B and W apart; Seq1F1B holds n + p - 1 slices on the first device."""
    problem = unequal(4, 8, 4 * held, slices={"count": count}, backward_weight_bytes=0)
    assert pattern_of(problem, width=48).period_us == max(problem.work_us) / problem.units
    roomy = unequal(4, 8, 4 * (count + 3), slices={"count": count}, backward_weight_bytes=0)
    assert schedule_found(modulo_with_units, roomy, 1.0).value_us < simulate(roomy, seq1f1b(roomy)).value_us


def test_a_free_order_is_sorted_into_a_cycle() -> None:
    """As given, a cycle of six that does not repeat; by length, one of three."""
    problem = unequal(3, 6, microbatch_factors=times(1, 1, 2, 2, 3, 3), microbatch_order="free")
    schedule = schedule_found(modulo_with_units, problem, 0.5)
    assert schedule.microbatch_order is not None
    lengths = [problem.microbatch_factors[i].time for i in schedule.microbatch_order]
    assert lengths[:3] == lengths[3:]
    assert sorted(lengths[:3]) == [1, 2, 3]


@pytest.mark.parametrize("first", some(range(0, 40, 4)))
def test_it_keeps_every_rule_and_budget(first: int) -> None:
    for seed in range(first, first + 4):
        data = random_unequal(Random(seed))
        for stage in data["stages"]:
            stage.pop("modes", None)
            stage["split_backward"] = True
        problem = Problem.from_data(data)
        if cycles(problem) and serial_orders(problem) is not None:
            schedule_found(modulo_with_units, problem, 0.05)


SMALL = {
    "slices": unequal(2, 3, 20, slices={"count": 2, "factors": {"forward": [1, 2]}}, slice_gradient_bytes=1),
    "cycle": unequal(2, 4, 16, microbatch_factors=times(1, 2) * 2),
    "free": unequal(2, 4, 16, microbatch_factors=times(1, 1, 2, 2), microbatch_order="free"),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_ones_are_not_below_the_optimum_and_near_it(name: str) -> None:
    problem = SMALL[name]
    answer = solve_cp_sat(problem, Limits(120, workers=1), Solution(bound_us=lower_bound_us(problem)), lambda _: None)
    assert answer.value_us == answer.bound_us
    assert answer.value_us <= schedule_found(modulo_with_units, problem, 1.0).value_us <= 1.15 * answer.value_us


def test_costs_that_do_not_repeat_are_refused_by_name() -> None:
    pattern = METHODS["pattern"]
    refuse_unsupported(pattern, unequal(2, 4, microbatch_factors=times(1, 2, 1, 2)))
    with pytest.raises(MethodError, match="repeat after at most 2 of the 4 microbatches"):
        refuse_unsupported(pattern, unequal(2, 4, microbatch_factors=times(1, 2, 3, 4)))
    with pytest.raises(MethodError, match=r"slices\.count is 33"):
        refuse_unsupported(pattern, unequal(2, 4, slices={"count": 33}))
    modes = [{"name": "full", "kept_bytes": 1, "recompute_us": 1}]
    with pytest.raises(MethodError, match=r"stages\[0\]\.modes only where microbatches are whole and alike"):
        refuse_unsupported(pattern, unequal(2, 4, slices={"count": 2}, modes=modes))
