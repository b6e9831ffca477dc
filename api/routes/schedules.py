"""Jobs: submit, look, list, cancel, retry, remove."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import nullcontext, suppress
from dataclasses import asdict
from typing import Annotated, Literal
from uuid import UUID

from fastapi import APIRouter, Depends, Header, Query, Response
from fastapi.responses import JSONResponse
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from api.errors import HttpError
from api.jobs.records import Job, Status
from api.jobs.results import Built, Equality
from api.jobs.submit import SubmittedProblem
from api.middleware import JsonBody, Owner
from api.models import (
    CheckedAnswer,
    JobAnswer,
    JobsAnswer,
    ReadSubmission,
    SubmissionBody,
    hash_submission,
    read_submission,
)
from api.openapi import WITH_BODY, errors, json_request
from api.process_pool import ProcessPool
from api.service import Service, TheService
from optpipe.problem import Problem

router = APIRouter(prefix="/v1/schedules", tags=["schedules"])

INLINE_BYTES = 64 * 2**10
"""Bodies up to here are parsed within milliseconds, and so at once; larger ones in a process of the pool."""

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
    if operation == "validate":
        if len(body) <= INLINE_BYTES:
            return JSONResponse(CheckedAnswer.of(read_submission(body, service.caps).problem).model_dump())
        checked = await service.pool.run("check_submission", body, owner, caps=asdict(service.caps))
        return Response(checked, media_type="application/json")
    job = await submit_body(service, owner, body, idempotency_key)
    if wait and not job.ended:
        job = await service.store.wait_until_ended(job.id, owner, wait)
    return submitted_response(job)


async def submit_body(
    service: Service, owner: UUID | None, body: bytes, idempotency_key: str | None, problem_alone: bool = False
) -> Job:
    """Submit what a body describes, a large one parsed in a process of the pool; `problem_alone` as `read_submission`.

    Raises HttpError, JobError.
    """
    problem: Problem | LargeProblem
    if len(body) > INLINE_BYTES:
        options = {"caps": asdict(service.caps), "problem_alone": problem_alone}
        head, text = (await service.pool.run("parse_submission", body, owner, **options)).split(b"\n", 1)
        read = ReadSubmission.model_validate_json(head)
        problem = LargeProblem(read, text.decode(), service.pool, owner)
        config, body_hash = read.config, bytes.fromhex(read.body_hash)
    else:
        submission = read_submission(body, service.caps, problem_alone)
        problem, config, body_hash = submission.problem, submission.config, hash_submission(submission)
    return (await service.store.submit(problem, config, owner, idempotency_key, body_hash)).job


def submitted_response(job: Job) -> Response:
    """The answer to a submission: 200 with a job that has ended, else 202."""
    answer = _job_response(job, 200 if job.ended else 202)
    answer.headers["Location"] = f"/v1/schedules/{job.id}"
    return answer


class LargeProblem(SubmittedProblem):
    """A problem that only processes of the pool parse, so that it takes neither this process's time nor its memory."""

    def __init__(self, read: ReadSubmission, text: str, pool: ProcessPool, owner: UUID | None) -> None:
        self.text, self.digest = text, bytes.fromhex(read.digest)
        self.name, self.objective = read.name, read.objective
        self._equality = Equality(read.equality_key, read.time_us)
        self._pool, self._owner = pool, owner

    async def equality(self) -> Equality:
        """See `SubmittedProblem.equality`."""
        return self._equality

    async def build(self, orders: str, bound_us: float, method: str, solve_seconds: float) -> Built | None:
        """See `SubmittedProblem.build`. Also None where the pool is busy or fails: the job is then queued."""
        options = {"orders": orders, "bound_us": bound_us, "method": method, "solve_seconds": solve_seconds}
        answer = b""
        with suppress(HttpError):
            answer = await self._pool.run("build_equal", self.text.encode(), self._owner, **options)
        if not answer:
            return None
        head, text = answer.split(b"\n", 1)
        return Built(text.decode(), *json.loads(head))


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
