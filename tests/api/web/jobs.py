"""Jobs that a test of the page begins with."""

from __future__ import annotations

from typing import Any

from httpx import Client

from optpipe.problem import Problem
from tests.api.harness import PROBLEM, body, client_of


def posted(url: str, key: str | None, problem: Problem = PROBLEM, wait: int = 20, **config: Any) -> str:
    """The id of a job that the service at `url` was given, ended unless `wait` is 0."""
    with client_of(url, key) as client:
        return post(client, problem, wait, **config)


def post(client: Client, problem: Problem = PROBLEM, wait: int = 20, **config: Any) -> str:
    """Submit with a client that is there already."""
    answer = client.post("/v1/schedules", params={"wait": wait}, json=body(problem, **config))
    assert answer.is_success, answer.text
    return str(answer.json()["id"])
