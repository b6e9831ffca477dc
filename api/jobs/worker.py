"""A worker: leases jobs, solves them in child processes and removes old rows.

Any number of workers share a database, on any host. One without a heartbeat for `heartbeat_s` is considered lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from uuid import UUID, uuid4

import structlog

from api.errors import DatabaseGoneError
from api.jobs import leases, queue
from api.jobs.database import Listener, end_tasks, make_engine
from api.jobs.leases import Lease
from api.jobs.queries import CANCEL, REMOVED_AT_ONCE, SEEN_EVERY_S, remove_old, say_alive, say_goodbye
from api.jobs.queue import HeartbeatGrace, Picker
from api.jobs.run import MakePlan, Run, Solve, WorkerMetrics, Workplace
from api.settings import Settings
from solver.layout.plan_process import plan_in_child
from solver.process import available_bytes

MEMORY_SHARE = 0.8
"""Share of the memory that is free when a worker starts, for all of its solves together."""

STOP_S = 5.0
"""Time for a stopping worker to end or give back its jobs; the heartbeat timeout recovers the rest."""

REMOVE_EVERY_S = 60.0
REMOVE_MORE_S = 1.0
"""Pause where one pass did not remove all that is to go."""

_log = structlog.get_logger("optpipe.worker")


class Worker:
    """One worker, in the event loop that runs it."""

    def __init__(
        self,
        settings: Settings,
        solve: Solve,
        prepare: Callable[[], None] = lambda: None,
        plan: MakePlan | None = None,
    ) -> None:
        """`solve` and `plan` are called in threads; `prepare` in the loop's own thread, whenever a slot is free."""
        assert settings.database_url is not None
        url = settings.database_url.get_secret_value()
        self.id = uuid4()
        self.settings = settings
        self.metrics = WorkerMetrics()
        self._engine = make_engine(url)
        self._executor = ThreadPoolExecutor(settings.solves, "solve")
        self._wake = asyncio.Event()
        self._grace = HeartbeatGrace(settings.heartbeat_s)
        memory_limit_bytes, free_bytes = settings.job_memory_bytes, available_bytes()
        if memory_limit_bytes is None and free_bytes is not None:
            memory_limit_bytes = int(MEMORY_SHARE * free_bytes / settings.solves)
        self._workplace = Workplace(
            self._engine,
            self._executor,
            solve,
            memory_limit_bytes,
            settings.threads_per_job,
            self.metrics,
            self._grace,
            plan or partial(plan_in_child, max_ops=settings.max_ops),
        )
        channels = {queue.NEW_WORK: lambda _: self._wake.set(), CANCEL: self._cancel}
        self._listener = Listener(url, channels, missed=self._wake.set)
        self._prepare = prepare
        self._runs: dict[Run, asyncio.Task[None]] = {}
        self._stopping = False

    def stop(self) -> None:
        """End or give back all jobs, then return from `run`."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Work until `stop`."""
        _log.info("worker begun", worker=str(self.id), solves=self.settings.solves)
        caretaker = asyncio.create_task(self._care(), name="caretaker")
        presence = asyncio.create_task(self._say_alive(), name="presence")
        try:
            async with self._listener:
                try:
                    while not self._stopping:
                        await self._take_up()
                        if len(self._runs) < self.settings.solves:
                            self._prepare()
                        # Until there may be work, or a worker may have been lost.
                        with suppress(TimeoutError):
                            async with asyncio.timeout(min(1.0, self.settings.heartbeat_s / 4)):
                                await self._wake.wait()
                        self._wake.clear()
                finally:  # after a bug too: its jobs need not wait for the heartbeat timeout
                    tasks = list(self._runs.values())
                    for run in self._runs:
                        run.leave()
                    if tasks:
                        _, late = await asyncio.wait(tasks, timeout=STOP_S)
                        await end_tasks(*late)
        finally:
            await end_tasks(caretaker, presence)
            with suppress(DatabaseGoneError):
                await say_goodbye(self._engine, self.id)
            await self._engine.dispose()
            self._executor.shutdown()
        _log.info("worker ended", worker=str(self.id))

    async def _take_up(self) -> None:
        """Lease and start as many jobs as there are free slots, none together with one that must be alone.

        A slot in which it helps with another worker's job is as good as free. What is free then may help.
        """
        helping = [run for run in self._runs if run.lease.share]
        free = self.settings.solves - len(self._runs) + len(helping)
        if free == 0 or any(run.lease.alone for run in self._runs):
            return
        heartbeat_timeout_s = queue.FOREVER_S if self._grace.active else self.settings.heartbeat_s
        picker = Picker(
            self.id, self.settings.solves, free, heartbeat_timeout_s, self.settings.max_running_jobs, len(helping)
        )
        primary_ids = {run.lease.job_id for run in self._runs if not run.lease.share}
        try:
            claimed = await leases.claim(self._engine, picker, primary_ids, self.settings.threads_per_job)
        except DatabaseGoneError:
            self._grace.database_lost()
            return
        self._grace.database_answered()
        to_stop = len(helping) if any(lease.alone for lease in claimed) else len(claimed) + len(helping) - free
        for run in helping[: max(to_stop, 0)]:
            run.leave()
        for lease in (*claimed, *await self._shares(picker, claimed, free - len(helping) - len(claimed))):
            run = Run(self._workplace, lease)
            self._runs[run] = task = asyncio.create_task(run.run(), name=f"run {lease.job_id}")
            task.add_done_callback(partial(self._done, run))
        self.metrics.solving.set(len(self._runs))

    async def _shares(self, picker: Picker, claimed: Sequence[Lease], most: int) -> list[Lease]:
        """Lease shares of other workers' jobs, for slots that would be idle."""
        busy_ids = {lease.job_id for lease in (*claimed, *(run.lease for run in self._runs))}
        shares: list[Lease] = []
        with suppress(DatabaseGoneError):
            while len(shares) < most and not any(lease.alone for lease in claimed):
                share = await leases.claim_share(self._engine, picker, busy_ids)
                if share is None:
                    break
                shares.append(share)
                busy_ids.add(share.job_id)
        return shares

    def _done(self, run: Run, task: asyncio.Task[None]) -> None:
        del self._runs[run]
        self.metrics.solving.set(len(self._runs))
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a bug ended a run", job=str(run.lease.job_id), exc_info=error)

    def _cancel(self, payload: str) -> None:
        for run in self._runs:
            if run.lease.job_id == UUID(payload):
                run.cancel()

    async def _say_alive(self) -> None:
        while True:
            with suppress(DatabaseGoneError):
                await say_alive(self._engine, self.id, self.settings.solves)
            await asyncio.sleep(SEEN_EVERY_S)

    async def _care(self) -> None:
        while True:
            removed = 0
            with suppress(DatabaseGoneError):
                removed = await remove_old(self._engine, self.settings)
                if removed:
                    _log.info("old jobs removed", jobs=removed)
            await asyncio.sleep(REMOVE_EVERY_S if removed < REMOVED_AT_ONCE else REMOVE_MORE_S)
