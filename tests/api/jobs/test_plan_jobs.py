"""Plans as jobs: what a lost worker found is kept, equal ones are made once, and each is stored as it grows."""

from __future__ import annotations

import json
import time
from typing import Any
from uuid import UUID

from api.jobs import leases
from api.jobs.records import JobConfig
from api.jobs.store import Store
from api.jobs.submit import Request, SubmittedPlan
from api.settings import Settings
from solver.layout.plan_process import SEPARATOR, FoundPlan, PlanResult, plan_part
from solver.layout.request import PlanRequest
from solver.limits import Limits
from tests.api.harness import at_once
from tests.api.jobs.stand_in import StandIn
from tests.api.jobs.test_worker import working
from tests.promises.harness import PATIENCE_S, until

JOB = {"model": "llama-3.1-8b", "gpus": 16, "machine": "h100", "sequence": 4096, "global_batch": 32}


def found(*seconds: float) -> FoundPlan:
    """A plan with strategies of these times, and a schedule of the first."""
    strategies = [{"seconds": one, "bound_s": 1.0, "end": "solved"} for one in seconds]
    axes = dict.fromkeys(("tp", "cp", "ep", "etp", "dp", "pp", "vpp", "microbatch_size"), 2)
    document = {"strategies": strategies, "best": axes, "solved": [{"bubble": 0.25}]}
    return FoundPlan.of_text(SEPARATOR.join([json.dumps(document), '{"schedule": 1}']), 0.5)


async def submit(store: Store, **config: Any) -> UUID:
    request = PlanRequest.from_data(JOB)
    plan = SubmittedPlan(request.to_json(), request.equality_key(), "plan", request.gpus)
    return (await store.submit_request(Request(plan, JobConfig(**config), None, None, b""))).job.id


async def strategies(store: Store, job_id: UUID) -> list[float]:
    """Seconds of the strategies in the stored plan."""
    document = json.loads((await store.best_plan(job_id)).text)
    return [one["seconds"] for one in document["strategies"]]


async def test_a_plan_grows_and_outlives_its_worker(store: Store, settings: Settings) -> None:
    job_id = await submit(store)
    async with StandIn(settings) as lost:
        lease = await lost.claim()
        assert lease is not None
        for grown in ((3.0,), (3.0, 4.0), (2.0, 3.0, 4.0)):
            await leases.beat(lost.engine, lease, found(*grown))
            assert await strategies(store, job_id) == list(grown)
    assert [event.kind for event in await store.events(job_id)][2:] == ["incumbent", "strategies", "incumbent"]
    assert (await store.best_schedule(job_id)).text == '{"schedule": 1}'

    def plan(request: PlanRequest, limits: Limits, memory: int | None, on_event: Any) -> PlanResult:
        return PlanResult(found(2.5), "time")

    async with working(settings.model_copy(update={"heartbeat_s": 1.0}), at_once, plan):
        job = await store.wait_until_ended(job_id, wait_s=PATIENCE_S)
    assert (job.status, job.attempt, job.value_us, job.bubble) == ("succeeded", 2, 2e6, 0.25)
    assert await strategies(store, job_id) == [2.0, 3.0, 4.0]
    assert [event.kind for event in await store.events(job_id)][5:] == ["status"] * 3


async def test_equal_plans_are_made_once(store: Store, settings: Settings) -> None:
    made: list[int] = []
    done = False

    def plan(request: PlanRequest, limits: Limits, memory: int | None, on_event: Any) -> PlanResult:
        made.append(request.gpus)
        on_event(found(3.0))
        while not (done or limits.cancel.requested):
            time.sleep(0.01)
        return PlanResult(found(2.0), None)

    async with working(settings, at_once, plan):
        first = await submit(store)
        await until(store, first, lambda job: job.value_us is not None)
        second = await submit(store)
        done = True
        jobs = [await store.wait_until_ended(job_id, wait_s=PATIENCE_S) for job_id in (first, second)]
        third = await store.get(await submit(store))
    assert made == [16]
    assert [(job.status, job.value_us) for job in (*jobs, third)] == [("succeeded", 2e6)] * 3
    assert plan_part((await store.best_plan(third.id)).text, 1) is None
    assert (await store.best_plan(third.id, part=1)).text == '{"schedule": 1}'
