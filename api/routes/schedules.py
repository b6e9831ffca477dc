"""Jobs: submit, look, list, cancel, retry, remove."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Literal
from uuid import UUID

from anyio import to_thread
from fastapi import APIRouter, Depends, Header, Query, Response
from fastapi.responses import JSONResponse
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from api.jobs.records import Job, Status
from api.middleware import JsonBody, Owner
from api.models import CheckedAnswer, JobAnswer, JobsAnswer, SubmissionBody, read_submission
from api.openapi import WITH_BODY, errors, json_request
from api.service import Service, TheService
from solver.scale import count_ops

router = APIRouter(prefix="/v1/schedules", tags=["schedules"])

INLINE_BYTES = 64 * 2**10
"""Bodies up to here are read within milliseconds, and so at once; larger ones are first tried in another process."""

MOST_WAIT_S = 60.0
MOST_JOBS = 200


def _printable(text: str) -> str:
    if not text.isprintable():
        raise PydanticCustomError("not_printable", "no control characters are allowed")
    return text


IdempotencyKey = Annotated[
    str | None,
    Header(max_length=200, pattern=r"^[\x21-\x7e]+$", description="The same key and body give the same job."),
]
Tag = Annotated[str | None, Query(min_length=1, max_length=64), AfterValidator(lambda tag: tag and _printable(tag))]


async def _waiting(
    service: TheService,
    owner: Owner,
    wait: Annotated[
        float, Query(ge=0, le=MOST_WAIT_S, allow_inf_nan=False, description="Seconds to wait for the end.")
    ] = 0,
) -> AsyncIterator[float]:
    """How long a request waits; one that does holds one of the caller's connections until it is answered."""
    with service.connections.taken(owner) if wait else nullcontext():
        yield wait


Wait = Annotated[float, Depends(_waiting)]


@router.post(
    "",
    status_code=202,
    response_model=JobAnswer,
    responses={
        200: {"model": JobAnswer | CheckedAnswer, "description": "The finished job, or what was checked."},
        202: {"description": "The job, queued.", "headers": {"Location": {"schema": {"type": "string"}}}},
        **errors(*WITH_BODY),
    },
    openapi_extra=json_request(SubmissionBody),
)
async def submit(
    service: TheService,
    owner: Owner,
    body: JsonBody,
    wait: Wait,
    operation: Annotated[Literal["solve", "validate"], Query(description="validate: only check.")] = "solve",
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Have a problem solved. An equal problem that was solved at least as well before is answered at once."""
    submission = await _read(service, owner, body)
    if operation == "validate":
        return JSONResponse(_checked(submission).model_dump())
    digest = hashlib.sha256(submission.to_json().encode()).digest()
    taken = await service.store.submit(submission.problem, submission.config, owner, idempotency_key, digest)
    job = taken.job
    if wait and not job.ended:
        job = await service.store.wait_until_ended(job.id, owner, wait)
    answer = _job_response(job, 200 if job.ended else 202)
    answer.headers["Location"] = f"/v1/schedules/{job.id}"
    return answer


async def _read(service: Service, owner: UUID | None, body: bytes) -> SubmissionBody:
    """The submission in a body. One that is large is tried first where it can take neither our time nor our memory."""
    if len(body) <= INLINE_BYTES:
        return read_submission(body, service.caps)
    await service.pool.run("check_submission", body, owner, caps=asdict(service.caps))
    return await to_thread.run_sync(read_submission, body, service.caps)


def _checked(submission: SubmissionBody) -> CheckedAnswer:
    problem = submission.problem
    return CheckedAnswer(
        name=problem.name,
        objective=problem.objective,
        devices=len(problem.devices),
        stages=len(problem.stages),
        microbatches=problem.microbatches,
        ops=count_ops(problem),
    )


def _job_response(job: Job, status: int = 200) -> Response:
    return Response(JobAnswer.of(job).model_dump_json(), status, media_type="application/json")


@router.get("", response_model=JobsAnswer, responses=errors(422))
async def list_jobs(
    service: TheService,
    owner: Owner,
    status: Status | None = None,
    tag: Tag = None,
    limit: Annotated[int, Query(ge=1, le=MOST_JOBS)] = 50,
    cursor: Annotated[str | None, Query(max_length=200)] = None,
) -> Response:
    """Jobs, newest first. `cursor` of one answer asks for the jobs that follow."""
    page = await service.store.list_jobs(owner, status, tag, limit, cursor)
    return Response(JobsAnswer.of(page).model_dump_json(), media_type="application/json")


@router.get("/{job_id}", response_model=JobAnswer, responses=errors(404, 422))
async def get_job(service: TheService, owner: Owner, job_id: UUID, wait: Wait) -> Response:
    """A job as it stands, or once it has ended."""
    if wait:
        return _job_response(await service.store.wait_until_ended(job_id, owner, wait))
    return _job_response(await service.store.get(job_id, owner))


@router.post("/{job_id}/cancel", response_model=JobAnswer, responses=errors(404))
async def cancel(service: TheService, owner: Owner, job_id: UUID) -> Response:
    """Stop a job and keep its best schedule. One that runs ends within a second; one that has ended stays as it is."""
    return _job_response(await service.store.cancel(job_id, owner))


@router.post("/{job_id}/retry", status_code=202, response_model=JobAnswer, responses=errors(404, 409))
async def retry(service: TheService, owner: Owner, job_id: UUID) -> Response:
    """Queue an ended job again, from its best schedule on."""
    return _job_response(await service.store.retry(job_id, owner), 202)


@router.delete("/{job_id}", status_code=204, responses=errors(404, 409))
async def remove(service: TheService, owner: Owner, job_id: UUID) -> None:
    """Remove a job with all that belongs to it; not while it runs."""
    await service.store.delete(job_id, owner)
