"""Running the command line in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from instances import uniform
from instances.schedules import one_f_one_b
from optpipe.cli import main
from optpipe.problem import Problem
from optpipe.schedule import schedule_text
from solver.limits import Limits
from solver.solve import solve


@dataclass(frozen=True)
class Run:
    """Outcome of a run: exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """stdout as exactly one JSON document."""
        return json.loads(self.out)


Cli = Callable[..., Run]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache for each test: none answers another, and the user's own stays as it is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], forked_children: None) -> Cli:
    """Runs `optpipe` with arguments."""

    def run(*arguments: object) -> Run:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return Run(caught.value.code, captured.out, captured.err)

    return run


@pytest.fixture
def problem_file(tmp_path: Path) -> Path:
    """p = 2, m = 3 with a budget that 1F1B keeps and GPipe does not."""
    path = tmp_path / "problem.json"
    path.write_text(uniform(2, 3, budget=4, name="two").to_json())
    return path


@pytest.fixture
def schedule_file(problem_file: Path, tmp_path: Path) -> Path:
    """Its proved schedule."""
    path = tmp_path / "schedule.json"
    path.write_text(schedule_text(solve(Problem.load(problem_file), "cp-sat", Limits(workers=1))))
    return path


@pytest.fixture
def quick_schedule_file(tmp_path: Path) -> Path:
    """One that needs no search."""
    path = tmp_path / "schedule.json"
    path.write_text(schedule_text(one_f_one_b(2, 2)))
    return path
