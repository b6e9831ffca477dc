"""Server-sent events: every revision once and in order, resumed without a gap; those of one job end with its status."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from httpx import Client

from api.app import create_app
from api.jobs.store import Store
from api.routes import events as api_events
from api.settings import Settings
from optpipe.client.connection import Event, read_events
from tests.api.harness import STEP_VALUES_US, Stepwise, body, client_of, listening, new_key, working


def events_of(client: Client, path: str, after: int | None = None) -> list[Event]:
    """All events of a stream."""
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    with client.stream("GET", f"{path}/events", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        return list(read_events(answer.iter_lines()))


class Gate:
    """Lets a solve go on when a test says so."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)

    def open(self, steps: int) -> None:
        for _ in range(steps):
            self._allowed.release()

    def passed(self) -> bool:
        return self._allowed.acquire(blocking=False)


@pytest.fixture
def gate(settings: Settings) -> Iterator[Gate]:
    """A worker on the test's own database, whose solves wait for the gate."""
    gate = Gate()
    with working(settings, Stepwise(gate.passed)):
        yield gate


@pytest.fixture
def followed(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """A client of a service on that database."""
    monkeypatch.setattr(api_events, "KEEP_ALIVE_S", 0.2)
    with listening(create_app(settings)) as url, Client(base_url=url, timeout=90) as client:
        yield client


def test_every_event_of_a_job_that_has_ended(client: Client) -> None:
    job = client.post("/v1/schedules", params={"wait": 50}, json=body()).json()
    path = f"/v1/schedules/{job['id']}"
    events = events_of(client, path)
    assert [event.revision for event in events] == list(range(1, job["revision"] + 1))
    assert (events[-1].kind, events[-1].data["status"]) == ("status", "succeeded")
    assert events[-1].data["value_us"] == job["value_us"]
    assert all(event.data["revision"] == event.revision and event.data["kind"] == event.kind for event in events)
    for after in range(job["revision"]):
        assert events_of(client, path, after) == events[after:]
    done = client.get(f"{path}/events", headers={"Last-Event-ID": str(job["revision"])})
    assert (done.status_code, done.content) == (204, b"")


@pytest.mark.parametrize("last", ["x", "-1", "1.5", str(2**31), "9" * 400])
def test_a_bad_last_event_id(client: Client, last: str) -> None:
    path = client.post("/v1/schedules", json=body()).headers["location"]
    assert client.get(f"{path}/events", headers={"Last-Event-ID": last}).status_code == 422


def test_events_come_as_they_happen_and_resume(gate: Gate, followed: Client) -> None:
    path = followed.post("/v1/schedules", json=body()).headers["location"]
    first: list[Event] = []
    with followed.stream("GET", f"{path}/events") as answer:
        for event in read_events(answer.iter_lines()):
            first.append(event)
            if event.data["value_us"] == STEP_VALUES_US[0]:
                break  # the connection is lost here
    assert followed.get(path).json()["status"] == "running"
    gate.open(len(STEP_VALUES_US))
    rest = events_of(followed, path, first[-1].revision)
    together = first + rest
    assert [event.revision for event in together] == list(range(1, len(together) + 1))
    values = [event.data["value_us"] for event in together if event.kind == "incumbent"]
    assert (values[0], values[-1]) == (STEP_VALUES_US[0], STEP_VALUES_US[-1])  # those between may be passed over
    assert rest[-1].data["status"] == "succeeded"


def test_a_quiet_stream_is_kept_alive_and_one_that_nobody_reads_is_noticed(gate: Gate, followed: Client) -> None:
    path = followed.post("/v1/schedules", json=body()).headers["location"]
    with followed.stream("GET", f"{path}/events") as answer:
        lines = answer.iter_lines()
        comments = 0
        while comments < 2:
            comments += next(lines).startswith(":")
        assert _open_connections(followed) == 1
    until = time.monotonic() + 60
    while _open_connections(followed) and time.monotonic() < until:
        time.sleep(0.05)
    assert _open_connections(followed) == 0
    followed.post(f"{path}/cancel")
    assert followed.get(path, params={"wait": 50}).json()["status"] == "cancelled"


def _open_connections(client: Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith("optpipe_http_open_connections ")]
    return float(value)


def test_a_stream_ends_when_its_job_is_removed(idle: Client) -> None:
    path = idle.post("/v1/schedules", json=body()).headers["location"]
    with idle.stream("GET", f"{path}/events") as answer:
        lines = answer.iter_lines()
        assert next(event.data["status"] for event in read_events(lines)) == "queued"
        assert idle.delete(path).status_code == 204
        assert list(read_events(lines)) == []


def test_all_jobs_of_a_key_in_one_stream(client: Client) -> None:
    with client.stream("GET", "/v1/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        jobs = [client.post("/v1/schedules", params={"wait": 50}, json=body()).json() for _ in range(3)]
        first, ids = read_until_ended(answer.iter_lines(), jobs[0]["id"])
        assert first[-1]["status"] == "succeeded"
    with client.stream("GET", "/v1/events", headers={"Last-Event-ID": ids[-1]}) as answer:
        rest, _ = read_until_ended(answer.iter_lines(), jobs[-1]["id"])
    for job in jobs:
        of_job = [data["revision"] for data in first + rest if data["job_id"] == job["id"]]
        assert of_job == list(range(1, job["revision"] + 1))
    assert {data["job_id"] for data in first + rest} == {job["id"] for job in jobs}


def read_until_ended(lines: Iterator[str], job_id: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Data and ids of the events up to the one with which a job ends."""
    data: list[dict[str, Any]] = []
    ids: list[str] = []
    while not data or (data[-1]["job_id"], data[-1]["status"]) != (job_id, "succeeded"):
        name, _, value = next(lines).partition(": ")
        if name == "data":
            data.append(json.loads(value))
        elif name == "id":
            ids.append(value)
    return data, [*ids, next(lines).partition(": ")[2]]


def test_a_stream_of_all_jobs_resumes_where_nothing_had_happened_yet(idle: Client) -> None:
    with idle.stream("GET", "/v1/events") as answer:
        place = next(line for line in answer.iter_lines() if line.startswith("id: ")).removeprefix("id: ")
    job = idle.post("/v1/schedules", json=body()).json()
    with idle.stream("GET", "/v1/events", headers={"Last-Event-ID": place}) as answer:
        data = next(line for line in answer.iter_lines() if line.startswith("data: ")).removeprefix("data: ")
    assert (json.loads(data)["job_id"], json.loads(data)["revision"]) == (job["id"], 1)


@pytest.mark.parametrize("last", ["x", "1", "-1", "2-1-0", "9" * 400])
def test_a_bad_last_event_id_of_all_jobs(idle: Client, last: str) -> None:
    assert idle.get("/v1/events", headers={"Last-Event-ID": last}).status_code == 422


@pytest.mark.parametrize("of_all", [True, False])
def test_the_streams_of_a_revoked_key_end(idle_url: str, idle_settings: Settings, of_all: bool) -> None:
    async def revoke(key_id: UUID) -> None:
        async with Store(idle_settings) as store:
            await store.revoke_key(key_id)

    secret = new_key(idle_settings)
    with client_of(idle_url, secret) as client:
        path = client.post("/v1/schedules", json=body()).headers["location"]
        with client.stream("GET", "/v1/events" if of_all else f"{path}/events") as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith(("retry:", "id:"))
            asyncio.run(revoke(UUID(secret.split("_")[1])))
            assert len(list(read_events(lines))) <= 1  # that the job is queued, and then the end
        assert client.get(path).status_code == 401
