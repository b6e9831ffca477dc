"""One request that returns a schedule, and what was submitted comes back."""

from __future__ import annotations

from typing import Any

import pytest
from httpx import Client

from api.routes import solve as solve_route
from api.routes.documents import format_for
from instances import uniform
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.verify import verify
from solver.serial import serial_orders
from tests.api.harness import PROBLEM, body


def test_a_problem_alone_comes_back_as_a_schedule(client: Client) -> None:
    # As curl sends it, without a header.
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = client.post("/v1/solve", content=PROBLEM.to_json(), headers=form)
    assert answer.status_code == 200, answer.text
    schedule = Schedule.from_json(answer.content)
    assert verify(schedule).ok
    assert schedule.problem == PROBLEM
    job = client.get(answer.headers["location"]).json()
    assert (job["status"], job["value_us"]) == ("succeeded", schedule.value_us)
    assert client.get(f"{answer.headers['location']}/schedule").content == answer.content


def test_a_large_problem_alone(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.routes.schedules.INLINE_BYTES", 10)
    answer = client.post("/v1/solve", json=PROBLEM.to_data())
    assert Schedule.from_json(answer.content).problem == PROBLEM
    wrong = client.post("/v1/solve", json=PROBLEM.to_data() | {"microbatches": 0})
    assert [fault["pointer"] for fault in wrong.json()["errors"]] == ["/microbatches"]


def test_faults_are_where_they_are_in_the_body(idle: Client) -> None:
    def pointers(content: dict[str, Any]) -> list[str]:
        answer = idle.post("/v1/solve", json=content)
        assert answer.status_code == 422
        return [fault["pointer"] for fault in answer.json()["errors"]]

    wrong = PROBLEM.to_data() | {"microbatches": 0}
    assert pointers(wrong) == ["/microbatches"]
    assert pointers({"problem": wrong}) == ["/problem/microbatches"]
    assert pointers({"problem": PROBLEM.to_data(), "config": {"method": "none"}}) == ["/config/method"]
    huge = uniform(2, 10**6).to_data()
    assert pointers(huge) == [""]
    assert pointers({"problem": huge}) == ["/problem"]


def test_other_formats(client: Client) -> None:
    svg = client.post("/v1/solve", json=body(), headers={"Accept": "image/svg+xml"})
    assert svg.headers["content-type"] == "image/svg+xml"
    csv = client.post("/v1/solve", json=body(), params={"format": "torch-csv"}, headers={"Accept": "image/svg+xml"})
    assert csv.headers["content-type"].startswith("text/csv")


@pytest.mark.parametrize(
    ("accept", "format"),
    [
        ("", "optpipe.schedule/1"),
        ("*/*", "optpipe.schedule/1"),
        ("application/pdf", "optpipe.schedule/1"),
        ("image/png", "png"),
        ("text/csv;q=0.5, image/svg+xml;q=0.9", "svg"),
        ("Text/CSV , application/json;q=0.1", "torch-csv"),
        ("image/png;q=0, application/json;q=0.001", "optpipe.schedule/1"),
        ("image/png;q=nonsense", "png"),
    ],
)
def test_the_format_that_accept_prefers(accept: str, format: str) -> None:
    assert format_for(accept) == format


def test_one_that_is_not_done_in_time(idle: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve_route, "AFTER_LIMIT_S", 0.1)
    for params in ({}, {"wait": 0}, {"wait": 1e6}):
        answer = idle.post("/v1/solve", json=body(time_limit_s=0.01), params=params)
        assert (answer.status_code, answer.json()["status"]) == (202, "queued")
        assert answer.headers["location"] == f"/v1/schedules/{answer.json()['id']}"
    assert idle.post("/v1/solve", json=body(), params={"wait": -1}).status_code == 422


def test_a_problem_that_is_proved_infeasible(client: Client) -> None:
    answer = client.post("/v1/solve", json=body(uniform(2, 4, budget=1)))
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    assert answer.json()["errors"][0]["code"] == "infeasible"
    budgets = answer.json()["budgets_bytes"]
    job = client.get(answer.headers["location"]).json()
    assert job["budgets_bytes"] == budgets
    assert str(budgets) in job["error"]
    problem = client.get(f"{answer.headers['location']}/problem").json()
    for device, budget in zip(problem["devices"], budgets, strict=True):
        device["memory_bytes"] = budget
    assert serial_orders(Problem.from_data(problem)) is not None
    other = client.post("/v1/solve", json={})
    assert "budgets_bytes" not in other.json()


def test_one_that_ends_without_a_schedule(client: Client) -> None:
    answer = client.post("/v1/solve", json=body(uniform(2, 4, budget=2)))  # nothing published keeps it
    assert (answer.status_code, answer.json()["errors"][0]["code"]) == (422, "no_solution")


def test_what_was_submitted_comes_back(idle: Client) -> None:
    config = {"method": "cp-sat", "time_limit_s": 7, "seed": 3, "name": "mine", "tags": ["a"]}
    path = idle.post("/v1/schedules", json={"problem": PROBLEM.to_data(), "config": config}).headers["location"]
    job = idle.get(path).json()
    defaults = {"gap": 0.0, "workers": 1, "priority": 0}
    assert job["config"] == config | defaults
    answer = idle.get(f"{path}/problem")
    assert answer.json() == PROBLEM.to_data()
    assert idle.get(f"{path}/problem", headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
    again = idle.post("/v1/schedules?operation=validate", json={"problem": answer.json(), "config": job["config"]})
    assert again.json()["valid"] is True
