"""Jobs of every kind: list, look, rename, cancel, retry, remove. An id names the same job under each prefix."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from http import HTTPStatus
from math import ceil
from typing import Annotated, Any, TypeVar
from uuid import UUID

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator
from pydantic_core import PydanticCustomError

from api.errors import http_error
from api.jobs.records import ApiKey, Job, JobKind, JobLabels, Sort, Status, Submission, SubmissionRate, is_printable
from api.middleware import Key, Owner, SmallJsonBody
from api.models import JobAnswer, JobsAnswer, read_document
from api.openapi import SUBMITTED, WITH_BODY, Responses, errors, headers, json_request
from api.routes.documents import is_known, validated_by
from api.service import Service, TheService

PREFIXES: dict[JobKind, str] = {"solve": "/v1/schedules", "plan": "/v1/plans"}
ROUTERS = [APIRouter(prefix=prefix, tags=[prefix.rpartition("/")[2]]) for prefix in PREFIXES.values()]
Handler = TypeVar("Handler", bound=Callable[..., Any])


def route(method: str, path: str, **options: Any) -> Callable[[Handler], Handler]:
    """Decorator of a route that jobs of every kind have, under the prefix of each."""

    def register(function: Handler) -> Handler:
        for router in ROUTERS:
            router.add_api_route(path, function, methods=[method], **options)
        return function

    return register


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


async def _kind(request: Request) -> JobKind:
    """Kind of the jobs under the request's prefix."""
    return "plan" if request.url.path.startswith(PREFIXES["plan"]) else "solve"


Kind = Annotated[JobKind, Depends(_kind)]


def submitted_response(job: Job, submission: Submission) -> Response:
    """The answer to a submission: 200 with a job that has ended, else 202."""
    answer = _job_response(job, 200 if job.ended else 202)
    answer.headers.update(headers_of(submission))
    return answer


def headers_of(submission: Submission) -> dict[str, str]:
    """Headers of every answer to a submission."""
    return {"Location": f"{PREFIXES[submission.job.kind]}/{submission.job.id}", **rate_headers(submission.rate)}


def rate_headers(rate: SubmissionRate) -> dict[str, str]:
    """Headers of the submissions that are left, as in draft-ietf-httpapi-ratelimit-headers-10."""
    return {
        "RateLimit-Policy": f'"submissions";q={rate.most};w=60',
        "RateLimit": f'"submissions";r={rate.left};t={ceil(rate.reset_s)}',
    }


def _job_response(job: Job, status: int = 200) -> Response:
    return Response(JobAnswer.of(job).model_dump_json(), status, media_type="application/json")


def unless_known(answer: BaseModel, if_none_match: str) -> Response:
    """An answer with a tag of its content, or 304 where the caller names that tag."""
    content = answer.model_dump_json().encode()
    tag = f'W/"{hashlib.sha256(content).hexdigest()[:32]}"'
    if is_known(tag, if_none_match):
        return Response(status_code=304, headers=validated_by(tag))
    return Response(content, headers=validated_by(tag), media_type="application/json")


IfNoneMatch = Annotated[str, Header(description="304 where the answer has this ETag still.")]
VALIDATED: Responses = {
    200: {"headers": headers("ETag")},
    304: {"description": "The answer is still the one that If-None-Match names.", "headers": headers("ETag")},
}


@route("GET", "", response_model=JobsAnswer, responses=errors() | VALIDATED)
async def list_jobs(
    service: TheService,
    owner: Owner,
    key: Key,
    kind: Kind,
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
        kind=kind,
        name=name,
        submitted_after=submitted_after,
        submitted_before=submitted_before,
        sort=sort,
        count=count,
        all_keys=all_keys,
    )
    return unless_known(JobsAnswer.of(page), if_none_match)


@route("GET", "/{job_id}", response_model=JobAnswer, responses=errors(404) | VALIDATED)
async def get_job(
    service: TheService, owner: Owner, key: Key, job_id: UUID, wait: Wait, if_none_match: IfNoneMatch = ""
) -> Response:
    """A job as it stands, or once it has ended."""
    if wait:
        job = await service.store.wait_until_ended(job_id, owner, wait, key.id if key else None)
    else:
        job = await service.store.get(job_id, owner)
    return unless_known(JobAnswer.of(job), if_none_match)


@route(
    "PATCH",
    "/{job_id}",
    response_model=JobAnswer,
    responses=errors(404, *WITH_BODY),
    openapi_extra=json_request(
        JobLabels, example={"name": "nightly", "tags": ["a100"], "note": "With half of the memory."}
    ),
)
async def rename(service: TheService, owner: Owner, job_id: UUID, body: SmallJsonBody) -> Response:
    """Change name, tags or note; what the body leaves out stays."""
    return _job_response(await service.store.rename(job_id, read_document(JobLabels, body), owner))


@route("POST", "/{job_id}/cancel", response_model=JobAnswer, responses=errors(404))
async def cancel(service: TheService, owner: Owner, key: Key, job_id: UUID) -> Response:
    """Stop a job and keep its best schedule. One that runs ends within a second; one that has ended stays as it is."""
    return _job_response(await cancel_job(service, owner, key, job_id))


async def cancel_job(service: Service, owner: UUID | None, key: ApiKey | None, job_id: UUID) -> Job:
    """Cancel a job of the owner; with a key of an admin, of anybody. Raises NotFoundError."""
    if key is not None and key.scope == "admin":
        owner = await service.store.owner_of(job_id)
    return await service.store.cancel(job_id, owner)


@route(
    "POST",
    "/{job_id}/retry",
    status_code=202,
    response_model=JobAnswer,
    responses={202: {"headers": headers(*SUBMITTED)}, **errors(404, 409)},
)
async def retry(service: TheService, owner: Owner, job_id: UUID) -> Response:
    """Queue an ended job again, from its best schedule on; it counts as a submission."""
    submission = await service.store.retry(job_id, owner)
    return submitted_response(submission.job, submission)


@route("DELETE", "/{job_id}", status_code=204, responses=errors(404, 409))
async def remove(service: TheService, owner: Owner, job_id: UUID) -> None:
    """Remove a job with all that belongs to it; not while it runs."""
    await service.store.delete(job_id, owner)
