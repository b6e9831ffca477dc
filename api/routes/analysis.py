"""Answers that need no job: what a schedule is worth, and what the published ones make of a problem."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query, Response

from api.analysis import Analysis, Comparison
from api.middleware import JsonBody, Owner
from api.models import ProblemBody
from api.openapi import WITH_BODY, errors, json_request
from api.service import TheService
from optpipe.schedule import Schedule

router = APIRouter(prefix="/v1", tags=["judgements"])


@router.post("/analyze", response_model=Analysis, responses=errors(*WITH_BODY), openapi_extra=json_request(Schedule))
async def analyze(service: TheService, owner: Owner, body: JsonBody) -> Response:
    """Every figure of a schedule recomputed, memory over time, and each rule that it breaks."""
    content = await service.pool.run("analyze", body, owner, max_ops=service.caps.max_ops)
    return Response(content, media_type="application/json")


@router.post(
    "/compare", response_model=Comparison, responses=errors(*WITH_BODY), openapi_extra=json_request(ProblemBody)
)
async def compare(
    service: TheService,
    owner: Owner,
    body: JsonBody,
    schedules: Annotated[bool, Query(description="Answer with the schedules themselves too.")] = False,
) -> Response:
    """The published schedules of a problem, side by side, the best first."""
    content = await service.pool.run("compare", body, owner, caps=asdict(service.caps), schedules=schedules)
    return Response(content, media_type="application/json")
