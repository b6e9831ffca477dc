"""R2: workers killed at random while they work: no job is lost, none finishes twice, re-runs say attempt 2."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from uuid import UUID

import pytest

from api.jobs import queries
from api.jobs.leases import MOST_LOST
from api.jobs.records import TERMINAL, Event
from api.jobs.store import Store
from api.settings import Settings
from tests.promises.harness import Workers, submitted, workers_on

LONGEST_S = 600.0


@pytest.mark.parametrize(
    ("jobs", "each_s", "number", "every_s"),
    [
        pytest.param(20, 0.3, 3, 0.7, id="small"),
        pytest.param(500, 1.0, 4, 1.5, id="full", marks=pytest.mark.slow),
    ],
)
async def test_killed_at_random(
    store: Store, settings: Settings, jobs: int, each_s: float, number: int, every_s: float
) -> None:
    """`number` workers solve jobs that take `each_s`; one of them is killed every `every_s` and replaced."""
    with workers_on(settings) as workers:
        for _ in range(number):
            workers.start()
        began_s = time.monotonic()
        submitting = asyncio.create_task(_submit(store, jobs, each_s))
        async with asyncio.timeout(LONGEST_S):
            kills = await _kill_until_ended(store, workers, every_s, jobs)
        ids = await submitting
        histories = [await store.events(job_id) for job_id in ids]
        for history in histories:
            _judge(history)
        counts = await store.counts()
        lost = counts.totals[queries.LOST, ""]
        print(f"{jobs} jobs, {number} workers, {kills} kills, {time.monotonic() - began_s:.0f} s: ", end="")
        print(f"{lost:g} attempts lost, {sum(history[-1].attempt > 1 for history in histories)} jobs ran again")
        print({status: count for status, count in counts.jobs.items() if count})
        assert lost > 0


async def _submit(store: Store, jobs: int, each_s: float) -> list[UUID]:
    return [await submitted(store, "chaos", each_s, microbatches=2 + k) for k in range(jobs)]


async def _kill_until_ended(store: Store, workers: Workers, every_s: float, jobs: int) -> int:
    chance = random.Random(0)
    kills = 0
    while True:
        await asyncio.sleep(every_s)
        counts = await store.counts()
        if sum(counts.jobs[status] for status in TERMINAL) == jobs:
            return kills
        await asyncio.to_thread(workers.kill, chance.choice(workers.running))
        workers.start()
        kills += 1


def _judge(history: Sequence[Event]) -> None:
    """Every revision is there; it ended once, at the last; each time that it was taken up counts as an attempt."""
    assert [event.revision for event in history] == list(range(1, len(history) + 1))
    assert [event.revision for event in history if event.status in TERMINAL] == [len(history)]
    begun = [event.attempt for event in history if event.kind == "status" and event.status == "running"]
    assert begun == list(range(1, len(begun) + 1))
    # That a job did not kill its worker itself cannot be known: bad luck three times ends it too, and says so.
    assert history[-1].status == "succeeded" or begun == list(range(1, MOST_LOST + 1))
