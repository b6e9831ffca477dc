"""Documents of a job: the best schedule in several formats, and the problem as it was submitted."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Header, Query, Response

from api.errors import unprocessable
from api.jobs.records import BestRevision, BestSchedule, JobKind
from api.middleware import Owner
from api.openapi import errors, headers
from api.service import Service, TheService
from optpipe.export import EXPORTERS

router = APIRouter(prefix="/v1/schedules", tags=["schedules"])

DOCUMENT = "optpipe.schedule/1"
"""The format of the stored document."""

_SERVED = {name: one for name, one in EXPORTERS.items() if one.media_type}

if TYPE_CHECKING:
    Format = str
else:
    Format = Literal[DOCUMENT, *_SERVED]
"""The document and the formats of other tools."""

_BY_MEDIA_TYPE = {one.media_type: name for name, one in _SERVED.items()} | dict.fromkeys(
    ("application/json", "*/*"), DOCUMENT
)


def _content_of(media_type: str) -> dict[str, Any]:
    """The answers of a media type, as OpenAPI describes them."""
    if media_type == "application/json":
        return {"schema": {"anyOf": [{"$ref": "#/components/schemas/Schedule"}, {"type": "object"}]}}
    is_text = media_type.startswith("text/") or media_type.endswith("+xml")
    return {"schema": {"type": "string"} | ({} if is_text else {"contentMediaType": media_type})}


CONTENT = {one.media_type: _content_of(one.media_type) for one in _SERVED.values()}


@router.get(
    "/{job_id}/schedule",
    response_class=Response,
    responses={
        200: {"description": "The schedule.", "content": CONTENT, "headers": headers("ETag")},
        304: {"description": "It is still the one that If-None-Match names.", "headers": headers("ETag")},
        **errors(404),
    },
)
async def best_schedule(
    service: TheService,
    owner: Owner,
    job_id: UUID,
    format: Annotated[Format, Query()] = DOCUMENT,
    drop_offload: Annotated[bool, Query(description="torch-csv: leave out what torch cannot run.")] = False,
    if_none_match: Annotated[str, Header()] = "",
) -> Response:
    """The best schedule so far, verified. The ETag changes whenever a better one is found."""
    check_drop_offload(format, drop_offload)
    revision = await service.store.best_revision(job_id, owner)
    tag = tag_of(revision, format, drop_offload)
    if is_known(tag, if_none_match):
        return Response(status_code=304, headers=validated_by(tag))
    best = await best_document(service, owner, job_id, revision)
    answer = await schedule_response(service, owner, job_id, best, format, drop_offload)
    answer.headers.update(validated_by(tag_of(best.revision, format, drop_offload)))
    return answer


def check_drop_offload(format: Format, drop_offload: bool) -> None:
    """Raise HttpError where offloads are to be left out of a format that keeps them."""
    if drop_offload and (format == DOCUMENT or "drop_offload" not in _SERVED[format].options):
        raise unprocessable(
            "nothing_to_drop", f"drop_offload is given with {format}, which keeps offloads. Maybe leave it out."
        )


def tag_of(revision: BestRevision, format: Format, drop_offload: bool) -> str:
    """The entity tag of a schedule in a format."""
    parts = [f"{revision.revision}-{revision.bound_us!r}", format]
    parts += ["final"] * revision.final + ["dropped"] * drop_offload
    return f'W/"{"-".join(parts)}"'


async def best_document(service: Service, owner: UUID | None, job_id: UUID, revision: BestRevision) -> BestSchedule:
    """The best schedule, or a better one found meanwhile.

    One that is not kept is made in a process of the pool, at the caller's expense, and remembered for a while.
    """
    made = service.made.get((job_id, revision))
    if made is not None:
        return BestSchedule(revision, made)

    async def build(problem: str, orders: str, bound_us: float, method: str, solve_seconds: float) -> str | None:
        options = {"orders": orders, "bound_us": bound_us, "method": method, "solve_seconds": solve_seconds}
        answer = await service.pool.run("build_equal", problem.encode(), owner, **options)
        return answer.partition(b"\n")[2].decode() or None

    best = await service.store.best_schedule(job_id, owner, build)
    if not best.revision.kept:
        service.made.put((job_id, best.revision), best.text)
    return best


async def schedule_response(
    service: Service, owner: UUID | None, job_id: UUID, best: BestSchedule, format: Format, drop_offload: bool = False
) -> Response:
    """A schedule in a format, made in a process of the pool where it is not the stored document. Raises HttpError."""
    content: str | bytes = best.text
    ending, media_type = "json", "application/json"
    if format != DOCUMENT:
        ending, media_type = _SERVED[format].ending, _SERVED[format].media_type
        options = {"drop_offload": True} if drop_offload else {}
        content = await service.pool.run("export", best.text.encode(), owner, exporter=format, **options)
    named = {"Content-Disposition": f'inline; filename="schedule-{job_id}.{ending}"'}
    return Response(content, headers=named, media_type=media_type)


def is_known(tag: str, if_none_match: str) -> bool:
    """True if `If-None-Match` names the entity tag."""
    return if_none_match.strip() == "*" or tag.removeprefix("W/") in if_none_match


def validated_by(tag: str) -> dict[str, str]:
    """Headers of a response that clients may keep and must ask for again.

    Tags are weak ones, since the bytes that are sent depend on the compression.
    """
    return {"ETag": tag, "Cache-Control": "private, no-cache"}


def format_for(accept: str) -> Format:
    """The format whose media type an `Accept` header prefers; the document where it names none of them."""
    preferred: Format = DOCUMENT
    highest = 0.0
    for part in accept.split(","):
        media_type, *parameters = (text.strip().lower() for text in part.split(";"))
        weights = [text.removeprefix("q=") for text in parameters if text.startswith("q=")]
        weight = float(weights[0]) if weights and _WEIGHT.fullmatch(weights[0]) else 1.0
        format = _BY_MEDIA_TYPE.get(media_type)
        if format is not None and weight > highest:
            preferred, highest = format, weight
    return preferred


_WEIGHT = re.compile(r"[01](\.[0-9]{0,3})?", re.ASCII)


@router.get(
    "/{job_id}/problem",
    response_class=Response,
    responses={
        200: {
            "description": "The problem.",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
            "headers": headers("ETag"),
        },
        304: {"description": "It is the one that If-None-Match names: it never changes.", "headers": headers("ETag")},
        **errors(404),
    },
)
async def submitted_problem(
    service: TheService, owner: Owner, job_id: UUID, if_none_match: Annotated[str, Header()] = ""
) -> Response:
    """The problem as it was submitted. The job has the configuration."""
    return await submitted_text(service, owner, job_id, "solve", if_none_match)


async def submitted_text(
    service: Service, owner: UUID | None, job_id: UUID, kind: JobKind, if_none_match: str
) -> Response:
    """Request that a job of this kind was submitted with."""
    text = await service.store.problem_text(job_id, owner, kind)
    tag = f'W/"{job_id}"'
    if is_known(tag, if_none_match):
        return Response(status_code=304, headers=validated_by(tag))
    return Response(text, headers=validated_by(tag), media_type="application/json")
