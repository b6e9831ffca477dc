"""Suites are read strictly, derive instances by microbatches and budgets, and are written as they were read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optpipe.errors import InputError
from optpipe.problem import Problem
from solver.bench.cases import cases_of
from solver.bench.suite import Entry, Suite, suites_folder
from tests.problems import INSTANCES, uniform
from tests.solver.bench.suites import RECORDED, write_suite

SUITES = suites_folder()


@pytest.mark.parametrize("path", sorted(SUITES.glob("*.json")), ids=lambda path: path.stem)
def test_every_suite_of_the_project_loads_with_all_its_problems(path: Path) -> None:
    suite = Suite.load(path)
    assert suite.to_text() == path.read_text()
    cases = cases_of(path, suite)
    assert len(cases) == len(suite.entries)


def test_published_has_every_instance() -> None:
    names = {entry.instance for entry in Suite.load(SUITES / "published.json").entries}
    assert names == {file.stem for file in INSTANCES.glob("*.json")} - {"reference"}


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
    assert [(case.instance, case.method) for case in cases_of(path, suite)] == [
        ("two", "auto"),
        ("two", "milp"),
        ("two, m 5", "auto"),
    ]
    cases = cases_of(path, suite, ["cp-sat", "auto"], only="two")
    assert [(case.method, case.recorded is not None) for case in cases] == [("cp-sat", False), ("auto", True)]


def test_what_cannot_run_is_refused_before_anything_runs(tmp_path: Path) -> None:
    path = write_suite(tmp_path, {}, {"method": "zb-9"})
    suite = Suite.load(path)
    with pytest.raises(InputError, match="method is 'zb-9'"):
        cases_of(path, suite)
    with pytest.raises(InputError, match=r"only 'nine\*' matches none of the suite's instances, such as 'two'"):
        cases_of(path, suite, ["auto"], only="nine*")
    (tmp_path / "two.json").unlink()
    with pytest.raises(InputError, match=r"two\.json|No such file"):
        cases_of(path, suite, ["auto"])


def test_public_values_stand_beside_the_instance_as_it_is_alone(tmp_path: Path) -> None:
    path = write_suite(tmp_path, {}, {"microbatches": 5}, reference="reference.json", never_above_public=True)
    (tmp_path / "reference.json").write_text(json.dumps({"two": {"zb_v_us": 110}}))
    cases = cases_of(path, Suite.load(path))
    assert [case.public.value_us if case.public else None for case in cases] == [110, None]
