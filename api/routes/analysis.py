"""Routes without a job: analysis of a schedule, comparison of published schedules, recognition of files."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query, Response

from api.analysis import Analysis, Comparison, FileBody, Recognized
from api.middleware import JsonBody, Owner
from api.models import ProblemBody
from api.openapi import WITH_BODY, errors, json_request
from api.routes.demo_data import BODIES
from api.routes.health import TOY
from api.service import TheService
from optpipe.schedule import Schedule
from solver.solve import solve

router = APIRouter(prefix="/v1", tags=["judgements"])


@router.post(
    "/analyze",
    response_model=Analysis,
    responses=errors(*WITH_BODY),
    openapi_extra=json_request(Schedule, example=solve(TOY, "1f1b").to_data()),
)
async def analyze(service: TheService, owner: Owner, body: JsonBody) -> Response:
    """Recompute every figure of a schedule, memory over time, and list the rules that it breaks."""
    content = await service.pool.run("analyze", body, owner, max_ops=service.caps.max_ops)
    return Response(content, media_type="application/json")


@router.post(
    "/compare",
    response_model=Comparison,
    responses=errors(*WITH_BODY),
    openapi_extra=json_request(ProblemBody, example={"problem": BODIES["tiny"]["problem"]}),
)
async def compare(
    service: TheService,
    owner: Owner,
    body: JsonBody,
    schedules: Annotated[bool, Query(description="Answer with the schedules themselves too.")] = False,
) -> Response:
    """Compare the published schedules of a problem, best first."""
    content = await service.pool.run("compare", body, owner, caps=asdict(service.caps), schedules=schedules)
    return Response(content, media_type="application/json")


@router.post(
    "/recognize",
    response_model=Recognized,
    responses=errors(*WITH_BODY),
    openapi_extra=json_request(FileBody, example={"name": "two-ranks.csv", "text": "0F0,0B0\n1F0,1B0\n"}),
)
async def recognize(service: TheService, owner: Owner, body: JsonBody) -> Response:
    """Tell what a file is: a problem, a schedule, a measured step, a schedule CSV of torch or a model's config.json."""
    content = await service.pool.run("recognize", body, owner, max_ops=service.caps.max_ops)
    return Response(content, media_type="application/json")
