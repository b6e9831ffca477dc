"""Removing what is old: jobs that ended long ago or are too many, answers that nobody asked for in a long time, and
documents that belong to neither."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import delete, exists, func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from api.jobs import queue
from api.jobs.database import transaction
from api.jobs.tables import answers, documents, jobs, schedules, solved_problems
from api.settings import Settings

LOCK = 0x6F70747069706532
"""Key of the advisory lock under which one worker at a time removes."""

AT_ONCE = 500
"""Jobs removed in one transaction: the rest follows the next time."""

KEEP_DOCUMENTS = timedelta(hours=1)
"""So long after it was written, whoever wrote a document has said whose it is."""

KEEP_ANSWERS = timedelta(days=90)
MOST_ANSWERS = 10_000


async def remove_old(engine: AsyncEngine, settings: Settings) -> int:
    """Remove ended jobs beyond the age and the number that are kept, with all that belongs to them; how many."""
    async with transaction(engine) as connection:
        free = await connection.execute(text("SELECT pg_try_advisory_xact_lock(:lock)"), {"lock": LOCK})
        if not free.scalar():
            return 0
        ended = select(jobs.c.id).where(jobs.c.finished_at.is_not(None))
        too_old = ended.where(jobs.c.finished_at < func.now() - timedelta(days=settings.keep_jobs_days))
        too_many = ended.order_by(jobs.c.finished_at.desc(), jobs.c.id).offset(settings.keep_jobs)
        removed = 0
        for which in (too_old, too_many):
            result = await connection.execute(delete(jobs).where(jobs.c.id.in_(which.limit(AT_ONCE))))
            removed += result.rowcount
        await _remove_answers(connection)
        await _remove_documents(connection)
        await queue.forget(connection)
    return removed


async def _remove_answers(connection: AsyncConnection) -> None:
    used = solved_problems.c.used_at
    beyond = select(solved_problems.c.key).order_by(used.desc()).offset(MOST_ANSWERS)
    old = used < func.now() - KEEP_ANSWERS
    await connection.execute(delete(solved_problems).where(old | solved_problems.c.key.in_(beyond)))


async def _remove_documents(connection: AsyncConnection) -> None:
    old = documents.c.written_at < func.now() - KEEP_DOCUMENTS
    used = [exists().where(table.c.document == documents.c.digest) for table in (schedules, answers)]
    await connection.execute(delete(documents).where(old, *(~each for each in used)))
