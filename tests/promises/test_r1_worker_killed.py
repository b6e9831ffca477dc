"""R1: after kill -9 of a worker its job runs again elsewhere within the heartbeat + 2 s, from its best incumbent."""

from __future__ import annotations

import time

from api.jobs.store import Store
from api.settings import Settings
from tests.promises.harness import CONTINUED, FIRST, HEARTBEAT_S, lateness, submitted, until, workers_on


async def test_the_job_goes_on_elsewhere(settings: Settings) -> None:
    settings = settings.model_copy(update={"solves": 1, "heartbeat_s": HEARTBEAT_S})
    with workers_on(settings) as workers:
        async with Store(settings) as store:
            first = workers.start()
            job_id = await submitted(store, "long", seconds=60)
            before = await until(store, job_id, lambda job: job.value_us is not None)
            workers.start()
            await until(store, await submitted(store, "short", seconds=0.1, microbatches=5), lambda job: job.ended)
            async with lateness(store) as late:
                workers.kill(first)
                killed_s = time.monotonic()
                again = await until(store, job_id, lambda job: job.attempt == 2)
                assert time.monotonic() - killed_s < settings.heartbeat_s + 2 + late.allowed_s
            assert again.value_us == before.value_us
            done = await until(store, job_id, lambda job: job.ended)
            assert (done.status, done.attempt) == ("succeeded", 2)
            told = await store.events(job_id)
            assert [event.method for event in told if event.kind == "incumbent"] == [FIRST]
            assert told[-1].method == CONTINUED
