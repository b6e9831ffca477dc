"""Keys: what their scope opens, whose jobs they are for, when they end and were last used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID, uuid4

import pytest
from typer.testing import CliRunner

from api.app import create_app
from api.errors import NotFoundError
from api.jobs.records import ApiKey, NewApiKey
from api.jobs.store import Store
from api.settings import Settings
from optpipe.cli.app import command_line
from tests.api.harness import at_once, body, client_of, listening, working

pytestmark = pytest.mark.usefixtures("forked_pool")

T = TypeVar("T")


def ask(settings: Settings, query: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
    async def run() -> T:
        async with Store(settings) as store:
            return await query(store)

    return asyncio.run(run())


def make(settings: Settings, **options: Any) -> NewApiKey:
    return ask(settings, lambda store: store.create_key("test", **options))


def found(settings: Settings, key_id: UUID) -> ApiKey:
    (key,) = [key for key in ask(settings, lambda store: store.list_keys()) if key.id == key_id]
    return key


@pytest.fixture
def with_keys(settings: Settings) -> Settings:
    return settings.model_copy(update={"require_keys": True})


@pytest.fixture
def url(with_keys: Settings) -> Iterator[str]:
    with listening(create_app(with_keys)) as url:
        yield url


def test_a_key_that_may_only_read(url: str, with_keys: Settings) -> None:
    own = make(with_keys)
    reader = make(with_keys, scope="read", owner=own.key.id)
    with client_of(url, own.secret) as owner, client_of(url, reader.secret) as client:
        job = owner.post("/v1/schedules", json=body()).json()
        path = f"/v1/schedules/{job['id']}"
        assert client.get(path).json()["id"] == job["id"]
        assert [listed["id"] for listed in client.get("/v1/schedules").json()["jobs"]] == [job["id"]]
        assert client.post("/v1/compare", json={"problem": body()["problem"]}).status_code == 200
        for method, to in (("POST", "/v1/schedules"), ("POST", "/v1/solve"), ("POST", f"{path}/cancel")):
            refused = client.request(method, to, json=body())
            assert (refused.status_code, refused.json()["errors"][0]["code"]) == (403, "scope")
        for method in ("DELETE", "PATCH"):
            assert client.request(method, path, json={}).status_code == 403
        assert owner.get(path).json()["status"] == "queued"


def test_an_admin_lists_and_cancels_the_jobs_of_all(url: str, with_keys: Settings) -> None:
    own, admin, other = (make(with_keys, scope=scope) for scope in ("submit", "admin", "submit"))
    with client_of(url, own.secret) as owner:
        path = f"/v1/schedules/{owner.post('/v1/schedules', json=body()).json()['id']}"
    ask(with_keys, lambda store: store.revoke_key(own.key.id))
    with client_of(url, other.secret) as client:
        assert client.post(f"{path}/cancel").status_code == 404
        assert client.get("/v1/schedules", params={"all_keys": True}).json()["errors"][0]["code"] == "scope"
    with client_of(url, admin.secret) as client:
        assert client.get("/v1/schedules").json()["jobs"] == []
        (job,) = client.get("/v1/schedules", params={"all_keys": True}).json()["jobs"]
        assert path.endswith(job["id"])
        assert client.get(path).status_code == 404  # to see it, a key of its owner is needed
        assert client.post(f"{path}/cancel").json()["status"] == "cancelled"
        assert client.post(f"/v1/schedules/{uuid4()}/cancel").status_code == 404


def test_a_server_without_keys_has_no_admin(settings: Settings) -> None:
    """Jobs of keys stay theirs where the same database is served without keys."""
    with listening(create_app(settings)) as url, client_of(url, None) as client:
        refused = client.get("/v1/schedules", params={"all_keys": True})
        assert (refused.status_code, refused.json()["errors"][0]["code"]) == (403, "scope")


def test_a_key_expires(url: str, with_keys: Settings) -> None:
    now = datetime.now(UTC)
    expired = make(with_keys, expires_at=now - timedelta(seconds=1))
    lasting = make(with_keys, expires_at=now + timedelta(days=1))
    with client_of(url, expired.secret) as client:
        refused = client.get("/v1/schedules")
        assert (refused.status_code, refused.json()["errors"][0]["code"]) == (401, "bad_key")
    with client_of(url, lasting.secret) as client:
        assert client.get("/v1/schedules").status_code == 200


async def test_streams_end_with_the_key_that_reads_them(store: Store) -> None:
    own = (await store.create_key("own")).key
    reader = (await store.create_key("reader", "read", own.id)).key
    position = await store.newest_position()
    await store.revoke_key(reader.id)
    with pytest.raises(NotFoundError):
        await store.all_events(reader.owner, position, 60, reader.id)
    assert (await store.all_events(own.id, position)).events == []
    soon = (await store.create_key("soon", "read", own.id, datetime.now(UTC) - timedelta(seconds=1))).key
    with pytest.raises(NotFoundError):
        await store.all_events(soon.owner, position, 60, soon.id)


def test_the_last_use_is_noted(url: str, with_keys: Settings) -> None:
    made = make(with_keys)
    assert found(with_keys, made.key.id).last_used_at is None
    before = datetime.now(UTC) - timedelta(minutes=1)  # clocks of one machine, but another process
    with client_of(url, made.secret) as client:
        client.get("/v1/schedules")
        used_at = found(with_keys, made.key.id).last_used_at
        assert used_at is not None
        assert used_at > before
        client.get("/v1/schedules")
    assert found(with_keys, made.key.id).last_used_at == used_at  # once a minute is enough


def test_keys_of_the_command_line(database_url: str) -> None:
    def run(*arguments: str) -> Any:
        result = CliRunner().invoke(command_line(), ["keys", *arguments, "--database-url", database_url, "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    own = run("create", "me")
    reader = run("create", "dashboard", "--scope", "read", "--of", own["id"], "--expires-days", "7")
    listed = {key["name"]: key for key in run("list")}
    assert (listed["me"]["scope"], listed["me"]["of"], listed["me"]["expires_at"]) == ("submit", own["id"], None)
    assert (listed["dashboard"]["scope"], listed["dashboard"]["of"]) == ("read", own["id"])
    assert listed["dashboard"]["expires_at"] == reader["expires_at"] is not None
    result = CliRunner().invoke(
        command_line(), ["keys", "create", "x", "--of", str(uuid4()), "--database-url", database_url]
    )
    assert result.exit_code != 0
    assert "there is no key" in str(result.exception)


def test_a_reader_follows_a_job_to_its_end(url: str, with_keys: Settings) -> None:
    own = make(with_keys)
    reader = make(with_keys, scope="read", owner=own.key.id)
    with working(with_keys, at_once), client_of(url, own.secret) as owner, client_of(url, reader.secret) as client:
        job = owner.post("/v1/schedules", json=body()).json()["id"]
        with client.stream("GET", f"/v1/schedules/{job}/events") as stream:
            assert '"status":"succeeded"' in "".join(stream.iter_text())
