"""What is old goes: by age, by number, and only what has ended."""

from __future__ import annotations

from uuid import UUID

from sqlalchemy import text

from api.jobs.config import JobConfig
from api.jobs.database import make_engine, transaction
from api.jobs.errors import NotFoundError
from api.jobs.retention import remove_old
from api.jobs.store import Store
from api.settings import Settings
from tests.problems import uniform


async def test_by_age_and_number(store: Store, settings: Settings, database_url: str) -> None:
    engine = make_engine(database_url)
    ids = [(await store.submit(uniform(2, 2), JobConfig(), None, str(k), b"")).job.id for k in range(5)]
    waits, *ended = ids
    for job_id in ended:
        await store.cancel(job_id)
    async with transaction(engine) as connection:
        for k, job_id in enumerate(ids):
            await connection.execute(
                text("UPDATE jobs SET submitted_at = now() - make_interval(days => 10 - :k) WHERE id = :id"),
                {"k": k, "id": job_id},
            )
            await connection.execute(
                text("UPDATE jobs SET finished_at = submitted_at WHERE id = :id AND finished_at IS NOT NULL"),
                {"id": job_id},
            )
    assert await remove_old(engine, settings.model_copy(update={"keep_jobs_days": 8.5})) == 1
    assert await remove_old(engine, settings.model_copy(update={"keep_jobs": 2})) == 1
    assert await _there(store, ids) == [waits, *ended[-2:]]
    assert await remove_old(engine, settings) == 0
    await engine.dispose()


async def _there(store: Store, ids: list[UUID]) -> list[UUID]:
    found = []
    for job_id in ids:
        try:
            found.append((await store.get(job_id)).id)
        except NotFoundError:
            continue
    return found
