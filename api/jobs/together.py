"""What is done one after the other for each owner, done several at a time: one transaction, one write to the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar
from uuid import UUID

from api.jobs.errors import DatabaseGoneError

Asked = TypeVar("Asked")
Done = TypeVar("Done")

MOST = 32
"""Done in one go."""


class Together(Generic[Asked, Done]):
    """Whoever asks while others of the same owner are being served waits, and is served with all who wait by then.

    `do` serves some of one owner, in order; its answer for one of them may be an exception, which is raised there. Use
    it from one event loop.
    """

    def __init__(self, do: Callable[[UUID | None, Sequence[Asked]], Awaitable[Sequence[Done | Exception]]]) -> None:
        self._do = do
        self._waiting: dict[UUID | None, list[tuple[Asked, asyncio.Future[Done]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, owner: UUID | None, asked: Asked) -> Done:
        """Have it done."""
        done: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        if owner in self._waiting:
            self._waiting[owner].append((asked, done))
        else:
            self._waiting[owner] = [(asked, done)]
            task = asyncio.create_task(self._serve(owner), name="together")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await done

    async def _serve(self, owner: UUID | None) -> None:
        """Until nobody of this owner waits."""
        waiting = self._waiting[owner]
        while waiting:
            now, waiting[:MOST] = waiting[:MOST], []
            answers = await self._answers(owner, [asked for asked, _ in now])
            for (_, done), answer in zip(now, answers, strict=True):
                _tell(done, answer)
        del self._waiting[owner]

    async def _answers(self, owner: UUID | None, asked: Sequence[Asked]) -> Sequence[Done | Exception]:
        try:
            return await self._do(owner, asked)
        except DatabaseGoneError as error:
            return [error] * len(asked)
        except Exception as error:
            if len(asked) == 1:
                return [error]
            return [answer for one in asked for answer in await self._answers(owner, [one])]  # what fails, fails alone


def _tell(done: asyncio.Future[Done], answer: Done | Exception) -> None:
    if done.done():  # nobody waits any more
        return
    if isinstance(answer, Exception):
        done.set_exception(answer)
    else:
        done.set_result(answer)
