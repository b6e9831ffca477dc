"""Example request bodies."""

from __future__ import annotations

import json
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from api.errors import http_error
from api.openapi import errors

router = APIRouter(prefix="/v1/demo-data", tags=["demo data"])

FOLDER = Path(__file__).parents[1] / "demo_data"
BODIES: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


class DemoEntry(BaseModel):
    """One body that can be posted to /v1/schedules."""

    model_config = ConfigDict(extra="forbid")

    name: str
    about: str
    url: str


class DemoList(BaseModel):
    """All example bodies."""

    model_config = ConfigDict(extra="forbid")

    demo_data: list[DemoEntry]


@router.get("", response_model=DemoList, responses=errors())
async def demo_list() -> DemoList:
    """Example bodies, smallest first."""
    entries = [
        DemoEntry(name=name, about=body["problem"]["source"], url=f"/v1/demo-data/{name}")
        for name, body in sorted(BODIES.items(), key=lambda item: item[1]["problem"]["microbatches"])
    ]
    return DemoList(demo_data=entries)


@router.get(
    "/{name}",
    responses={
        200: {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/SubmissionBody"}}}},
        **errors(404),
    },
)
async def demo_body(name: str) -> JSONResponse:
    """A body for POST /v1/schedules."""
    if name not in BODIES:
        raise http_error(HTTPStatus.NOT_FOUND, "not_found", f"the demo data are {', '.join(BODIES)}.")
    return JSONResponse(BODIES[name])
