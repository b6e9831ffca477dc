"""S5: the job of another key is not there, on any route."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from httpx import Client

from api.settings import Settings
from optpipe.client.connection import read_events
from tests.api.harness import body, client_of, new_key


@pytest.fixture
def other(service_url: str, service_settings: Settings) -> Iterator[Client]:
    """A client with another key."""
    with client_of(service_url, new_key(service_settings)) as client:
        yield client


def test_another_keys_job_is_not_there(client: Client, other: Client) -> None:
    job = client.post("/v1/schedules", params={"wait": 50}, json=body(name="mine", tags=["mine"])).json()
    assert job["status"] == "succeeded"
    paths = client.get("/openapi.json").json()["paths"]
    calls = [(method, path) for path, methods in paths.items() if "{job_id}" in path for method in methods]
    assert len(calls) >= 6
    for method, path in calls:
        body_of_call = {"json": {}} if method == "patch" else {}
        needed = [one for one in paths[path][method].get("parameters", []) if one["in"] == "query" and one["required"]]
        params = {one["name"]: one["schema"]["enum"][0] for one in needed}
        answer = other.request(method, re.sub(r"{job_id}", job["id"], path), params=params, **body_of_call)
        assert answer.status_code == 404, (method, path)
        assert answer.json()["errors"][0]["code"] == "not_found"
    assert client.get(f"/v1/schedules/{job['id']}").json() == job


def test_lists_hold_the_keys_own_jobs(client: Client, other: Client) -> None:
    client.post("/v1/schedules", json=body(tags=["mine"]))
    assert len(client.get("/v1/schedules", params={"tag": "mine"}).json()["jobs"]) == 1
    assert other.get("/v1/schedules").json()["jobs"] == []
    assert other.get("/v1/schedules", params={"tag": "mine"}).json()["jobs"] == []


def test_the_stream_of_all_jobs_has_the_keys_own(client: Client, other: Client) -> None:
    with other.stream("GET", "/v1/events") as answer:
        client.post("/v1/schedules", params={"wait": 50}, json=body())
        theirs = other.post("/v1/schedules", json=body()).json()
        event = next(read_events(answer.iter_lines()))
    assert event.data["job_id"] == theirs["id"]


def test_the_same_idempotency_key_of_two_keys_is_two_jobs(client: Client, other: Client) -> None:
    ids = {
        caller.post("/v1/schedules", json=body(), headers={"Idempotency-Key": "same"}).json()["id"]
        for caller in (client, other)
    }
    assert len(ids) == 2
