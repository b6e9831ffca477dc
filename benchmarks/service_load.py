"""Load of a running service: responses per second, latencies, and the time to a first schedule.

`python -m benchmarks.service_load service-load` prints a Markdown table of a service that it starts in an empty folder.
It needs wrk (``apt-get install wrk``).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import httpx

from benchmarks.markdown import Row, machine, table
from benchmarks.section import Section, Size, main, say
from instances import instance, uniform
from optpipe.client import Client
from optpipe.problem import Problem

COMMAND = "python -m benchmarks.service_load service-load"
CONNECTIONS = 4
SOLVED, METHOD = "zb-1.5b-p8-m24-mem1", "zb-auto"
SECONDS = {"quick": 2, "full": 10}
READY_S = 60
FIRST_SCHEDULES = {"quick": 3, "full": 30}
"""Problems whose first schedule is timed, at rest and under load."""
REST_S = 3.0
"""Pause before each of them, in which the worker prepares a process."""

_UNIT_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}


@dataclass(frozen=True)
class Load:
    """Measurement of one call by wrk."""

    what: str
    answers_a_second: float
    p50_ms: float
    p99_ms: float
    refused: int

    @classmethod
    def read(cls, what: str, output: str) -> Load:
        """Parse the output of wrk."""
        refused = re.search(r"Non-2xx or 3xx responses: (\d+)", output)
        rate = re.search(r"Requests/sec: +([\d.]+)", output)
        assert rate is not None, output
        return cls(
            what, float(rate[1]), _latency_ms(output, 50), _latency_ms(output, 99), int(refused[1]) if refused else 0
        )

    @property
    def row(self) -> Row:
        """Cells of the table."""
        rate, p50, p99 = f"{self.answers_a_second:,.0f}", f"{self.p50_ms:.1f}", f"{self.p99_ms:.1f}"
        return (self.what, rate, p50, p99, str(self.refused))


def _latency_ms(output: str, per_cent: int) -> float:
    found = re.search(rf"^ +{per_cent}% +([\d.]+)(us|ms|s|m) *$", output, re.MULTILINE)
    assert found is not None, output
    return float(found[1]) * _UNIT_MS[found[2]]


def measure(size: Size, pictures: Path) -> str:
    """Measure a service started for this; returns the table. Exits if wrk is not installed."""
    del pictures  # nothing is drawn
    if shutil.which("wrk") is None:
        raise SystemExit("service-load asks with wrk, and there is none. Maybe 'apt-get install wrk'.")
    with own_service() as url, Client(url) as client:
        loads = cached_loads(client, url, SECONDS[size])
        numbers = range(FIRST_SCHEDULES[size])
        at_rest_ms = [first_schedule_ms(client, k) for k in numbers]
        say(f"first schedule, at rest: {_spread(at_rest_ms)}")
        with _loaded(f"{url}/v1/schedules/{client.submit(instance(SOLVED), METHOD).id}/schedule"):
            loaded_ms = [first_schedule_ms(client, k) for k in numbers]
    rows = table(("call", "answers a second", "p50 ms", "p99 ms", "refused"), [load.row for load in loads], 1)
    return (
        f"{rows}\n\nFrom submitting to the first valid schedule, {len(numbers)} problems one after the other: "
        f"{_spread(at_rest_ms)}; while {CONNECTIONS} connections ask for a schedule again and again: "
        f"{_spread(loaded_ms)}.\n\n`{COMMAND} --size {size}`: wrk with {CONNECTIONS} connections that ask again as "
        f"soon as they are answered, {SECONDS[size]} s a call, on the machine of the service; {machine()}."
    )


@contextmanager
def own_service(*options: str, **settings: object) -> Iterator[str]:
    """Start `optpipe serve` with its own data folder, further options and settings, and yield its address."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        os.chmod(folder, 0o755)  # for root PostgreSQL runs as another user
        port = free.getsockname()[1]
        free.close()
        more = {"XDG_DATA_HOME": folder, "OPTPIPE_MAX_SUBMISSIONS_A_MINUTE": "1000000"}
        more |= {f"OPTPIPE_{name.upper()}": str(value) for name, value in settings.items()}
        command = [sys.executable, "-m", "optpipe", "serve", "--port", str(port), *options]
        log = Path(folder) / "log"
        with log.open("w") as out, subprocess.Popen(command, env=os.environ | more, stdout=out, stderr=out) as service:
            try:
                yield _when_ready(service, f"http://127.0.0.1:{port}", log)
            finally:
                service.terminate()


def _when_ready(service: subprocess.Popen[bytes], url: str, log: Path) -> str:
    """Wait for the service and return its address. Raises RuntimeError if it ends or takes too long."""
    for _ in range(READY_S):
        time.sleep(1)
        if service.poll() is not None:
            raise RuntimeError(f"the service ended with code {service.returncode}:\n{log.read_text()[-2000:]}")
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/readyz").is_success:
                return url
    raise RuntimeError(f"the service was not ready after {READY_S} s:\n{log.read_text()[-2000:]}")


def cached_loads(client: Client, url: str, seconds: int) -> Sequence[Load]:
    """Measure calls answered from cached results, each for so many seconds."""
    problem = instance(SOLVED)
    job = client.submit(problem, METHOD)
    client.follow(job.id)
    path = f"/v1/schedules/{job.id}"
    again = json.dumps({"problem": problem.to_data(), "config": {"method": METHOD}})
    calls: Sequence[tuple[str, str, str | None]] = (
        ("the job", path, None),
        ("its schedule, 576 ops", f"{path}/schedule", None),
        ("the same problem submitted again", "/v1/schedules", again),
        ("the newest 50 of these jobs", "/v1/schedules?limit=50", None),
    )
    loads = []
    for what, call, body in calls:
        loads.append(Load.read(what, _wrk(url + call, body, seconds)))
        say(" ".join(loads[-1].row))
    return loads


def _wrk(url: str, body: str | None, seconds: int) -> str:
    """Run wrk with GET, or with POST if there is a body; returns its output."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "request.lua"
        script.write_text(_lua(body) if body else "")
        rate = ("-t1", f"-c{CONNECTIONS}", f"-d{seconds}s")
        command: list[str] = ["wrk", *rate, "--latency", "--timeout", "10s", "-s", str(script), url]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        return run.stdout


@contextmanager
def _loaded(url: str) -> Iterator[None]:
    """Context in which an address is asked as fast as it answers."""
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", "-d1h", url]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as asking:
        try:
            yield
        finally:
            asking.terminate()


def _lua(body: str) -> str:
    """Lua script for wrk to post a JSON body."""
    lines = ['wrk.method = "POST"', 'wrk.headers["Content-Type"] = "application/json"', f"wrk.body = [==[{body}]==]"]
    return "\n".join(lines)


def first_schedule_ms(client: Client, number: int) -> float:
    """Milliseconds from the submission of a new problem to the event of its first schedule."""
    problem = _new_problem(number)
    time.sleep(REST_S)
    began = time.perf_counter()
    job = client.submit(problem, time_limit_s=1)
    with_value = (event for event in client.events(job.id) if event.data["value_us"] is not None)
    next(with_value)
    taken_ms = 1e3 * (time.perf_counter() - began)
    client.follow(job.id)
    return taken_ms


def _new_problem(number: int) -> Problem:
    """Problem with a transfer time of its own, so that no cached result exists."""
    moment = int(time.time() * 1000) % 10**6
    return uniform(4, 8, budget=8, transfer_us=1 + (1000 * moment + number) / 10**10)


def _spread(times_ms: Sequence[float]) -> str:
    low, *_, high = quantiles(times_ms, n=10, method="inclusive")
    return f"p50 {median(times_ms):.0f} ms, p10 {low:.0f} ms, p90 {high:.0f} ms, the slowest {max(times_ms):.0f} ms"


SECTIONS = (
    Section(
        "service-load",
        "What the service bears",
        "A job and its schedule, a problem submitted again that was solved before, a page of the list; and "
        "how soon a new problem has a schedule.",
        COMMAND,
        measure,
    ),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
