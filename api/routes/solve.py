"""One request that returns a schedule."""

from __future__ import annotations

from contextlib import nullcontext
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Header, Query, Response

from api.errors import Fault, HttpError
from api.jobs.records import Job
from api.middleware import JsonOrFormBody, Key, Owner
from api.models import JobAnswer, SubmissionBody
from api.openapi import SUBMITTED, WITH_BODY, errors, headers, json_request
from api.routes.demo_data import BODIES
from api.routes.documents import CONTENT, Format, best_document, format_for, schedule_response
from api.routes.jobs import IdempotencyKey, headers_of, submitted_response
from api.routes.schedules import submit_body
from api.service import TheService
from optpipe.problem import Problem

router = APIRouter(prefix="/v1", tags=["schedules"])

AFTER_LIMIT_S = 5.0
"""Wait of a request beyond the time limit of its job, for the queue, the start and the end of the solve."""

LONGEST_WAIT_S = 1e7


@router.post(
    "/solve",
    response_class=Response,
    responses={
        200: {"description": "The schedule.", "content": CONTENT, "headers": headers(*SUBMITTED)},
        202: {
            "model": JobAnswer,
            "description": "The job, which has not ended in time.",
            "headers": headers(*SUBMITTED),
        },
        **errors(*WITH_BODY),
    },
    openapi_extra=json_request(SubmissionBody, Problem, example=BODIES["tiny"]["problem"]),
)
async def solve(
    service: TheService,
    owner: Owner,
    key: Key,
    body: JsonOrFormBody,
    wait: Annotated[
        float | None,
        Query(
            ge=0,
            le=LONGEST_WAIT_S,
            allow_inf_nan=False,
            description=f"Seconds to wait for the end; by default and at most the time limit and {AFTER_LIMIT_S:g} s.",
        ),
    ] = None,
    format: Annotated[Format | None, Query(description="Of the schedule; by default what Accept prefers.")] = None,
    idempotency_key: IdempotencyKey = None,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    """Solve a problem and answer with its schedule. The body is a submission, or a problem alone."""
    with service.connections.taken(owner) if wait != 0 else nullcontext():
        submission = await submit_body(service, owner, body, idempotency_key, problem_alone=True)
        job = submission.job
        most_s = job.config.time_limit_s + AFTER_LIMIT_S
        if not job.ended:
            wait_s = most_s if wait is None else min(wait, most_s)
            job = await service.store.wait_until_ended(job.id, owner, wait_s, key.id if key else None)
    if not job.ended:
        return submitted_response(job, submission)
    if job.value_us is None:
        raise _no_schedule(job)
    best = await best_document(service, owner, job.id, await service.store.best_revision(job.id, owner))
    answer = await schedule_response(service, owner, job.id, best, format or format_for(accept))
    answer.headers.update(headers_of(submission))
    return answer


def _no_schedule(job: Job) -> HttpError:
    """The error for a job that has ended without a schedule."""
    code = job.reason if job.status == "failed" and job.reason is not None else job.status
    detail = job.error or f"job {job.id} ended as {job.status} before it had a schedule."
    return HttpError(
        HTTPStatus.UNPROCESSABLE_ENTITY,
        [Fault(pointer="", code=code, detail=detail)],
        headers={"Location": f"/v1/schedules/{job.id}"},
        budgets_bytes=job.budgets_bytes,
    )
