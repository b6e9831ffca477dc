"""Processes beside the server: limits on time and memory, and what becomes of a process that is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import ExitStack
from http import HTTPStatus
from uuid import UUID

import pytest

from api.errors import HttpError
from api.models import Caps
from api.process_pool import ProcessPool, Quota
from instances import instance
from tests.api.harness import PROBLEM, body

CAPS = vars(Caps(50_000, 60, 1))
SMALL = json.dumps({"problem": PROBLEM.to_data()}).encode()
LARGE = json.dumps({"problem": instance("po-18.1b-16k-d16-v3-m128-mem0.25").to_data()}).encode()


async def compare(pool: ProcessPool, content: bytes) -> int:
    """How many methods were compared."""
    return len(json.loads(await pool.run("compare", content, None, caps=CAPS, schedules=False))["methods"])


async def refused(pool: ProcessPool, content: bytes) -> HttpError:
    with pytest.raises(HttpError) as caught:
        await compare(pool, content)
    return caught.value


async def test_a_task_that_takes_too_long_is_ended_and_the_next_one_is_done() -> None:
    async with ProcessPool(1, most_seconds=0.2) as pool:
        error = await refused(pool, LARGE)
        assert (error.status, error.faults[0].code) == (HTTPStatus.UNPROCESSABLE_ENTITY, "too_slow")
        pool.most_seconds = 60
        assert await compare(pool, SMALL) > 10


async def test_a_process_that_is_lost_is_replaced() -> None:
    async with ProcessPool(1) as pool:
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
    async with ProcessPool(1) as pool:
        assert (await refused(pool, b"[")).status == HTTPStatus.BAD_REQUEST
        (process,) = pool._idle
        checked = await pool.run("check_submission", json.dumps(body()).encode(), None, caps=CAPS)
        assert json.loads(checked)["ops"] == 24
        assert pool._idle == [process]


async def test_nothing_is_left_behind() -> None:
    async with ProcessPool(2) as pool:
        await compare(pool, SMALL)
        (process,) = pool._idle
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


ONE, OTHER = UUID(int=1), UUID(int=2)


def test_one_caller_has_its_share_and_others_theirs() -> None:
    shares = Quota("open_things", most=3, most_of_one=2)
    with ExitStack() as stack:
        stack.enter_context(shares.taken(ONE))
        stack.enter_context(shares.taken(ONE))
        assert _refused(shares, ONE) == 429
        stack.enter_context(shares.taken(OTHER))
        assert _refused(shares, OTHER) == 503
        assert shares.held == 3
    assert shares.held == 0
    with shares.taken(ONE):
        assert shares.held == 1


def _refused(shares: Quota, owner: UUID) -> int:
    with pytest.raises(HttpError, match="open things already") as caught, shares.taken(owner):
        pass
    assert caught.value.headers is not None
    assert int(caught.value.headers["Retry-After"]) >= 1
    return int(caught.value.status)
