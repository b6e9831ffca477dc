"""Names of the parts of `auto` are those under which they find and prove, and a measurement can leave each out."""

from __future__ import annotations

import pytest

from instances import HALF, uniform
from optpipe.errors import InputError
from optpipe.problem import Problem
from solver.bounds.lower_bound import best_bound, lower_bounds_us
from solver.components import COMPONENTS, components_named
from solver.limits import Limits
from solver.search.in_flight import list_kinds
from solver.searches import SEARCHES
from solver.strategy import SharedIncumbent, auto_subsolvers
from solver.warm_starts import offer_published, starts
from tests.optpipe.test_spread import vocabulary
from tests.recomputing import recomputing
from tests.solver.published.test_dualpipe_v import v_blocks
from tests.unequal import times, unequal

MODES = recomputing(4, 8, offload=HALF)
FREE = unequal(3, 6, microbatch_factors=times(*[1, 2] * 3), microbatch_order="free")
SLICED = unequal(3, 6, 30, slices={"count": 2, "factors": {"forward": [1, 2]}})
SPREAD = Problem.from_data(vocabulary(3, 6))
FROZEN = uniform(3, 6)
FROZEN = FROZEN.replaced(stages=[FROZEN.stages[0].replaced(backward="none"), *FROZEN.stages[1:]])
PROBLEMS = [
    uniform(3, 6, budget=8, offload=HALF),
    uniform(3, 6, v_shape=True),
    MODES,
    FREE,
    SLICED,
    SPREAD,
    v_blocks(2, 4, 2),
    FROZEN,
]


def test_they_are_those_of_the_rooms() -> None:
    words = {word for problem in PROBLEMS for name, _ in starts(problem) for word in name.split(", ")}
    assert {*COMPONENTS["start"]} - words == {"first-lists", "floor", "in-order"}  # offered elsewhere, and every order
    assert {name.split(", ")[0] for name, _ in starts(MODES)} <= {*COMPONENTS["start"]}
    assert {name for problem in PROBLEMS for name in lower_bounds_us(problem)} == set(COMPONENTS["bound"])
    kinds = {name for problem in PROBLEMS for name in list_kinds(problem)}
    assert kinds == set(COMPONENTS["list kind"])
    assert SEARCHES.keys() - {"milp"} | {"mode-rounds"} == set(COMPONENTS["search"])


@pytest.mark.parametrize("name", SEARCHES)
def test_each_search_is_there(name: str) -> None:
    assert callable(SEARCHES[name].load())


def test_wrong_names_are_refused_with_all_names() -> None:
    with pytest.raises(InputError, match=r"--without names 'serch'; there are search, .*floor. Maybe search."):
        components_named(["serch", "states"], "--without")


def test_the_others_of_a_recipe_have_the_work_of_what_is_left_out() -> None:
    [whole], [left] = (auto_subsolvers(uniform(4, 8), 1, without=names) for names in (set(), {"cp-sat", "windows"}))
    assert {turn.method for turn in whole} - {turn.method for turn in left} == {"cp-sat", "windows"}
    assert sum(turn.share for turn in left) == pytest.approx(sum(turn.share for turn in whole))


def test_starts_and_bounds_are_left_out() -> None:
    problem = uniform(4, 8)
    every = {name for name in COMPONENTS["start"] if name != "1f1b"}
    shared = SharedIncumbent(problem, Limits(without=frozenset(every)), None)
    offer_published(problem, shared)
    assert shared.best.method == "1f1b"
    name, bound_us = best_bound(problem)
    assert shared.best.proved_by == name
    assert best_bound(problem, {name})[0] != name
    assert best_bound(problem, {name})[1] <= bound_us
    assert best_bound(problem, set(COMPONENTS["bound"])) == ("", 0.0)
