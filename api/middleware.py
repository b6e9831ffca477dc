"""ASGI middleware: access log, body limit, security headers, cross-site requests, bearer keys and HEAD.

Log lines hold the route's template, never a path that a client made up, a query, a body or a key.

Where keys are not required, the server listens on a loopback address. A page from anywhere can make its visitor's
browser send requests there, under a name of its own that it has resolve to 127.0.0.1; such a request carries that name.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from contextlib import suppress
from difflib import get_close_matches
from http import HTTPStatus
from traceback import extract_tb
from typing import Annotated
from uuid import UUID, uuid4

import structlog
from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import DatabaseGoneError, Fault, HttpError, http_error, unauthorized
from api.jobs.records import ApiKey
from api.metrics import Metrics
from api.problem_details import LONGEST_ECHO, job_error, problem_response
from api.service import Service
from api.web import is_page_path

UNKNOWN_ROUTE = "unknown"
KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

GONE = 499
"""Status in the log for a client that disconnected before it had sent its request (as nginx writes it)."""

_CLIENTS_ID = re.compile(r"[A-Za-z0-9._-]{8,64}", re.ASCII)
_log = structlog.get_logger("optpipe.access")


class AccessLog:
    """ASGI middleware, the outermost one."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, then log and count it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # The client's own id where it is a plain one, so that both logs can be joined.
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = scope["optpipe.request_id"] = given if _CLIENTS_ID.fullmatch(given) else uuid4().hex
        began, status, streams = time.perf_counter(), 0, False
        request_headers = Headers(scope=scope)
        # Two lengths may be an attempt to smuggle a request past a proxy: RFC 9112, 6.1 has the connection closed.
        two_lengths = "content-length" in request_headers and "transfer-encoding" in request_headers

        async def send_named(message: Message) -> None:
            nonlocal status, streams
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = request_id
                if two_lengths:
                    headers["Connection"] = "close"
                status = int(message["status"])
                streams = headers.get("content-type", "").startswith("text/event-stream")
            await send(message)

        try:
            await self.app(scope, receive, send_named)
        except ClientDisconnect:
            status = GONE
        except Exception as error:
            # Without the error's message, which might repeat what a client sent.
            frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in extract_tb(error.__traceback__)]
            kind = type(error).__qualname__
            _log.error("unexpected", request_id=request_id, route=_route(scope), error=kind, frames=frames)
            if status:
                raise  # the response has begun: closing the connection is the only signal left
            detail = f"the server made a mistake; see its log for request {request_id}. Maybe try again."
            unexpected = http_error(HTTPStatus.INTERNAL_SERVER_ERROR, "unexpected", detail)
            await problem_response(unexpected, request_id)(scope, receive, send_named)
        finally:
            seconds = time.perf_counter() - began
            method = scope["method"] if scope["method"] in KNOWN_METHODS else "other"
            self.metrics.count_request(method, _route(scope), status, None if streams else seconds)
            _log.info(
                "request",
                request_id=request_id,
                method=method,
                route=_route(scope),
                status=status,
                seconds=round(seconds, 4),
                key_id=str(scope["optpipe.key"].id) if "optpipe.key" in scope else None,
            )


def _route(scope: Scope) -> str:
    """The template of the route, such as ``/v1/schedules/{job_id}``."""
    return str(getattr(scope.get("route"), "path", UNKNOWN_ROUTE))


BODY_S = 30.0
BODY_BYTES_A_SECOND = 16 * 2**10
"""A body may take `BODY_S`, and beyond that as long as so many bytes a second come on average."""


class BodyLimit:
    """ASGI middleware: 413 for a body above `max_bytes`, 408 for one that comes too slowly.

    An announced length is checked before anything is read; a chunked body is cut off at the limit.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with at most `max_bytes` of its body."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdigit() and int(announced) > self.max_bytes:
            await problem_response(self._too_large(), scope["optpipe.request_id"])(scope, receive, send)
            return
        read, began_s, is_complete = 0, time.monotonic(), False

        async def receive_bounded() -> Message:
            nonlocal read, is_complete
            if is_complete:  # what is still to come is that the client has gone
                return await receive()
            left_s = began_s + BODY_S + read / BODY_BYTES_A_SECOND - time.monotonic()
            try:
                async with asyncio.timeout(left_s):
                    message = await receive()
            except TimeoutError:
                raise _too_slow(read) from None
            is_complete = not message.get("more_body", False)
            read += len(message.get("body", b""))
            if read > self.max_bytes:
                raise self._too_large()
            return message

        await self.app(scope, receive_bounded, send)

    def _too_large(self) -> HttpError:
        detail = f"the body has more than {self.max_bytes:,} bytes (max_body_bytes). Maybe it is another file."
        status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        return http_error(status, "too_large", detail, headers={"Connection": "close"})


def _too_slow(read: int) -> HttpError:
    detail = f"after {BODY_S:g} s only {read:,} bytes of the body had come. Maybe the connection is too slow."
    return http_error(HTTPStatus.REQUEST_TIMEOUT, "too_slow_body", detail, headers={"Connection": "close"})


JSON, FORM = "application/json", "application/x-www-form-urlencoded"


async def _json_body(request: Request) -> bytes:
    return await _body(request, JSON)


async def _json_or_form_body(request: Request) -> bytes:
    return await _body(request, JSON, FORM)


async def _body(request: Request, *media_types: str) -> bytes:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in media_types:
        detail = f"Content-Type is {media_type[:100]!a} but must be 'application/json'. Maybe it was not set."
        raise http_error(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "not_json", detail)
    if request.headers.get("content-encoding", "").lower() not in ("", "identity"):
        detail = "the body is compressed. Maybe send it plain."
        headers = {"Accept-Encoding": "identity"}  # RFC 9110, 15.5.16
        raise http_error(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "encoded", detail, headers=headers)
    body = await request.body()
    if not body.strip():
        raise http_error(HTTPStatus.BAD_REQUEST, "empty", "the body is empty, but JSON is needed.")
    return body


JsonBody = Annotated[bytes, Depends(_json_body)]
"""The raw body of a request with ``Content-Type: application/json``."""

SMALL_BODY_BYTES = 256 * 2**10
"""Largest body that is always read in this process: 16 MiB of wrong fields take three seconds."""


async def _small_json_body(body: JsonBody) -> bytes:
    if len(body) > SMALL_BODY_BYTES:
        detail = f"the body has {len(body):,} bytes, and this call takes at most {SMALL_BODY_BYTES:,}. Maybe it is "
        detail += "another file."
        raise http_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too_large", detail)
    return body


SmallJsonBody = Annotated[bytes, Depends(_small_json_body)]
"""The same, of `SMALL_BODY_BYTES` at most."""

JsonOrFormBody = Annotated[bytes, Depends(_json_or_form_body)]
"""The same, also where the type is a form's: that is what ``curl --data @problem.json`` says of any body."""


SINGLE_HEADERS = {"authorization", "idempotency-key", "last-event-id"}


async def refuse_ignored_parameters(request: Request) -> None:
    """Raise HttpError for a query parameter that the route does not have, or one or a header that stands there twice.

    So none is ignored unseen: of several values only one would count.
    """
    for name, times in Counter(name.decode("latin-1") for name, _ in request.scope["headers"]).items():
        if name in SINGLE_HEADERS and times > 1:
            detail = f"the header {name} is given {times} times, but takes one value. Maybe send it once."
            raise http_error(HTTPStatus.UNPROCESSABLE_ENTITY, "repeated_parameter", detail)
    known = _query_parameters(request.scope["route"].dependant)
    given = Counter(name for name, _ in request.query_params.multi_items())
    ignored = [name for name, times in given.items() if times > 1 or name not in known]
    if not ignored:
        return
    faults = []
    for name in ignored[:MOST_NAMED]:
        which = f"the query parameter {name[:LONGEST_ECHO]!a}"
        if name in known:
            detail = f"{which} is given {given[name]} times, but takes one value. Maybe ask once for each."
            faults.append(Fault(pointer="", code="repeated_parameter", detail=detail))
            continue
        close = get_close_matches(name, known, n=1)
        maybe = close[0] if close else ", ".join(sorted(known)) or "leave it out: this call takes none"
        faults.append(Fault(pointer="", code="unknown_parameter", detail=f"{which} is not known here. Maybe {maybe}."))
    raise HttpError(HTTPStatus.UNPROCESSABLE_ENTITY, faults)


def _query_parameters(dependant: Dependant) -> set[str]:
    own = {parameter.alias for parameter in dependant.query_params}
    return own.union(*(_query_parameters(part) for part in dependant.dependencies))


MOST_NAMED = 20
"""Parameters that an error lists."""


SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""On every answer that does not say otherwise; styles are for pictures (svg) that are opened by themselves."""

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", ""})


class SecurityHeaders:
    """ASGI middleware: adds `SECURITY_HEADERS` to every response that does not set them itself."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and add the headers to its response."""

        async def send_safe(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, send_safe)


class LocalRequestsOnly:
    """ASGI middleware of a service without keys: refuses other host names, and changes asked for by other sites' pages.

    A browser sends a page's POST without a body to any address, and only withholds the response from the page. It marks
    such a request by `Origin` and `Sec-Fetch-Site`; clients that are no browsers send neither.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self.app = app
        self.names = LOCAL_NAMES | {host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 421 to a foreign Host, or 403 to a change from another origin."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        host = Headers(scope=scope).get("host", "")
        name, colon, port = host.rpartition(":")
        error = None
        if (name if colon and port.isdigit() else host).lower() not in self.names:
            detail = "this server answers to localhost alone. Maybe set OPTPIPE_REQUIRE_KEYS=true for other names."
            error = http_error(HTTPStatus.MISDIRECTED_REQUEST, "wrong_host", detail)
        elif scope["method"] not in ("GET", "HEAD") and _is_cross_site(Headers(scope=scope), host):
            detail = "a page of another origin may not change anything here. Maybe use the page of this server."
            error = http_error(HTTPStatus.FORBIDDEN, "cross_site", detail)
        if error is None:
            await self.app(scope, receive, send)
        else:
            await problem_response(error, scope["optpipe.request_id"])(scope, receive, send)


def _is_cross_site(headers: Headers, host: str) -> bool:
    """True for a request from a page of another origin; `same-site` is another port or subdomain."""
    origin = headers.get("origin")
    foreign = origin is not None and origin.partition("://")[2].lower() != host.lower()
    return foreign or headers.get("sec-fetch-site", "none") in ("cross-site", "same-site")


class HeadAsGet:
    """ASGI middleware: answers HEAD like GET without its body (RFC 9110, 9.3.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Route HEAD to the GET route; an event stream ends with its headers."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        begun = False

        async def send_headers(message: Message) -> None:
            nonlocal begun
            if begun:
                raise OSError  # as if the client had gone: a stream would send for ever
            if message["type"] == "http.response.start":
                scope["method"] = "HEAD"  # for the server, which must not expect a body, and for the log
                begun = True
                await send(message)
                await send({"type": "http.response.body", "body": b""})

        scope["method"] = "GET"
        with suppress(ClientDisconnect, OSError):
            await self.app(scope, receive, send_headers)


ANSWERED_AT_ONCE_BYTES = 256 * 2**10


class InPieces:
    """ASGI middleware: passes a large answer on in pieces, with a turn of the event loop between two of them.

    To compress a megabyte takes up to 20 ms, in which no other request is answered.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and its answer in pieces of `ANSWERED_AT_ONCE_BYTES`."""

        async def send_in_pieces(message: Message) -> None:
            body = message.get("body", b"")
            rest = range(ANSWERED_AT_ONCE_BYTES, len(body), ANSWERED_AT_ONCE_BYTES)
            for end in rest:
                await send({**message, "body": body[end - ANSWERED_AT_ONCE_BYTES : end], "more_body": True})
                await asyncio.sleep(0)
            await send({**message, "body": body[rest[-1] :]} if rest else message)

        await self.app(scope, receive, send_in_pieces)


LONGEST_SECRET = 200

READING = frozenset({"GET", "HEAD"})
READING_PATHS = frozenset({"/v1/analyze", "/v1/compare", "/v1/recognize"})
"""Methods and paths open to a key with the scope `read`: they change nothing."""


class RequireKey:
    """ASGI middleware: requires a bearer key, except for `/healthz` and the page, which holds no data.

    The page asks its user for a key, and sends it with every request of its own.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if it carries a valid key or needs none, else answer 401."""
        if scope["type"] != "http" or scope["path"] == "/healthz" or is_page_path(scope["path"]):
            await self.app(scope, receive, send)
            return
        service: Service = scope["app"].state.service
        scheme, _, secret = Headers(scope=scope).get("authorization", "").partition(" ")
        try:
            if scheme.lower() != "bearer" or not secret:
                raise unauthorized("no_key", "this needs a key: send the header 'Authorization: Bearer KEY'.")
            key = await service.store.verify_key(secret.strip()) if len(secret) <= LONGEST_SECRET else None
            if key is None:
                detail = "this key is not known, has expired, or was revoked. Maybe a character is missing."
                raise unauthorized("bad_key", detail)
            if key.scope == "read" and scope["method"] not in READING and scope["path"] not in READING_PATHS:
                detail = "this key may only read. Maybe ask for one with the scope 'submit'."
                raise http_error(HTTPStatus.FORBIDDEN, "scope", detail)
        except (HttpError, DatabaseGoneError) as error:
            raised = job_error(error) if isinstance(error, DatabaseGoneError) else error
            await problem_response(raised, scope["optpipe.request_id"])(scope, receive, send)
            return
        scope["optpipe.key"] = key
        await self.app(scope, receive, send)


async def _owner(request: Request) -> UUID | None:
    key: ApiKey | None = request.scope.get("optpipe.key")
    return key.owner if key else None


Owner = Annotated[UUID | None, Depends(_owner)]
"""The id of the key whose jobs the caller may see; None where no keys are asked for."""


async def _key(request: Request) -> ApiKey | None:
    key: ApiKey | None = request.scope.get("optpipe.key")
    return key


Key = Annotated[ApiKey | None, Depends(_key)]
"""The caller's key; None where none are asked for."""
