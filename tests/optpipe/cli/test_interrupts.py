"""Ctrl-C at any moment: exit code 130 and one message, with what was found by then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup

from instances import uniform
from optpipe.cli import serve
from optpipe.cli.console import compile_once, compile_within
from optpipe.problem import Problem
from solver.layout.ranking import Judged, rank
from solver.limits import Limits
from solver.process import ChildResult
from solver.solve import solve
from tests.optpipe.cli.conftest import Cli

LAYERS = Path(__file__).parents[3] / "examples" / "problems" / "real8.layers.json"


def _interrupted(*_: object, **__: object) -> Any:
    raise KeyboardInterrupt


def test_while_the_program_is_loading(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optpipe.cli.app.run", _interrupted)
    assert cli("methods").code == 130


def test_little_is_loaded_before_an_interrupt_is_answered() -> None:
    loaded = "import optpipe.cli, sys; print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True, timeout=60)
    assert {"typer", "rich", "numpy", "pydantic", "optpipe.cli.train"}.isdisjoint(names.stdout.split())


def test_while_options_are_read(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TyperGroup, "make_context", _interrupted)
    run = cli("methods", "--json")
    assert run.code == 130
    assert run.err == "error: interrupted.\n"
    assert run.document["error"]["type"] == "KeyboardInterrupt"


@pytest.mark.parametrize("judged", [True, False], ids=["with a schedule by then", "with none"])
def test_while_layouts_are_judged(judged: bool, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(candidates: Any, limits: Any, on_judged: Any) -> Sequence[Judged]:
        os.kill(os.getpid(), signal.SIGINT)
        ranking = rank(candidates, limits, on_judged)
        return ranking if judged else [replace(one, schedule=None) for one in ranking]

    monkeypatch.setattr("solver.layout.ranking.rank", interrupted)
    options = ("--devices", "2", "--global-batch", "4", "--microbatch-sizes", "1", "--placements", "linear")
    run = cli("plan", LAYERS, *options, "-o", tmp_path / "schedule.json")
    assert (run.code, (tmp_path / "schedule.json").exists()) == (130, judged)
    assert "best" in run.out if judged else run.err.endswith("error: interrupted.\n")


def test_an_ignored_ctrl_c_stays_ignored(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in what a script runs in the background, where the terminal's Ctrl-C is for the script alone."""

    def interrupted(problem: Problem, _method: str, limits: Limits, *_: object, **__: object) -> ChildResult:
        os.kill(os.getpid(), signal.SIGINT)
        assert not limits.cancel.requested
        return ChildResult(solve(problem, "1f1b"), "feasible", "time")

    monkeypatch.setattr("solver.process.solve_in_child", interrupted)
    path = tmp_path / "problem.json"
    path.write_text(uniform(2, 3).to_json())
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = cli("solve", path, "--no-cache", "--json")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (run.code, run.document["interrupted"]) == (0, False)


def test_a_service_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with serve._signals_interrupt():
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_while_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The terminal's Ctrl-C goes to every process of a session: this one would complain of it at length."""
    started: dict[str, object] = {}
    monkeypatch.setattr("solver.warm_up.is_warm", lambda: False)
    monkeypatch.setattr(subprocess, "run", lambda _command, **options: started.update(options))
    compile_once()
    assert started["start_new_session"] is True
    assert capsys.readouterr().err == "compiling kernels: once for an installation, up to a minute or two\n"


def test_a_plan_is_kept_while_kernels_are_compiled(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first Ctrl-C, or the time limit, ends the wait for the compiler, and what was rated is written."""

    def interrupted() -> bool:
        signal.raise_signal(signal.SIGINT)
        return True

    monkeypatch.setattr("solver.warm_up.warm_up_in_background", lambda: True)
    monkeypatch.setattr("solver.kernels.are_being_compiled", interrupted)
    job = ("llama-3.1-8b", "--gpus", 16, "--sequence", 8192, "--global-batch", 32, "--pp", 2)
    run = cli("plan", *job, "-o", tmp_path)
    assert (run.code, "compiling kernels" in run.err) == (130, True)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["complete"], plan["best"]["pp"], plan["solved"]) == (True, 2, [])
    monkeypatch.setattr("solver.kernels.are_being_compiled", lambda: True)
    monkeypatch.setattr("solver.warm_up.is_warm", lambda: False)
    compile_within(Limits(0.0))
    assert capsys.readouterr().err.endswith("so nothing is searched. Maybe run again in a minute.\n")
