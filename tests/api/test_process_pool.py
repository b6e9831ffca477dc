"""Processes beside the server: limits on time and memory, and what becomes of a process that is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from http import HTTPStatus

import pytest

from api.faults import ProblemError
from api.heavy import Pool
from api.submissions import Caps
from tests.api.solves import PROBLEM, body
from tests.problems import instance

CAPS = vars(Caps(50_000, 60, 1))
SMALL = json.dumps({"problem": PROBLEM.to_data()}).encode()
LARGE = json.dumps({"problem": instance("po-18.1b-16k-d16-v3-m128-mem0.25").to_data()}).encode()


async def compare(pool: Pool, content: bytes) -> int:
    """How many methods were compared."""
    return len(json.loads(await pool.run("compare", content, None, caps=CAPS, schedules=False))["methods"])


async def refused(pool: Pool, content: bytes) -> ProblemError:
    with pytest.raises(ProblemError) as caught:
        await compare(pool, content)
    return caught.value


async def test_a_task_that_takes_too_long_is_ended_and_the_next_one_is_done() -> None:
    async with Pool(1, most_seconds=0.2) as pool:
        error = await refused(pool, LARGE)
        assert (error.status, error.faults[0].code) == (HTTPStatus.UNPROCESSABLE_ENTITY, "too_slow")
        pool.most_seconds = 60
        assert await compare(pool, SMALL) > 10


async def test_a_process_that_is_lost_is_replaced() -> None:
    async with Pool(1) as pool:
        assert await compare(pool, SMALL) > 10
        (process,) = pool._idle
        os.kill(process.pid, signal.SIGKILL)
        while process.alive:
            await asyncio.sleep(0.01)
        assert await compare(pool, SMALL) > 10
        working = asyncio.create_task(refused(pool, LARGE))
        while not pool._busy:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        (busy,) = pool._busy
        os.kill(busy.pid, signal.SIGKILL)
        error = await working
        assert (error.status, error.faults[0].code) == (HTTPStatus.SERVICE_UNAVAILABLE, "died")
        assert await compare(pool, SMALL) > 10


async def test_a_refusal_keeps_the_process() -> None:
    async with Pool(1) as pool:
        assert (await refused(pool, b"[")).status == HTTPStatus.BAD_REQUEST
        (process,) = pool._idle
        assert await pool.run("check_submission", json.dumps(body()).encode(), None, caps=CAPS) == b""
        assert pool._idle == [process]


async def test_nothing_is_left_behind() -> None:
    async with Pool(2) as pool:
        await compare(pool, SMALL)
        (process,) = pool._idle
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
