"""S13: however a client's bytes come, the requests of others wait for a few pieces of them, and not for all.

Work is counted, not timed: the events that h11 makes of other connections' bytes, each of which takes microseconds,
from the moment in which a request has come to that in which it is answered.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI, Request

from api import server
from api.server import BYTES_A_CHUNK, FREE_CHUNKS, HEAD_BYTES, PIECE_BYTES, BoundedConnection, Protocol
from tests.api.harness import listening

CONNECTIONS = 4
SENT_BYTES = 2**20
TURNS = 8
"""Turns of the event loop from a request's first byte to the end of its answer, with room to spare."""

POST = b"POST /body HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
WHOLE = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


def repeated(piece: bytes, size: int = SENT_BYTES) -> bytes:
    return piece * (size // len(piece))


HOSTILE = {
    "one-byte chunks": CHUNKED + repeated(b"1\r\n \r\n"),
    "16-byte chunks": CHUNKED + repeated(b"10\r\n" + b" " * 16 + b"\r\n"),
    "one-byte chunks with extensions": CHUNKED + repeated(b"1;a=b\r\n \r\n"),
    "short trailers": CHUNKED + b"0\r\n" + repeated(b"a:\r\n"),
    "short headers": b"GET / HTTP/1.1\r\n" + repeated(b"a:\r\n"),
    "a long header": b"GET / HTTP/1.1\r\na:" + b"a" * SENT_BYTES,
    "a long query": b"GET /?" + repeated(b"a&"),
    "a long chunk header": CHUNKED + b"1;" + b"a" * SENT_BYTES,
    "pipelined requests": repeated(WHOLE, 2**16),
}


def quiet_app() -> FastAPI:
    app = FastAPI()

    @app.get("/")
    async def answer() -> str:
        return "here"

    @app.post("/body")
    async def digest(request: Request) -> str:
        return hashlib.sha256(await request.body()).hexdigest()

    return app


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The events of other connections while each request to /others was answered, once it is."""
    counts: list[int] = []
    began: dict[Any, int] = {}
    parsed = 0
    next_event, on_response_complete = BoundedConnection.next_event, Protocol.on_response_complete
    data_received = Protocol.data_received

    def count(connection: BoundedConnection) -> Any:
        nonlocal parsed
        parsed += 1
        return next_event(connection)

    def come(protocol: Protocol, data: bytes) -> None:
        if data.startswith(b"GET /others"):
            began[protocol] = parsed
        data_received(protocol, data)

    def answered(protocol: Protocol) -> None:
        if protocol in began:
            counts.append(parsed - began.pop(protocol))
        on_response_complete(protocol)

    monkeypatch.setattr(BoundedConnection, "next_event", count)
    monkeypatch.setattr(Protocol, "data_received", come)
    monkeypatch.setattr(Protocol, "on_response_complete", answered)
    return counts


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening(quiet_app()) as url:
        yield url


@pytest.fixture(autouse=True)
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LINGER_S", 0.2)


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname or "", address.port or 0), timeout=90)


def send(connection: socket.socket, data: bytes, ended: Event) -> None:
    with suppress(OSError):
        connection.sendall(data)
    ended.set()


def document_of(connection: socket.socket) -> bytes:
    """An answer with JSON; its head and its body may come one after the other."""
    answer = b""
    while not answer.endswith(b"}"):
        part = connection.recv(2**16)
        assert part, answer
        answer += part
    return answer


def answer_of(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    parts = []
    with suppress(ConnectionResetError):
        while part := connection.recv(2**16):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("what", HOSTILE)
def test_others_are_answered(url: str, counted: list[int], what: str) -> None:
    with ExitStack() as stack:
        ends = []
        for _ in range(CONNECTIONS):
            ends.append(Event())
            sender = Thread(target=send, args=(stack.enter_context(connect(url)), HOSTILE[what], ends[-1]), daemon=True)
            sender.start()
        others = stack.enter_context(connect(url))
        for asked in range(10):
            others.sendall(b"GET /others HTTP/1.1\r\nHost: a\r\n\r\n")
            assert document_of(others).startswith(b"HTTP/1.1 404")
            while len(counted) <= asked:  # it is counted just after it was sent
                time.sleep(0.001)
    shortest_event_bytes = 6  # a chunk of one byte
    assert max(counted) < TURNS * (PIECE_BYTES / shortest_event_bytes + CONNECTIONS)


@pytest.mark.parametrize("what", ["one-byte chunks", "16-byte chunks", "one-byte chunks with extensions"])
def test_too_many_chunks(url: str, what: str) -> None:
    head, content = refusal(url, HOSTILE[what])
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(content)["errors"][0]["code"] == "too_many_chunks"
    assert f"beyond {FREE_CHUNKS:,} each must have {BYTES_A_CHUNK} bytes".encode() in content


@pytest.mark.parametrize("what", ["short headers", "a long header", "a long query"])
def test_too_large_heads(url: str, what: str) -> None:
    head, content = refusal(url, HOSTILE[what])
    assert head.startswith(b"HTTP/1.1 431")
    assert json.loads(content)["errors"][0]["code"] == "head_too_large"
    assert f"more than {HEAD_BYTES:,} bytes".encode() in content


def test_no_http(url: str) -> None:
    head, content = refusal(url, b"GET / HTTP/1.1\r\nno colon\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(content)["errors"][0]["code"] == "bad_http"


def refusal(url: str, data: bytes) -> tuple[bytes, bytes]:
    with connect(url) as connection:
        Thread(target=send, args=(connection, data, Event()), daemon=True).start()
        head, _, content = answer_of(connection).partition(b"\r\n\r\n")
    assert b"application/problem+json" in head
    return head, content


@pytest.mark.parametrize("size", [1, 7, 128, 10_000, 2**18])
def test_bodies_come_whole(url: str, size: int) -> None:
    sent = bytes(range(256)) * 4 * min(size, 1024)
    sent = sent[: size * FREE_CHUNKS]
    chunks = (sent[start : start + size] for start in range(0, len(sent), size))
    data = CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    with connect(url) as connection:
        connection.sendall(data + WHOLE)  # with a request behind it
        answers = b""
        while answers.count(b"HTTP/1.1 200") < 2 or not answers.endswith(b'"here"'):
            answers += connection.recv(2**16)
    assert hashlib.sha256(sent).hexdigest().encode() in answers


def test_what_follows_an_answer_is_bounded_as_well(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(CHUNKED.replace(b"/body", b"/nowhere"))
        assert document_of(connection).startswith(b"HTTP/1.1 404")
        with suppress(OSError):
            connection.sendall(repeated(b"1\r\n \r\n"))
        assert answer_of(connection) == b""  # and closed
