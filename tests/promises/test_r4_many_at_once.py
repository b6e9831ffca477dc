"""R4: 50 clients submit ten jobs each, or two: 500 ids, or 100, and no error; one Idempotency-Key from 50: one job."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import httpx
import pytest

from api.app import create_app
from api.settings import Settings
from tests.api.harness import body, client_of, listening
from tests.sample import examples

pytestmark = pytest.mark.usefixtures("forked_pool")

CLIENTS, SUBMISSIONS = 50, examples(10, 5)


@pytest.fixture
def url(settings: Settings) -> Iterator[str]:
    """A service without a worker, which lets one caller submit as much as this test does."""
    roomy = settings.model_copy(update={"max_submissions_a_minute": 10_000, "max_queued_jobs": 10_000})
    with listening(create_app(roomy)) as url:
        yield url


def test_many_clients_submit_at_once(url: str) -> None:
    start = Barrier(CLIENTS)

    def submit(number: int) -> list[httpx.Response]:
        with client_of(url, None) as client:
            start.wait()
            return [client.post("/v1/schedules", json=body(name=f"{number}.{k}")) for k in range(SUBMISSIONS)]

    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = [answer for some in clients.map(submit, range(CLIENTS)) for answer in some]
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["id"] for answer in answers}) == CLIENTS * SUBMISSIONS
    assert {answer.json()["name"] for answer in answers} == {
        f"{number}.{k}" for number in range(CLIENTS) for k in range(SUBMISSIONS)
    }


def test_one_idempotency_key_from_many_clients(url: str) -> None:
    start = Barrier(CLIENTS)

    def submit(_: int) -> httpx.Response:
        with client_of(url, None) as client:
            start.wait()
            return client.post("/v1/schedules", json=body(), headers={"Idempotency-Key": "the-same"})

    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(submit, range(CLIENTS)))
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(httpx.get(f"{url}/v1/schedules").json()["jobs"]) == 1
