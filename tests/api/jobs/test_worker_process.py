"""A worker as a process: what it does before its first job, and which signals end it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from api.jobs import worker_process
from api.settings import Settings


def test_jobs_do_not_wait_for_kernels(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compiled in the background, and searches join when theirs are ready."""
    done: list[str] = []

    def compiles() -> bool:
        done.append("compile")
        return True

    def work(working: Coroutine[Any, Any, None]) -> None:
        working.close()
        done.append("work")

    monkeypatch.setattr(worker_process, "warm_up_in_background", compiles)
    monkeypatch.setattr(worker_process.asyncio, "run", work)
    worker_process.run_worker(settings)
    assert done == ["compile", "work"]


@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_ends_a_worker_unless_it_is_ignored(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, ignored: bool
) -> None:
    """A shell has it ignored by what a script runs in the background."""
    stopped: list[str] = []
    monkeypatch.setattr(worker_process.signal, "setitimer", lambda *_: None)  # which would end the tests

    async def run() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.1)

    metrics = SimpleNamespace(served=lambda *_: nullcontext())
    worker: Any = SimpleNamespace(settings=settings, metrics=metrics, run=run, stop=lambda: stopped.append("stopped"))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        asyncio.run(worker_process._run(worker, until_stdin_ends=False))
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped == ([] if ignored else ["stopped"])
