"""A running service for tests: server and worker in threads of this process, or the server in one of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import httpx
import structlog
import uvicorn
from fastapi import FastAPI

from api.jobs.run import Solve
from api.jobs.worker import Worker
from api.settings import Settings

START_S = 60.0


def log_through_pytest() -> None:
    """Hand what the service logs to the standard library, where pytest catches it, instead of printing it."""
    structlog.configure(
        processors=[structlog.stdlib.render_to_log_kwargs],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


log_through_pytest()


@contextmanager
def listening(app: FastAPI, port: int = 0) -> Iterator[str]:
    """The address of a server that runs in a thread of this process."""
    config = uvicorn.Config(app, port=port, log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
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


@contextmanager
def api_process(settings: Settings, port: int, folder: Path) -> Iterator[ApiProcess]:
    """Start `tests.api.api_process`; what it prints and logs goes to a file in `folder`."""
    assert settings.database_url is not None
    log = folder / "api.log"
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tests.api.api_process", settings.database_url.get_secret_value(), str(port)]
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
