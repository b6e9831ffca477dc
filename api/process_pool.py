"""A few processes for heavy work: each task has its time, each caller a share, and a queue that is full says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import structlog

from api.faults import ProblemError, passing, unprocessable
from api.heavy.process import HeavyProcess, ProcessDiedError
from api.shares import Shares

MOST_SECONDS = 30.0
"""Time of one task, once there is a process for it. A process that takes longer is killed."""

MOST_WAITING = 64
MOST_WAITING_OF_ONE = 16
"""Tasks that may wait, in all and of one caller."""

_log = structlog.get_logger("optpipe.heavy")


class Pool:
    """Processes for heavy work; as an async context they end with it. The first starts at once, others when needed."""

    def __init__(self, processes: int, most_seconds: float = MOST_SECONDS) -> None:
        self.most_seconds = most_seconds
        self._slots = asyncio.Semaphore(processes)
        self._idle: list[HeavyProcess] = []
        self._busy: set[HeavyProcess] = set()
        self._shares = Shares("heavy_tasks", MOST_WAITING, MOST_WAITING_OF_ONE)

    async def __aenter__(self) -> Self:
        self._first = asyncio.create_task(self._start_first(), name="first heavy process")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._first.cancel()
        await asyncio.gather(self._first, return_exceptions=True)
        for process in [*self._idle, *self._busy]:
            await process.end()

    async def _start_first(self) -> None:
        """So that the first task need not wait. A service whose processes die at once says so when one is needed."""
        with suppress(ProcessDiedError):
            self._idle.append(await HeavyProcess.start())

    async def run(self, task: str, body: bytes, owner: UUID | None, **options: Any) -> bytes:
        """What the task makes of the body. Raises ProblemError where it refuses, takes too long, or all is busy."""
        with self._shares.taken(owner):
            async with self._slots:
                try:
                    return await self._in_time(task, options, body)
                except TimeoutError:
                    detail = f"this takes more than {self.most_seconds:g} s. Maybe send a smaller document."
                    raise unprocessable("too_slow", detail) from None
                except ProcessDiedError:
                    _log.warning("process died", task=task)
                    text = "the process that worked on this ended before it was done. Maybe try again."
                    raise passing(HTTPStatus.SERVICE_UNAVAILABLE, "died", text, retry_after_s=1) from None

    async def _in_time(self, task: str, options: dict[str, Any], body: bytes) -> bytes:
        async with self._process() as process, asyncio.timeout(self.most_seconds):
            return await process.run(task, options, body)

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[HeavyProcess]:
        """One that nobody else uses; it is used again unless it was stopped in the middle of a task."""
        await asyncio.wait([self._first])
        self._idle = [process for process in self._idle if process.alive]
        process = self._idle.pop() if self._idle else await HeavyProcess.start()
        self._busy.add(process)
        try:
            yield process
        except ProblemError:
            self._idle.append(process)
            raise
        except BaseException:
            await process.end()
            raise
        else:
            self._idle.append(process)
        finally:
            self._busy.discard(process)
