"""S14: what is no op counts as well, a worker that reads keeps its lease, and SIGTERM ends one that is stuck."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest
from httpx import Client

from api.jobs import leases
from api.jobs.run import Prepared
from api.jobs.store import Store
from api.jobs.worker_process import END_S
from api.server import SHUTDOWN_TIMEOUT_S
from api.settings import Settings
from instances import uniform
from optpipe.cli.compare import _run
from optpipe.errors import InputError, ModelTooLargeError
from optpipe.fields import MAX_DEVICES
from optpipe.problem import Problem
from optpipe.stage import MAX_MODES
from solver.limits import Limits
from solver.process import solve_in_child
from solver.scale import count_ops
from tests.api.harness import body
from tests.api.jobs.test_worker import working
from tests.promises.harness import PATIENCE_S, scripted, submitted, until, workers_on
from tests.promises.test_s3_model_size import refusal

TINY = uniform(2, 2).to_data()


def modes(count: int) -> list[dict[str, Any]]:
    return [{"name": f"m{k}", "kept_bytes": 0, "recompute_us": 1} for k in range(count)]


TOO_LONG = {
    "devices": ("devices", TINY | {"devices": [{"memory_bytes": 1000}] * (MAX_DEVICES + 1)}, MAX_DEVICES),
    "groups": (
        "copy_channels.shared_by",
        TINY | {"copy_channels": {"shared_by": [[]] * (MAX_DEVICES + 1)}},
        MAX_DEVICES,
    ),
    "modes": (
        "stages[0].modes",
        TINY | {"stages": [TINY["stages"][0] | {"modes": modes(MAX_MODES + 1)}, TINY["stages"][1]]},
        MAX_MODES,
    ),
}


@pytest.mark.parametrize("what", TOO_LONG)
def test_lists_without_ops_are_bounded(idle: Client, what: str) -> None:
    where, data, most = TOO_LONG[what]
    said = f"has {most + 1:,} entries but at most {most:,} are allowed"
    with pytest.raises(InputError, match=said) as caught:
        Problem.from_data(data)
    assert str(caught.value).startswith(where)
    assert said in refusal(idle, "/v1/schedules", {"problem": data})["detail"]


def test_modes_count_for_each_kind_of_microbatch(idle: Client, idle_settings: Settings) -> None:
    kinds = idle_settings.max_ops // MAX_MODES + 1
    data = TINY | {
        "microbatches": kinds,
        "microbatch_factors": [{"time": 1 + k} for k in range(kinds)],
        "stages": [TINY["stages"][0] | {"modes": modes(MAX_MODES)}, TINY["stages"][1]],
    }
    assert count_ops(Problem.from_data(data)) < idle_settings.max_ops / 100
    fault = refusal(idle, "/v1/schedules", {"problem": data})
    assert (fault["pointer"], fault["code"]) == ("/problem", "too_many_entries")
    assert f"{idle_settings.max_ops:,} (max_ops)" in fault["detail"]
    assert refusal(idle, "/v1/compare", {"problem": data})["code"] == "too_many_entries"
    batch = {"submissions": [body(), {"problem": data}]}
    assert refusal(idle, "/v1/batch/submit", batch)["pointer"] == "/submissions/1/problem"


def test_what_cannot_be_verified_in_time_is_refused() -> None:
    many = uniform(2, 20_000).to_data() | {"microbatch_factors": [{"time": 1 + k} for k in range(20_000)]}
    many["stages"][0]["modes"] = modes(MAX_MODES)
    with pytest.raises(ModelTooLargeError, match="20,000,000 modes"):
        solve_in_child(Problem.from_data(many), limits=Limits(5))
    with pytest.raises(ModelTooLargeError, match=r"6,000,000 ops, .* about 30 s, but the time limit is 5 s"):
        solve_in_child(uniform(2, 10**6), limits=Limits(5))
    assert "about 30 s, but the time limit is 5 s" in _run(uniform(2, 10**6), "gpipe", Limits(5)).why_not


async def test_a_worker_that_reads_keeps_its_lease(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    beat, read = leases.beat, Prepared.of

    async def counted(*arguments: Any, **options: Any) -> leases.Beat:
        answer = await beat(*arguments, **options)
        beats.release()
        return answer

    def read_slowly(lease: leases.Lease) -> Prepared:
        for _ in range(3):  # it reads for as long as three heartbeats take
            asyncio.run_coroutine_threadsafe(beats.acquire(), loop).result(PATIENCE_S)
        return read(lease)

    monkeypatch.setattr(leases, "beat", counted)
    monkeypatch.setattr(Prepared, "of", read_slowly)
    async with working(settings, scripted):
        job_id = await submitted(store, "slow to read", seconds=0.1)
        done = await store.wait_until_ended(job_id, wait_s=PATIENCE_S)
    assert (done.status, done.attempt) == ("succeeded", 1)


async def test_sigterm_ends_a_worker_that_is_stuck(store: Store, settings: Settings) -> None:
    assert SHUTDOWN_TIMEOUT_S + END_S < 10  # those of `optpipe serve`, one after the other
    with workers_on(settings) as workers:
        stuck = workers.start(end_s=0.5)
        job_id = await submitted(store, "stuck", seconds=0.1)
        await until(store, job_id, lambda job: job.value_us is not None)
        stuck.terminate()
        await asyncio.to_thread(stuck.join, PATIENCE_S)
        assert stuck.exitcode == -signal.SIGALRM
