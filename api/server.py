"""The HTTP server under the application: uvicorn, with limits for what one client's bytes may cost the others.

uvicorn parses all that has come on a connection before anything else is done, and h11 parses a chunk in about 5 us
however short it is. So here the bytes of all connections are parsed piece by piece, with whatever else there is to do
in between, and a body has a limited number of chunks.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from http import HTTPStatus
from socket import socket
from typing import Any
from uuid import uuid4

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from api.errors import HttpError, http_error
from api.middleware import SECURITY_HEADERS
from api.problem_details import problem_response

HEAD_S = 15.0
"""Time from the start of a connection, or from the first byte after an answer, to the end of a request's head."""

HEAD_BYTES = 32 * 2**10
"""Largest head of a request, line of a chunk, or trailer."""

PIECE_BYTES = 4 * 2**10
"""Bytes that are parsed in one turn of the event loop: at most 700 chunks, 5 ms."""

FREE_CHUNKS = 20_000
BYTES_A_CHUNK = 128
"""A body may come in `FREE_CHUNKS` chunks, and in one more for each `BYTES_A_CHUNK` bytes."""

LINGER_S = 2.0
LINGER_BYTES = 16 * 2**20
"""For so long, and so much, what a refused client still sends is dropped unread, so that it can read why."""

SHUTDOWN_TIMEOUT_S = 3
"""Time that open event streams have to end when the service stops; their clients reconnect to the next one."""


def server_config(app: FastAPI) -> uvicorn.Config:
    """Configuration of the server of `app`, without a log of its own."""
    return Config(
        app,
        http=Protocol,
        ws="none",
        log_config=None,
        h11_max_incomplete_event_size=HEAD_BYTES,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
    )


class Server(uvicorn.Server):
    """Server of a process of its own, whose garbage collections stay short.

    A full collection walks every object there is: with the loaded modules it takes 50 to 100 ms, in which no request is
    answered, and it comes up several times a second under load. So what is there at the start is left out of them.
    """

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Start to serve."""
        await super().startup(sockets)
        gc.collect()
        gc.freeze()


class Config(uvicorn.Config):
    """Configuration of one server, with the turns of its connections."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.turns = Turns()


class Turns:
    """Connections with bytes to parse: one of them parses a piece in each turn of the event loop, in rotation."""

    def __init__(self) -> None:
        self._waiting: dict[Protocol, None] = {}
        self._scheduled = False

    def add(self, connection: Protocol) -> None:
        """Give a connection turns until it has nothing to parse."""
        self._waiting[connection] = None
        self._schedule(connection.loop)

    def remove(self, connection: Protocol) -> None:
        """Give a connection no more turns."""
        self._waiting.pop(connection, None)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._waiting and not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._next, loop)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._scheduled = False
        if self._waiting:
            connection = next(iter(self._waiting))
            self.remove(connection)
            try:
                connection.parse_piece()
                if connection.may_parse:
                    self._waiting[connection] = None  # behind all others
            finally:
                self._schedule(loop)


class BoundedConnection(h11.Connection):
    """State of a connection in HTTP/1.1, with a limit for the chunks of a body.

    `refusal` is the answer to what cannot be parsed, or is not parsed any further.
    """

    refusal: HttpError | None = None
    _chunks = _body_bytes = 0

    def next_event(self) -> Any:
        """See `h11.Connection.next_event`. Raises h11.RemoteProtocolError, with `refusal` set."""
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.refusal = _malformed(error)
            raise
        if isinstance(event, h11.Request):
            self._chunks = self._body_bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._body_bytes += len(event.data)
            if self._chunks > FREE_CHUNKS + self._body_bytes // BYTES_A_CHUNK:
                self.refusal = _too_many_chunks(self._chunks, self._body_bytes)
                raise h11.RemoteProtocolError("too many chunks")
        return event


def _malformed(error: h11.RemoteProtocolError) -> HttpError:
    if error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
        detail = f"the head of the request has more than {HEAD_BYTES:,} bytes. Maybe a header or the query is too long."
        return http_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large", detail)
    detail = "the request is not HTTP/1.1 as RFC 9112 has it. Maybe a line of its head or of a chunk is malformed."
    return http_error(HTTPStatus.BAD_REQUEST, "bad_http", detail)


def _too_many_chunks(chunks: int, read: int) -> HttpError:
    detail = (
        f"{read:,} bytes of the body came in {chunks:,} chunks, and beyond {FREE_CHUNKS:,} each must have "
        f"{BYTES_A_CHUNK} bytes on average. Maybe send the body with a Content-Length."
    )
    return http_error(HTTPStatus.BAD_REQUEST, "too_many_chunks", detail)


class _Flow(FlowControl):
    """Flow control of a connection that first parses what has been read when the application asks for more."""

    def __init__(self, transport: asyncio.Transport, resume: Callable[[], None]) -> None:
        super().__init__(transport)
        self._resume = resume

    def resume_reading(self) -> None:
        """Go on reading."""
        if self.read_paused:
            self.read_paused = False
            self._resume()


class Protocol(H11Protocol):
    """HTTP/1.1 that parses in turns, and closes a connection where the head of a request does not come in time.

    The first piece of a request is parsed at once; so a short request never waits for a turn. While there are bytes to
    parse, no more are read. uvicorn ends a connection only where nothing at all comes after an answer. How long a body
    may take is a matter of `api.middleware.BodyLimit`.
    """

    config: Config
    conn: BoundedConnection
    _deadline: asyncio.TimerHandle | None = None
    _parsed_bytes = 0
    """Bytes of this request, and of what followed it in the same pieces."""
    _dropped_bytes = 0

    def __init__(self, config: Config, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.conn = BoundedConnection(h11.SERVER, HEAD_BYTES)
        self._unparsed = bytearray()

    @property
    def may_parse(self) -> bool:
        """True where bytes were read that the application has room for."""
        return bool(self._unparsed) and not self.flow.read_paused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self.flow = _Flow(transport, self._resume)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Parse the data at once or in turns; drop it where the connection was refused."""
        if self.conn.refusal is not None:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > LINGER_BYTES:
                self.transport.close()
            return
        self._unparsed += data
        if self._parsed_bytes + len(self._unparsed) <= PIECE_BYTES:
            self.parse_piece()
        elif self.may_parse:
            self.config.turns.add(self)
        self._hold_back()

    def parse_piece(self) -> None:
        """Parse a piece of what was read, and wait for the rest of a head that is not complete."""
        if self.transport.is_closing():
            self._unparsed.clear()
            return
        piece = bytes(self._unparsed[:PIECE_BYTES])
        del self._unparsed[:PIECE_BYTES]
        self._parsed_bytes += len(piece)
        super().data_received(piece)
        if self.conn.refusal is not None:
            return
        self._watch()
        self._hold_back()
        if not self._unparsed and not self.flow.read_paused:
            self.transport.resume_reading()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self._parsed_bytes = 0
        super().on_response_complete()
        self._hold_back()

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed, if it may still be answered, and close the connection."""
        del msg
        refusal = self.conn.refusal
        assert refusal is not None
        self._unparsed.clear()
        self.config.turns.remove(self)
        self._stop_watching()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the application's answer would come after this one
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        request_id = uuid4().hex
        answer = problem_response(refusal, request_id)
        answer.headers["X-Request-ID"] = request_id
        headers = [*answer.raw_headers, *((name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items())]
        events = (
            h11.Response(
                status_code=refusal.status,
                headers=[*headers, (b"Connection", b"close")],
                reason=refusal.status.phrase.encode(),
            ),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        )
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()
        self._deadline = self.loop.call_later(LINGER_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._unparsed.clear()
        self.config.turns.remove(self)
        super().connection_lost(exc)
        self._stop_watching()

    def _resume(self) -> None:
        if self._unparsed:
            self.config.turns.add(self)
        else:
            self.transport.resume_reading()

    def _hold_back(self) -> None:
        """Read no more while there is something to parse, whatever uvicorn has asked for."""
        if self._unparsed and not self.transport.is_closing():
            self.transport.pause_reading()

    def _watch(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or self.transport.is_closing():
            self._stop_watching()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
