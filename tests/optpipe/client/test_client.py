"""Solving on a server: what comes back, what is told on the way, and what happens when something breaks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from api.app import create_app
from api.settings import Settings
from instances import uniform
from optpipe.client import Client, Progress
from optpipe.client import connection as client_connection
from optpipe.errors import InfeasibleError, InputError, NoSolutionError, ServiceError
from optpipe.verify import verify
from tests.api.harness import PROBLEM, STEP_VALUES_US, Stepwise, listening, new_key, working


@pytest.fixture
def remote(service_url: str, service_settings: Settings) -> Iterator[Client]:
    """A client of a service that solves within milliseconds."""
    with Client(service_url, new_key(service_settings)) as client:
        yield client


def test_a_schedule_comes_back(remote: Client) -> None:
    problem = uniform(2, 6, budget=8)
    told: list[Progress] = []
    schedule = remote.solve(problem, on_progress=told.append, name="mine", tags=["a"])
    assert verify(schedule).ok
    assert schedule.problem == problem
    assert told[-1].value_us == schedule.value_us
    assert [progress.value_us for progress in told] == sorted((p.value_us for p in told), reverse=True)


def test_a_plan_comes_back(remote: Client) -> None:
    assert "llama-3.1-8b" in [model["name"] for model in remote.models()]
    h100 = next(machine for machine in remote.machines() if machine["name"] == "h100")
    faster: list[Progress] = []
    fixed = {"pp": 2, "tp": 2, "microbatch_size": 1}
    plan = remote.plan("llama-3.1-8b", 8, h100, 4096, 16, fixed=fixed, time_limit_s=6, on_progress=faster.append)
    assert plan.document["best"]["pp"] == 2
    assert plan.job.value_us == faster[-1].value_us == plan.document["strategies"][0]["seconds"] * 1e6
    assert plan.schedule is not None
    assert verify(plan.schedule).ok
    with pytest.raises(InfeasibleError, match="nothing fits"):
        remote.plan("llama-3.1-405b", 8, "h100", 4096, 16, time_limit_s=5)


def test_no_solution_is_the_same_error_as_here(remote: Client) -> None:
    with pytest.raises(NoSolutionError, match="nothing published keeps the budgets"):
        remote.solve(uniform(2, 4, budget=2))


def test_the_servers_words_for_what_is_wrong(remote: Client) -> None:
    with pytest.raises(InputError, match="method is 'best' but must be one of: auto, cp-sat"):
        remote.solve(PROBLEM, "best")
    with pytest.raises(InputError, match="/config/workers is 3 but this server allows at most 2"):
        remote.solve(PROBLEM, workers=3)


def test_a_wrong_key(service_url: str) -> None:
    with Client(service_url, "wrong") as client, pytest.raises(ServiceError, match="this key is not known") as caught:
        client.solve(PROBLEM)
    assert caught.value.status == 401


def test_a_server_that_is_not_there(free_tcp_port: int) -> None:
    with (
        Client(f"http://127.0.0.1:{free_tcp_port}", patience_s=0.3) as client,
        pytest.raises(ServiceError, match=r"cannot be reached: .* Maybe it is not running"),
    ):
        client.solve(PROBLEM)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", "http://[::1", ""])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(InputError, match="server is ") as caught, Client(url, patience_s=0) as client:
        client.solve(PROBLEM)
    assert caught.value.issues[0].code == "bad_url"


def test_a_timeout_brings_the_best_so_far(settings: Settings) -> None:
    with listening(create_app(settings)) as url, working(settings, Stepwise(lambda: False)), Client(url) as client:
        job = client.submit(PROBLEM)
        while client.job(job.id).value_us is None:
            time.sleep(0.05)
        with pytest.raises(TimeoutError):
            client.follow(job.id, until=time.monotonic() + 0.2)
        client.cancel(job.id)
        result = client.result(job.id)
    assert result.schedule_or_error().value_us == STEP_VALUES_US[0]
    assert (result.job.status, result.limit) == ("cancelled", "interrupted")


def test_a_timeout_in_the_queue(settings: Settings) -> None:
    with listening(create_app(settings)) as url, Client(url) as client:
        with pytest.raises(NoSolutionError, match="ended as cancelled without a schedule"):
            client.solve(PROBLEM, timeout_s=0.2)
        (job,) = client._connection.request("GET", "/v1/schedules").json()["jobs"]
    assert job["status"] == "cancelled"


def test_an_interrupt_cancels_the_job(settings: Settings) -> None:
    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    with listening(create_app(settings)) as url, working(settings, Stepwise(lambda: False)), Client(url) as client:
        with pytest.raises(KeyboardInterrupt):
            client.solve(PROBLEM, on_progress=interrupt)
        (job,) = client._connection.request("GET", "/v1/schedules").json()["jobs"]
        ended = client.result(job["id"])
    assert ended.job.status == "cancelled"
    assert ended.schedule is not None
    assert ended.limit == "interrupted"


JOB = {
    "id": "1",
    "status": "failed",
    "termination": {"reason": "infeasible", "limit": None},
    "value_us": None,
    "bound_us": None,
    "error": "proved: no schedule keeps the budgets. Maybe raise devices[].memory_bytes to [5], which is known to do.",
}


class Scripted(BaseHTTPRequestHandler):
    """Answers each request with the next one of a script: a status, headers and a body."""

    script: list[tuple[int, dict[str, str], Any]]
    asked: list[tuple[str, str, str | None, str | None]]

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        seen = (self.command, self.path, self.headers.get("Idempotency-Key"), self.headers.get("Last-Event-ID"))
        self.asked.append(seen)
        status, headers, content = self.script.pop(0)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content.encode())

    do_GET = do_POST = _answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[Scripted], str]]:
    """A server that misbehaves as told."""
    monkeypatch.setattr(client_connection, "FIRST_PAUSE_S", 0.01)
    handler = type("Handler", (Scripted,), {"script": [], "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield handler, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def job_text(**changes: Any) -> str:
    return json.dumps(JOB | changes)


def test_a_busy_server_is_asked_again_with_the_same_idempotency_key(scripted: tuple[type[Scripted], str]) -> None:
    handler, url = scripted
    handler.script += [
        (503, {"Retry-After": "0"}, '{"detail": "the database does not answer."}'),
        (502, {}, "<html>a proxy"),
        (202, {}, job_text(status="queued", termination=None)),
    ]
    with Client(url) as client:
        client.submit(PROBLEM)
    keys = {key for _, _, key, _ in handler.asked}
    assert len(handler.asked) == 3
    assert len(keys) == 1
    assert None not in keys


def test_a_stream_that_breaks_is_resumed_after_its_last_whole_event(scripted: tuple[type[Scripted], str]) -> None:
    handler, url = scripted
    event = 'event: incumbent\ndata: {{"value_us":{0},"revision":{0}}}\nid: {0}\n\n'
    handler.script += [
        (200, {"Content-Length": "500"}, event.format(1) + event.format(2) + "event: inc"),
        (503, {}, '{"detail": "gone"}'),
        (200, {}, event.format(3)),
        (200, {}, job_text(status="running", termination=None)),
        (200, {}, event.format(4)),
        (200, {}, job_text()),
    ]
    with Client(url) as client:
        events = list(client.events("1"))
    assert [e.revision for e in events] == [1, 2, 3, 4]
    assert [last for _, path, _, last in handler.asked if path.endswith("/events")] == [None, "2", "2", "3"]


def test_an_infeasible_problem(scripted: tuple[type[Scripted], str]) -> None:
    handler, url = scripted
    handler.script += [(202, {}, job_text()), (204, {}, ""), (200, {}, job_text()), (200, {}, job_text())]
    with Client(url) as client, pytest.raises(InfeasibleError, match="which is known to do"):
        client.solve(PROBLEM)


def test_something_else_at_that_address(scripted: tuple[type[Scripted], str]) -> None:
    handler, url = scripted
    handler.script += [(404, {}, "<html>")]
    with Client(url) as client, pytest.raises(ServiceError, match=r"404 Not Found. Maybe it is no OptPipe server"):
        client.job("1")


@pytest.mark.parametrize(
    ("status", "headers", "content", "message"),
    [
        (200, {}, "<html>", r"answered 200 OK. Maybe it is no OptPipe server\.$"),
        (200, {}, "[]", r"answered 200 OK. Maybe it is no OptPipe server\.$"),
        (200, {}, '{"id": "1"}', r"lacks bound_us, error, status, termination, value_us. Maybe it comes from another"),
        (301, {"Location": "https://x.org/"}, "", r"301 Moved Permanently. Maybe its address is 'https://x.org/'\.$"),
    ],
)
def test_an_answer_that_is_no_job(
    scripted: tuple[type[Scripted], str], status: int, headers: dict[str, str], content: str, message: str
) -> None:
    handler, url = scripted
    handler.script += [(status, headers, content)]
    with Client(url) as client, pytest.raises(ServiceError, match=message):
        client.job("1")
