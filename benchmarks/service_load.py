"""What a running service bears: answers a second and their latencies, and how soon a first schedule is there.

`python -m benchmarks.service_load http://localhost:8000` prints a Markdown table. It needs wrk
(``apt-get install wrk``) and a service with a worker; OPTPIPE_KEY holds a key where the service asks for one.
Submitting is refused beyond OPTPIPE_MAX_SUBMISSIONS_A_MINUTE: set it high for the service that is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from benchmarks.markdown import Row, machine, table
from benchmarks.section import say
from optpipe.client import Client
from optpipe.problem import Problem
from tests.problems import instance, uniform

FIRST_SCHEDULES = 20
"""Problems of which the first schedule is timed,"""
REST_S = 3.0
"""with so much time between them that the worker has a process ready for the next one."""

_UNIT_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}


@dataclass(frozen=True)
class Load:
    """What wrk measured on one call."""

    what: str
    answers_a_second: float
    p50_ms: float
    p99_ms: float
    refused: int

    @classmethod
    def read(cls, what: str, output: str) -> Load:
        """The figures in wrk's output."""
        refused = re.search(r"Non-2xx or 3xx responses: (\d+)", output)
        rate = re.search(r"Requests/sec: +([\d.]+)", output)
        assert rate is not None, output
        return cls(
            what, float(rate[1]), _latency_ms(output, 50), _latency_ms(output, 99), int(refused[1]) if refused else 0
        )

    @property
    def row(self) -> Row:
        rate, p50, p99 = f"{self.answers_a_second:,.0f}", f"{self.p50_ms:.1f}", f"{self.p99_ms:.1f}"
        return (self.what, rate, p50, p99, str(self.refused))


def _latency_ms(output: str, per_cent: int) -> float:
    found = re.search(rf"^ +{per_cent}% +([\d.]+)(us|ms|s|m) *$", output, re.MULTILINE)
    assert found is not None, output
    return float(found[1]) * _UNIT_MS[found[2]]


def main() -> None:
    """Parse the options, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="address of the service")
    parser.add_argument("--seconds", type=int, default=10, help="how long each call is repeated")
    parser.add_argument("--connections", type=int, default=8, help="that ask again as soon as they are answered")
    options = parser.parse_args()
    key = os.environ.get("OPTPIPE_KEY")
    with Client(options.url, key) as client:
        loads = cached_loads(client, options.url, key, options.seconds, options.connections)
        first_ms = [first_schedule_ms(client, k) for k in range(FIRST_SCHEDULES)]
    print(table(("call", "answers a second", "p50 ms", "p99 ms", "refused"), [load.row for load in loads], 1))
    print(f"\nwrk, 1 thread, {options.connections} connections, {options.seconds} s a call; {machine()}.")
    print(f"Submit to first valid schedule, {len(first_ms)} problems: {_spread(first_ms)}.")


def cached_loads(client: Client, url: str, key: str | None, seconds: int, connections: int) -> Sequence[Load]:
    """Calls that are answered from what was solved before."""
    problem = instance("zb-1.5b-p8-m24-mem1")
    job = client.submit(problem, "zb-auto")
    client.follow(job.id)
    path = f"/v1/schedules/{job.id}"
    again = json.dumps({"problem": problem.to_data(), "config": {"method": "zb-auto"}})
    calls: Sequence[tuple[str, str, str | None]] = (
        ("the job", path, None),
        ("its schedule, 576 ops", f"{path}/schedule", None),
        ("the same problem submitted again", "/v1/schedules", again),
    )
    loads = []
    for what, call, body in calls:
        loads.append(Load.read(what, _wrk(url + call, key, body, seconds, connections)))
        say(" ".join(loads[-1].row))
    return loads


def _wrk(url: str, key: str | None, body: str | None, seconds: int, connections: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "request.lua"
        script.write_text(_lua(key, body))
        rate = ("-t1", f"-c{connections}", f"-d{seconds}s")
        command: list[str] = ["wrk", *rate, "--latency", "--timeout", "10s", "-s", str(script), url]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        return run.stdout


def _lua(key: str | None, body: str | None) -> str:
    lines = [f'wrk.headers["Authorization"] = "Bearer {key}"'] if key else []
    if body is not None:
        lines += [
            'wrk.method = "POST"',
            'wrk.headers["Content-Type"] = "application/json"',
            f"wrk.body = [==[{body}]==]",
        ]
    return "\n".join(lines)


def first_schedule_ms(client: Client, number: int) -> float:
    """From a submission to the event of its first schedule, of a problem that nobody solved before."""
    problem = _new_problem(number)
    time.sleep(REST_S)
    began = time.perf_counter()
    job = client.submit(problem, time_limit_s=1)
    events = client.events(job.id)
    for event in events:
        if event.data["value_us"] is not None:
            taken_ms = 1e3 * (time.perf_counter() - began)
            break
    client.follow(job.id)
    return taken_ms


def _new_problem(number: int) -> Problem:
    moment = int(time.time() * 1000) % 10**6
    return uniform(4, 8, budget=8, transfer_us=1 + (1000 * moment + number) / 10**10)


def _spread(times_ms: Sequence[float]) -> str:
    low, *_, high = quantiles(times_ms, n=10)
    return f"p50 {median(times_ms):.0f} ms, p10 {low:.0f} ms, p90 {high:.0f} ms"


if __name__ == "__main__":
    main()
