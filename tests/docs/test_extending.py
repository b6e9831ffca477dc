"""A toy of each extension changes the files that docs/extending.md lists, and then does what the page says of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

Edit = tuple[str, str, str]
"""A file, a text in it, and what is written before that text."""

TOYS: dict[str, list[Edit]] = {
    "A published schedule": [
        ("solver/published/__init__.py", "GPIPE = Paper(", 'TOY = Paper("Nobody", 2026, "A Toy", "nowhere")\n'),
        (
            "solver/published/toy.py",
            "",
            "from solver.published.one_stage import gpipe\n\n\ndef toy(problem):\n    return gpipe(problem)\n",
        ),
        ("solver/methods.py", "from solver.published.one_stage import", "from solver.published.toy import toy\n"),
        ("solver/methods.py", "_ONE_STAGE = ", "from solver.published import TOY\n\n"),
        (
            "solver/methods.py",
            '    _published("gpipe"',
            '    _published("toy-gpipe", toy, TOY, "gpipe once more", _ONE_STAGE, WHOLE_MODELS),\n',
        ),
    ],
    "A stage field": [
        ("optpipe/stage.py", "    backward_input_us: TimeUs\n", "    gather_us: TimeUs = 0\n"),
        (
            "optpipe/stage.py",
            "            backward_input_us=scaled_us(",
            "            gather_us=scaled_us(stage.gather_us, factors.forward),\n",
        ),
        ("optpipe/kinds.py", '"forward", "backward_input", "backward_weight", "offload"', '"gather", '),
        ("optpipe/costs.py", '"forward": "forward", ', '"gather": "forward", '),
        ("optpipe/costs.py", '        "forward": stage.forward_us,\n', '        "gather": stage.gather_us or nan,\n'),
    ],
    "A kind of op": [
        ("optpipe/kinds.py", '"F", "B", "W", "BW", "O", "R", "C"', '"G", '),
        (
            "optpipe/kinds.py",
            '    Kind(\n        "CBW"',
            '    Kind("G", "gather", "#000000", times=("gather",), needs=(Need("F"),)),\n',
        ),
        (
            "optpipe/verify/columns.py",
            '            "B": [backward],\n',
            '            "G": [(stage.gather_us or None, "forward")],\n',
        ),
        ("optpipe/verify/order.py", " = (self.ops.kind == code for", ", gather"),
        ("optpipe/verify/order.py", "]\n        if c.any() or cb.any():", ', (gather, "F")'),
    ],
    "A search": [
        ("solver/toy.py", "", "def keep(problem, limits, start, on_solution):\n    return start\n"),
        ("solver/searches.py", '    "parts": LazySearch(', '    "toy": LazySearch("toy", "keep"),\n'),
        (
            "solver/methods.py",
            '    Method("search", "search"',
            '    Method("toy", "search", "keeps its start", _ALL, EVERYTHING, search=SEARCHES["toy"]),\n',
        ),
    ],
    "An export format": [
        (
            "optpipe/export/__init__.py",
            '@exporter(\n    "torch-csv"',
            '@exporter("toy", "readers", title="Toy", ending="txt")\ndef toy(schedule: Any) -> Exported:\n'
            "    return Exported(schedule.method, {})\n\n\n",
        ),
    ],
}

USED = """
import json
from instances import uniform
from optpipe.export import EXPORTERS
from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from solver.build import build_schedule
from solver.limits import Limits
from solver.solve import solve

data = uniform(1, 2).to_data()
data["stages"][0]["gather_us"] = 5
orders = Orders.of_compute([[Op.parse(f"{kind}0.{i}") for i in range(2) for kind in "FGBW"]])
gathering = build_schedule(Problem.from_data(data), orders, 0.0, "toy", 0.0)  # which verifies it
kept = solve(uniform(2, 2), "toy", Limits(1.0, workers=1, deterministic_limit=0.01))
published = solve(uniform(2, 2), "toy-gpipe")
assert published.value_us == solve(uniform(2, 2), "gpipe").value_us
print(json.dumps([gathering.value_us, kept.status, EXPORTERS["toy"].export(kept).content == kept.method]))
"""


def listed(section: str) -> set[str]:
    """Files in the table of a section, those that are changed only in some cases left out."""
    text = (ROOT / "docs" / "extending.md").read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w/.]+)`(?:, `[\w.]+`)? \| (.*) \|$", text, re.MULTILINE)
    return {file for file, what in rows if " if " not in what}


@pytest.mark.parametrize("section", TOYS)
def test_files_of_an_extension_are_listed(section: str) -> None:
    files = listed(section)
    assert files
    assert [file for file, _, _ in TOYS[section] if not any(file.startswith(one) for one in files)] == []


def test_a_toy_of_each_does_what_the_page_says(tmp_path: Path) -> None:
    for package in ("optpipe", "solver", "instances"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file, text, added in (edit for edits in TOYS.values() for edit in edits):
        path = tmp_path / file
        before = path.read_text() if path.exists() else ""
        assert before.count(text) == 1 or not before, (file, text)
        path.write_text(before.replace(text, added + text) if before else added)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "NUMBA_DISABLE_JIT": "1"}
    run = subprocess.run(
        [sys.executable, "-P", "-c", USED], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == '[70.0, "feasible", true]'
