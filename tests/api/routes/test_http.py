"""HTTP as its clients expect it: tags, compression, names of operations, parameters that are not there, lists."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from httpx import Client

from api import create_app
from api.middleware import SMALL_BODY_BYTES
from api.server import HEAD_BYTES
from api.settings import Settings
from instances import uniform
from tests.api.harness import body


def submit(client: Client, name: str, **config: Any) -> str:
    return str(client.post("/v1/schedules", json=body(name=name, **config)).headers["location"])


def test_a_job_and_a_list_have_tags(idle: Client) -> None:
    path = submit(idle, "mine")
    for url in (path, "/v1/schedules"):
        first = idle.get(url)
        known = {"If-None-Match": first.headers["etag"]}
        again = idle.get(url, headers=known)
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
        idle.patch(path, json={"tags": [url]})
        assert idle.get(url, headers=known).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "identity"])
def test_answers_are_compressed_where_asked_for(client: Client, encoding: str) -> None:
    problem = uniform(4, 16, name="large enough")
    plain = client.post("/v1/solve", json=problem.to_data(), headers={"Accept-Encoding": "identity"})
    with client.stream("POST", "/v1/solve", json=problem.to_data(), headers={"Accept-Encoding": encoding}) as answer:
        sent = b"".join(answer.iter_raw())
    assert answer.headers.get("content-encoding", "identity") == encoding
    assert (len(sent) < len(plain.content) / 4) == (encoding != "identity")
    whole = client.post("/v1/solve", json=problem.to_data(), headers={"Accept-Encoding": encoding})
    assert whole.content == plain.content


def test_unknown_parameters_are_refused(idle: Client) -> None:
    path = submit(idle, "mine")
    for method, url in (("GET", "/v1/schedules"), ("GET", path), ("POST", f"{path}/cancel"), ("GET", "/healthz")):
        answer = idle.request(method, url, params={"Limits": "1", "wiat": "1"})
        assert answer.status_code == 422, url
        assert [fault["code"] for fault in answer.json()["errors"]] == ["unknown_parameter"] * 2
    assert idle.get(path).json()["status"] == "queued"
    assert "Maybe wait." in idle.get(path, params={"wiat": "1"}).json()["detail"]


def test_repeated_parameters_are_refused(idle: Client) -> None:
    """Two states are two calls: of several values the last alone would count."""
    path = submit(idle, "mine")
    for url in ("/v1/schedules?status=queued&status=running", f"{path}?wait=0&wait=1", f"{path}/problem?x=1&x=2"):
        answer = idle.get(url)
        assert answer.status_code == 422, url
        [fault] = answer.json()["errors"]
        assert fault["code"] == ("repeated_parameter" if "x=" not in url else "unknown_parameter")
    assert "'status' is given 2 times" in idle.get("/v1/schedules?status=queued&status=running").json()["detail"]


@pytest.mark.parametrize("name", ["Idempotency-Key", "Authorization", "Last-Event-ID"])
def test_repeated_headers_are_refused(idle: Client, name: str) -> None:
    answer = idle.get("/v1/schedules", headers=[(name, idle.headers.get(name, "one")), (name, "other")])
    assert answer.status_code == 422
    assert f"the header {name.lower()} is given 2 times, but takes one value" in answer.json()["detail"]


def test_a_body_may_begin_with_the_mark_of_utf_8(idle: Client) -> None:
    content = BOM_UTF8 + json.dumps(body(name="marked")).encode()
    answer = idle.post("/v1/schedules", content=content, headers={"Content-Type": "application/json"})
    assert answer.json()["name"] == "marked"


def test_operations_have_names_that_stay() -> None:
    paths = create_app(Settings()).openapi()["paths"]
    names = sorted(operation["operationId"] for verbs in paths.values() for operation in verbs.values())
    assert names == [
        "alive",
        "all_events",
        "analyze",
        "best_schedule",
        "cancel",
        "cancel_many",
        "compare",
        "demo_body",
        "demo_list",
        "get_job",
        "job_events",
        "list_jobs",
        "machines",
        "metrics",
        "models",
        "openapi",
        "plan_cancel",
        "plan_document",
        "plan_export",
        "plan_get_job",
        "plan_job_events",
        "plan_list_jobs",
        "plan_remove",
        "plan_rename",
        "plan_request",
        "plan_retry",
        "plan_schedule",
        "plan_submit",
        "ready",
        "recognize",
        "remove",
        "rename",
        "retry",
        "solve",
        "submit",
        "submit_many",
        "submitted_problem",
    ]


def test_a_job_gets_another_name_and_other_tags(idle: Client) -> None:
    path = submit(idle, "mine", tags=["a"])
    assert idle.patch(path, json={"name": "yours"}).json()["name"] == "yours"
    job = idle.patch(path, json={"tags": ["b", "c"]}).json()
    assert (job["name"], job["tags"], job["config"]["tags"]) == ("yours", ["b", "c"], ["b", "c"])
    assert idle.get("/v1/schedules", params={"tag": "b"}).json()["jobs"] == [job]
    assert idle.patch(path, json={"name": ""}).json()["name"] == "two devices"  # that of the problem
    noted = idle.patch(path, json={"note": "two\nlines"}).json()
    assert (noted["note"], noted["tags"]) == ("two\nlines", ["b", "c"])
    assert idle.patch(path, json={"tags": []}).json()["note"] == "two\nlines"
    assert idle.patch(path, json={"note": ""}).json()["note"] == ""
    for wrong in (
        {"note": "\u0000"},
        {"note": "x" * 10_001},
        {"title": "x"},
        {"name": "\u0000"},
        {"tags": [""]},
        {"tags": "b"},
    ):
        assert idle.patch(path, json=wrong).status_code == 422


def test_labels_and_ids_are_small(idle: Client) -> None:
    """They are read where all requests are answered, however many wrong fields there are."""
    path = submit(idle, "mine")
    content = b'{"name": "x"' + b" " * SMALL_BODY_BYTES + b"}"
    for verb, url in (("PATCH", path), ("POST", "/v1/batch/cancel")):
        answer = idle.request(verb, url, content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["errors"][0]["code"]) == (413, "too_large")
    wide = "\N{GRINNING FACE}"
    largest = {"name": wide * 200, "tags": [wide * 64] * 20, "note": wide * 10_000}
    answer = idle.patch(path, content=json.dumps(largest), headers={"Content-Type": "application/json"})
    assert answer.json()["note"] == largest["note"]


def listed(client: Client, **params: Any) -> list[str]:
    """Names of all jobs of a list, read in pages of two."""
    names, cursor = [], {}
    while True:
        page = client.get("/v1/schedules", params={"limit": 2, **params, **cursor}).json()
        names += [job["name"] for job in page["jobs"]]
        if page["cursor"] is None:
            return names
        cursor = {"cursor": page["cursor"]}


def test_lists_are_sorted_filtered_and_counted(client: Client) -> None:
    for name in ("b", "C", "a"):
        client.post("/v1/schedules", params={"wait": 20}, json=body(name=name))
    client.post("/v1/schedules", params={"wait": 20}, json=body(uniform(2, 4, budget=1), name="infeasible"))
    assert listed(client) == ["infeasible", "a", "C", "b"]
    assert listed(client, sort="submitted_at") == ["b", "C", "a", "infeasible"]
    assert listed(client, sort="finished_at") == ["b", "C", "a", "infeasible"]
    by_name = listed(client, sort="name")
    assert listed(client, sort="-name") == by_name[::-1]
    assert sorted(by_name) == ["C", "a", "b", "infeasible"]
    for sort in ("gap", "-gap"):
        assert listed(client, sort=sort)[-1] == "infeasible"  # it has none
    assert listed(client, name="FEAS") == ["infeasible"]
    assert listed(client, name="%") == []
    assert "total" in client.get("/v1/schedules").json()
    assert client.get("/v1/schedules", params={"limit": 1, "count": True, "name": "a"}).json()["total"] == 2
    times = [job["submitted_at"] for job in client.get("/v1/schedules").json()["jobs"]]
    assert listed(client, submitted_after=times[1]) == ["infeasible", "a"]
    assert listed(client, submitted_before=times[1]) == ["C", "b"]
    later = (datetime.fromisoformat(times[0]) + timedelta(days=1)).isoformat()
    assert listed(client, submitted_after=later) == []
    for wrong in ("2026-01-01T00:00:00", "0.5", "1767225600", "2026"):  # no zone, no time
        assert client.get("/v1/schedules", params={"submitted_after": wrong}).status_code == 422
    cursor = client.get("/v1/schedules", params={"limit": 1}).json()["cursor"]
    wrong = client.get("/v1/schedules", params={"cursor": cursor, "sort": "name"})
    assert wrong.json()["errors"][0]["code"] == "bad_cursor"


def test_every_submission_says_how_many_are_left(idle: Client, idle_settings: Settings) -> None:
    most = idle_settings.max_submissions_a_minute
    for used in (1, 2):
        headers = idle.post("/v1/schedules", json=body(seed=used)).headers
        assert headers["ratelimit-policy"] == f'"submissions";q={most};w=60'
        name, left, reset = headers["ratelimit"].split(";")
        assert (name, left) == ('"submissions"', f"r={most - used}")
        assert 1 <= int(reset.removeprefix("t=")) <= 60


def test_headers_of_answers_are_described(client: Client) -> None:
    document = client.get("/openapi.json").json()
    path = submit(client, "mine")
    client.get(path, params={"wait": 50})
    for verb, route, content in (
        ("post", "/v1/schedules", body()),
        ("post", "/v1/schedules", {}),
        ("post", "/v1/solve", body()),
        ("post", "/v1/batch/submit", {"submissions": [body()]}),
        ("post", "/v1/schedules/{job_id}/retry", None),
        ("put", "/v1/schedules", None),
        ("get", "/v1/schedules", None),
        ("get", "/v1/schedules/{job_id}", None),
        ("get", "/v1/schedules/{job_id}/schedule", None),
        ("get", "/v1/schedules/{job_id}/problem", None),
    ):
        answer = client.request(
            verb, route.replace("/v1/schedules/{job_id}", path).replace("/v1/plans/{job_id}", path), json=content
        )
        operation = document["paths"][route]["get" if verb == "put" else verb]
        described = operation["responses"][str(answer.status_code)]["headers"]
        sent = {name for name in document["components"]["headers"] if name in answer.headers}
        assert set(described) == sent, (verb, route)
        assert sent > {"X-Request-ID"} or answer.status_code == 422
    for methods in document["paths"].values():
        for operation in methods.values():
            assert all("Retry-After" in operation["responses"][status]["headers"] for status in ("429", "503"))


def test_every_operation_describes_the_errors_of_any_request(client: Client) -> None:
    for route, verbs in client.get("/openapi.json").json()["paths"].items():
        for verb, operation in verbs.items():
            responses = operation["responses"]
            path = route.replace("{job_id}", str(UUID(int=0)))
            wrong = client.request(verb, path, params={"unknown": "1"})
            long = client.request(verb, path, headers={"X-Long": "x" * 2 * HEAD_BYTES})
            assert [wrong.status_code, long.status_code] == [422, 431]
            assert long.headers["x-request-id"] == long.json()["request_id"]
            assert {"422", "431"} <= responses.keys(), route
            for status, response in responses.items():
                assert int(status) < 400 or [*response["content"]] == ["application/problem+json"], (route, status)


def test_examples_of_the_description_can_be_sent_as_they_are(client: Client) -> None:
    path = submit(client, "mine")
    document = client.get("/openapi.json").json()
    sent = 0
    for route, verbs in document["paths"].items():
        for verb, operation in verbs.items():
            if "requestBody" in operation:
                example = operation["requestBody"]["content"]["application/json"]["example"]
                url = route.replace("/v1/schedules/{job_id}", path).replace("/v1/plans/{job_id}", path)
                assert client.request(verb, url, json=example).is_success, route
                sent += 1
    assert sent >= 5
