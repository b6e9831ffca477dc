"""Submission of problems, alone and in batches."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Annotated, Literal
from uuid import UUID

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse

from api.errors import HttpError
from api.jobs.records import Submission
from api.jobs.results import Built, Equality
from api.jobs.submit import ParsedProblem, Request, SubmittedProblem
from api.middleware import JsonBody, Key, Owner
from api.models import (
    CheckedAnswer,
    JobAnswer,
    LongCheckError,
    ReadSubmission,
    SubmissionBody,
    hash_submission,
    read_batch,
    read_submission,
)
from api.openapi import SUBMITTED, WITH_BODY, errors, headers, json_request
from api.process_pool import ProcessPool
from api.routes.demo_data import BODIES
from api.routes.jobs import IdempotencyKey, Wait, submitted_response
from api.service import Service, TheService
from optpipe.problem import Problem
from solver.scale import count_ops

router = APIRouter(prefix="/v1/schedules", tags=["schedules"])

INLINE_BYTES = 64 * 2**10
"""Bodies up to here are parsed within milliseconds, and so at once; larger ones in a process of the pool."""

INLINE_OPS = 2_000
"""Ops up to which a schedule is made from that of an equal problem, and costs of units are compared, in this process,
within milliseconds."""


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
            with suppress(LongCheckError):
                document = read_submission(body, service.caps, most_ops=INLINE_OPS)
                return JSONResponse(CheckedAnswer.of(document.problem).model_dump())
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
    """Submit what a body describes; `problem_alone` as `read_submission`. One that is large, or takes long to check, is
    read in a process of the pool.

    Raises HttpError, JobError.
    """
    request = None
    if len(body) <= INLINE_BYTES:
        with suppress(LongCheckError):
            document = read_submission(body, service.caps, problem_alone, INLINE_OPS)
            request = _request(document, service.pool, owner, idempotency_key)
    if request is None:
        options = {"caps": asdict(service.caps), "problem_alone": problem_alone}
        head, text = (await service.pool.run("parse_submission", body, owner, **options)).split(b"\n", 1)
        request = _large_request(head, text, service.pool, owner, idempotency_key)
    return await service.store.submit_request(request)


async def submit_batch(
    service: Service, owner: UUID | None, body: bytes, idempotency_key: str | None
) -> list[Submission]:
    """Submit all jobs of a body, or none. Raises HttpError, JobError.

    Each is stored with an Idempotency-Key of its own: the first one with the caller's, so that no single submission has
    that too, and the others with a space, which no caller's key has.
    """
    requests = []
    if len(body) <= INLINE_BYTES:
        with suppress(LongCheckError):
            documents = read_batch(body, service.caps, INLINE_OPS)
            requests = [_request(document, service.pool, owner, None) for document in documents]
    if not requests:
        answer = await service.pool.run("parse_batch", body, owner, caps=asdict(service.caps))
        lines = answer.split(b"\n")
        parsed = zip(lines[::2], lines[1::2], strict=True)
        requests = [_large_request(head, text, service.pool, owner, None) for head, text in parsed]
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
