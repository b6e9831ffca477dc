"""Patterns with activation modes: valid, better than one choice a stage, and as far from the bound with any number."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from optpipe.ops import Floats
from solver.bounds import lower_bound_us
from solver.build import build_schedule
from solver.by_stage import choices
from solver.search.annealing.table import budgets_bytes
from solver.search.modulo.ends import Ends, Filler
from solver.search.modulo.mode_rounds import ModeRound, keeping, planned_shares, spread_positions
from solver.search.modulo.modes import modulo_with_modes
from solver.search.modulo.pattern import orders_from_pattern
from solver.search.modulo.search import fitting_patterns
from tests.recomputing import random_pipeline, recomputing
from tests.sample import some
from tests.solutions import schedule_found

LIGHT = {"name": "light", "kept_bytes": 1, "recompute_us": 1, "forward_workspace_bytes": 0}


def test_it_is_better_than_one_choice_a_stage() -> None:
    """At half the memory of 1F1B that is 34; the optimum is 31."""
    schedule = schedule_found(modulo_with_modes, recomputing(4, 8, [LIGHT], 20, backward_weight_bytes=10), 1.0)
    assert schedule.value_us <= 33
    recomputed = [sum(op.op == "C" for op in device.compute) for device in schedule.devices]
    assert 0 < sum(recomputed) < 4 * 8


@pytest.mark.parametrize("microbatches", [64, 1024])
def test_it_is_as_near_to_the_bound_with_any_number_of_microbatches(microbatches: int) -> None:
    """At three eighths of the memory of 1F1B."""
    problem = recomputing(4, microbatches, [LIGHT], 15, backward_weight_bytes=10)
    assert schedule_found(modulo_with_modes, problem, 1.0).value_us <= 1.12 * lower_bound_us(problem)


@pytest.mark.parametrize("first", some(range(0, 20, 2)))
def test_it_keeps_every_rule_and_budget(first: int) -> None:
    for seed in range(first, first + 2):
        problem = random_pipeline(Random(seed))
        if all(stage.split_backward for stage in problem.stages):
            schedule_found(modulo_with_modes, problem, 0.05)


def test_a_plan_takes_a_share_of_each_recomputation() -> None:
    by_stage = next(by_stage for by_stage in choices(recomputing(2, 2, [LIGHT])) if by_stage.chosen[0].ahead)
    assert [stage.backward_input_us for stage in by_stage.plain.stages] == [2, 2]
    assert [stage.backward_input_us for stage in by_stage.plain_at([0.25, 0.5]).stages] == [1.25, 1.5]


def round_of(counts: list[int], lanes: int, budget: int = 40) -> ModeRound:
    """A round of so many microbatches of which each stage recomputes so many, within so many bytes a device."""
    problem = recomputing(len(counts), 60, [LIGHT], budget, backward_weight_bytes=10)
    ahead = next(by_stage for by_stage in choices(problem) if all(variant.ahead for variant in by_stage.chosen))
    return ModeRound(ahead, keeping(problem), spread_positions(np.array(counts) / lanes, lanes))


def test_positions_of_a_round_have_the_costs_of_their_modes() -> None:
    passes = round_of([2, 1, 0], 2).passes()
    durations, delays = (values.reshape(3, 2, 3) for values in (passes.duration_us, passes.delay_us))
    assert durations.tolist() == [[[1, 1, 1]] * 2, [[2, 1, 1], [2, 2, 1]], [[1, 1, 1]] * 2]
    assert passes.stage_bytes.tolist() == [1, 10, 10, 1, 1, 10]
    # C begins before the gradient comes: B of the first position on stage 0 and of the second on stages 0 and 1.
    assert (durations[1] + delays[1]).tolist() == [[1, 1, 1]] * 2


def test_some_of_the_microbatches_of_a_stage_are_recomputed_in_every_round() -> None:
    """Two of three on the first two stages and one on the next two: a period of 11 for three, in 4 of 8 activations."""
    mode_round = round_of([2, 2, 1, 1, 0, 0, 0, 0], 3)
    problem, passes = mode_round.by_stage.problem, mode_round.passes()
    budgets = budgets_bytes(problem)
    pattern = fitting_patterns(passes, budgets, 11 / 3, 24, 0.15, np.random.default_rng(0))[0]
    never = Ends(np.zeros((2, passes.size), np.int64), 0.0, np.zeros(8, np.int64))
    values = []
    for units in (54, 57, 60):
        filler = Filler(pattern, passes, units, budgets, by_span=False)
        values.append(filler.value_us(never))
    assert np.diff(values).tolist() == [11, 11]
    compute = [device.compute for device in orders_from_pattern(problem, filler.orders(never)).devices]
    (orders,) = mode_round.orders(compute)
    schedule = build_schedule(problem, orders, 0.0, "pattern", 0.0)
    assert schedule.value_us <= values[-1]
    # Along the order the fourth stage has room to keep all; the ends have room where the middle has none.
    assert orders.modes[:, 24:36].sum(axis=1).tolist() == [8, 8, 4, 0, 0, 0, 0, 0]
    assert orders.modes.sum() < 5 * 20


def test_rounds_are_nearer_to_the_bound_than_equal_rounds() -> None:
    """At half of the memory of 1F1B plans of one microbatch a round are 18 % above the bound."""
    problem = recomputing(16, 128, [LIGHT], 80, backward_weight_bytes=10)
    assert schedule_found(modulo_with_modes, problem, 8.0).value_us <= 1.14 * lower_bound_us(problem)


def test_shares_are_what_memory_asks_for() -> None:
    def shares(budget: int | None, fullness: float) -> Floats:
        problem = recomputing(4, 8, [LIGHT], budget)
        ahead = next(by_stage for by_stage in choices(problem) if all(variant.ahead for variant in by_stage.chosen))
        return planned_shares(ahead, keeping(problem), fullness)

    assert not shares(None, 1.0).any()
    fuller, emptier = shares(20, 1.0), shares(20, 0.6)
    assert (np.diff(fuller) <= 0).all()
    assert (fuller <= emptier).all()
    assert 0 < fuller.sum() < emptier.sum()
