"""A worker as a process: what it does before its first job."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from api.jobs import process
from api.settings import Settings


@pytest.mark.parametrize("warm", [False, True])
def test_kernels_are_compiled_before_the_first_job(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    done: list[str] = []

    def run(command: Sequence[str], **_: Any) -> None:
        done.append(command[-1])

    def work(working: Coroutine[Any, Any, None]) -> None:
        working.close()
        done.append("work")

    monkeypatch.setattr(process, "is_warm", lambda: warm)
    monkeypatch.setattr(process.subprocess, "run", run)
    monkeypatch.setattr(process.asyncio, "run", work)
    process.run_worker(settings)
    assert done == ["work"] if warm else ["solver.warm_up", "work"]
