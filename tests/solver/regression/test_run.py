"""Suites are read strictly, derive instances by microbatches and budgets, and are written as they were read."""

from __future__ import annotations

import json
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from instances import HALF, INSTANCES, REFERENCE, instance, uniform
from optpipe.errors import InputError
from optpipe.problem import Problem
from solver.limits import Limits
from solver.methods import METHODS, Method
from solver.regression.run import (
    Entry,
    MeasuredRun,
    Point,
    Public,
    Suite,
    expand_cases,
    load_public,
    measure,
    suites_folder,
)
from solver.solution import Solution
from solver.strategy import wait_for_outlived
from tests.solver.regression.suites import PROBLEM, RECORDED, figures, write_suite

SUITES = suites_folder()


@pytest.mark.parametrize("path", sorted(SUITES.glob("*.json")), ids=lambda path: path.stem)
def test_every_suite_of_the_project_loads_with_all_its_problems(path: Path) -> None:
    suite = Suite.load(path)
    assert suite.to_text() == path.read_text()
    cases = expand_cases(path, suite)
    assert len(cases) == len(suite.entries)


def test_every_instance_is_in_its_suite() -> None:
    """Activation modes, slices and unequal microbatches have suites of their own: nothing of them is published."""
    names = {
        suite: {entry.instance for entry in Suite.load(SUITES / f"{suite}.json").entries}
        for suite in ("published", "recomputation", "slices")
    }
    instances = {file.stem for file in INSTANCES.glob("*.json")} - {"reference"}
    assert names["recomputation"] == {name for name in instances if instance(name).has_modes}
    unequal = {name for name in instances if instance(name).has_factors or instance(name).slice_count > 1}
    assert names["slices"] == unequal
    assert names["published"] == instances - names["recomputation"] - unequal


def test_an_instance_is_derived_from_a_file(tmp_path: Path) -> None:
    problem = uniform(3, 4, budget=7, name="three", host_memory_bytes=5)
    unlimited = problem.to_data()
    unlimited["devices"][1]["memory_bytes"] = None
    (tmp_path / "three.json").write_text(json.dumps(unlimited))
    entry = Entry.from_data({"problem": "three.json", "microbatches": 9, "memory_share": 1.5})
    derived = entry.load_problem(tmp_path)
    assert derived.name == entry.instance == "three, m 9, memory x 1.5"
    assert [device.memory_bytes for device in derived.devices] == [10, None, 10]
    changed = {"name", "microbatches", "devices"}
    assert derived.microbatches == 9
    assert derived.model_dump(exclude=changed) == problem.model_dump(exclude=changed)
    assert Entry.from_data({"problem": "three.json"}).load_problem(tmp_path) == Problem.load(tmp_path / "three.json")


def test_a_share_of_no_budget_is_refused(tmp_path: Path) -> None:
    (tmp_path / "free.json").write_text(uniform(2, 2).to_json())
    entry = Entry.from_data({"problem": "free.json", "memory_share": 2})
    with pytest.raises(InputError, match=r"memory_share is 2, but no device of .*free\.json has a budget"):
        entry.load_problem(tmp_path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"tolerence": 0.1}], r"tolerence is not a field. Maybe you meant tolerance"),
        ([{"memory_share": -1}], r"entries\[0\].memory_share is -1"),
        ([{}, {}], r"entries\[1\] is two with auto, as is entries\[0\]. Maybe"),
        ([{"recorded": RECORDED | {"bound_us": 105}}], r"bound_us 105 above value_us 104. Maybe"),
        ([], "entries"),
    ],
)
def test_wrong_suites_are_refused(tmp_path: Path, entries: list[dict[str, Any]], message: str) -> None:
    path = tmp_path / "suite.json"
    data = {"format": "optpipe.suite/1", "entries": [{"problem": "two.json"} | entry for entry in entries]}
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=message):
        Suite.load(path)


def test_methods_take_the_place_of_the_recorded_one_on_each_instance_once(tmp_path: Path) -> None:
    path = write_suite(tmp_path, {"recorded": RECORDED}, {"method": "milp"}, {"microbatches": 5})
    suite = Suite.load(path)
    assert [(case.instance, case.method) for case in expand_cases(path, suite)] == [
        ("two", "auto"),
        ("two", "milp"),
        ("two, m 5", "auto"),
    ]
    cases = expand_cases(path, suite, ["cp-sat", "auto"], only="two")
    assert [(case.method, case.recorded is not None) for case in cases] == [("cp-sat", False), ("auto", True)]


def test_what_cannot_run_is_refused_before_anything_runs(tmp_path: Path) -> None:
    path = write_suite(tmp_path, {}, {"method": "zb-9"})
    suite = Suite.load(path)
    with pytest.raises(InputError, match="method is 'zb-9'"):
        expand_cases(path, suite)
    with pytest.raises(InputError, match=r"only is 'nine\*', which matches no instance\. Maybe one such as 'two'"):
        expand_cases(path, suite, ["auto"], only="nine*")
    (tmp_path / "two.json").unlink()
    with pytest.raises(InputError, match=r"two\.json|No such file"):
        expand_cases(path, suite, ["auto"])


def test_public_values_stand_beside_the_instance_as_it_is_alone(tmp_path: Path) -> None:
    path = write_suite(tmp_path, {}, {"microbatches": 5}, reference="reference.json", never_above_public=True)
    (tmp_path / "reference.json").write_text(json.dumps({"two": {"zb_v_us": 110}}))
    cases = expand_cases(path, Suite.load(path))
    assert [case.public.value_us if case.public else None for case in cases] == [110, None]


def test_the_curve_falls_to_the_schedule() -> None:
    problem = uniform(3, 4, budget=4, offload=HALF)
    run = measure(problem, "cp-sat", Limits(60, workers=1))
    assert run.figures is not None
    assert run.curve[-1].value_us == run.figures.value_us
    assert run.curve[-1].bound_us == run.figures.bound_us
    assert run.proof_seconds == run.curve[-1].seconds
    for earlier, later in pairwise(run.curve):
        assert earlier.seconds <= later.seconds
        assert earlier.value_us >= later.value_us
        assert earlier.bound_us <= later.bound_us
        assert earlier[1:3] != later[1:3]


def test_a_published_schedule_is_one_point() -> None:
    run = measure(PROBLEM, "1f1b", Limits())
    assert run.figures is not None
    assert [(point.value_us, point.method) for point in run.curve] == [(run.figures.value_us, "1f1b")]


def test_a_method_that_cannot_says_why() -> None:
    run = measure(PROBLEM, "gpipe", Limits())
    assert (run.figures, run.failed, run.curve) == (None, False, ())
    assert "its budget is 4" in run.why_not


def test_a_bug_of_a_method_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(problem: Problem, *_: object) -> None:
        raise AssertionError("no such stage")

    monkeypatch.setattr("solver.regression.run.solve_until_interrupted", broken)
    run = measure(PROBLEM, "auto", Limits())
    assert run.failed
    assert run.why_not == "AssertionError: no such stage"


def test_a_search_that_outlives_its_limit_is_over_before_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, ended = Event(), []

    def stubborn(problem: Problem, limits: Limits, start: Solution, *_: object) -> Solution:
        assert measured.wait(60)
        ended.append(limits.seconds)
        return start

    def wait(seconds: float) -> None:
        measured.set()
        wait_for_outlived(seconds)

    monkeypatch.setattr("solver.regression.run.wait_for_outlived", wait)

    monkeypatch.setitem(METHODS, "stubborn", Method("stubborn", "search", "", "", search=stubborn))
    monkeypatch.setattr(import_module("solver.solve"), "offer_published", lambda *_: None)
    run = measure(PROBLEM, "stubborn", Limits(0.5))
    assert "nothing within the budgets was found" in run.why_not
    assert [seconds > run.seconds for seconds in ended] == [True]


def test_reading_a_curve() -> None:
    curve = (Point(1.0, 9, 4, "1f1b"), Point(3.0, 8, 4, "cp-sat"), Point(4.0, 8, 8, "cp-sat"))
    run = MeasuredRun(figures(), "", False, 5.0, False, curve)
    assert [run.at(seconds) for seconds in (0.5, 1.0, 2.0, 10.0)] == [None, curve[0], curve[0], curve[2]]
    assert [run.seconds_to(value) for value in (9.5, 8, 7)] == [1.0, 3.0, None]
    assert run.proof_seconds is None


def loaded(tmp_path: Path, data: Any) -> dict[str, Public]:
    path = tmp_path / "reference.json"
    path.write_text(json.dumps(data))
    return load_public(path)


def test_the_best_exact_value_counts(tmp_path: Path) -> None:
    entry = {"best_public": {"value_us": 90, "scheduler": "best"}, "zb_v_us": 80, "zero_bubble_heuristic_us": 85}
    assert loaded(tmp_path, {"a": entry}) == {"a": Public(80, "ZB-V")}


def test_a_printed_bubble_is_read_as_the_most_that_it_can_mean(tmp_path: Path) -> None:
    public = loaded(tmp_path, {"a": {"public_bubble": {"v-half": 0.2}, "work_us": 800}})["a"]
    assert public.scheduler == "v-half"
    assert public.value_us == pytest.approx(800 / 0.79995)


def test_nothing_known(tmp_path: Path) -> None:
    assert loaded(tmp_path, {"a": {"best_public": None, "work_us": 8}}) == {}


def test_the_reference_of_the_project() -> None:
    public = load_public(INSTANCES / "reference.json")
    assert {name for name, entry in REFERENCE.items() if entry.get("best_public")} <= set(public)
    assert public["zb-1.5b-p8-m24-mem1"].value_us == 1310405


def test_a_wrong_reference_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"best_public\.value_us is missing"):
        loaded(tmp_path, {"a": {"best_public": {"scheduler": "best"}}})
    with pytest.raises(InputError, match="must be an object"):
        loaded(tmp_path, [])


def test_bubble_of_the_public_schedule() -> None:
    """The work of a device is 90, so that a value of 120 has a bubble of a quarter."""
    assert Public(120, "someone's").bubble(figures()) == pytest.approx(0.25)
