"""S3: a model that is too large to build is refused with the cap's name, before anything is built."""

from __future__ import annotations

import time
from typing import Any

import pytest
from httpx import Client

from api.settings import Settings
from instances import uniform
from optpipe.problem import Problem
from solver.scale import MOST_MILP_OPS
from tests.api.harness import body

AT_ONCE_S = 60.0
"""To build what these ask for would take hours, or all memory."""


def refusal(client: Client, route: str, content: dict[str, Any]) -> dict[str, Any]:
    """The only fault of a request that is refused at once."""
    began = time.perf_counter()
    answer = client.post(route, json=content)
    assert time.perf_counter() - began < AT_ONCE_S
    assert answer.status_code == 422
    (fault,) = answer.json()["errors"]
    assert fault["detail"].rpartition(". ")[2].startswith("Maybe ")
    found: dict[str, Any] = fault
    return found


def huge(microbatches: int = 10**6, **more: Any) -> Problem:
    return uniform(4, microbatches, **more)


def test_too_many_ops(idle: Client, idle_settings: Settings) -> None:
    fault = refusal(idle, "/v1/schedules", body(huge()))
    assert (fault["pointer"], fault["code"]) == ("/problem", "too_many_ops")
    assert f"{idle_settings.max_ops:,} (max_ops)" in fault["detail"]
    assert "12,000,000 ops" in fault["detail"]
    assert idle.get("/v1/schedules").json()["jobs"] == []


def test_a_million_slices_build_no_factors(idle: Client) -> None:
    sliced = Problem.from_data(uniform(2, 1).to_data() | {"slices": {"count": 999_999}})
    assert not sliced.has_factors
    assert not any(isinstance(value, list) and len(value) > 1000 for value in vars(sliced).values())
    assert "_slice_factors" not in vars(sliced)
    assert refusal(idle, "/v1/schedules", body(sliced))["code"] == "too_many_ops"


def test_validate_says_so_too(idle: Client) -> None:
    assert refusal(idle, "/v1/schedules?operation=validate", body(huge()))["code"] == "too_many_ops"


def test_comparing_builds_nothing_either(idle: Client) -> None:
    assert refusal(idle, "/v1/compare", {"problem": huge().to_data()})["code"] == "too_many_ops"


def test_analyzing_a_claim_of_a_huge_schedule(idle: Client) -> None:
    device = {"compute": [], "peak_bytes": 0, "peak_bytes_any_timing": 0, "busy_us": 0, "bubble": 0}
    schedule = {
        "format": "optpipe.schedule/1",
        "problem": huge().to_data(),
        "status": "feasible",
        "objective": "makespan",
        "value_us": 0,
        "bound_us": 0,
        "gap": 0,
        "method": "none",
        "solve_seconds": 0,
        "devices": [device] * 4,
    }
    assert refusal(idle, "/v1/analyze", schedule)["code"] == "too_many_ops"


def test_the_mixed_integer_program_has_its_own_cap(idle: Client) -> None:
    problem = huge(MOST_MILP_OPS // 12 + 1)
    fault = refusal(idle, "/v1/schedules", body(problem, method="milp"))
    assert (fault["pointer"], fault["code"]) == ("/config/method", "model_too_large")
    assert f"its limit is {MOST_MILP_OPS:,}" in fault["detail"]
    assert idle.post("/v1/schedules", json=body(problem, method="cp-sat")).status_code == 202


@pytest.mark.parametrize(("name", "asked"), [("workers", 3), ("time_limit_s", 3601)])
def test_caps_of_an_installation_are_named(idle: Client, name: str, asked: int) -> None:
    answer = idle.post("/v1/schedules", json=body(**{name: asked}))
    assert answer.status_code == 422
    (fault,) = answer.json()["errors"]
    assert (fault["pointer"], fault["code"]) == (f"/config/{name}", "out_of_range")
    assert f"(max_{name})" in fault["detail"]
