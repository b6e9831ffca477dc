"""Jobs over HTTP: submit, look, list, cancel, retry, remove; the schedule in every format."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import psycopg
import pytest
from httpx import Client

from api.jobs.results import Equality
from api.routes.schedules import INLINE_BYTES, INLINE_OPS
from api.settings import Settings
from instances import HALF, uniform
from optpipe.errors import MethodError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.verify import verify
from solver.solve import solve
from tests.api.harness import PROBLEM, STEPS, body
from tests.recomputing import recomputing


def solved(client: Client, **config: Any) -> dict[str, Any]:
    """A job that has ended."""
    answer = client.post("/v1/schedules", params={"wait": 50}, json=body(**config))
    assert answer.status_code == 200, answer.text
    job: dict[str, Any] = answer.json()
    return job


def test_a_job_is_queued(idle: Client) -> None:
    answer = idle.post("/v1/schedules", json=body(name="mine", tags=["a", "b"]))
    job = answer.json()
    assert answer.status_code == 202
    assert answer.headers["location"] == f"/v1/schedules/{UUID(job['id'])}"
    assert (job["status"], job["name"], job["tags"]) == ("queued", "mine", ["a", "b"])
    assert job["queue_place"] >= 1
    assert job["termination"] is job["value_us"] is job["finished_at"] is None
    assert idle.get(answer.headers["location"]).json() == job


def test_a_job_is_solved(client: Client) -> None:
    problem = uniform(2, 4, budget=8, transfer_us=2)
    expected = solve(problem, STEPS[-1])
    job = client.post("/v1/schedules", params={"wait": 50}, json=body(problem)).json()
    assert job["status"] == "succeeded"
    assert job["termination"] == {"reason": expected.status, "limit": None}
    assert (job["value_us"], job["bound_us"]) == (expected.value_us, expected.bound_us)
    assert (job["gap"], job["attempt"], job["queue_place"]) == (expected.gap, 1, None)
    schedule = Schedule.from_json(client.get(f"/v1/schedules/{job['id']}/schedule").content)
    assert verify(schedule).ok
    assert schedule.problem == problem
    assert schedule.value_us == expected.value_us


def test_an_equal_problem_is_answered_at_once(client: Client) -> None:
    first = solved(client)
    again = client.post("/v1/schedules", json=body())
    assert again.status_code == 200
    assert again.json()["id"] != first["id"]
    assert again.json()["attempt"] == 0
    assert again.json()["value_us"] == first["value_us"]


def test_validate_only_checks(idle: Client) -> None:
    answer = idle.post("/v1/schedules", params={"operation": "validate"}, json=body())
    assert answer.status_code == 200
    assert answer.json() == {
        "valid": True,
        "name": "two devices",
        "objective": "makespan",
        "devices": 2,
        "stages": 2,
        "microbatches": 4,
        "ops": 24,
    }
    assert idle.get("/v1/schedules").json()["jobs"] == []


def test_a_method_that_cannot_handle_a_problem_is_refused(idle: Client) -> None:
    """With the sentence of the solver, whether it is submitted alone, in a batch, or only checked."""
    problem = Problem.from_data(recomputing(2, 4).to_data() | {"slices": {"count": 2}})
    sent = body(problem, method="pattern")
    with pytest.raises(MethodError, match="only where microbatches are whole and alike") as refused:
        solve(problem, "pattern")
    expected = {"code": "unsupported_by_method", "detail": str(refused.value)}
    for place, path, content in (
        ("", "schedules", sent),
        ("", "schedules?operation=validate", sent),
        ("", "solve", sent),
        ("/submissions/1", "batch/submit", {"submissions": [body(), sent]}),
    ):
        answer = idle.post(f"/v1/{path}", json=content)
        assert answer.status_code == 422
        assert answer.json()["errors"] == [{"pointer": f"{place}/config/method", **expected}]
    assert idle.get("/v1/schedules").json()["jobs"] == []


def test_idempotency_key(idle: Client) -> None:
    headers = {"Idempotency-Key": "once"}
    first = idle.post("/v1/schedules", json=body(), headers=headers).json()
    reordered = dict(reversed(body().items()))
    assert idle.post("/v1/schedules", json=reordered, headers=headers).json()["id"] == first["id"]
    other = idle.post("/v1/schedules", json=body(seed=1), headers=headers)
    assert other.status_code == 422
    assert other.json()["errors"][0]["code"] == "idempotency_mismatch"
    bad = idle.post("/v1/schedules", json=body(), headers={"Idempotency-Key": "x" * 201})
    assert bad.status_code == 422


def test_list_in_pages_newest_first(idle: Client) -> None:
    ids = [idle.post("/v1/schedules", json=body(name=f"job {k}", tags=[f"tag{k % 2}"])).json()["id"] for k in range(5)]
    found, cursor = [], None
    for _ in range(3):
        params: dict[str, Any] = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        page = idle.get("/v1/schedules", params=params).json()
        found += [job["id"] for job in page["jobs"]]
        cursor = page["cursor"]
    assert found == ids[::-1]
    assert cursor is None
    tagged = idle.get("/v1/schedules", params={"tag": "tag1", "status": "queued"}).json()["jobs"]
    assert [job["name"] for job in tagged] == ["job 3", "job 1"]
    assert idle.get("/v1/schedules", params={"status": "failed"}).json()["jobs"] == []


@pytest.mark.parametrize(
    "query", ["limit=201", "limit=0", "status=done", "cursor=nonsense", "tag=%00", "tag=", "limit=nan", "limit=1e400"]
)
def test_bad_queries_are_refused(idle: Client, query: str) -> None:
    answer = idle.get(f"/v1/schedules?{query}")
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["errors"][0]["code"] in ("bad_parameter", "bad_cursor")


def test_what_is_wrong_is_told_once(idle: Client) -> None:
    answer = idle.post("/v1/schedules?wait=61&operation=x", json=body())
    assert answer.status_code == 422
    assert len(answer.json()["errors"]) == 2


def test_cancel_retry_remove(idle: Client) -> None:
    path = idle.post("/v1/schedules", json=body()).headers["location"]
    assert idle.post(f"{path}/retry").status_code == 409
    cancelled = idle.post(f"{path}/cancel").json()
    assert (cancelled["status"], cancelled["termination"]["limit"]) == ("cancelled", "interrupted")
    retried = idle.post(f"{path}/retry")
    assert (retried.status_code, retried.json()["status"]) == (202, "queued")
    idle.post(f"{path}/cancel")
    assert idle.delete(path).status_code == 204
    assert idle.get(path).status_code == 404
    assert idle.delete(path).status_code == 404


PLAIN = [
    "no\u00a0break",
    "family \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u0645\u06cc\u200c\u062e",
    "new \U0001fae9",
]
"""A no-break space, joiners of an emoji and of a Persian word, and a character that is newer than Python's tables."""


@pytest.mark.parametrize("text", PLAIN)
def test_text_of_any_language_can_be_given_and_found(idle: Client, text: str) -> None:
    problem = PROBLEM.model_copy(update={"name": text, "source": text})
    job = idle.post("/v1/schedules", json=body(problem, tags=[text])).json()
    assert job["name"] == text  # the problem's
    changed = {"name": f"{text} job", "tags": [text, "b"], "note": f"{text}\r\n\tsecond line\n"}
    path = f"/v1/schedules/{job['id']}"
    assert idle.patch(path, json=changed).json() == {**idle.get(path).json(), **changed}
    named = idle.post("/v1/schedules", json=body(name=text)).json()["id"]
    for query in ({"tag": text}, {"name": text, "sort": "name", "limit": "1"}):
        listed = idle.get("/v1/schedules", params=query).json()
        assert len(listed["jobs"]) == 1
    following = {"name": text, "sort": "name", "limit": 1, "cursor": listed["cursor"]}
    assert {listed["jobs"][0]["id"], idle.get("/v1/schedules", params=following).json()["jobs"][0]["id"]} == {
        job["id"],
        named,
    }


@pytest.mark.parametrize("text", ["\x00", "\x1b[31m", "\x7f", "\u202ebob", "\u2066", "\u2028", "a\rb"])
def test_text_that_hides_or_reorders_is_refused(idle: Client, text: str) -> None:
    path = idle.post("/v1/schedules", json=body()).headers["location"]
    for changed in ({"name": text}, {"tags": [text]}, {"note": text}):
        refused = idle.patch(path, json=changed)
        assert (refused.status_code, refused.json()["errors"][0]["code"]) == (422, "not_printable")


def test_no_schedule_yet(idle: Client) -> None:
    path = idle.post("/v1/schedules", json=body()).headers["location"]
    answer = idle.get(f"{path}/schedule")
    assert answer.status_code == 404
    assert answer.json()["errors"][0]["code"] == "no_schedule"


@pytest.mark.parametrize("path", ["", "/schedule", "/events", "/cancel", "/retry"])
@pytest.mark.parametrize("job_id", ["019eb9f0-9d3f-7a1c-8f6e-3f1f5e1c2d4b", "no-id", "%2E%2E", "%00", "0" * 32])
def test_what_is_not_there(idle: Client, job_id: str, path: str) -> None:
    method = "POST" if path in ("/cancel", "/retry") else "GET"
    answer = idle.request(method, f"/v1/schedules/{job_id}{path}")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"


def test_formats(client: Client) -> None:
    path = f"/v1/schedules/{solved(client)['id']}/schedule"
    csv = client.get(path, params={"format": "torch-csv"})
    assert csv.headers["content-type"].startswith("text/csv")
    assert [line[:7] for line in csv.text.splitlines()] == ["0F0,0F1", "1F0,1I0"]
    trace = client.get(path, params={"format": "chrome-trace"}).json()
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 24
    svg = client.get(path, params={"format": "svg"})
    assert svg.headers["content-type"] == "image/svg+xml"
    assert "<svg" in svg.text
    png = client.get(path, params={"format": "png"})
    assert png.content.startswith(b"\x89PNG")
    assert png.headers["content-disposition"].endswith('.png"')
    assert client.get(path, params={"format": "html"}).status_code == 422


def test_what_a_format_cannot_hold(client: Client) -> None:
    problem = uniform(2, 4, budget=8, offload=HALF)
    job = client.post("/v1/schedules", params={"wait": 50}, json=body(problem)).json()
    path = f"/v1/schedules/{job['id']}/schedule"
    assert client.get(path, params={"format": "svg", "drop_offload": True}).status_code == 422
    assert client.get(path, params={"format": "torch-csv", "drop_offload": True}).status_code == 200


def test_a_schedule_that_is_known_is_not_sent_again(client: Client) -> None:
    path = f"/v1/schedules/{solved(client)['id']}/schedule"
    first = client.get(path)
    assert client.get(path, headers={"If-None-Match": first.headers["etag"]}).status_code == 304
    for several in ("*", '"other", W/' + first.headers["etag"]):
        assert client.get(path, headers={"If-None-Match": several}).status_code == 304
    assert client.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
    other = client.get(path, params={"format": "svg"}, headers={"If-None-Match": first.headers["etag"]})
    assert other.status_code == 200


@pytest.mark.parametrize(("microbatches", "made"), [(4, []), (INLINE_OPS, ["build_equal"])])
def test_a_known_problem_with_many_ops_is_answered_by_the_pool(
    client: Client, tasks: list[str], microbatches: int, made: list[str]
) -> None:
    known = {"problem": uniform(2, microbatches).to_data(), "config": {"method": "1f1b"}}
    assert len(json.dumps(known)) < INLINE_BYTES
    assert client.post("/v1/schedules", params={"wait": 50}, json=known).status_code == 200
    renamed = known | {"problem": known["problem"] | {"name": "again"}}
    tasks.clear()
    assert client.post("/v1/schedules", json=renamed).json()["status"] == "succeeded"
    assert tasks == made
    renamed["problem"]["name"] = "and again"
    client.post("/v1/batch/submit", json={"submissions": [renamed]})
    assert tasks == made * 2


def test_costs_of_many_units_are_compared_in_the_pool(idle: Client, tasks: list[str]) -> None:
    """A few words may be of thousands of slices, and a batch of a hundred such."""
    for slices, in_pool in ((100, False), (INLINE_OPS, True)):
        problem = uniform(1, 1).to_data() | {"slices": {"count": slices}}
        problem["stages"][0]["slice_gradient_bytes"] = 1
        asked = {"problem": problem, "config": {"method": "search"}}
        tasks.clear()
        assert idle.post("/v1/schedules", params={"operation": "validate"}, json=asked).json()["ops"] == 3 * slices
        assert idle.post("/v1/schedules", json=asked).status_code == 202
        assert idle.post("/v1/solve", params={"wait": 0}, json=problem).status_code == 202
        assert idle.post("/v1/batch/submit", json={"submissions": [asked] * 2}).is_success
        expected = ["check_submission", "parse_submission", "parse_submission", "parse_batch"]
        assert tasks == (expected if in_pool else [])


def test_a_schedule_that_is_not_kept_is_made_once(client: Client, service_settings: Settings, tasks: list[str]) -> None:
    job_id = solved(client)["id"]
    path = f"/v1/schedules/{job_id}/schedule"
    kept = client.get(path)
    assert service_settings.database_url is not None
    with psycopg.connect(service_settings.database_url.get_secret_value()) as connection:
        assert connection.execute("DELETE FROM schedules WHERE job_id = %s", [job_id]).rowcount == 1
    tasks.clear()
    assert client.get(path, headers={"If-None-Match": kept.headers["etag"]}).status_code == 304
    assert tasks == []
    made = client.get(path)
    assert made.json() == kept.json()
    assert made.headers["etag"] == kept.headers["etag"]
    assert client.get(path).text == made.text
    assert tasks == ["build_equal"]


def test_a_better_bound_alone_is_another_tag(client: Client, service_settings: Settings) -> None:
    job_id = solved(client)["id"]
    path = f"/v1/schedules/{job_id}/schedule"
    known = {"If-None-Match": client.get(path).headers["etag"]}
    assert client.get(path, headers=known).status_code == 304
    assert service_settings.database_url is not None
    with psycopg.connect(service_settings.database_url.get_secret_value()) as connection:
        connection.execute("UPDATE incumbents SET bound_us = bound_us - 1 WHERE job_id = %s", [job_id])
    assert client.get(path, headers=known).status_code == 200


def _large(**config: Any) -> dict[str, Any]:
    stages = [PROBLEM.stages[0].to_data() | {"device": k % 2} for k in range(600)]
    large = body(PROBLEM, **config)
    large["problem"] |= {"microbatches": 1, "stages": stages, "devices": [{"memory_bytes": None}] * 2}
    assert len(json.dumps(large)) > INLINE_BYTES
    return large


def test_large_bodies_are_read_elsewhere(idle: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.models.parse_json", None)  # nothing is parsed in this process
    large = _large()
    answer = idle.post("/v1/schedules", params={"operation": "validate"}, json=large)
    assert answer.json()["ops"] == 1800
    large["problem"]["stages"][599]["forward_us"] = -1
    refused = idle.post("/v1/schedules", params={"operation": "validate"}, json=large)
    assert refused.status_code == 422
    assert [fault["pointer"] for fault in refused.json()["errors"]] == ["/problem/stages/599/forward_us"]


def test_a_large_problem_is_submitted_without_parsing_it_here(idle: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.models.parse_json", None)
    monkeypatch.setattr(Equality, "of", None)
    large = _large(name="mine", tags=["a"], priority=1)
    headers = {"Idempotency-Key": "large"}
    job = idle.post("/v1/schedules", json=large, headers=headers).json()
    assert (job["name"], job["tags"], job["objective"]) == ("mine", ["a"], "makespan")
    reordered = dict(reversed(large.items()))
    assert idle.post("/v1/schedules", json=reordered, headers=headers).json()["id"] == job["id"]
    other = idle.post("/v1/schedules", json=_large(), headers=headers)
    assert other.json()["errors"][0]["code"] == "idempotency_mismatch"


def test_a_large_equal_problem_is_answered_in_its_own_words(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.routes.schedules.INLINE_BYTES", 1)
    large = body(uniform(2, 5, budget=8, transfer_us=0), gap=1.0)
    first = client.post("/v1/schedules", params={"wait": 50}, json=large).json()
    assert first["status"] == "succeeded"
    monkeypatch.setattr("api.models.parse_json", None)
    monkeypatch.setattr("api.jobs.submit.rebuild_schedule", None)
    large["problem"]["name"] = "other words"
    for stage in large["problem"]["stages"]:
        stage |= {name: 1000 * stage[name] for name in stage if name.endswith("_us")}
    for _ in range(2):  # built from the solution; then the document that was stored
        again = client.post("/v1/schedules", json=large)
        assert again.status_code == 200
        assert again.json()["value_us"] == 1000 * first["value_us"]
        schedule = Schedule.from_json(client.get(f"/v1/schedules/{again.json()['id']}/schedule").content)
        assert schedule.problem == Problem.from_data(large["problem"])
        assert verify(schedule).ok
