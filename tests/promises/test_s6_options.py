"""S6: a solve takes options from a short list, each within its range; none names a file."""

from __future__ import annotations

from typing import Any

import pytest
from httpx import Client

from api.jobs.records import JobConfig
from tests.api.harness import body

ALLOWED = {"method", "time_limit_s", "gap", "workers", "seed", "priority", "name", "tags"}


def test_the_list_is_the_contracts() -> None:
    assert set(JobConfig.model_fields) == ALLOWED


@pytest.mark.parametrize(
    "name", ["log_file", "output_flag", "write_model_file", "solution_file", "options", "memory_limit", "__class__"]
)
def test_options_of_the_solvers_are_unknown(idle: Client, name: str) -> None:
    assert _codes(idle, {name: "/tmp/x"}) == [(f"/config/{name}", "unknown_field")]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("time_limit_s", 0),
        ("time_limit_s", 1e9),
        ("time_limit_s", "30"),
        ("gap", -0.1),
        ("gap", 1.1),
        ("workers", 0),
        ("workers", 1.5),
        ("workers", True),
        ("seed", -1),
        ("seed", 2**31),
        ("priority", 101),
        ("method", "milp --log-file=/tmp/x"),
        ("method", ["auto"]),
        ("name", "x" * 201),
        ("name", "line\nbreak"),
        ("tags", ["x"] * 21),
        ("tags", [""]),
    ],
)
def test_each_has_its_range(idle: Client, name: str, value: Any) -> None:
    faults = _codes(idle, {name: value})
    assert faults
    assert all(pointer.startswith(f"/config/{name}") for pointer, _ in faults)


def _codes(client: Client, config: dict[str, Any]) -> list[tuple[str, str]]:
    answer = client.post("/v1/schedules", json=body(**config))
    assert answer.status_code == 422
    return [(fault["pointer"], fault["code"]) for fault in answer.json()["errors"]]
