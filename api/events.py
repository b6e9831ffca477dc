"""A job's events as server-sent events (HTML Living Standard, 9.2): every revision once, in order, to the last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import UUID

from fastapi.sse import format_sse_event

from api.jobs.errors import DatabaseGoneError, NotFoundError
from api.jobs.records import TERMINAL, Event
from api.jobs.store import Store
from api.models import EventAnswer

MEDIA_TYPE = "text/event-stream"

KEEP_ALIVE_S = 10.0
"""A comment is sent after so much silence: proxies keep the connection, and a client that went away is noticed."""

RETRY_MS = 1000
"""How soon a client that lost the connection should come back."""


async def event_stream(store: Store, job_id: UUID, owner: UUID | None, after: int) -> AsyncIterator[bytes]:
    """The events of a job above the revision `after`, as they happen, up to its terminal status.

    A database that is gone for a while delays them. A job that is removed has no more.
    """
    yield format_sse_event(retry=RETRY_MS)
    while True:
        try:
            events = await store.events(job_id, owner, after, KEEP_ALIVE_S)
            over = not events and await _is_over(store, job_id, owner, after)
        except NotFoundError:
            return
        except DatabaseGoneError as error:
            yield format_sse_event(comment="the database is gone")
            await asyncio.sleep(error.retry_after_s)
            continue
        for event in events:
            yield _text(event)
            after = event.revision
        if over or (events and _is_last(events[-1])):
            return
        if not events:
            yield format_sse_event(comment="nothing new")


async def _is_over(store: Store, job_id: UUID, owner: UUID | None, after: int) -> bool:
    """Whether nothing comes after this revision: whoever resumes may have seen the end already."""
    job = await store.get(job_id, owner)
    return job.ended and job.revision <= after


def _is_last(event: Event) -> bool:
    return event.kind == "status" and event.status in TERMINAL


def _text(event: Event) -> bytes:
    data = EventAnswer.of(event).model_dump_json()
    return format_sse_event(data_str=data, event=event.kind, id=str(event.revision))
