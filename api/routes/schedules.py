"""Jobs: submit, look, list, cancel, retry, remove."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from http import HTTPStatus
from math import ceil
from typing import Annotated, Literal
from uuid import UUID

from fastapi import APIRouter, Depends, Header, Query, Response
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator
from pydantic_core import PydanticCustomError

from api.errors import HttpError, http_error
from api.jobs.records import ApiKey, Job, JobLabels, Sort, Status, Submission, SubmissionRate, is_printable
from api.jobs.results import Built, Equality
from api.jobs.submit import ParsedProblem, Request, SubmittedProblem
from api.middleware import JsonBody, Key, Owner
from api.models import (
    CheckedAnswer,
    JobAnswer,
    JobsAnswer,
    ReadSubmission,
    SubmissionBody,
    hash_submission,
    read_batch,
    read_document,
    read_submission,
)
from api.openapi import SUBMITTED, WITH_BODY, Responses, errors, headers, json_request
from api.process_pool import ProcessPool
from api.routes.demo_data import BODIES
from api.routes.documents import is_known, validated_by
from api.service import Service, TheService
from optpipe.problem import Problem
from solver.scale import count_ops

router = APIRouter(prefix="/v1/schedules", tags=["schedules"])

INLINE_BYTES = 64 * 2**10
"""Bodies up to here are parsed within milliseconds, and so at once; larger ones in a process of the pool."""

INLINE_OPS = 2_000
"""Ops up to which a schedule is made from that of an equal problem in this process, within milliseconds."""

MOST_WAIT_S = 60.0
MOST_JOBS = 200


def _printable(text: str) -> str:
    if not is_printable(text):
        raise PydanticCustomError("not_printable", "no control characters are allowed")
    return text


IdempotencyKey = Annotated[
    str | None,
    Header(max_length=200, pattern=r"^[\x21-\x7e]+$", description="The same key and body give the same job."),
]


def _no_number(text: object) -> object:
    if isinstance(text, str) and not re.match(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ]", text, re.ASCII):
        raise PydanticCustomError("no_time", "it must be a time of RFC 3339, such as 2026-11-22T16:00:00Z")
    return text


Time = Annotated[AwareDatetime, BeforeValidator(_no_number)]
"""A time with its zone. Pydantic also takes seconds since 1970, which the description does not."""
NamePart = Annotated[
    str, Query(max_length=200, description="Part of the name, in either case."), AfterValidator(_printable)
]
Tag = Annotated[str | None, Query(min_length=1, max_length=64), AfterValidator(lambda tag: tag and _printable(tag))]


async def _waiting(
    service: TheService,
    owner: Owner,
    wait: Annotated[
        float, Query(ge=0, le=MOST_WAIT_S, allow_inf_nan=False, description="Seconds to wait for the end.")
    ] = 0,
) -> AsyncIterator[float]:
    """Seconds that a request waits; if any, it holds one of the caller's connections until it is answered."""
    with service.connections.taken(owner) if wait else nullcontext():
        yield wait


Wait = Annotated[float, Depends(_waiting)]


@router.post(
    "",
    status_code=202,
    response_model=JobAnswer,
    responses={
        200: {
            "model": JobAnswer | CheckedAnswer,
            "description": "The finished job; or, without further headers, what was checked.",
            "headers": headers(*SUBMITTED),
        },
        202: {"description": "The job, queued.", "headers": headers(*SUBMITTED)},
        **errors(*WITH_BODY),
    },
    openapi_extra=json_request(SubmissionBody, example=BODIES["tiny"]),
)
async def submit(
    service: TheService,
    owner: Owner,
    key: Key,
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
    submission = await submit_body(service, owner, body, idempotency_key)
    job = submission.job
    if wait and not job.ended:
        job = await service.store.wait_until_ended(job.id, owner, wait, key.id if key else None)
    return submitted_response(job, submission)


async def submit_body(
    service: Service, owner: UUID | None, body: bytes, idempotency_key: str | None, problem_alone: bool = False
) -> Submission:
    """Submit what a body describes, a large one parsed in a process of the pool; `problem_alone` as `read_submission`.

    Raises HttpError, JobError.
    """
    if len(body) > INLINE_BYTES:
        options = {"caps": asdict(service.caps), "problem_alone": problem_alone}
        head, text = (await service.pool.run("parse_submission", body, owner, **options)).split(b"\n", 1)
        request = _large_request(head, text, service.pool, owner, idempotency_key)
    else:
        document = read_submission(body, service.caps, problem_alone)
        request = _request(document, service.pool, owner, idempotency_key)
    return await service.store.submit_request(request)


async def submit_batch(
    service: Service, owner: UUID | None, body: bytes, idempotency_key: str | None
) -> list[Submission]:
    """Submit all jobs of a body, or none. Raises HttpError, JobError.

    Each is stored with an Idempotency-Key of its own: the first one with the caller's, so that no single submission has
    that too, and the others with a space, which no caller's key has.
    """
    if len(body) > INLINE_BYTES:
        answer = await service.pool.run("parse_batch", body, owner, caps=asdict(service.caps))
        lines = answer.split(b"\n")
        parsed = zip(lines[::2], lines[1::2], strict=True)
        requests = [_large_request(head, text, service.pool, owner, None) for head, text in parsed]
    else:
        requests = [_request(document, service.pool, owner, None) for document in read_batch(body, service.caps)]
    if idempotency_key is not None:
        whole = hashlib.sha256(b"batch" + b"".join(request.body_hash for request in requests)).digest()
        keys = [idempotency_key, *(f"{idempotency_key} {k}" for k in range(1, len(requests)))]
        requests = [
            replace(request, idempotency_key=key, body_hash=whole) for request, key in zip(requests, keys, strict=True)
        ]
    return await service.store.submit_all(requests)


def _request(document: SubmissionBody, pool: ProcessPool, owner: UUID | None, idempotency_key: str | None) -> Request:
    """A request from what was parsed here. A small body may have many ops: their schedule is made in the pool."""
    many = count_ops(document.problem) > INLINE_OPS
    problem = LongProblem(document.problem, pool, owner) if many else ParsedProblem(document.problem)
    return Request(problem, document.config, owner, idempotency_key, hash_submission(document))


def _large_request(
    head: bytes, text: bytes, pool: ProcessPool, owner: UUID | None, idempotency_key: str | None
) -> Request:
    """A request from what a process of the pool has parsed: a line with `ReadSubmission`, and the problem's text."""
    read = ReadSubmission.model_validate_json(head)
    problem = LargeProblem(read, text.decode(), pool, owner)
    return Request(problem, read.config, owner, idempotency_key, bytes.fromhex(read.body_hash))


def submitted_response(job: Job, submission: Submission) -> Response:
    """The answer to a submission: 200 with a job that has ended, else 202."""
    answer = _job_response(job, 200 if job.ended else 202)
    answer.headers.update(headers_of(submission))
    return answer


def headers_of(submission: Submission) -> dict[str, str]:
    """Headers of every answer to a submission."""
    return {"Location": f"/v1/schedules/{submission.job.id}", **rate_headers(submission.rate)}


def rate_headers(rate: SubmissionRate) -> dict[str, str]:
    """Headers of the submissions that are left, as in draft-ietf-httpapi-ratelimit-headers-10."""
    return {
        "RateLimit-Policy": f'"submissions";q={rate.most};w=60',
        "RateLimit": f'"submissions";r={rate.left};t={ceil(rate.reset_s)}',
    }


class PooledProblem(SubmittedProblem):
    """A problem whose schedule is made in a process of the pool, at the caller's expense."""

    _pool: ProcessPool
    _owner: UUID | None

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


class LargeProblem(PooledProblem):
    """A problem that only processes of the pool parse, so that it takes neither this process's time nor its memory."""

    def __init__(self, read: ReadSubmission, text: str, pool: ProcessPool, owner: UUID | None) -> None:
        self.text, self.digest = text, bytes.fromhex(read.digest)
        self.name, self.objective = read.name, read.objective
        self.devices, self.stages, self.microbatches = read.devices, read.stages, read.microbatches
        self._equality = Equality(read.equality_key, read.time_us)
        self._pool, self._owner = pool, owner

    async def equality(self) -> Equality:
        """See `SubmittedProblem.equality`."""
        return self._equality


class LongProblem(PooledProblem, ParsedProblem):
    """A problem that was parsed in this process, because it is small; but it has many ops."""

    def __init__(self, problem: Problem, pool: ProcessPool, owner: UUID | None) -> None:
        super().__init__(problem)
        self._pool, self._owner = pool, owner


def _job_response(job: Job, status: int = 200) -> Response:
    return Response(JobAnswer.of(job).model_dump_json(), status, media_type="application/json")


def _unless_known(answer: BaseModel, if_none_match: str) -> Response:
    """An answer with a tag of its content, or 304 where the caller names that tag."""
    content = answer.model_dump_json().encode()
    tag = f'W/"{hashlib.sha256(content).hexdigest()[:32]}"'
    if is_known(tag, if_none_match):
        return Response(status_code=304, headers=validated_by(tag))
    return Response(content, headers=validated_by(tag), media_type="application/json")


IfNoneMatch = Annotated[str, Header(description="304 where the answer has this ETag still.")]
_VALIDATED: Responses = {
    200: {"headers": headers("ETag")},
    304: {"description": "The answer is still the one that If-None-Match names.", "headers": headers("ETag")},
}


@router.get("", response_model=JobsAnswer, responses=errors(422) | _VALIDATED)
async def list_jobs(
    service: TheService,
    owner: Owner,
    key: Key,
    status: Status | None = None,
    tag: Tag = None,
    name: NamePart = "",
    submitted_after: Annotated[Time | None, Query(description="Or at this time.")] = None,
    submitted_before: Time | None = None,
    sort: Annotated[Sort, Query(description="With a minus: the largest first. Jobs that have no such value: last.")] = (
        "-submitted_at"
    ),
    count: Annotated[bool, Query(description="Also count the jobs of all pages.")] = False,
    all_keys: Annotated[bool, Query(description="Of all keys; with the scope `admin` only.")] = False,
    limit: Annotated[int, Query(ge=1, le=MOST_JOBS)] = 50,
    cursor: Annotated[str | None, Query(max_length=1000)] = None,
    if_none_match: IfNoneMatch = "",
) -> Response:
    """Jobs, newest first unless `sort` says otherwise. `cursor` of one answer asks for the jobs that follow."""
    if all_keys and (key is None or key.scope != "admin"):
        raise http_error(HTTPStatus.FORBIDDEN, "scope", "all_keys needs a key with the scope 'admin'.")
    page = await service.store.list_jobs(
        owner,
        status,
        tag,
        limit,
        cursor,
        name=name,
        submitted_after=submitted_after,
        submitted_before=submitted_before,
        sort=sort,
        count=count,
        all_keys=all_keys,
    )
    return _unless_known(JobsAnswer.of(page), if_none_match)


@router.get("/{job_id}", response_model=JobAnswer, responses=errors(404, 422) | _VALIDATED)
async def get_job(
    service: TheService, owner: Owner, key: Key, job_id: UUID, wait: Wait, if_none_match: IfNoneMatch = ""
) -> Response:
    """A job as it stands, or once it has ended."""
    if wait:
        job = await service.store.wait_until_ended(job_id, owner, wait, key.id if key else None)
    else:
        job = await service.store.get(job_id, owner)
    return _unless_known(JobAnswer.of(job), if_none_match)


@router.patch(
    "/{job_id}",
    response_model=JobAnswer,
    responses=errors(404, *WITH_BODY),
    openapi_extra=json_request(
        JobLabels, example={"name": "nightly", "tags": ["a100"], "note": "With half of the memory."}
    ),
)
async def rename(service: TheService, owner: Owner, job_id: UUID, body: JsonBody) -> Response:
    """Change name, tags or note; what the body leaves out stays."""
    return _job_response(await service.store.rename(job_id, read_document(JobLabels, body), owner))


@router.post("/{job_id}/cancel", response_model=JobAnswer, responses=errors(404))
async def cancel(service: TheService, owner: Owner, key: Key, job_id: UUID) -> Response:
    """Stop a job and keep its best schedule. One that runs ends within a second; one that has ended stays as it is."""
    return _job_response(await cancel_job(service, owner, key, job_id))


async def cancel_job(service: Service, owner: UUID | None, key: ApiKey | None, job_id: UUID) -> Job:
    """Cancel a job of the owner; with a key of an admin, of anybody. Raises NotFoundError."""
    if key is not None and key.scope == "admin":
        owner = await service.store.owner_of(job_id)
    return await service.store.cancel(job_id, owner)


@router.post(
    "/{job_id}/retry",
    status_code=202,
    response_model=JobAnswer,
    responses={202: {"headers": headers(*SUBMITTED)}, **errors(404, 409)},
)
async def retry(service: TheService, owner: Owner, job_id: UUID) -> Response:
    """Queue an ended job again, from its best schedule on; it counts as a submission."""
    submission = await service.store.retry(job_id, owner)
    return submitted_response(submission.job, submission)


@router.delete("/{job_id}", status_code=204, responses=errors(404, 409))
async def remove(service: TheService, owner: Owner, job_id: UUID) -> None:
    """Remove a job with all that belongs to it; not while it runs."""
    await service.store.delete(job_id, owner)
