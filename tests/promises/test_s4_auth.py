"""S4: off loopback every route but /healthz needs a bearer key, which is stored hashed; a key has its caps.

The page's own files are open too: it is where the key is typed in, it is the same for everybody, and it holds no data.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import psycopg
import pytest
from httpx import Client

from api.app import create_app
from api.jobs import store
from api.jobs.store import Store
from api.settings import Settings
from tests.api.harness import body, client_of, listening, new_key


@pytest.mark.parametrize(
    ("host", "required"),
    [("127.0.0.1", False), ("::1", False), ("localhost", False), ("0.0.0.0", True), ("::", True), ("solver.lan", True)],
)
def test_keys_are_asked_for_wherever_others_can_reach_it(host: str, required: bool) -> None:
    assert Settings.load(host=host).keys_required is required
    assert Settings.load(host=host, require_keys=True).keys_required


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic abc", "Bearer", "Bearer " + "x" * 5000])
def test_every_route_needs_a_key(client: Client, service_url: str, header: str | None) -> None:
    paths: dict[str, Any] = client.get("/openapi.json").json()["paths"]
    calls = [(method, path) for path, methods in paths.items() for method in methods] + [("GET", "/nothing-here")]
    assert len(calls) > 15
    with client_of(service_url, None) as anybody:
        anybody.headers.update({"Authorization": header} if header else {})
        for method, path in calls:
            answer = anybody.request(method, re.sub(r"{\w+}", "9d5d1ba0-4ff3-4f6b-95b3-0f3e9b0fd5b1", path))
            if path == "/healthz":
                assert answer.status_code == 200
                continue
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["content-type"] == "application/problem+json"


def test_the_page_is_open_and_the_same_for_everybody(client: Client, service_url: str) -> None:
    client.post("/v1/schedules", json=body(name="only for me"))
    with client_of(service_url, None) as anybody:
        page = anybody.get("/")
        files = re.findall(r'(?:href|src)="(/static/[^"]+)"', page.text)
        assert len(files) > 10
        for path in ("/", *files):
            open_to_all = anybody.get(path)
            assert open_to_all.status_code == 200
            assert open_to_all.content == client.get(path).content


def test_nothing_else_is_open(client: Client, service_url: str) -> None:
    job = client.post("/v1/schedules", json=body()).json()["id"]
    to_a_job = [f"/static/../v1/schedules/{job}", f"/static/..%2fv1/schedules/{job}", f"//v1/schedules/{job}"]
    beside_the_page = ["/index.html", "/static", "/docs", "/redoc", "/healthz/", "/HEALTHZ"]
    for path in (*to_a_job, *beside_the_page):
        status, answer = _as_it_stands(service_url, path)
        assert status in (401, 404), path
        assert "submitted_at" not in answer


def _as_it_stands(url: str, path: str) -> tuple[int, str]:
    """The answer to a GET of a path that no client has tidied up."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=90)
    with closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_a_revoked_key_opens_nothing(service_settings: Settings, service_url: str) -> None:
    secret = new_key(service_settings)

    async def revoke() -> None:
        async with Store(service_settings) as store:
            key = await store.verify_key(secret)
            assert key is not None
            await store.revoke_key(key.id)

    with client_of(service_url, secret) as client:
        assert client.get("/v1/schedules").status_code == 200
        asyncio.run(revoke())
        refused = client.get("/v1/schedules")
    assert (refused.status_code, refused.json()["errors"][0]["code"]) == (401, "bad_key")


def test_the_database_holds_no_secret(settings: Settings) -> None:
    secret = new_key(settings)
    assert settings.database_url is not None
    with psycopg.connect(settings.database_url.get_secret_value()) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        rows = [
            str(row)
            for (table,) in tables
            for row in connection.execute(f'SELECT row_to_json("{table}".*)::text FROM "{table}"').fetchall()
        ]
    assert any("test" in row for row in rows)  # the key's name
    random_part = secret.split("_", 2)[2]
    assert not any(random_part in row for row in rows)


def test_secrets_are_compared_in_constant_time(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is sent, two digests of one length are compared, by the function that is made for it."""
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return hmac.compare_digest(one, other)

    secret = new_key(settings)
    monkeypatch.setattr(store, "hmac", type("spy", (), {"compare_digest": staticmethod(compare)}))
    sent = [secret, secret[:-1] + ("A" if secret[-1] != "A" else "B"), "optpipe_" + "0" * 32 + "_" + "x" * 43, "", "x"]

    async def verify() -> list[bool]:
        async with Store(settings) as store:
            return [await store.verify_key(one) is not None for one in sent]

    assert asyncio.run(verify()) == [True, False, False, False, False]
    assert compared == [(32, 32)] * len(sent)


def test_a_key_has_its_caps(settings: Settings) -> None:
    capped = settings.model_copy(update={"require_keys": True, "max_queued_jobs": 2, "max_submissions_a_minute": 4})
    with listening(create_app(capped)) as url:
        with client_of(url, new_key(capped)) as client:
            paths = [client.post("/v1/schedules", json=body(seed=k)).headers["location"] for k in range(2)]
            _check_capped(client, "queued_jobs")
            for path in paths:
                client.post(f"{path}/cancel")
            for k in range(2):
                client.post(client.post("/v1/schedules", json=body(seed=k + 2)).headers["location"] + "/cancel")
            _check_capped(client, "submissions")
        with client_of(url, new_key(capped)) as other:
            assert other.post("/v1/schedules", json=body()).status_code == 202


def _check_capped(client: Client, code: str) -> None:
    answer = client.post("/v1/schedules", json=body(seed=99))
    assert answer.status_code == 429
    assert answer.json()["errors"][0]["code"] == code
    assert int(answer.headers["retry-after"]) >= 1
