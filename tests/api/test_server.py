"""Requests that are sent by half, and no further: the server gives up on them, and on nothing else. Short pauses."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI

from api import middleware, server
from api.app import create_app
from api.settings import Settings
from tests.api.harness import body, client_of, listening

SOON_S = 0.2
WHOLE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD = (
    b"POST /v1/schedules HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
)


@pytest.fixture
def url(settings: Settings) -> Iterator[str]:
    with listening(create_app(settings)) as url:
        yield url


@pytest.fixture
def soon_for_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_S", SOON_S)


@pytest.fixture
def soon_for_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_S", SOON_S)


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    address = urlsplit(url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=90) as connection:
        yield connection


def read_to_end(connection: socket.socket) -> bytes:
    parts = []
    with suppress(ConnectionResetError):
        while part := connection.recv(2**16):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.usefixtures("soon_for_heads")
@pytest.mark.parametrize("sent", [b"", b"G", WHOLE[:-2]])
def test_half_a_head(url: str, sent: bytes) -> None:
    with connected(url) as connection:
        connection.sendall(sent)
        assert read_to_end(connection) == b""


def test_half_a_head_after_an_answer(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(url) as connection:
        connection.sendall(WHOLE)
        assert connection.recv(2**16).startswith(b"HTTP/1.1 200 OK")
        monkeypatch.setattr(server, "HEAD_S", SOON_S)
        connection.sendall(WHOLE[:-2])
        assert b"HTTP/1.1" not in read_to_end(connection)


@pytest.mark.usefixtures("soon_for_bodies")
@pytest.mark.parametrize("sent", [b"", b'{"problem": '])
def test_half_a_body(url: str, sent: bytes) -> None:
    with connected(url) as connection:
        connection.sendall(HEAD + sent)
        head, _, content = read_to_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"application/problem+json" in head
    assert json.loads(content)["errors"][0]["code"] == "too_slow_body"


def test_an_answer_may_take_longer(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with client_of(url, None) as client:
        path = client.post("/v1/schedules", json=body()).headers["location"]
    monkeypatch.setattr(server, "HEAD_S", 1.0)
    with client_of(url, None) as client:
        for _ in range(5):  # on a busy machine this process may not even send a head within a second
            with suppress(httpx.TransportError):
                assert client.get(path, params={"wait": 2}).json()["status"] == "queued"
                break
        else:
            raise AssertionError("every answer was cut off")


def test_many_halves_leave_room_for_others(url: str) -> None:
    address = urlsplit(url)
    halves = [socket.create_connection((address.hostname or "", address.port or 0), timeout=90) for _ in range(100)]
    for half in halves:
        half.sendall(b"GET /healthz HTTP/1.1\r\n")
    with client_of(url, None) as client:
        assert client.get("/healthz").status_code == 200
    for half in halves:
        half.close()


def test_collections_of_garbage_leave_out_what_was_there_at_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = server.Server(server.server_config(FastAPI()))

        async def run() -> None:
            serving = asyncio.create_task(process.serve([listener]))
            while not process.started:
                await asyncio.sleep(0.01)
            process.should_exit = True
            await serving

        gc.collect()  # of what other tests have left, nothing stays
        before, frozen = len(gc.get_objects()), gc.get_freeze_count()
        try:
            asyncio.run(run())
            assert gc.get_freeze_count() - frozen > before / 2
        finally:
            gc.unfreeze()
