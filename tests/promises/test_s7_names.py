"""S7: names are text and nothing else; ids are the server's UUIDs."""

from __future__ import annotations

import os
from uuid import UUID

import pytest
from httpx import Client

from tests.api.harness import PROBLEM, body

NAMES = ["../../etc/passwd", "/etc/passwd", "..\\x", "a/b", "${HOME}", "$(id)", "con", "<b>x</b>"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_comes_back_as_it_was_and_names_no_file(client: Client, name: str) -> None:
    problem = PROBLEM.model_copy(update={"name": name})
    here = set(os.listdir())
    answer = client.post("/v1/schedules", params={"wait": 50}, json=body(problem))
    job = answer.json()
    assert answer.status_code == 200
    assert job["name"] == name
    assert UUID(job["id"]).version == 4
    assert answer.headers["location"] == f"/v1/schedules/{job['id']}"
    for picture_format in ("optpipe.schedule/1", "torch-csv", "svg"):
        got = client.get(f"/v1/schedules/{job['id']}/schedule", params={"format": picture_format})
        assert got.status_code == 200
        assert got.headers["content-disposition"].startswith(f'inline; filename="schedule-{job["id"]}.')
    assert set(os.listdir()) == here


@pytest.mark.parametrize(
    "path", ["%2e%2e/%2e%2e/etc/passwd", "..%2fsettings.py", "%00", "tiny.json", "../demo_data/tiny"]
)
def test_paths_lead_to_no_files(client: Client, path: str) -> None:
    assert client.get(f"/v1/demo-data/{path}").status_code == 404
    assert client.get(f"/v1/schedules/{path}/schedule").status_code == 404
