"""Many submissions at once are as many jobs; one Idempotency-Key from many callers, on many hosts, is one job."""

from __future__ import annotations

import asyncio
from uuid import UUID

from api.jobs.config import JobConfig
from api.jobs.store import Store
from api.settings import Settings
from tests.postgresql import with_store
from tests.problems import uniform

CLIENTS, EACH = 20, 5
PROBLEM = uniform(2, 4)


def test_each_submission_is_a_job(settings: Settings) -> None:
    async def client(store: Store) -> list[UUID]:
        return [(await store.submit(PROBLEM, JobConfig())).job.id for _ in range(EACH)]

    async def scenario(store: Store) -> None:
        ids = await asyncio.gather(*(client(store) for _ in range(CLIENTS)))
        assert len({job_id for of_client in ids for job_id in of_client}) == CLIENTS * EACH
        assert (await store.counts()).jobs["queued"] == CLIENTS * EACH

    with_store(settings, scenario)


def test_one_key_is_one_job(settings: Settings) -> None:
    async def scenario(store: Store) -> None:
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

    with_store(settings, scenario)


def test_caps_hold_among_many(settings: Settings) -> None:
    async def scenario(store: Store) -> None:
        async with Store(store.settings) as elsewhere:
            many = [place.submit(PROBLEM, JobConfig()) for place in (store, elsewhere) for _ in range(10)]
            answers = await asyncio.gather(*many, return_exceptions=True)
        assert sum(not isinstance(answer, Exception) for answer in answers) == 7
        assert (await store.counts()).jobs["queued"] == 7

    with_store(settings.model_copy(update={"max_queued_jobs": 7}), scenario)
