"""Processes beside the server: limits on time and memory, and what becomes of a process that is lost."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
from contextlib import ExitStack, suppress
from http import HTTPStatus
from uuid import UUID

import pytest
from anyio import move_on_after

from api.errors import HttpError
from api.models import Caps
from api.process_pool import FairSlots, ProcessPool, Quota, SecondsBudget
from instances import instance
from tests.api.harness import PROBLEM, body

pytestmark = pytest.mark.usefixtures("forked_pool")

CAPS = vars(Caps(50_000, 60, 1))
SMALL = json.dumps({"problem": PROBLEM.to_data()}).encode()
LARGE = json.dumps({"problem": instance("po-18.1b-16k-d16-v3-m128-mem0.25").to_data()}).encode()


async def compare(pool: ProcessPool, content: bytes) -> int:
    """Number of methods that were compared."""
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


@pytest.mark.parametrize("cancelled", ["a start", "a task", "neither"])
def test_all_pipes_are_closed_when_the_pool_ends(cancelled: str) -> None:
    """Also where the scope of a request is cancelled, so that every wait in it ends at once: a tab that is closed."""

    async def run() -> None:
        async with ProcessPool(2) as pool:
            await asyncio.wait([pool._first])
            if cancelled == "neither":
                reading = asyncio.create_task(refused(pool, LARGE))
                while not pool._busy:
                    await asyncio.sleep(0.01)
            else:
                if cancelled == "a start":
                    await pool._idle.pop().end()
                with move_on_after(0.05):
                    await compare(pool, LARGE)
        if cancelled == "neither":
            assert (await reading).faults[0].code == "died"

    with pytest.MonkeyPatch.context() as patch:
        unraisable: list[str] = []
        patch.setattr("sys.unraisablehook", lambda caught: unraisable.append(repr(caught.exc_value)))
        asyncio.run(run())
        gc.collect()
    assert unraisable == []


ONE, OTHER = UUID(int=1), UUID(int=2)


def test_one_caller_has_its_share_and_others_theirs() -> None:
    """However much those before hold, the next one finds room, until all is held."""
    shares = Quota("open_things", most=9, most_of_one=3)
    with ExitStack() as stack:
        taken = [_taken(shares, UUID(int=number), stack) for number in range(5)]
        assert taken == [(3, 429), (3, 429), (2, 503), (1, 503), (0, 503)]
        assert shares.held == 9
    assert shares.held == 0
    with shares.taken(ONE):
        assert shares.held == 1


def _taken(shares: Quota, owner: UUID, stack: ExitStack) -> tuple[int, int]:
    """The number of things that an owner can hold, and the status of the refusal of one more."""
    count = 0
    with suppress(HttpError):
        while count <= shares.most:
            stack.enter_context(shares.taken(owner))
            count += 1
    with pytest.raises(HttpError, match="open things") as caught, shares.taken(owner):
        pass
    assert caught.value.headers is not None
    assert int(caught.value.headers["Retry-After"]) >= 1
    return count, int(caught.value.status)


async def test_a_key_leaves_a_process_to_others_and_they_take_turns() -> None:
    slots, order = FairSlots(2), list[str]()
    ends = {name: asyncio.Event() for name in ("bomb 0", "bomb 1", "bomb 2", "picture", "other")}

    async def hold(name: str, owner: UUID | None) -> None:
        async with slots.taken(owner):
            order.append(name)
            await ends[name].wait()

    tasks = [asyncio.create_task(hold(f"bomb {k}", ONE)) for k in range(3)]
    await _settle()
    assert order == ["bomb 0"]  # one of two slots stays free
    tasks.append(asyncio.create_task(hold("picture", OTHER)))
    await _settle()
    assert order == ["bomb 0", "picture"]  # though two bombs came before it
    tasks.append(asyncio.create_task(hold("other", OTHER)))
    for name in ("bomb 0", "picture", "bomb 1"):
        ends[name].set()
        await _settle()
    assert order == ["bomb 0", "picture", "bomb 1", "other", "bomb 2"]
    for end in ends.values():
        end.set()
    await asyncio.gather(*tasks)
    async with slots.taken(None), slots.taken(None):  # who has no key may hold all
        pass


async def test_callers_who_give_up_hold_nothing() -> None:
    slots = FairSlots(1)
    async with slots.taken(ONE):
        waiting = [asyncio.create_task(_take(slots, OTHER)) for _ in range(2)]
        await _settle()
        waiting[0].cancel()
        await _settle()
    assert await waiting[1]
    granted = asyncio.create_task(_take(slots, OTHER))
    async with slots.taken(ONE):
        pass
    granted.cancel()
    await asyncio.gather(granted, return_exceptions=True)
    assert await _take(slots, OTHER)


async def _take(slots: FairSlots, owner: UUID) -> bool:
    async with slots.taken(owner):
        return True


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_key_has_so_many_seconds_in_a_minute() -> None:
    now_s = 1000.0
    budget = SecondsBudget(30, lambda: now_s)
    for seconds in (10, 12, 9):
        budget.check(ONE)
        budget.spend(ONE, seconds)
        now_s += 5
    with pytest.raises(HttpError, match="max_heavy_seconds_a_minute") as caught:
        budget.check(ONE)
    assert caught.value.status == HTTPStatus.TOO_MANY_REQUESTS
    assert caught.value.headers == {"Retry-After": "45"}  # when the first of them is a minute ago
    budget.check(OTHER)
    budget.spend(None, 1000)
    budget.check(None)
    now_s += 45
    budget.check(ONE)
