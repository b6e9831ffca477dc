"""A running service for tests: stand-in solves, servers and workers in threads or processes, and fixtures.

Fixtures: two services for all tests of a file, one with a worker and one without; every test has its own keys, and
so sees its own jobs alone.

idle       a client of the service whose jobs stay in the queue
client     a client of the service whose jobs are solved within milliseconds
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from socket import socket
from typing import Any

import httpx
import psycopg
import pytest
import structlog
import uvicorn
from fastapi import FastAPI
from httpx import Client
from sqlalchemy import make_url

from api.app import create_app
from api.jobs.run import OnEvent, Solve, SolveRequest
from api.jobs.store import Store
from api.jobs.worker import Worker
from api.server import server_config
from api.settings import Settings
from instances import uniform
from optpipe.errors import InfeasibleError, MethodError, NoSolutionError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from solver.process import ChildResult, Heartbeat
from solver.serial import impossible_budgets, known_budgets_bytes
from solver.solution import Progress, Solution
from solver.solve import solve
from tests.postgresql import TEMPLATE

PROBLEM = uniform(2, 4, budget=8, name="two devices")
STEPS = ("1f1b", "zb-h1", "zb-h2")
STEP_VALUES_US = (154, 134, 131)
"""Values that they reach on PROBLEM; the last is optimal."""


def body(problem: Problem = PROBLEM, **config: Any) -> dict[str, Any]:
    """Body of a request to solve a problem."""
    return {"problem": problem.to_data(), "config": config}


class Stepwise:
    """Solves with one published schedule after another; `may_go_on` is asked, again and again, before each but the
    first. Ends early when it is cancelled."""

    def __init__(self, may_go_on: Callable[[], bool]) -> None:
        self.may_go_on = may_go_on

    def __call__(self, task: SolveRequest, on_event: OnEvent) -> ChildResult:
        best: Schedule | None = None
        for method in STEPS:
            while best is not None and not self.may_go_on():
                if task.cancel.requested:
                    return ChildResult(best, "feasible", "interrupted")
                on_event(Heartbeat(0.0, None))
                time.sleep(0.02)
            best = _better(task.problem, method, best, on_event)
        if best is None and impossible_budgets(task.problem):
            error = InfeasibleError("one microbatch alone needs more.", known_budgets_bytes(task.problem))
            return ChildResult(None, "infeasible", None, error)
        if best is None:
            return ChildResult(None, "no_solution", "time", NoSolutionError("nothing published keeps the budgets."))
        return ChildResult(best, best.status, None)


def _better(problem: Problem, method: str, best: Schedule | None, on_event: OnEvent) -> Schedule | None:
    try:
        found = solve(problem, method)
    except MethodError:
        return best
    if best is not None and found.value_us >= best.value_us:
        return best
    on_event(Progress(Solution(found.orders, found.value_us, found.bound_us, method), 0.1))
    return found


at_once = Stepwise(lambda: True)
"""Solves within milliseconds."""


START_S = 60.0


def log_through_pytest() -> None:
    """Hand what the service logs to the standard library, where pytest catches it, instead of printing it."""
    structlog.configure(
        processors=[structlog.stdlib.render_to_log_kwargs],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


log_through_pytest()


class _Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Also end connections whose clients read nothing. Left to the end of the loop, their sockets stay open."""
        await super().shutdown(sockets)
        for connection in [*self.server_state.connections]:
            connection.transport.abort()
        await asyncio.sleep(0)


@contextmanager
def listening(app: FastAPI, port: int = 0) -> Iterator[str]:
    """The address of a server that runs in a thread of this process.

    It ends what it answers at once: a stream of events would be waited for, though nobody reads it any more.

    Its loop is asyncio's, which waits for child processes by threads. A torch DataLoader with workers takes SIGCHLD for
    itself, and then uvloop's never hears of an ended one: each server of a run took a minute to stop.
    """
    config = server_config(app)
    config.port, config.timeout_graceful_shutdown, config.loop = port, 0, "asyncio"
    server = _Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + START_S
    while not server.started and thread.is_alive() and time.monotonic() < until:
        time.sleep(0.01)
    assert server.started
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(START_S)


@contextmanager
def working(settings: Settings, solve: Solve) -> Iterator[None]:
    """A worker that runs in a thread of this process."""
    ready: SimpleQueue[tuple[Worker, asyncio.AbstractEventLoop]] = SimpleQueue()

    async def work() -> None:
        worker = Worker(settings, solve)
        ready.put((worker, asyncio.get_running_loop()))
        await worker.run()

    thread = threading.Thread(target=lambda: asyncio.run(work()), daemon=True)
    thread.start()
    worker, loop = ready.get(timeout=START_S)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(worker.stop)
        thread.join(START_S)


@dataclass(frozen=True)
class ApiProcess:
    """A service in a process of its own, without a worker."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait()
        with suppress(httpx.TransportError):  # a forked one ends behind its client
            while True:
                httpx.get(f"{self.url}/healthz")


@contextmanager
def api_process(
    settings: Settings, port: int, folder: Path, python: str | Path = sys.executable
) -> Iterator[ApiProcess]:
    """Start `tests.api.api_process`; what it prints and logs goes to a file in `folder`."""
    assert settings.database_url is not None
    log = folder / "api.log"
    url = f"http://127.0.0.1:{port}"
    command = [python, "-m", "tests.api.api_process", settings.database_url.get_secret_value(), str(port)]
    with log.open("ab") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            _wait_until_it_answers(url)
            yield ApiProcess(url, process, log)
        finally:
            process.kill()


def _wait_until_it_answers(url: str) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        with suppress(httpx.TransportError):
            httpx.get(f"{url}/healthz")
            return
        time.sleep(0.05)
    raise AssertionError("the service does not answer")


NewClient = Callable[[], Client]
_numbers = count()


@pytest.fixture(scope="module")
def idle_settings(postgresql: str) -> Settings:
    """Settings of the service without a worker."""
    return _settings(postgresql, "idle")


@pytest.fixture(scope="module")
def idle_url(idle_settings: Settings, forked_pool: None) -> Iterator[str]:
    """The address of the service without a worker."""
    with listening(create_app(idle_settings)) as url:
        yield url


@pytest.fixture(scope="module")
def service_settings(postgresql: str) -> Settings:
    """Settings of the service with a worker."""
    return _settings(postgresql, "worked")


@pytest.fixture(scope="module")
def service_url(service_settings: Settings, forked_pool: None) -> Iterator[str]:
    """The address of the service with a worker."""
    with listening(create_app(service_settings)) as url, working(service_settings, at_once):
        yield url


@pytest.fixture
def idle(idle_url: str, idle_settings: Settings) -> Iterator[Client]:
    """A client of the service without a worker, with a key of its own."""
    with client_of(idle_url, new_key(idle_settings)) as client:
        yield client


@pytest.fixture
def client(service_url: str, service_settings: Settings) -> Iterator[Client]:
    """A client of the service with a worker, with a key of its own."""
    with client_of(service_url, new_key(service_settings)) as client:
        yield client


def client_of(url: str, key: str | None) -> Client:
    """A client that sends a key. It reads no certificates, which takes longer than most tests' calls."""
    return Client(base_url=url, timeout=90, verify=False, headers={"Authorization": f"Bearer {key}"} if key else {})


def new_key(settings: Settings) -> str:
    """The secret of a new key."""

    async def create() -> str:
        async with Store(settings) as store:
            return (await store.create_key("test")).secret

    return asyncio.run(create())


def _settings(postgresql: str, database: str) -> Settings:
    """Settings of a service on a database of its own, which asks for keys.

    Every file of tests has services of its own, hence the number: what a test of another file patches, or does to the
    one state of an outage that a process has, must not reach them.
    """
    database = f"{database}_{next(_numbers)}"
    with psycopg.connect(postgresql, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {database} TEMPLATE {TEMPLATE}".encode())
    url = make_url(postgresql).set(database=database).render_as_string(hide_password=False)
    return Settings.load(database_url=url, require_keys=True, max_workers=2, max_body_bytes=2**20)
