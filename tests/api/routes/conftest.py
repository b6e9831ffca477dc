"""Services to call, and what their pools do."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from api.process_pool import ProcessPool
from tests.api.harness import client, idle, idle_settings, idle_url, service_settings, service_url

__all__ = ["client", "idle", "idle_settings", "idle_url", "service_settings", "service_url"]


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tasks of the pool's processes, as they are asked for."""
    asked: list[str] = []
    run = ProcessPool.run

    async def counted(pool: ProcessPool, task: str, body: bytes, owner: UUID | None, **options: Any) -> bytes:
        assert owner is not None  # whose quota it is
        asked.append(task)
        return await run(pool, task, body, owner, **options)

    monkeypatch.setattr(ProcessPool, "run", counted)
    return asked
