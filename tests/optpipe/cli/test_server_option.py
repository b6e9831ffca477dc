"""`optpipe solve --server`: the same lines, files and exit codes as a solve on this machine."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from api.app import create_app
from api.settings import Settings
from instances import uniform
from optpipe.schedule import Schedule
from optpipe.units import time_text
from optpipe.verify import verify
from tests.api.harness import (
    PROBLEM,
    STEP_VALUES_US,
    Stepwise,
    listening,
    new_key,
    service_settings,
    service_url,
    working,
)
from tests.optpipe.cli.conftest import Cli
from tests.postgresql import database_url, settings

__all__ = ["database_url", "service_settings", "service_url", "settings"]


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    path = tmp_path / "two.json"
    path.write_text(PROBLEM.to_json())
    return path


@pytest.fixture
def server(service_url: str, service_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a service, with a key for it in the environment."""
    monkeypatch.setenv("OPTPIPE_KEY", new_key(service_settings))
    return service_url


@pytest.fixture
def slow_server(settings: Settings) -> Iterator[str]:
    """A service that finds one schedule and then searches until it is stopped."""
    with listening(create_app(settings)) as url, working(settings, Stepwise(lambda: False)):
        yield url


def test_a_schedule_is_written(cli: Cli, problem: Path, server: str, tmp_path: Path) -> None:
    output = tmp_path / "schedule.json"
    run = cli("solve", problem, "--server", server, "-o", output)
    assert run.code == 0
    schedule = Schedule.load(output)
    assert verify(schedule).ok
    assert schedule.problem == PROBLEM
    assert f"makespan {time_text(STEP_VALUES_US[-1])}, optimal" in run.out
    assert "job " in run.err


def test_as_json(cli: Cli, problem: Path, server: str) -> None:
    run = cli("solve", problem, "--server", server, "--json")
    assert run.code == 0
    assert run.document["value_us"] == STEP_VALUES_US[-1]
    assert run.document["interrupted"] is False


def test_no_solution(cli: Cli, tmp_path: Path, server: str) -> None:
    path = tmp_path / "tight.json"
    path.write_text(uniform(2, 4, budget=2).to_json())
    run = cli("solve", path, "--server", server)
    assert run.code == 4
    assert "nothing published keeps the budgets" in run.err


@pytest.mark.parametrize("option", [("--no-cache",), ("--memory-limit", "1GiB")])
def test_what_is_the_servers_to_decide(cli: Cli, problem: Path, option: tuple[str, ...]) -> None:
    run = cli("solve", problem, "--server", "http://127.0.0.1:1", *option)
    assert run.code == 2
    assert f"{option[0]} is for a solve on this machine" in run.err


def test_a_wrong_key(cli: Cli, problem: Path, service_url: str) -> None:
    run = cli("solve", problem, "--server", service_url, "--key", "wrong")
    assert run.code == 1
    assert "this key is not known" in run.err


def test_ctrl_c_cancels_there_and_writes_the_best_so_far(
    cli: Cli, problem: Path, slow_server: str, tmp_path: Path
) -> None:
    output = tmp_path / "schedule.json"
    threading.Thread(target=_interrupt_when_following, args=(slow_server,), daemon=True).start()
    run = cli("solve", problem, "--server", slow_server, "-o", output, "--json")
    assert run.code == 130
    assert run.document["interrupted"] is True
    assert Schedule.load(output).value_us == STEP_VALUES_US[0]
    assert json.loads(output.read_text())["status"] == "feasible"


def _interrupt_when_following(url: str) -> None:
    with httpx.Client(base_url=url) as client:
        for _ in range(600):
            jobs = client.get("/v1/schedules").json()["jobs"]
            open_streams = "optpipe_http_open_connections 1.0" in client.get("/metrics").text
            if open_streams and jobs and jobs[0]["value_us"] is not None:
                break
            time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
