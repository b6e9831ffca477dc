"""The published schedules of one problem, side by side."""

from __future__ import annotations

import time
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from optpipe.errors import MethodError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from solver.methods import METHODS
from solver.portfolio import solve


class ComparedMethod(BaseModel):
    """One published schedule, or why there is none for this problem."""

    model_config = ConfigDict(extra="forbid")

    method: str
    summary: str
    why_not: str | None = Field(description="null: there is a schedule.")
    seconds: float = Field(description="What it took to make and verify.")
    value_us: float | None = None
    bound_us: float | None = None
    gap: float | None = None
    bubble: float | None = None
    peak_bytes: list[int] | None = Field(default=None, description="Of each device.")
    peak_bytes_any_timing: list[int] | None = None
    schedule: dict[str, Any] | None = Field(default=None, description="The whole schedule, where asked for.")


class Comparison(BaseModel):
    """All published schedules of a problem, the best first and those that there are not last."""

    model_config = ConfigDict(extra="forbid")

    objective: str
    methods: list[ComparedMethod]


def comparison(problem: Problem, schedules: bool) -> dict[str, Any]:
    """The comparison as plain JSON values, with the schedules themselves where asked for."""
    names = [method.name for method in METHODS.values() if method.kind == "published"]
    rows = [_row(problem, name, schedules) for name in names]
    rows.sort(key=lambda row: row.get("value_us", float("inf")))
    return {"objective": problem.objective, "methods": rows}


def _row(problem: Problem, name: str, schedules: bool) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        found: Schedule | None = solve(problem, name)
        why_not = None
    except MethodError as error:
        found, why_not = None, str(error)
    row: dict[str, Any] = {"method": name, "summary": METHODS[name].summary, "why_not": why_not}
    row["seconds"] = round(time.perf_counter() - began, 6)
    if found is None:
        return row
    figures = {name: value for name, value in found.figures().items() if name in ComparedMethod.model_fields}
    return row | figures | ({"schedule": found.to_data()} if schedules else {})
