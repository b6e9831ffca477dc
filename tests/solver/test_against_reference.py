"""Claims of optimality and infeasibility against a model without the cuts, bounds and dominance of the solvers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from instances import HALF, uniform
from optpipe.errors import DeadlockError, InfeasibleError, NoSolutionError
from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us, split_backward_suffices
from solver.build import snapped_bound, within_budgets
from solver.exact.relaxation import relaxation_bound
from solver.limits import Limits
from solver.serial import impossible_budgets, serial_orders
from solver.solution import Solution
from solver.solve import solve
from tests.problems import problems
from tests.reference_model import TooHardError, reference_optimum_us
from tests.sample import examples, some

ROUNDING_US = 1e-9


def tiny(stages: int, passes: int) -> st.SearchStrategy[Problem]:
    """Problems of up to so many stages, and so many microbatches times stages."""
    drawn = problems(max_devices=3, max_stages=stages, max_microbatches=4)
    return drawn.filter(lambda problem: len(problem.stages) * problem.microbatches <= passes)


def optimum_of(problem: Problem) -> float | None:
    """The reference, None where no schedule exists. Problems that are too hard for it are left out."""
    try:
        optimum_us = reference_optimum_us(problem)
    except TooHardError:
        assume(False)
        raise
    return None if optimum_us is None else float(optimum_us)


def answered(problem: Problem, method: str) -> Schedule | None:
    """The answer of a method, None where it proves that there is none. What takes it too long is left out."""
    try:
        return solve(problem, method, Limits(workers=1, deterministic_limit=0.5))
    except InfeasibleError:
        return None
    except NoSolutionError:
        assume(False)
        raise


@pytest.mark.parametrize("method", ["cp-sat", "auto"])
@settings(max_examples=examples(20))
@given(problem=tiny(4, 5))
def test_claims_are_true(problem: Problem, method: str) -> None:
    optimum_us, schedule = optimum_of(problem), answered(problem, method)
    assert (schedule is None) == (optimum_us is None)
    if schedule is not None and optimum_us is not None:
        assert schedule.bound_us <= optimum_us + ROUNDING_US
        assert schedule.value_us >= optimum_us - ROUNDING_US


@settings(max_examples=examples(30))
@given(problem=tiny(3, 5))
def test_bounds_hold(problem: Problem) -> None:
    optimum_us = optimum_of(problem)
    if impossible_budgets(problem):
        assert optimum_us is None
    assume(optimum_us is not None)
    assert optimum_us is not None
    assert lower_bound_us(problem) <= optimum_us + ROUNDING_US


@settings(max_examples=examples(10))
@given(problem=tiny(4, 5))
def test_parts_claim_no_more_than_the_whole(problem: Problem) -> None:
    """Also not where they begin from the optimum itself, which is a bound of the whole."""
    orders = serial_orders(problem)
    assume(orders is not None and split_backward_suffices(problem))
    assert orders is not None
    optimum_us = optimum_of(problem)
    assert optimum_us is not None
    value_us = simulate(problem, orders).value_us
    limits = Limits(workers=1, deterministic_limit=1.0)
    for known_us in (0.0, optimum_us):
        start = Solution(orders, value_us, known_us)
        assert relaxation_bound(problem, limits, start, lambda answer: None).bound_us <= optimum_us + ROUNDING_US


def tight_problem(seed: int) -> Problem:
    """A small random problem with budgets near what one microbatch takes on all stages of a device."""
    random = Random(seed)
    devices, stages, microbatches = random.randint(1, 3), random.randint(1, 4), random.randint(1, 4)
    times = random.choice([[1, 2, 3, 5, 9], [0, 1, 2], [0.5, 2.25, 0.1, 3], [10, 10.1, 12.7], [1234.5678, 987.654321]])

    def stage() -> dict[str, Any]:
        held = random.randint(1, 6)
        made = {name: random.choice(times) for name in ("forward_us", "backward_input_us", "backward_weight_us")}
        made |= {"device": random.randrange(devices), "activation_bytes": held}
        made |= {"backward_weight_bytes": random.randint(0, held + 1)}
        if random.random() < 0.4:
            made["workspace_bytes"] = {kind: random.randint(0, 2) for kind in ("F", "B", "W", "BW")}
        if random.random() < 0.5:
            copies = {name: random.choice(times) for name in ("offload_us", "reload_us")}
            made["offload"] = {"bytes": random.randint(1, held), **copies}
        return made

    every = [stage() for _ in range(stages)]
    held = [sum(stage["activation_bytes"] for stage in every if stage["device"] == d) for d in range(devices)]
    data = {"format": "optpipe.problem/1", "microbatches": microbatches, "stages": every}
    data |= {"objective": random.choice(["makespan", "device_span"]), "transfer_us": random.choice([0, 1, 0.5])}
    data |= {"devices": [{"memory_bytes": max(1, total + random.randint(-4, 4))} for total in held]}
    data |= {"copy_channels": {"duplex": random.random() < 0.5}, "host_memory_bytes": random.choice([None, 0, 2, 4])}
    return Problem.from_data(data)


def timeless(problem: Problem) -> Problem:
    """The same with ops and copies of one length: whether anything fits is a matter of orders alone."""
    stages = problem.to_data()["stages"]
    for stage in stages:
        stage |= dict.fromkeys(("forward_us", "backward_input_us", "backward_weight_us"), 1)
        if stage.get("offload"):
            stage["offload"] |= {"offload_us": 1, "reload_us": 1}
    return Problem.from_data(problem.to_data() | {"stages": stages, "transfer_us": 0, "objective": "makespan"})


@pytest.mark.parametrize("seed", some([17, 30, 34, 46, 54, 76, 106, 121, 123, 146], 3))
def test_where_nothing_fits_that_is_proved(seed: int) -> None:
    problem = tight_problem(seed)
    assert not impossible_budgets(problem)
    with pytest.raises(InfeasibleError) as caught:
        solve(problem, "auto", Limits(workers=1, deterministic_limit=10.0))
    assert caught.value.budgets_bytes
    try:
        assert reference_optimum_us(problem) is None
    except TooHardError:
        assert reference_optimum_us(timeless(problem)) is None


TIGHT = {
    "rounds": uniform(2, 4, budget=4, backward_weight_bytes=2),
    "one in flight": uniform(3, 2, budget=2),
    "V": uniform(2, 2, budget=6, v_shape=True),
    "offload": uniform(2, 3, budget=3, offload=HALF),
    "host": uniform(2, 3, budget=3, offload=HALF, host_memory_bytes=1),
    "spans": uniform(3, 2, budget=4, objective="device_span"),
}


@pytest.mark.parametrize("problem", TIGHT.values(), ids=TIGHT.keys())
def test_optima_in_tight_memory(problem: Problem) -> None:
    schedule = solve(problem, "cp-sat", Limits(workers=1))
    assert (schedule.status, schedule.value_us) == ("optimal", reference_optimum_us(problem))


OVERTAKEN = "F0.0 F0.1 B0.0 BW0.1 W0.0"
"""W of microbatch 0 after BW of microbatch 1: BW counts as B in the order of microbatches, not as W (docs/adr/0006)."""


def test_a_fused_backward_before_an_earlier_weight_pass_is_one_of_all_orders() -> None:
    every = [" ".join(map(str, orders)) for orders in all_orders(uniform(1, 2), [0])]
    assert OVERTAKEN in every
    assert "F0.0 F0.1 BW0.1 B0.0 W0.0" not in every


@pytest.mark.parametrize("method", ["cp-sat", "milp", "search", "pattern", "auto"])
def test_methods_that_begin_with_a_fused_backward_before_an_earlier_weight_pass(method: str) -> None:
    """Every method takes it for a schedule, and none loses the optimum by it."""
    problem = uniform(2, 2, budget=4)
    last = [Op(op.kind, 1, op.microbatch) for op in map(Op.parse, OVERTAKEN.split())]
    start = Orders.of_compute([[Op.parse(name) for name in OVERTAKEN.split()], last])
    assert value_us(problem, start) < float("inf")
    schedule = solve(problem, method, Limits(workers=1), starts=[start])
    assert schedule.bound_us <= reference_optimum_us(problem) <= schedule.value_us
    assert schedule.status == "optimal" or method in ("search", "pattern")


@pytest.mark.parametrize("objective", ["makespan", "device_span"])
@pytest.mark.parametrize("method", ["cp-sat", "auto"])
def test_whole_times_are_proved_exactly_however_long(method: str, objective: str) -> None:
    """10 us of 2e12 are less than a billionth: the value is the optimum all the same, not one that is as good as it."""
    data = uniform(2, 2, budget=4, objective=objective).to_data()
    data["stages"][0]["forward_us"] = 1e12
    problem = Problem.from_data(data)
    schedule = solve(problem, method, Limits(workers=1))
    assert (schedule.status, schedule.value_us) == ("optimal", reference_optimum_us(problem))


def test_equal_means_equal_where_values_are_multiples_of_a_step() -> None:
    assert snapped_bound(2e12 + 10, 2e12, step_us=1.0) == 2e12
    assert snapped_bound(2e12, 2e12 - 0.25, step_us=1.0) == 2e12
    assert snapped_bound(2e12, 2e12 + 0.25, step_us=1.0) == 2e12
    assert snapped_bound(2e12 + 10, 2e12, step_us=1e-9) == 2e12 + 10


def without_offload(problem: Problem) -> Problem:
    """The problem if nothing leaves to the host."""
    data = problem.to_data()
    data["stages"] = [stage | {"offload": None} for stage in data["stages"]]
    return Problem.from_data(data)


def has_few_orders(problem: Problem) -> bool:
    """True if no device has more than three microbatches of a stage, or one of two."""
    return all(len(stages) * problem.microbatches <= 3 for stages in problem.stages_of)


@settings(max_examples=examples(20))
@given(problem=tiny(2, 4).filter(has_few_orders).map(without_offload))
def test_the_reference_is_the_best_of_all_orders(problem: Problem) -> None:
    """The reference itself, against every order that the rules allow, budgets kept: fused backwards or split."""
    every = product(*(list(all_orders(problem, stages)) for stages in problem.stages_of))
    best_us = min(value_us(problem, Orders.of_compute(compute)) for compute in every)
    optimum_us = optimum_of(problem)
    assert best_us == pytest.approx(float("inf") if optimum_us is None else optimum_us)


def value_us(problem: Problem, orders: Orders) -> float:
    """The value of orders, infinite where they exceed a budget or wait in a circle."""
    try:
        simulation = simulate(problem, orders)
    except DeadlockError:
        return float("inf")
    return simulation.value_us if within_budgets(problem, orders, simulation) else float("inf")


def all_orders(problem: Problem, stages: Sequence[int]) -> Iterator[Sequence[Op]]:
    """Every order in which a device can run its stages: B and BW of one stage in order, like every other op type."""
    passes = list(product(stages, range(problem.microbatches)))
    for fused in product([False, True], repeat=len(passes)):
        kinds = [("F", "BW") if together else ("F", "B", "W") for together in fused]
        yield from continuations([], {Op(kind, *at) for at, way in zip(passes, kinds, strict=True) for kind in way})


def continuations(done: Sequence[Op], left: AbstractSet[Op]) -> Iterator[Sequence[Op]]:
    """Every order of what is `left`, after what is `done`."""
    if not left:
        yield done
    for op in left:
        if not any(comes_before(other, op) for other in left):
            yield from continuations([*done, op], left - {op})


def comes_before(one: Op, other: Op) -> bool:
    """True if a rule puts one op of a device before another."""
    if one.stage != other.stage:
        return False
    first, second = ("FBW".index(op.kind[0]) for op in (one, other))
    if one.microbatch == other.microbatch:
        return first < second
    return one.microbatch < other.microbatch and first == second
