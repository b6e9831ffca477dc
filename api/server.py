"""The HTTP server under the application: uvicorn, with a time limit for the heads of requests."""

from __future__ import annotations

import asyncio
import gc
from socket import socket

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 15.0
"""Time from the start of a connection, or from the first byte after an answer, to the end of a request's head."""

SHUTDOWN_TIMEOUT_S = 3
"""Time that open event streams have to end when the service stops; their clients reconnect to the next one."""


def server_config(app: FastAPI) -> uvicorn.Config:
    """Configuration of the server of `app`, without a log of its own."""
    return uvicorn.Config(
        app,
        http=DeadlineProtocol,
        log_config=None,
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


class DeadlineProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection where the head of a request does not come in time.

    uvicorn ends a connection only where nothing at all comes after an answer. How long a body may take is a matter of
    `api.middleware.BodyLimit`.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Pass the data on, and wait for the rest of a head that is not complete."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        super().connection_lost(exc)
        self._stop_watching()

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
