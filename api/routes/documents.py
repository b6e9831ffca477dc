"""The best schedule of a job in several formats."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

from fastapi import APIRouter, Header, Query, Response

from api.errors import unprocessable
from api.middleware import Owner
from api.openapi import errors
from api.service import TheService

router = APIRouter(prefix="/v1/schedules", tags=["schedules"])

Format = Literal["optpipe.schedule/1", "torch-csv", "chrome-trace", "svg", "png"]


class _Form(NamedTuple):
    """A format: media type, file ending and the task that converts to it (none: sent as stored)."""

    media_type: str
    ending: str
    task: str = ""
    options: dict[str, Any] = {}


_FORMS: dict[Format, _Form] = {
    "optpipe.schedule/1": _Form("application/json", "json"),
    "torch-csv": _Form("text/csv", "csv", "to_torch_csv"),
    "chrome-trace": _Form("application/json", "trace.json", "to_chrome_trace"),
    "svg": _Form("image/svg+xml", "svg", "to_picture", {"picture_format": "svg"}),
    "png": _Form("image/png", "png", "to_picture", {"picture_format": "png"}),
}

_CONTENT = {
    "application/json": {"schema": {"anyOf": [{"$ref": "#/components/schemas/Schedule"}, {"type": "object"}]}},
    "text/csv": {"schema": {"type": "string"}},
    "image/svg+xml": {"schema": {"type": "string"}},
    "image/png": {"schema": {"type": "string", "contentMediaType": "image/png"}},
}


@router.get(
    "/{job_id}/schedule",
    response_class=Response,
    responses={
        200: {"description": "The schedule.", "content": _CONTENT},
        304: {"description": "It is still the one that If-None-Match names."},
        **errors(404, 422),
    },
)
async def best_schedule(
    service: TheService,
    owner: Owner,
    job_id: UUID,
    format: Annotated[Format, Query()] = "optpipe.schedule/1",
    drop_offload: Annotated[bool, Query(description="torch-csv: leave out what torch cannot run.")] = False,
    if_none_match: Annotated[str, Header()] = "",
) -> Response:
    """The best schedule so far, verified. The ETag changes whenever a better one is found."""
    if drop_offload and format != "torch-csv":
        raise unprocessable(
            "nothing_to_drop", f"drop_offload is given with {format}, which keeps offloads. Maybe leave it out."
        )
    best = await service.store.best_schedule(job_id, owner)
    form = _FORMS[format]
    tag = f'"{best.revision}{"-final" if best.final else ""}-{form.ending}{"-dropped" if drop_offload else ""}"'
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    if if_none_match.strip() == "*" or tag in if_none_match:
        return Response(status_code=304, headers=headers)
    content: str | bytes = best.text
    if form.task:
        options = form.options | ({"drop_offload": drop_offload} if format == "torch-csv" else {})
        content = await service.pool.run(form.task, best.text.encode(), owner, **options)
    headers["Content-Disposition"] = f'inline; filename="schedule-{job_id}.{form.ending}"'
    return Response(content, headers=headers, media_type=form.media_type)
