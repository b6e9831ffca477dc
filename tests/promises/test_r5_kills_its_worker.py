"""R5: a job that kills its worker three times ends as failed, and the queue goes on."""

from __future__ import annotations

import asyncio
import signal

from api.jobs.store import Store
from api.settings import Settings
from tests.promises.harness import HEARTBEAT_S, PATIENCE_S, submitted, until, workers_on


async def test_it_fails_and_the_others_do_not(settings: Settings) -> None:
    one_at_a_time = settings.model_copy(update={"solves": 1, "heartbeat_s": HEARTBEAT_S})
    with workers_on(one_at_a_time) as workers:
        async with Store(one_at_a_time) as store:
            killer = await submitted(store, "kills", seconds=0.1)
            others = [await submitted(store, "peaceful", seconds=0.1) for _ in range(3)]
            for _ in range(3):
                worker = workers.start()
                await asyncio.to_thread(worker.join, PATIENCE_S)
                assert worker.exitcode == -signal.SIGKILL
                workers.let_leases_end()
            workers.start()
            failed = await until(store, killer, lambda job: job.ended)
            assert (failed.status, failed.attempt) == ("failed", 3)
            assert failed.error is not None
            assert "lost 3 times" in failed.error
            for other in others:
                done = await until(store, other, lambda job: job.ended)
                assert (done.status, done.attempt) == ("succeeded", 1)
