"""For those who run the service, and for browsers that come by."""

from __future__ import annotations

import json
import re
import time
from http import HTTPStatus

import httpx
import pytest
from httpx import Client
from pydantic import SecretStr
from sqlalchemy import make_url

from api.app import create_app
from api.errors import DatabaseFullError, DatabaseGoneError
from api.jobs.database import Outage
from api.jobs.store import Store
from api.metrics import Metrics
from api.models import SubmissionBody
from api.settings import Settings
from tests.api.harness import START_S, at_once, body, listening, working

pytestmark = pytest.mark.usefixtures("forked_pool")


def test_alive_and_ready(client: Client) -> None:
    assert client.get("/healthz").json() == {"status": "alive"}
    assert client.get("/readyz").json() == {"status": "ready", "workers": 1}


def test_workers_that_live_are_counted(idle: Client, settings: Settings) -> None:
    assert idle.get("/readyz").json()["workers"] == 0
    three = settings.model_copy(update={"solves": 3})
    with listening(create_app(settings)) as url:

        def figures() -> set[str]:
            return {line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith("optpipe_")}

        with working(three, at_once), working(settings.model_copy(update={"solves": 1}), at_once):
            until = time.monotonic() + START_S
            while not {"optpipe_workers 2.0", "optpipe_places 4.0"} <= figures():
                assert time.monotonic() < until
                time.sleep(0.05)
        assert "optpipe_workers 0.0" in figures()  # those that ended in order


def test_faults_of_the_database_are_a_metric(settings: Settings) -> None:
    assert settings.database_url is not None
    elsewhere = make_url(settings.database_url.get_secret_value()).set(database="nowhere")
    url = elsewhere.render_as_string(hide_password=False)
    with listening(create_app(settings.model_copy(update={"database_url": SecretStr(url)}))) as api:
        assert httpx.get(f"{api}/readyz").json()["errors"][0]["code"] == "database_gone"
        answer = httpx.get(f"{api}/metrics")
    assert answer.status_code == 200
    assert re.search(r'^optpipe_database_faults_total\{kind="gone"\} [1-9]', answer.text, re.MULTILINE)


def test_an_outage_is_a_metric() -> None:
    metrics, outage = Metrics(), Outage()
    metrics.count_database_faults(outage)
    outage.begin(DatabaseFullError("the disk is full."))
    outage.end(written=False)
    during = metrics.text(None).decode()
    assert "optpipe_database_works 0.0" in during
    assert 'optpipe_database_faults_total{kind="full"} 1.0' in during
    outage.end(written=True)
    assert "optpipe_database_works 1.0" in metrics.text(None).decode()


def test_not_ready_without_the_database(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone(_: Store) -> None:
        raise DatabaseGoneError("the database does not answer.")

    monkeypatch.setattr(Store, "ping", gone)
    with listening(create_app(settings)) as url:
        answer = httpx.get(f"{url}/readyz")
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert httpx.get(f"{url}/healthz").status_code == 200


def test_metrics(client: Client) -> None:
    client.post("/v1/schedules", params={"wait": 50}, json=body())
    text = client.get("/metrics").text
    assert 'optpipe_http_requests_total{method="POST",route="/v1/schedules",status="200"}' in text
    assert 'optpipe_jobs{status="succeeded"}' in text
    assert "optpipe_queue_age_seconds" in text


def test_demo_data_can_be_posted_as_they_are(client: Client) -> None:
    entries = client.get("/v1/demo-data").json()["demo_data"]
    assert len(entries) >= 4
    for entry in entries:
        demo = client.get(entry["url"])
        SubmissionBody.from_json(demo.content)
        answer = client.post("/v1/schedules?operation=validate", content=demo.content, headers=JSON)
        assert answer.status_code == 200, answer.text
    assert client.get("/v1/demo-data/none").status_code == 404


JSON = {"Content-Type": "application/json"}


def test_errors_are_problem_documents(client: Client) -> None:
    for method, path, status in (("GET", "/none", 404), ("PUT", "/v1/schedules", 405), ("POST", "/", 405)):
        answer = client.request(method, path)
        problem = answer.json()
        assert answer.status_code == problem["status"] == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert problem["title"] == HTTPStatus(status).phrase
        assert problem["request_id"] == answer.headers["x-request-id"]
    assert client.put("/v1/schedules").headers["allow"] == "GET, HEAD, POST"


def test_a_mistake_of_the_server_tells_nothing_of_its_inside(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("secret of the inside")

    monkeypatch.setattr(Store, "list_jobs", broken)
    with listening(create_app(settings)) as url:
        answer = httpx.get(f"{url}/v1/schedules", headers={"X-Request-ID": "my-request-1"})
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    assert answer.json()["request_id"] == "my-request-1"


def test_the_openapi_document(client: Client) -> None:
    document = client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1.")
    text = json.dumps(document)
    references = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert references <= set(document["components"]["schemas"])
    assert set(document["paths"]) >= {"/v1/schedules", "/v1/analyze", "/v1/compare", "/healthz", "/metrics"}


def test_answers_are_safe_in_a_browser(client: Client) -> None:
    for path in ("/v1/demo-data", "/healthz", "/none"):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:8000", 200),
        ("[::1]:80", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example:8000", 421),
    ],
)
def test_a_local_server_answers_to_local_names(settings: Settings, host: str, status: int) -> None:
    with listening(create_app(settings)) as url:
        assert httpx.get(f"{url}/v1/schedules", headers={"Host": host}).status_code == status
