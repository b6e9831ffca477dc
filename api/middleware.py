"""One line in the log and one count for each request, a name for it, and an answer whatever a route does.

Lines hold the route's template, never a path that a client made up, a query, a body or a key.
"""

from __future__ import annotations

import re
import time
from http import HTTPStatus
from traceback import extract_tb
from typing import Any
from uuid import uuid4

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.faults import problem
from api.metrics import Metrics
from api.problems import problem_response

UNKNOWN_ROUTE = "unknown"
KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

GONE = 499
"""What logs call a client that went away before it had sent its request."""

_CLIENTS_ID = re.compile(r"[A-Za-z0-9._-]{8,64}", re.ASCII)
_log = structlog.get_logger("optpipe.access")


class AccessLog:
    """ASGI middleware, the outermost one."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, and note how it went."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = scope["optpipe.request_id"] = _request_id(scope)
        began, status, streams = time.perf_counter(), 0, False

        async def send_named(message: Message) -> None:
            nonlocal status, streams
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = request_id
                status = int(message["status"])
                streams = headers.get("content-type", "").startswith("text/event-stream")
            await send(message)

        try:
            await self.app(scope, receive, send_named)
        except ClientDisconnect:
            status = GONE
        except Exception as error:
            _log.error("unexpected", request_id=request_id, route=_route(scope), **_where(error))
            if status:
                raise  # the answer has begun: ending the connection is all that still tells the client
            await _unexpected(request_id)(scope, receive, send_named)
        finally:
            self._note(scope, status, time.perf_counter() - began, streams)

    def _note(self, scope: Scope, status: int, seconds: float, streams: bool) -> None:
        method = scope["method"] if scope["method"] in KNOWN_METHODS else "other"
        route = _route(scope)
        self.metrics.count_request(method, route, status, None if streams else seconds)
        _log.info(
            "request",
            request_id=scope["optpipe.request_id"],
            method=method,
            route=route,
            status=status,
            seconds=round(seconds, 4),
            key_id=str(scope["optpipe.owner"]) if "optpipe.owner" in scope else None,
        )


def _request_id(scope: Scope) -> str:
    """The client's own id where it is a plain one, so that both logs can be laid side by side; else a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _CLIENTS_ID.fullmatch(given) else uuid4().hex


def _route(scope: Scope) -> str:
    """The template of the route, such as ``/v1/schedules/{job_id}``."""
    return str(getattr(scope.get("route"), "path", UNKNOWN_ROUTE))


def _where(error: Exception) -> dict[str, Any]:
    """What went wrong and where, without the message: it might repeat what a client sent."""
    frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in extract_tb(error.__traceback__)]
    return {"error": type(error).__qualname__, "frames": frames}


def _unexpected(request_id: str) -> ASGIApp:
    detail = f"the server made a mistake; its log tells more under {request_id}. Maybe try again."
    return problem_response(problem(HTTPStatus.INTERNAL_SERVER_ERROR, "unexpected", detail), request_id)
