"""Bodies of requests as bytes: JSON alone, and never more of them than this server takes."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.faults import ProblemError, problem
from api.problems import problem_response


class BodyLimit:
    """ASGI middleware: 413 for a body that is too large, before it is read where its length is announced, else as soon
    as it is known. Whoever catches the error within has read no more than the limit."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, with no more of its body than is allowed."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdigit() and int(announced) > self.max_bytes:
            await problem_response(self._too_large(), scope["optpipe.request_id"])(scope, receive, send)
            return
        read = 0

        async def receive_bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.max_bytes:
                raise self._too_large()
            return message

        await self.app(scope, receive_bounded, send)

    def _too_large(self) -> ProblemError:
        detail = f"the body has more than {self.max_bytes:,} bytes (max_body_bytes). Maybe it is another file."
        status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        return problem(status, "too_large", detail, headers={"Connection": "close"})


async def _json_body(request: Request) -> bytes:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        detail = f"Content-Type is {media_type[:100]!a} but must be 'application/json'. Maybe it was not set."
        raise problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "not_json", detail)
    if request.headers.get("content-encoding", "identity") != "identity":
        raise problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "encoded", "the body is compressed. Maybe send it plain.")
    body = await request.body()
    if not body.strip():
        raise problem(HTTPStatus.BAD_REQUEST, "empty", "the body is empty, but JSON is needed.")
    return body


JsonBody = Annotated[bytes, Depends(_json_body)]
"""The body of a request that says it is JSON. Pages of other sites cannot send that without being allowed to, so this
also keeps them from using a visitor's local server."""
