"""Size and bubble of jobs: of those that are solved, of those that are answered, and of large ones."""

from __future__ import annotations

import pytest
from httpx import Client

from tests.api.harness import PROBLEM, body


def figures(job: dict[str, object]) -> tuple[object, ...]:
    return job["devices"], job["stages"], job["microbatches"], job["bubble"]


def test_solved_and_answered(client: Client) -> None:
    problem = PROBLEM.model_copy(update={"microbatches": 17})
    solved = client.post("/v1/schedules", params={"wait": 60}, json=body(problem)).json()
    schedule = client.get(f"/v1/schedules/{solved['id']}/schedule").json()
    bubble = max(schedule["devices"], key=lambda device: device["busy_us"])["bubble"]
    assert figures(solved) == (2, 2, 17, pytest.approx(bubble))
    answered = client.post("/v1/schedules", json=body(problem)).json()
    renamed = client.post("/v1/schedules", json=body(problem.model_copy(update={"name": "renamed"}))).json()
    for job in (answered, renamed):
        assert (job["attempt"], *figures(job)) == (0, *figures(solved))
        assert figures(client.get(f"/v1/schedules/{job['id']}").json()) == figures(solved)


def test_waiting_and_large(idle: Client) -> None:
    assert figures(idle.post("/v1/schedules", json=body()).json()) == (2, 2, 4, None)
    stages = [PROBLEM.stages[0].to_data() | {"device": k % 2} for k in range(600)]
    large = body()
    large["problem"]["stages"] = stages
    assert figures(idle.post("/v1/schedules", json=large).json()) == (2, 600, 4, None)
