"""Reads that many wait for at a time: all who ask for the same subject while it is read share the next read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping
from typing import Generic, TypeVar

from api.jobs.database import end_tasks

Subject = TypeVar("Subject", bound=Hashable)
Position = TypeVar("Position", bound=Hashable)
Answer = TypeVar("Answer")


class Rounds(Generic[Subject, Position, Answer]):
    """Reads of subjects, one of each at a time, from all positions that are asked for together.

    A read begins after each of its callers asked, so that it sees what was written before. Use it from one event loop.
    """

    def __init__(self, read: Callable[[Subject, Collection[Position]], Awaitable[Mapping[Position, Answer]]]) -> None:
        self._read = read
        self._next: dict[Subject, _Round[Position, Answer]] = {}
        """Rounds that have not begun."""
        self._latest: dict[Subject, asyncio.Task[Mapping[Position, Answer]]] = {}

    async def ask(self, subject: Subject, position: Position) -> Answer:
        """Answer of a read from a position. Raises what the read raises."""
        round = self._next.get(subject)
        if round is None:
            round = self._next[subject] = _Round()
            round.task = asyncio.create_task(self._run(subject, round, self._latest.get(subject)))
            self._latest[subject] = round.task
        round.positions.append(position)
        try:
            return (await asyncio.shield(round.task))[position]
        finally:
            round.positions.remove(position)
            if not round.positions:
                self._begin(subject, round)
                await end_tasks(round.task)

    async def _run(
        self, subject: Subject, round: _Round[Position, Answer], before: asyncio.Task[Mapping[Position, Answer]] | None
    ) -> Mapping[Position, Answer]:
        try:
            if before is not None:
                await asyncio.wait([before])
            self._begin(subject, round)
            return await self._read(subject, frozenset(round.positions))
        finally:
            if self._latest.get(subject) is round.task:
                del self._latest[subject]

    def _begin(self, subject: Subject, round: _Round[Position, Answer]) -> None:
        """Let nobody join the round any more."""
        if self._next.get(subject) is round:
            del self._next[subject]


class _Round(Generic[Position, Answer]):
    """One read, and the positions that its callers ask for."""

    task: asyncio.Task[Mapping[Position, Answer]]

    def __init__(self) -> None:
        self.positions: list[Position] = []
