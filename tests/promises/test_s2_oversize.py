"""S2: a body that is too large is answered with 413 within half a second, announced or not, and is not kept."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest

from api.settings import Settings
from solver.process.channel import resident_bytes
from tests.api.harness import new_key
from tests.clock import Clock

SENT_BYTES = 400 * 2**20
WITHIN_S = 0.5
MORE_BYTES = 100 * 2**20


def announced(total: int) -> Iterator[bytes]:
    """A body whose length stands in the head."""
    yield f"Content-Length: {total}\r\n\r\n".encode()
    piece = b"[" * 2**16
    for _ in range(total // len(piece)):
        yield piece


def chunked(total: int) -> Iterator[bytes]:
    """A body that does not say how long it is."""
    yield b"Transfer-Encoding: chunked\r\n\r\n"
    piece = b"10000\r\n" + b"[" * 2**16 + b"\r\n"
    for _ in range(total // 2**16):
        yield piece


@pytest.mark.parametrize("parts", [announced, chunked])
@pytest.mark.parametrize("route", ["/v1/schedules", "/v1/analyze"])
def test_oversize(
    service_url: str, service_settings: Settings, route: str, parts: Callable[[int], Iterator[bytes]]
) -> None:
    held_bytes = _resident_bytes()
    head = f"POST {route} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {new_key(service_settings)}\r\n"
    seconds, answer = _answer(service_url, head.encode(), parts(SENT_BYTES))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"application/problem+json" in answer
    assert b'"code":"too_large"' in answer
    assert seconds < WITHIN_S
    assert _resident_bytes() - held_bytes < MORE_BYTES


def _answer(url: str, head: bytes, parts: Iterator[bytes]) -> tuple[float, bytes]:
    """The seconds until the answer began, and the answer, of a server that may stop to listen in between."""
    address = urlsplit(url)
    clock = Clock()
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=90) as connection:
        try:
            connection.sendall(head)
            for part in parts:
                connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = connection.recv(2**16)
        return clock.seconds, answer


def _resident_bytes() -> int:
    held = resident_bytes(os.getpid())
    assert held is not None
    return held
