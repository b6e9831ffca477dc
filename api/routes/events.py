"""Server-sent events (HTML Living Standard, 9.2) of one job, or of all jobs of a key: every revision once, in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, get_args
from uuid import UUID

from fastapi import APIRouter, Depends, Header, Response
from fastapi.responses import StreamingResponse
from fastapi.sse import format_sse_event

from api.errors import DatabaseGoneError, NotFoundError, unprocessable
from api.jobs.feed import FeedPosition
from api.jobs.records import TERMINAL, Event, EventKind
from api.jobs.store import Store
from api.middleware import Key, Owner
from api.models import EventAnswer
from api.openapi import errors
from api.routes.jobs import route
from api.service import TheService

MEDIA_TYPE = "text/event-stream"

KEEP_ALIVE_S = 10.0
"""Interval of keep-alive comments: proxies keep the connection, and a disconnected client is noticed."""

RETRY_MS = 1000
"""Reconnection time sent to clients."""


async def event_stream(
    store: Store, job_id: UUID, owner: UUID | None, after: int, key: UUID | None = None
) -> AsyncIterator[bytes]:
    """Server-sent events of a job above the revision `after`, as they happen, up to its terminal status.

    An outage of the database delays them. The stream of a job that is removed ends, and that of a `key` that is revoked
    or expires.
    """
    yield format_sse_event(retry=RETRY_MS)
    while True:
        try:
            events = await store.events(job_id, owner, after, KEEP_ALIVE_S, key)
            over = False
            if not events:  # a client that resumes may have seen the end already
                job = await store.get(job_id, owner)
                over = job.ended and job.revision <= after
        except NotFoundError:
            return
        except DatabaseGoneError as error:
            yield format_sse_event(comment="the database is gone")
            await asyncio.sleep(error.retry_after_s)
            continue
        for event in events:
            yield _sent(event, str(event.revision))
            after = event.revision
        if over or (events and events[-1].kind == "status" and events[-1].status in TERMINAL):
            return
        if not events:
            yield format_sse_event(comment="nothing new")


async def all_events_stream(
    store: Store, owner: UUID | None, position: FeedPosition, key: UUID | None = None
) -> AsyncIterator[bytes]:
    """Server-sent events of all jobs of an owner after a position, until `key` is revoked or expires."""
    yield format_sse_event(retry=RETRY_MS, id=str(position))  # for a client that loses it before the first event
    while True:
        try:
            batch = await store.all_events(owner, position, KEEP_ALIVE_S, key)
        except NotFoundError:
            return
        except DatabaseGoneError as error:
            yield format_sse_event(comment="the database is gone")
            await asyncio.sleep(error.retry_after_s)
            continue
        for entry in batch.events:
            yield _sent(entry.event, str(entry.position))
        position = batch.position
        if not batch.events:
            yield format_sse_event(id=str(position))  # without data: a client keeps it, and sees no event


def _sent(event: Event, event_id: str) -> bytes:
    return format_sse_event(data_str=EventAnswer.of(event).model_dump_json(), event=event.kind, id=event_id)


router = APIRouter(prefix="/v1", tags=["schedules"])

LARGEST_REVISION = 2**31 - 1


_EVENT = {
    "type": "object",
    "properties": {
        "event": {"enum": list(get_args(EventKind))},
        "id": {"type": "string", "pattern": "^[0-9-]+$"},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
}
"""One event of the stream; its data is JSON text."""

_STREAM: dict[str, Any] = {
    "description": "Events `incumbent`, `bound`, `strategies` (of plans), `status`, each with EventAnswer as its data.",
    "content": {MEDIA_TYPE: {"schema": _EVENT}},
}


async def _connection(service: TheService, owner: Owner) -> AsyncIterator[None]:
    """Hold one of the caller's connections until the stream ends."""
    with service.connections.taken(owner):
        yield


@route(
    "GET",
    "/{job_id}/events",
    response_class=Response,
    dependencies=[Depends(_connection)],
    responses={
        200: _STREAM,
        204: {"description": "The job has ended, and the client has seen its last event."},
        **errors(404),
    },
)
async def job_events(
    service: TheService,
    owner: Owner,
    key: Key,
    job_id: UUID,
    last_event_id: Annotated[int, Header(ge=0, le=LARGEST_REVISION, description="Resume after this revision.")] = 0,
) -> Response:
    """Server-sent events from the first on, or from `Last-Event-ID` on, until the terminal status."""
    job = await service.store.get(job_id, owner)
    if job.ended and job.revision <= last_event_id:
        return Response(status_code=204)
    stream = event_stream(service.store, job_id, owner, last_event_id, key.id if key else None)
    return StreamingResponse(stream, media_type=MEDIA_TYPE)


@router.get(
    "/events",
    response_class=Response,
    dependencies=[Depends(_connection)],
    responses={
        200: _STREAM,
        **errors(),
    },
)
async def all_events(
    service: TheService,
    owner: Owner,
    key: Key,
    last_event_id: Annotated[str, Header(max_length=100, description="Resume after the event with this id.")] = "",
) -> Response:
    """Server-sent events of all jobs of the caller's key, from now on or from `Last-Event-ID` on, without an end."""
    if last_event_id:
        after = FeedPosition.from_text(last_event_id)
    else:
        after = await service.store.newest_position()
    if after is None:
        raise unprocessable("bad_event_id", f"Last-Event-ID is {last_event_id!a}, which this stream never sent.")
    stream = all_events_stream(service.store, owner, after, key.id if key else None)
    return StreamingResponse(stream, media_type=MEDIA_TYPE)
