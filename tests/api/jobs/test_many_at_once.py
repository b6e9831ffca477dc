"""Many submissions at once are as many jobs; one Idempotency-Key from many callers, on many hosts, is one job."""

from __future__ import annotations

import asyncio
from uuid import UUID

from api.jobs.config import JobConfig
from api.jobs.store import Store
from api.settings import Settings
from tests.problems import uniform

CLIENTS, EACH = 20, 5
PROBLEM = uniform(2, 4)


async def test_each_submission_is_a_job(store: Store) -> None:
    async def client(store: Store) -> list[UUID]:
        return [(await store.submit(PROBLEM, JobConfig())).job.id for _ in range(EACH)]

    ids = await asyncio.gather(*(client(store) for _ in range(CLIENTS)))
    assert len({job_id for of_client in ids for job_id in of_client}) == CLIENTS * EACH
    assert (await store.counts()).jobs["queued"] == CLIENTS * EACH


async def test_one_key_is_one_job(store: Store, settings: Settings) -> None:
    async with Store(settings) as elsewhere:
        same = [
            place.submit(PROBLEM, JobConfig(), None, "key", b"body")
            for place in (store, elsewhere)
            for _ in range(CLIENTS // 2)
        ]
        answers = await asyncio.gather(*same)
    assert len({answer.job.id for answer in answers}) == 1
    assert [answer.created for answer in answers].count(True) == 1
    assert (await store.counts()).jobs["queued"] == 1


async def test_caps_hold_among_many(settings: Settings) -> None:
    async with Store(settings.model_copy(update={"max_queued_jobs": 7})) as store:
        async with Store(store.settings) as elsewhere:
            many = [place.submit(PROBLEM, JobConfig()) for place in (store, elsewhere) for _ in range(10)]
            answers = await asyncio.gather(*many, return_exceptions=True)
        assert sum(not isinstance(answer, Exception) for answer in answers) == 7
        assert (await store.counts()).jobs["queued"] == 7
