"""Middleware: cross-site requests, HEAD, and framing of requests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import httpx
import pytest
from sqlalchemy import make_url
from starlette.types import Message, Receive, Scope, Send

from api.app import create_app
from api.middleware import ANSWERED_AT_ONCE_BYTES, InPieces
from api.settings import Settings
from tests.api.harness import body, listening


@pytest.fixture(scope="module")
def open_url(idle_settings: Settings) -> Iterator[str]:
    """The address of a service without keys and without a worker."""
    with listening(create_app(idle_settings.model_copy(update={"require_keys": False}))) as url:
        yield url


CROSS_SITE = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},  # another service of this machine
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]


@pytest.mark.parametrize("headers", CROSS_SITE)
def test_pages_of_other_origins_change_nothing(open_url: str, headers: dict[str, str]) -> None:
    with httpx.Client(base_url=open_url) as client:
        path = client.post("/v1/schedules", json=body()).headers["location"]
        for method, action in (("POST", "/cancel"), ("POST", "/retry"), ("DELETE", "")):
            refused = client.request(method, f"{path}{action}", headers=headers)
            assert (refused.status_code, refused.json()["errors"][0]["code"]) == (403, "cross_site")
        assert client.post("/v1/schedules", json=body(), headers=headers).status_code == 403
        assert client.get(path, headers=headers).json()["status"] == "queued"
        assert client.post(f"{path}/cancel").json()["status"] == "cancelled"


def test_the_own_page_may_change_jobs(open_url: str) -> None:
    own = {"Origin": open_url, "Sec-Fetch-Site": "same-origin"}
    with httpx.Client(base_url=open_url) as client:
        path = client.post("/v1/schedules", json=body(), headers=own).headers["location"]
        assert client.post(f"{path}/cancel", headers=own).json()["status"] == "cancelled"


def test_head_answers_like_get_without_a_body(open_url: str) -> None:
    with httpx.Client(base_url=open_url) as client:
        job = client.post("/v1/schedules", json=body()).headers["location"]
        for path in ("/", "/healthz", "/openapi.json", "/v1/schedules", job, f"{job}/events", f"{job}/schedule"):
            with client.stream("GET", path) as get:
                pass
            head = client.head(path)
            assert (head.status_code, head.content) == (get.status_code, b"")
            assert head.headers["content-type"] == get.headers["content-type"]
            assert head.headers.get("content-length") == get.headers.get("content-length")
        assert client.head(f"{job}/cancel").status_code == 405
        assert client.put("/v1/schedules").headers["allow"] == "GET, HEAD, POST"


def test_a_body_with_two_lengths_closes_the_connection(open_url: str) -> None:
    """RFC 9112, 6.1: Content-Length beside Transfer-Encoding may be an attempt to smuggle a request."""
    url = make_url(open_url)
    lengths = "Content-Length: 5\r\nTransfer-Encoding: chunked"
    request = f"POST /v1/analyze HTTP/1.1\r\nHost: localhost\r\n{lengths}\r\n\r\n0\r\n\r\n"
    with socket.create_connection((url.host, url.port), timeout=90) as connection:
        connection.sendall(request.encode())
        answer = b""
        while part := connection.recv(65536):  # until the server closes the connection
            answer += part
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"\r\nconnection: close\r\n" in answer.lower()


async def test_a_large_answer_leaves_turns_to_others() -> None:
    """A middleware around it may take long for each piece, such as to compress it."""
    body = bytes(range(256)) * 2**12
    sent: list[Message] = []
    turns_before: list[int] = []
    turns = 0

    async def application(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def send(message: Message) -> None:
        sent.append(message)
        turns_before.append(turns)

    async def receive() -> Message:
        raise AssertionError

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(take_turns())
    await InPieces(application)({"type": "http"}, receive, send)
    others.cancel()
    start, *pieces = sent
    assert start["type"] == "http.response.start"
    assert b"".join(piece["body"] for piece in pieces) == body
    assert [piece.get("more_body", False) for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert max(len(piece["body"]) for piece in pieces) <= ANSWERED_AT_ONCE_BYTES < len(body)
    assert len({*turns_before[1:]}) == len(pieces)
