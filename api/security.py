"""Headers that keep browsers from doing harm with an answer, and a guard against pages that would use a local server.

Where no keys are asked for, the server listens on a loopback address. A page from anywhere can make its visitor's
browser send requests there, under a name of its own that it has resolve to 127.0.0.1; such a request carries that name.
"""

from __future__ import annotations

from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.faults import problem
from api.problems import problem_response

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""On every answer that does not say otherwise; styles are for pictures (svg) that are opened by themselves."""

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", ""})


class SecurityHeaders:
    """ASGI middleware: adds HEADERS where a route set none of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, and its answer with the headers."""

        async def send_safe(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, send_safe)


class LocalNamesOnly:
    """ASGI middleware: refuses requests that were sent to another name than the loopback's."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self.app = app
        self.names = LOCAL_NAMES | {host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass where it was sent to a local name."""
        if scope["type"] != "http" or _name(Headers(scope=scope).get("host", "")) in self.names:
            await self.app(scope, receive, send)
            return
        detail = "this server answers to localhost alone. Maybe set OPTPIPE_REQUIRE_KEYS=true for other names."
        error = problem(HTTPStatus.MISDIRECTED_REQUEST, "wrong_host", detail)
        await problem_response(error, scope["optpipe.request_id"])(scope, receive, send)


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    name, colon, port = host.rpartition(":")
    return name.lower() if colon and port.isdigit() else host.lower()
