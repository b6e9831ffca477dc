"""Operations: liveness, readiness, metrics and the OpenAPI document."""

from __future__ import annotations

from contextlib import suppress
from http import HTTPStatus
from typing import Any

from anyio import fail_after, to_thread
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from api.errors import DatabaseGoneError, retry_later
from api.models import HealthAnswer, ReadyAnswer
from api.openapi import errors
from api.service import TheService
from optpipe.problem import Problem
from solver.solve import solve

router = APIRouter(tags=["operations"])

READY_S = 5.0
"""Time limit of the toy solve of `/readyz`."""

_STAGE = {"forward_us": 1, "backward_input_us": 1, "backward_weight_us": 1}
_MEMORY = {"activation_bytes": 1, "backward_weight_bytes": 1}
TOY = Problem.from_data(
    {
        "format": "optpipe.problem/1",
        "microbatches": 2,
        "devices": [{"memory_bytes": 2}] * 2,
        "stages": [{"device": d, **_STAGE, **_MEMORY} for d in range(2)],
    }
)
TOY_VALUE_US = 9.0
"""1F1B on two devices with two microbatches: the first device waits for one F, B and W of the second."""


@router.get("/healthz", responses=errors())
async def alive() -> HealthAnswer:
    """The process answers."""
    return HealthAnswer(status="alive")


@router.get("/readyz", responses=errors())
async def ready(service: TheService) -> ReadyAnswer:
    """The database answers, and a toy problem is solved to its known value; how many workers live."""
    workers = await service.store.ping()
    try:
        with fail_after(READY_S):
            toy = await to_thread.run_sync(solve, TOY, "1f1b", abandon_on_cancel=True)
    except TimeoutError:
        toy = None
    if toy is None or toy.value_us != TOY_VALUE_US:
        raise retry_later(
            HTTPStatus.SERVICE_UNAVAILABLE, "not_ready", "the toy problem was not solved as it must be.", 1
        )
    return ReadyAnswer(status="ready", workers=workers)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **errors()},
)
async def metrics(service: TheService) -> Response:
    """Figures for Prometheus; while the database is gone, those of this process alone."""
    counts = None
    with suppress(DatabaseGoneError):
        counts = await service.store.counts()
    text = service.metrics.text(counts)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/openapi.json", response_model=dict[str, Any], responses=errors())
async def openapi(request: Request) -> JSONResponse:
    """OpenAPI 3.1 document of this interface."""
    return JSONResponse(request.app.openapi())
