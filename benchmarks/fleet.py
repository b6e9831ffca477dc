"""One hard problem searched by several worker processes: time to the same value.

`python -m benchmarks.fleet fleet` prints a Markdown table. Each worker process has one thread, so on a machine with two
cores the second one has a core of its own and the next ones do not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psycopg

from api.jobs.embedded import embedded_postgresql
from benchmarks.markdown import Row, machine, table
from benchmarks.section import Section, Size, main, say
from benchmarks.service_load import own_service
from instances import instance
from optpipe.client import Client
from optpipe.problem import Problem

COMMAND = "python -m benchmarks.fleet fleet"
INSTANCES = (
    "po-10.5b-4k-d8-v5-m64-mem0.25",
    "suites/problems/four-by-eight/86",
    "a-p8-m16-c0-b1o3-vshape-make",
)
"""Problems whose value still falls after many seconds; the first one long enough to lose a process meanwhile."""

SEEDS = {"quick": 1, "full": 3}
TIME_LIMIT_S = {"quick": 10, "full": 40}
PROCESSES = (1, 2, 4)


@dataclass(frozen=True)
class Search:
    """The incumbents of one job, as they came: seconds since the job began, and value."""

    found: Sequence[tuple[float, float]]

    @property
    def value_us(self) -> float:
        """The value at the end."""
        return self.found[-1][1]

    def seconds_to(self, value_us: float) -> float:
        """Seconds until a value at most as high; infinite where it was not reached."""
        return next((seconds for seconds, value in self.found if value <= value_us * (1 + 1e-12)), float("inf"))


def measure(size: Size, pictures: Path) -> str:
    """Search each problem with one, two and four worker processes; returns the table."""
    del pictures  # nothing is drawn
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        os.chmod(folder, 0o755)  # for root PostgreSQL runs as another user
        database = stack.enter_context(embedded_postgresql(Path(folder)))
        options = ("--no-worker", "--database-url", database)
        client = stack.enter_context(Client(stack.enter_context(own_service(*options, max_workers=max(PROCESSES)))))
        rows = [_row(client, database, instance(name), size) for name in INSTANCES]
        killed = _kill_a_helper(client, database, TIME_LIMIT_S[size])
    columns = ("instance", "1 process", *(f"{count} processes" for count in PROCESSES[1:]))
    return (
        f"{table(columns, rows, 1)}\n\nSeconds in which one process reached its value of {TIME_LIMIT_S[size]} s, and "
        "the seconds of more processes to that value as a share of these; median of "
        f"{SEEDS[size]} seed{'s' if SEEDS[size] > 1 else ''}, inf where most did not reach it. "
        f"{killed}\n\n`{COMMAND} --size {size}`: {machine()}."
    )


def _row(client: Client, database: str, problem: Problem, size: Size) -> Row:
    alone_s: list[float] = []
    ratios: dict[int, list[float]] = {count: [] for count in PROCESSES}
    for seed in range(SEEDS[size]):
        seconds: dict[int, float] = {}
        value_us = float("inf")
        for count in PROCESSES:
            _forget(database)
            with _workers(database, count):
                search = _searched(client, problem, count, seed, TIME_LIMIT_S[size])
            if count == 1:
                value_us = search.value_us
            seconds[count] = search.seconds_to(value_us)
            say(f"{problem.name}, seed {seed}, {count}: {search.value_us:.0f} us, that of 1 in {seconds[count]:.1f} s")
        alone_s.append(seconds[1])
        for count in PROCESSES:
            ratios[count].append(seconds[count] / seconds[1])
    return (problem.name, f"{median(alone_s):.1f}", *(f"{median(ratios[count]):.2f}" for count in PROCESSES[1:]))


def _kill_a_helper(client: Client, database: str, time_limit_s: float) -> str:
    """Kill the process that helps in the middle of a search; a sentence on what the job has lost."""
    _forget(database)
    with _workers(database, 1):
        job = client.submit(instance(INSTANCES[0]), time_limit_s=time_limit_s + READY_S, workers=2)
        with _workers(database, 1) as (helper,):  # the other one leads by now
            time.sleep(time_limit_s / 2)
            before = client.job(job.id)
            helper.kill()
            client.follow(job.id)
        after = client.job(job.id)
    assert before.status == "running", f"the job has {before.status} before a process is lost"
    assert before.value_us is not None
    assert after.value_us is not None
    kept = "no more" if after.value_us <= before.value_us else "MORE"
    return (
        f"One of two processes killed in the middle: the job {after.status}, with {kept} than the value that it had by "
        "then."
    )


@contextmanager
def _workers(database: str, count: int) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """Worker processes with one thread each, idle and ready."""
    settings = {"OPTPIPE_SOLVES": "1", "OPTPIPE_THREADS_PER_JOB": "1"}
    command = [sys.executable, "-m", "optpipe", "worker", "--database-url", database]
    environment, nowhere = os.environ | settings, subprocess.DEVNULL
    processes = [subprocess.Popen(command, env=environment, stdout=nowhere, stderr=nowhere) for _ in range(count)]
    time.sleep(READY_S)
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


READY_S = 8.0
"""Pause in which the workers start and prepare a process for a solve."""


def _searched(client: Client, problem: Problem, workers: int, seed: int, time_limit_s: float) -> Search:
    """Submit a job that asks for so many threads, and follow it to its end."""
    job = client.submit(problem, time_limit_s=time_limit_s, workers=workers, seed=seed)
    client.follow(job.id)
    found = []
    for event in client.events(job.id):
        value_us, seconds = event.data["value_us"], event.data.get("seconds")
        if value_us is not None and seconds is not None:
            found.append((float(seconds), float(value_us)))
        if event.data["status"] in ("succeeded", "failed", "cancelled"):
            break
    return Search(found)


def _forget(database: str) -> None:
    """Remove the solutions of earlier jobs, with which an equal problem would begin."""
    with psycopg.connect(database) as connection:
        connection.execute("TRUNCATE solved_problems CASCADE")


SECTIONS = (
    Section(
        "fleet",
        "Several workers on one problem",
        "A job that asks for more threads than one worker gives is searched by several, which share what they find. On "
        "two cores four processes share what two have alone; and a search may end in one of several values, so that a "
        "median of three seeds still changes much from run to run.",
        COMMAND,
        measure,
    ),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
