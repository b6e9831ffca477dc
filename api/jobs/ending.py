"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN_S = 0.2


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks until they have ended; how they ended is not asked.

    Once is not enough before Python 3.12: `asyncio.wait_for`, on which psycopg waits, loses a cancel that comes just as
    what it waits for is there.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
