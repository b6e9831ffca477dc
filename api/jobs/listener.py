"""LISTEN: one connection a process, made again whenever it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

import psycopg
from psycopg import sql

from api.jobs.database import listening_connection
from api.jobs.ending import end_tasks

PAUSE_S = 0.5
"""Between two tries to connect."""


class Listener:
    """Within this async context each notification on a channel calls its function with the payload.

    `missed` is called whenever the connection is new: what was said before it was there, nobody heard.
    """

    def __init__(self, url: str, channels: Mapping[str, Callable[[str], None]], missed: Callable[[], None]) -> None:
        self._url = url
        self._channels = channels
        self._missed = missed
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._listen(), name="listener")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        await end_tasks(self._task)

    async def _listen(self) -> None:
        while True:
            with suppress(psycopg.Error, OSError):
                await self._listen_once()
            await asyncio.sleep(PAUSE_S)

    async def _listen_once(self) -> None:
        async with await listening_connection(self._url) as connection:
            for channel in self._channels:
                await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
            self._missed()
            async for note in connection.notifies():
                self._channels[note.channel](note.payload)
