"""A job as it goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Header, Response
from fastapi.responses import StreamingResponse

from api.auth import Owner
from api.events import MEDIA_TYPE, event_stream
from api.routes.responses import errors
from api.service import TheService

router = APIRouter(prefix="/v1/schedules", tags=["schedules"])

LARGEST_REVISION = 2**31 - 1


_EVENT = {
    "type": "object",
    "properties": {
        "event": {"enum": ["incumbent", "bound", "status"]},
        "id": {"type": "string", "pattern": "^[0-9]+$"},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
}
"""One event of the stream; its data is JSON text."""


async def _connection(service: TheService, owner: Owner) -> AsyncIterator[None]:
    """A stream holds one of the caller's connections until it ends."""
    with service.connections.taken(owner):
        yield


@router.get(
    "/{job_id}/events",
    response_class=Response,
    dependencies=[Depends(_connection)],
    responses={
        200: {
            "description": "Events `incumbent`, `bound` and `status`, each with EventAnswer as its data.",
            "content": {MEDIA_TYPE: {"schema": _EVENT}},
        },
        204: {"description": "The job has ended, and the client has seen its last event."},
        **errors(404, 422),
    },
)
async def events(
    service: TheService,
    owner: Owner,
    job_id: UUID,
    last_event_id: Annotated[int, Header(ge=0, le=LARGEST_REVISION, description="Resume after this revision.")] = 0,
) -> Response:
    """Server-sent events from the first on, or from `Last-Event-ID` on, until the terminal status."""
    job = await service.store.get(job_id, owner)
    if job.ended and job.revision <= last_event_id:
        return Response(status_code=204)
    return StreamingResponse(event_stream(service.store, job_id, owner, last_event_id), media_type=MEDIA_TYPE)
