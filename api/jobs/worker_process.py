"""Worker process: `optpipe worker`, and the supervised one of `optpipe serve`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Event, Thread

import structlog

from api.jobs.migrate import check_revision
from api.jobs.run import ChildSolver, Solve
from api.jobs.worker import STOP_S, Worker
from api.settings import Settings
from solver.process import child_environment, module_command
from solver.process.parent import load_verifier
from solver.warm_up import warm_up_in_background

END_S = STOP_S + 1
"""Time from SIGTERM to the end of the process at the latest."""

PAUSE_S = (0.5, 30.0)
"""First and longest pause before a worker that ended by itself is restarted."""

SETTLED_S = 60.0
"""Run time after which the pause is the first one again."""

_log = structlog.get_logger("optpipe.worker")


def run_worker(settings: Settings, *, until_stdin_ends: bool = False, solve: Solve | None = None) -> None:
    """Work until SIGTERM or SIGINT, unless ignored, or until stdin ends because its parent has gone.

    `solve`: instead of child processes. Raises InputError where the database is at another revision;
    DatabaseGoneError where it cannot be reached.
    """
    assert settings.database_url is not None
    check_revision(settings.database_url.get_secret_value())
    if solve is not None:
        asyncio.run(_run(Worker(settings, solve), until_stdin_ends))
        return
    if warm_up_in_background():
        _log.info("compiling kernels in the background, once for an installation: searches join as theirs are ready")
    with closing(ChildSolver()) as solver:
        solver.prepare()
        load_verifier()
        asyncio.run(_run(Worker(settings, solver, solver.prepare), until_stdin_ends))


async def _run(worker: Worker, until_stdin_ends: bool) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        worker.stop()
        # The system ends the process then, whatever its threads do; the heartbeat timeout recovers its jobs.
        signal.setitimer(signal.ITIMER_REAL, END_S)

    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stop)

    def stop_at_end_of_stdin() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        loop.call_soon_threadsafe(stop)

    if until_stdin_ends:
        Thread(target=stop_at_end_of_stdin, name="parent", daemon=True).start()
    with worker.metrics.served(worker.settings.host, worker.settings.metrics_port):
        await worker.run()


@contextmanager
def kept_worker(database_url: str) -> Iterator[None]:
    """Context with a worker process, which is restarted if it ends and never outlives this process.

    It takes its settings from the environment; the address is handed over there too, where no other user can read it.
    """
    stopping = Event()
    keeper = Thread(target=_keep, args=(database_url, stopping), name="keeper")
    keeper.start()
    try:
        yield
    finally:
        stopping.set()
        keeper.join()


def _keep(database_url: str, stopping: Event) -> None:
    pause_s = PAUSE_S[0]
    while not stopping.is_set():
        began_s = time.monotonic()
        code = _run_one(database_url, stopping)
        if stopping.is_set():
            return
        pause_s = PAUSE_S[0] if time.monotonic() - began_s > SETTLED_S else pause_s
        _log.error("worker ended by itself, and is started again", exit_code=code, pause_s=pause_s)
        stopping.wait(pause_s)
        pause_s = min(2 * pause_s, PAUSE_S[1])


def _run_one(database_url: str, stopping: Event) -> int:
    """Run one worker process until it ends or is to stop; its exit code."""
    with subprocess.Popen(
        module_command("optpipe", "worker", "--until-stdin-ends"),
        stdin=subprocess.PIPE,  # its end tells the worker that we have gone, however that was
        env=child_environment(OPTPIPE_DATABASE_URL=database_url),
        start_new_session=True,  # Ctrl-C in a terminal is for us: we stop it in our time
    ) as worker:
        while worker.poll() is None and not stopping.wait(0.1):
            pass
        worker.terminate()
        try:
            return worker.wait(END_S + 1)
        except subprocess.TimeoutExpired:
            worker.kill()
            return worker.wait()
