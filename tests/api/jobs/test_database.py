"""Tasks end, also those that lose a cancel."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from api.jobs.database import end_tasks


async def test_a_lost_cancel_is_not_the_last() -> None:
    async def loses_one() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    tasks = [asyncio.create_task(loses_one()), asyncio.create_task(asyncio.sleep(60))]
    await asyncio.sleep(0)
    await end_tasks(*tasks)
    assert all(task.cancelled() for task in tasks)
    await end_tasks(*tasks)
