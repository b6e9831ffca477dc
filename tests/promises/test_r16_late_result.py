"""R16: a worker that was given up and comes back cannot write: its late result is refused."""

from __future__ import annotations

import asyncio
import os
import signal

from api.jobs.store import Store
from api.settings import Settings
from tests.promises.harness import CONTINUED, HEARTBEAT_S, submitted, until, workers_on


async def test_it_is_refused(settings: Settings) -> None:
    settings = settings.model_copy(update={"solves": 1, "heartbeat_s": HEARTBEAT_S})
    with workers_on(settings) as workers:
        async with Store(settings) as store:
            late = workers.start()
            assert late.pid is not None
            job_id = await submitted(store, "late", seconds=60)
            await until(store, job_id, lambda job: job.value_us is not None)
            os.kill(late.pid, signal.SIGSTOP)
            workers.let_leases_end()
            other = workers.start()
            done = await until(store, job_id, lambda job: job.ended)
            assert (done.status, done.attempt) == ("succeeded", 2)
            text = (await store.best_schedule(job_id)).text

            os.kill(late.pid, signal.SIGCONT)
            workers.kill(other)
            # It takes up the next job only once it is done with that one: there are no two at a time.
            after = await submitted(store, "after", seconds=0.1, microbatches=5)
            assert (await until(store, after, lambda job: job.ended)).status == "succeeded"
            await asyncio.sleep(0.5)
            assert await store.get(job_id) == done
            assert (await store.best_schedule(job_id)).text == text
            assert (await store.events(job_id))[-1].method == CONTINUED
            assert late.is_alive()
