"""Several jobs in one request: submitted all or none, once; cancelled each for itself; followed by the client."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

from httpx import Client

from api.app import create_app
from api.settings import Settings
from optpipe.client import Client as Service
from tests.api.harness import PROBLEM, body, client_of, listening, new_key


def batch(count: int, **config: Any) -> dict[str, Any]:
    problems = [PROBLEM.model_copy(update={"microbatches": 2 + k}) for k in range(count)]
    return {"submissions": [body(problem, name=f"job {k}", **config) for k, problem in enumerate(problems)]}


def test_all_in_their_order(idle: Client) -> None:
    answer = idle.post("/v1/batch/submit", json=batch(3))
    assert answer.status_code == 200
    assert [(job["name"], job["status"]) for job in answer.json()["jobs"]] == [(f"job {k}", "queued") for k in range(3)]
    assert answer.headers["ratelimit"].startswith('"submissions";r=597')
    listed = idle.get("/v1/schedules", params={"sort": "name"}).json()["jobs"]
    assert [job["id"] for job in listed] == [job["id"] for job in answer.json()["jobs"]]


def test_none_where_one_is_wrong(idle: Client) -> None:
    wrong = batch(3)
    wrong["submissions"][1]["problem"]["stages"][0]["forward_us"] = -1
    wrong["submissions"][2]["config"]["time_limit_s"] = 0
    faults = idle.post("/v1/batch/submit", json=wrong).json()["errors"]
    assert [fault["pointer"] for fault in faults] == [
        "/submissions/1/problem/stages/0/forward_us",
        "/submissions/2/config/time_limit_s",
    ]
    over = batch(2)
    over["submissions"][1]["config"]["time_limit_s"] = 10**5
    (fault,) = idle.post("/v1/batch/submit", json=over).json()["errors"]
    assert (fault["pointer"], fault["code"]) == ("/submissions/1/config/time_limit_s", "out_of_range")
    for count in (0, 101):
        assert idle.post("/v1/batch/submit", json=batch(count)).status_code == 422
    assert idle.get("/v1/schedules").json()["jobs"] == []


def test_none_where_a_cap_is_reached(settings: Settings) -> None:
    capped = settings.model_copy(update={"require_keys": True, "max_queued_jobs": 2})
    with listening(create_app(capped)) as url, client_of(url, new_key(capped)) as client:
        refused = client.post("/v1/batch/submit", json=batch(3))
        assert (refused.status_code, refused.json()["errors"][0]["code"]) == (429, "queued_jobs")
        assert client.get("/v1/schedules").json()["jobs"] == []
        assert client.post("/v1/batch/submit", json=batch(2)).status_code == 200


def test_sent_twice_it_is_one_batch(idle: Client) -> None:
    key = {"Idempotency-Key": "nightly"}
    first, again = (idle.post("/v1/batch/submit", json=batch(2), headers=key).json() for _ in range(2))
    assert [job["id"] for job in first["jobs"]] == [job["id"] for job in again["jobs"]]
    for other in (batch(2, seed=1), batch(1), batch(3), {"submissions": batch(2)["submissions"][::-1]}):
        refused = idle.post("/v1/batch/submit", json=other, headers=key)
        assert (refused.status_code, refused.json()["errors"][0]["code"]) == (422, "idempotency_mismatch")
    alone = {"Idempotency-Key": "alone"}
    for path, content, given in (
        ("/v1/schedules", batch(1)["submissions"][0], key),
        ("/v1/solve?wait=0", batch(1)["submissions"][0], key),
        ("/v1/schedules", batch(1)["submissions"][0], alone),
        ("/v1/batch/submit", batch(1), alone),
    ):
        expected = 202 if path == "/v1/schedules" and given == alone else 422
        assert idle.post(path, json=content, headers=given).status_code == expected
    assert len(idle.get("/v1/schedules").json()["jobs"]) == 3


def test_a_large_one_is_read_elsewhere(idle: Client) -> None:
    large = batch(2)
    stages = [PROBLEM.stages[0].to_data() | {"device": k % 2} for k in range(300)]
    for submission in large["submissions"]:
        submission["problem"]["stages"] = stages
        submission["problem"]["name"] = "two\nlines"
    jobs = idle.post("/v1/batch/submit", json=large).json()["jobs"]
    for job, submission in zip(jobs, large["submissions"], strict=True):
        problem = idle.get(f"/v1/schedules/{job['id']}/problem").json()
        assert len(problem["stages"]) == 300
        assert (problem["microbatches"], problem["name"]) == (submission["problem"]["microbatches"], "two\nlines")
        assert job["config"]["name"] == submission["config"]["name"]
    large["submissions"][1]["config"]["time_limit_s"] = 10**5
    (fault,) = idle.post("/v1/batch/submit", json=large).json()["errors"]
    assert fault["pointer"] == "/submissions/1/config/time_limit_s"


def test_several_are_cancelled_and_those_of_others_are_not_there(
    idle: Client, idle_url: str, idle_settings: Settings
) -> None:
    jobs = [job["id"] for job in idle.post("/v1/batch/submit", json=batch(3)).json()["jobs"]]
    with client_of(idle_url, new_key(idle_settings)) as other:
        answer = other.post("/v1/batch/cancel", json={"ids": jobs[:1]}).json()
        assert answer == {"jobs": [], "not_found": jobs[:1]}
    nobody = str(uuid4())
    answer = idle.post("/v1/batch/cancel", json={"ids": [jobs[0], nobody, jobs[2]]}).json()
    assert [(job["id"], job["status"]) for job in answer["jobs"]] == [(jobs[0], "cancelled"), (jobs[2], "cancelled")]
    assert answer["not_found"] == [nobody]
    assert idle.get(f"/v1/schedules/{jobs[1]}").json()["status"] == "queued"
    assert idle.post("/v1/batch/cancel", json={"ids": ["x"]}).status_code == 422


def test_the_client_follows_all_its_jobs(service_url: str, service_settings: Settings) -> None:
    with Service(service_url, new_key(service_settings)) as client:
        events = client.all_events(time.monotonic() + 120)
        problems = [PROBLEM.model_copy(update={"microbatches": 31 + k}) for k in range(3)]
        running = {job.id for job in client.submit_all(problems, name="batch")}
        seen: dict[str, list[int]] = {job_id: [] for job_id in running}
        while running:
            event = next(events)
            seen[event.data["job_id"]].append(event.revision)
            if event.data["status"] == "succeeded":
                running.discard(event.data["job_id"])
        assert all(revisions == list(range(1, len(revisions) + 1)) for revisions in seen.values())
        assert [job.status for job in client.cancel_all([*seen, str(uuid4())])] == ["succeeded"] * 3


def test_the_client_begins_where_it_was_called(idle_url: str, idle_settings: Settings) -> None:
    with Service(idle_url, new_key(idle_settings)) as client:
        client.submit(PROBLEM)
        events = client.all_events(time.monotonic() + 120)
        later = client.submit(PROBLEM, seed=1)  # before the iterator is asked for the first event
        assert next(events).data["job_id"] == later.id
