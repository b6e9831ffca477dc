"""Parts of a problem: never longer than the whole, and worth more than the closed forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from threading import Barrier, Event
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from instances import HALF, REFERENCE, instance, uniform
from instances.four_by_eight import four_by_eight
from optpipe.fields import MAX_TIME_US
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us, split_backward_suffices
from solver.build import over_budget, peak_budgets, within_budgets
from solver.exact import relaxation
from solver.exact.cp_sat.model import ask_for_better, solve_cp_sat
from solver.exact.relaxation import projected, proof_by_parts, relaxation_bound, restricted
from solver.limits import Limits
from solver.published.ada_offload import in_flight_orders
from solver.serial import serial_orders
from solver.solution import Solution
from tests.problems import problems
from tests.sample import RARELY, examples, some
from tests.solutions import best_found, serial_start
from tests.unequal import random_orders, random_pipeline, random_unequal

PROVED = {name: entry["proved_optimum_us"] for name, entry in REFERENCE.items() if "proved_optimum_us" in entry}


def bound_of(problem: Problem, start: Solution, reported: list[Solution] | None = None) -> float:
    """The bound after a little work."""
    limits = Limits(workers=1, deterministic_limit=1.0)
    return relaxation_bound(problem, limits, start, (reported if reported is not None else []).append).bound_us


@st.composite
def parts(draw: st.DrawFn) -> tuple[Problem, list[int]]:
    """A problem, and stages of it that keep both ends and bring no two stages of one device together."""
    problem = draw(problems(max_stages=6))
    last = len(problem.stages) - 1
    kept = sorted({0, last} | {s for s in range(last) if draw(st.booleans())})
    for before, after in pairwise(kept):
        assume(after == before + 1 or problem.stages[before].device != problem.stages[after].device)
    return problem, kept


@settings(deadline=None)
@given(parts())
def test_orders_of_the_whole_serve_a_part_no_later_and_in_no_more_memory(drawn: tuple[Problem, list[int]]) -> None:
    problem, kept = drawn
    for orders in (in_flight_orders(problem, 2, 1), serial_orders(problem)):
        if orders is not None:
            whole, part_problem = simulate(problem, orders), projected(problem, kept)
            part_orders = restricted(orders, kept)
            part = simulate(part_problem, part_orders)
            assert part.value_us <= whole.value_us + 1e-9
            if within_budgets(problem, orders, whole):
                assert within_budgets(part_problem, part_orders, part)


def test_all_stages_are_the_whole() -> None:
    problem = instance("a-p4-m8-c0-b1o2-vshape-make")
    whole = projected(problem, range(len(problem.stages)))
    assert whole.stages == problem.stages
    assert whole.forward_delay_us == problem.forward_delay_us


def test_knows_more_than_the_closed_forms() -> None:
    """The first and the last device take as long as all four: the optimum, which CP-SAT proves of the whole as well."""
    problem = uniform(4, 5, budget=4, backward_weight_bytes=2, offload=HALF)
    start, reported = serial_start(problem), list[Solution]()
    assert start is not None
    assert lower_bound_us(problem) < bound_of(problem, start, reported) == 246
    assert [answer.bound_us for answer in reported] == sorted(answer.bound_us for answer in reported)
    assert reported[-1].orders is start.orders


@pytest.mark.parametrize("name", some(sorted(name for name in PROVED if "-p4-" in name), RARELY))
def test_is_never_above_a_proved_optimum(name: str) -> None:
    problem = instance(name)
    start = serial_start(problem)
    assert start is not None
    assert lower_bound_us(problem) <= bound_of(problem, start) <= PROVED[name]


@settings(max_examples=examples(25))
@given(problems(max_stages=5))
def test_no_schedule_is_below(problem: Problem) -> None:
    start, best = serial_start(problem), best_found(problem, 0.1)
    assume(start is not None and best is not None and split_backward_suffices(problem))
    assert start is not None
    assert best is not None
    assert bound_of(problem, start) <= best.value_us + 1e-9


@settings(max_examples=examples(25))
@given(problems(max_stages=5), st.booleans())
def test_what_parts_prove_is_optimal(problem: Problem, of_best: bool) -> None:
    """From a poor start there is a better schedule, or no answer; the best is proved, or not."""
    start, best = serial_start(problem), best_found(problem, 0.1)
    assume(start is not None and best is not None and split_backward_suffices(problem))
    assert start is not None
    assert best is not None
    limits = Limits(workers=1, deterministic_limit=0.2)
    answer = proof_by_parts(problem, limits, best if of_best else start, [].append)
    assert answer.bound_us <= best.value_us + 1e-9
    assert answer.orders is not None
    assert answer.value_us == pytest.approx(simulate(problem, answer.orders).value_us)


@pytest.mark.parametrize(
    ("name", "value_us"),
    some(
        [
            ("d-p8-m16-o1-mo0.5-b1o2-linear-make", 61_000),
            ("a-p8-m16-c0.1-b1o2-linear-span", 84_800),
            ("a-p16-m32-c0-b1o2-linear-make", 155_000),
        ]
    ),
)
def test_devices_that_would_be_late_prove_an_instance(
    name: str, value_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the last device, or all but the one that bounds most, nothing better is possible already."""
    asked: list[int] = []

    def ask(part: Problem, *rest: Any) -> Solution:
        asked.append(len(part.stages))
        return ask_for_better(part, *rest)

    monkeypatch.setattr(relaxation, "ask_for_better", ask)
    limits = Limits(workers=1, deterministic_limit=100.0)
    answer = proof_by_parts(instance(name), limits, Solution(None, value_us, 0.0), [].append)
    assert answer.bound_us == value_us
    assert asked == sorted(asked)
    assert asked[-1] < len(instance(name).stages)


def test_activations_without_room_beside_one_another_prove_a_part() -> None:
    """A tenth of a unit of work; where CP-SAT does not see that no two of them overlap, more than three."""
    part = projected(four_by_eight(72), [0, 1, 3])
    limits = Limits(workers=1, deterministic_limit=0.5)
    assert ask_for_better(part, limits, Solution(None, 7272.0, 0.0), [].append).bound_us == 7272


def test_several_workers_begin_with_different_devices_and_the_first_answer_ends_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = instance("d-p4-m8-o1-mo1-b1o2-linear-make")
    both_asked, asked = Barrier(2, timeout=60), list[Sequence[int]]()

    def ask(part: Problem, limits: Limits, start: Solution, _: Any) -> Solution:
        assert limits.workers == 1
        asked.append([stage.device for stage in part.stages])
        if both_asked.wait() == 0:
            return replace(start, bound_us=start.value_us)
        ended = Event()
        with limits.cancel.calling(ended.set):
            assert ended.wait(60)
        return start

    monkeypatch.setattr(relaxation, "ask_for_better", ask)
    start = Solution(None, 1e6, 0.0)
    answer = proof_by_parts(problem, Limits(workers=2, time_limit_s=float("inf")), start, [].append)
    assert answer.bound_us == answer.value_us == start.value_us
    assert len(asked) == 2
    assert asked[0] != asked[1]


def test_no_part_is_asked_about_from_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every part has a better schedule all devices come to the whole, and one of them asks."""
    problem = uniform(3, 4, budget=4)
    start, asked = serial_start(problem), list[Sequence[int]]()
    assert start is not None

    def ask(part: Problem, *rest: Any) -> Solution:
        asked.append([stage.device for stage in part.stages])
        return ask_for_better(part, *rest)

    monkeypatch.setattr(relaxation, "ask_for_better", ask)
    answer = proof_by_parts(problem, Limits(workers=3, time_limit_s=float("inf")), start, [].append)
    assert answer.bound_us <= answer.value_us < start.value_us
    assert len(asked) == len({*map(tuple, asked)})


def test_slices_and_unequal_microbatches_end_with_the_whole_itself() -> None:
    """Not with all of its stages as a part, in which delays of units may be shorter."""
    for seed in (21, 44, 45, 59):
        rng = Random(seed)
        problem = random_pipeline(rng) if seed % 2 else Problem.from_data(random_unequal(rng))
        orders, _, _ = random_orders(problem, rng)
        all_stages = range(len(problem.stages))
        as_part_us = simulate(projected(problem, all_stages), restricted(orders, all_stages)).value_us
        assert as_part_us < simulate(problem, orders).value_us
        start = Solution(orders, simulate(problem, orders).value_us, 0.0)
        answer = proof_by_parts(problem, Limits(workers=1, deterministic_limit=0.2), start, [].append)
        assert answer.orders is not None
        assert answer.value_us == simulate(problem, answer.orders).value_us <= start.value_us
        assert answer.bound_us <= answer.value_us * (1 + 1e-12)


def test_parts_end_with_a_better_schedule_of_the_whole() -> None:
    problem = uniform(3, 4, budget=4)
    start, reported = serial_start(problem), list[Solution]()
    assert start is not None
    answer = proof_by_parts(problem, Limits(workers=1, deterministic_limit=10.0), start, reported.append)
    assert reported[-1].orders is answer.orders is not start.orders
    assert answer.bound_us <= answer.value_us < start.value_us


def test_stops_when_cancelled_or_reached() -> None:
    problem = uniform(4, 8, budget=4)
    start = serial_start(problem)
    assert start is not None
    cancelled = Limits(deterministic_limit=1.0)
    cancelled.cancel.request()
    reported: list[Solution] = []
    for search in (relaxation_bound, proof_by_parts):
        assert search(problem, cancelled, start, reported.append).bound_us == lower_bound_us(problem)
    reached = replace(start, value_us=lower_bound_us(problem))
    assert bound_of(problem, reached, reported) == lower_bound_us(problem)
    assert not reported


def test_a_part_that_keeps_no_budget_proves_the_whole_infeasible() -> None:
    problem = uniform(4, 2, budget=1)
    answer = relaxation_bound(problem, Limits(workers=1, deterministic_limit=1.0), Solution(), [].append)
    assert answer.infeasible


def test_a_delay_in_place_of_stages_may_be_longer_than_a_problem_states() -> None:
    data = uniform(4, 4, budget=4).to_data()
    for stage in data["stages"]:
        stage["forward_us"] = 0.6 * MAX_TIME_US
    problem = Problem.from_data(data)
    start = serial_start(problem)
    assert start is not None
    assert lower_bound_us(problem) <= bound_of(problem, start) <= start.value_us


def test_what_a_part_proves_of_slices_is_not_raised_to_the_values_of_a_larger_part() -> None:
    """Stages 0 and 3 prove 115, the optimum. Beside stage 1 a gradient's delay of 5 us is put as 2: values are even."""
    data = uniform(4, 2).to_data() | {"transfer_us": [{"forward": 0, "backward": 4}, 0, 0], "slices": {"count": 2}}
    times_us = [(20, 2), (2, 2), (4, 4), (2, 4)]
    for stage, (forward_us, input_us) in zip(data["stages"], times_us, strict=True):
        stage |= {"forward_us": forward_us, "backward_input_us": input_us, "backward_weight_us": 2}
    data["stages"][1]["slice_factors"] = {"transfer": [1.25, 1]}
    data["stages"][2]["slice_factors"] = {"forward": [1, 2]}
    problem = Problem.from_data(data)
    start = serial_start(problem)
    assert start is not None
    best = solve_cp_sat(problem, Limits(workers=1, deterministic_limit=5.0), start, [].append)
    assert best.value_us == best.bound_us == 115
    assert bound_of(problem, start) == 115


def test_a_bound_of_the_whole_is_not_raised_to_the_values_of_a_part() -> None:
    """Stage 2 takes halves of a microsecond, the parts without it whole ones; the optimum is 14.5."""
    data = uniform(4, 2, budget=3, activation_bytes=1).to_data() | {"transfer_us": [0, 0.5, 0]}
    times_us = [(1, 2, 1), (1, 2, 2), (0.5, 0.5, 3.5), (1, 1, 2)]
    for stage, (forward_us, input_us, weight_us) in zip(data["stages"], times_us, strict=True):
        stage |= {"forward_us": forward_us, "backward_input_us": input_us, "backward_weight_us": weight_us}
    problem = Problem.from_data(data)
    start = serial_start(problem)
    assert start is not None
    limits = Limits(workers=1, deterministic_limit=10.0)
    assert solve_cp_sat(problem, limits, start, lambda answer: None).value_us == 14.5
    assert bound_of(problem, replace(start, bound_us=14.5)) == 14.5


@pytest.mark.parametrize("first", some(range(0, 120, 40)))
def test_parts_of_slices_and_unequal_microbatches_wait_no_longer_than_the_whole(first: int) -> None:
    """No delay of a unit is longer than the stages that are left out, and orders of the whole serve the part."""
    judged = 0
    for seed in range(first, first + 40):
        rng = Random(seed)
        problem = random_pipeline(rng) if seed % 2 else Problem.from_data(random_unequal(rng))
        orders, _, _ = random_orders(problem, rng)
        budgets = [{"memory_bytes": size} for size in peak_budgets(problem, orders)]
        problem = problem.from_data(problem.to_data() | {"devices": budgets})
        last = len(problem.stages) - 1
        kept = sorted({0, last} | {s for s in range(last) if rng.random() < 0.5})
        devices = [problem.stages[s].device for s in kept]
        if any(b > a + 1 and devices[k] == devices[k + 1] for k, (a, b) in enumerate(pairwise(kept))):
            continue
        judged += len(kept) <= last
        part, served = projected(problem, kept), restricted(orders, kept)
        for way, kinds in (("forward", "F"), ("backward", "B")):
            for k, (a, b) in enumerate(pairwise(kept)):
                passing_us = [problem.unit_delays_us[way][s] for s in range(a, b)]
                for s in range(a + 1, b):
                    kind = kinds if problem.stages[s].split_backward or kinds == "F" else "BW"
                    passing_us.append([problem.stage_of(s, unit).duration_us(kind) for unit in range(problem.units)])
                assert (part.unit_delays_us[way][k] <= np.sum(passing_us, axis=0) + 1e-9).all(), seed
        assert simulate(part, served).value_us <= simulate(problem, orders).value_us + 1e-9, seed
        assert not over_budget(part, served)
    assert judged >= 3


@pytest.mark.parametrize("own", [None, {}, {"bytes": [1, 1]}])
def test_a_stage_of_a_part_keeps_its_own_factors_of_slices(own: dict[str, list[float]] | None) -> None:
    """Lists that a stage leaves out are all 1, those of the problem hold only where it gives none at all."""
    data = uniform(3, 4, transfer_us=1).to_data()
    slower = {"forward": [1, 4], "backward_input": [1, 4], "backward_weight": [1, 4]}
    data["slices"] = {"count": 2, "factors": slower}
    data["stages"][0]["slice_factors"] = own
    problem = Problem.from_data(data)
    part = projected(problem, [0, 2])
    for kept, of_classes in zip((0, 2), part.unit_stages, strict=True):
        for unit in range(problem.units):
            for kind in ("F", "B", "W"):
                whole = problem.stage_of(kept, unit)
                assert of_classes[part.unit_class[unit]].duration_us(kind) == whole.duration_us(kind)
    start = serial_start(problem)
    assert start is not None
    assert bound_of(problem, start) <= start.value_us


def test_parts_of_causal_slices_wait_exactly_as_long_as_the_whole() -> None:
    """Without transfers, F and B of one shape: what is left out is a delay of each slice by itself."""
    problem = instance("q-p4-m4-n4-fused-b8")
    delays_us = projected(problem, [0, 3]).unit_delays_us
    assert delays_us["forward"].tolist() == [[30, 42, 54, 66] * 4]
    assert delays_us["backward"].tolist() == [[60, 84, 108, 132] * 4]


def test_parts_bound_a_free_order_better_than_the_closed_forms() -> None:
    """Two of four devices take 80, the four 82."""
    problem = instance("u-p4-m8-b4")
    start = Solution(bound_us=lower_bound_us(problem))
    assert start.bound_us < 80 <= bound_of(problem, start) <= PROVED["u-p4-m8-b4"]
