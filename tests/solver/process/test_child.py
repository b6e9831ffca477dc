"""A child before its problem is there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from solver.process import child


@pytest.mark.parametrize("is_there", [False, True])
def test_loads_the_searches_while_it_waits_for_a_problem(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[bool] = []
    monkeypatch.setattr("solver.searches.load_searches", lambda: loaded.append(True))
    reading, writing = os.pipe()
    with open(reading) as stdin, open(writing, "w") as parent:
        if is_there:
            print("{}", file=parent, flush=True)
        monkeypatch.setattr(sys, "stdin", stdin)
        child._load()
    assert loaded == ([] if is_there else [True])


def test_a_published_schedule_waits_for_no_search_to_load() -> None:
    code = """
import sys
from solver.solve import solve
from tests.problems import uniform
assert solve(uniform(2, 3, budget=4), "zb-h1").method == "zb-h1"
print({"ortools", "pandas", "highspy"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300)
    assert done.stdout == "set()\n"
