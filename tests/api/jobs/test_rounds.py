"""Reads that many wait for: shared by all who ask in time, never by who asks too late, ended with the last of them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from api.jobs.rounds import Rounds


class Source:
    """Answers each position with itself and the number of the read, once it may."""

    def __init__(self) -> None:
        self.reads: list[set[int]] = []
        self.may_answer = asyncio.Event()
        self.ended = 0

    async def read(self, subject: str, positions: Collection[int]) -> dict[int, tuple[int, int]]:
        number = len(self.reads)
        self.reads.append(set(positions))
        try:
            await self.may_answer.wait()
        finally:
            self.ended += 1
        if subject == "broken":
            raise ZeroDivisionError
        return {position: (position, number) for position in positions}


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_all_who_ask_while_one_is_read_share_the_next() -> None:
    source = Source()
    rounds = Rounds(source.read)
    first = [asyncio.create_task(rounds.ask("a", k % 2)) for k in range(50)]
    await settled()
    late = [asyncio.create_task(rounds.ask("a", 7)) for _ in range(50)]
    other = asyncio.create_task(rounds.ask("b", 3))
    await settled()
    assert source.reads == [{0, 1}, {3}]  # the late ones wait for a read that begins after they asked
    source.may_answer.set()
    assert await asyncio.gather(*first) == [(k % 2, 0) for k in range(50)]
    assert await asyncio.gather(*late) == [(7, 2)] * 50
    assert await other == (3, 1)
    assert source.reads == [{0, 1}, {3}, {7}]
    assert (rounds._next, rounds._latest) == ({}, {})


async def test_a_read_ends_with_the_last_who_waits() -> None:
    source = Source()
    rounds = Rounds(source.read)
    first, second = (asyncio.create_task(rounds.ask("a", k)) for k in range(2))
    await settled()
    waiting = asyncio.create_task(rounds.ask("a", 2))  # for a round that has not begun
    await settled()
    for task in (first, waiting):
        task.cancel()
    await settled()
    assert source.ended == 0  # the second still waits
    second.cancel()
    await asyncio.wait([first, second, waiting])
    assert (source.reads, source.ended) == ([{0, 1}], 1)
    source.may_answer.set()
    assert await rounds.ask("a", 3) == (3, 1)


async def test_an_error_is_everybodys() -> None:
    source = Source()
    source.may_answer.set()
    rounds = Rounds(source.read)
    answers = await asyncio.gather(*(rounds.ask("broken", k) for k in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [ZeroDivisionError] * 3
    with pytest.raises(ZeroDivisionError):
        await rounds.ask("broken", 0)
