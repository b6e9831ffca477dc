"""R3: the API is killed: every job answered with 202, or at once with 200, is there after the restart; a stream resumes
without a gap."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from api.settings import Settings
from optpipe.client import Client
from optpipe.client.connection import Event
from tests.api.harness import PROBLEM, STEP_VALUES_US, ApiProcess, Stepwise, api_process, at_once, body, working

SUBMITTERS = 8

Serve = Callable[[], AbstractContextManager[ApiProcess]]


@pytest.fixture
def serve(settings: Settings, free_tcp_port: int, tmp_path: Path, forked_services: Path) -> Serve:
    """Start the service, always on the same port."""
    return lambda: api_process(settings, free_tcp_port, tmp_path, forked_services / "python")


@pytest.mark.parametrize(("known", "code", "status"), [(False, 202, "queued"), (True, 200, "succeeded")])
def test_every_accepted_job_is_there_after_a_kill(
    settings: Settings, serve: Serve, known: bool, code: int, status: str
) -> None:
    accepted: list[str] = []
    enough = threading.Event()

    def submit_until_it_dies(number: int) -> None:
        with httpx.Client(base_url=api.url, timeout=90) as client:
            for k in range(10_000):
                try:
                    answer = client.post("/v1/schedules", json=body(name=f"job {number}.{k}"))
                except httpx.TransportError:
                    return
                if answer.status_code == code:
                    accepted.append(answer.json()["id"])
                if len(accepted) > 40:
                    enough.set()

    with serve() as api, ThreadPoolExecutor(SUBMITTERS) as submitters:
        if known:
            with working(settings, at_once):
                assert httpx.post(f"{api.url}/v1/schedules?wait=30", json=body()).json()["status"] == "succeeded"
        submitting = [submitters.submit(submit_until_it_dies, number) for number in range(SUBMITTERS)]
        assert enough.wait(60)
        api.kill()
        for one in submitting:
            one.result()
    with serve() as api, httpx.Client(base_url=api.url, timeout=90) as client:
        assert len(set(accepted)) == len(accepted) > 40
        for job_id in accepted:
            assert client.get(f"/v1/schedules/{job_id}").json()["status"] == status
            assert client.get(f"/v1/schedules/{job_id}/schedule").is_success is known


def test_a_stream_resumes_without_a_gap(settings: Settings, serve: Serve) -> None:
    restarted = threading.Event()
    with working(settings, Stepwise(restarted.is_set)):
        with serve() as api:
            client = Client(api.url)
            job = client.submit(PROBLEM)
            seen, follower = _follow(client, job.id)
            _wait_until(lambda: any(event.data["value_us"] == STEP_VALUES_US[0] for event in seen))
            api.kill()
        with serve():
            restarted.set()
            follower.join(60)
            assert not follower.is_alive()
            assert client.job(job.id).status == "succeeded"
        client.close()
    assert [event.revision for event in seen] == list(range(1, len(seen) + 1))
    values = [event.data["value_us"] for event in seen if event.kind == "incumbent"]
    assert (values[0], values[-1]) == (STEP_VALUES_US[0], STEP_VALUES_US[-1])
    assert seen[-1].data["status"] == "succeeded"


def _follow(client: Client, job_id: str) -> tuple[list[Event], threading.Thread]:
    """The events that a client sees, as they come, and the thread in which it follows the job to its end."""
    seen: list[Event] = []

    def follow() -> None:
        for event in client.events(job_id):
            seen.append(event)  # noqa: PERF402 (one by one, while another thread looks)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    return seen, follower


def _wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(1200):
        if condition():
            return
        threading.Event().wait(0.05)
    raise AssertionError("it did not come")
