"""Bearer keys: asked for before anything else is looked at, on every path but those named here."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated
from uuid import UUID

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.faults import ProblemError, problem
from api.jobs.errors import DatabaseGoneError
from api.problems import problem_of_job, problem_response
from api.service import Service
from api.web import is_page_path

LONGEST_SECRET = 200


class RequireKey:
    """ASGI middleware: no request passes without a key, except for `/healthz` and the page, which holds no data.

    The page asks its user for a key, and sends it with every request of its own.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass where it brings a key, or needs none."""
        if scope["type"] != "http" or _is_open(scope["path"]):
            await self.app(scope, receive, send)
            return
        try:
            await self._admit(scope)
        except (ProblemError, DatabaseGoneError) as error:
            raised = problem_of_job(error) if isinstance(error, DatabaseGoneError) else error
            await problem_response(raised, scope["optpipe.request_id"])(scope, receive, send)
            return
        await self.app(scope, receive, send)

    async def _admit(self, scope: Scope) -> None:
        service: Service = scope["app"].state.service
        scheme, _, secret = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise _refusal("no_key", "this needs a key: send the header 'Authorization: Bearer KEY'.")
        key = await service.store.verify_key(secret.strip()) if len(secret) <= LONGEST_SECRET else None
        if key is None:
            raise _refusal("bad_key", "this key is not known, or was revoked. Maybe a character is missing.")
        scope["optpipe.owner"] = key.id


def _is_open(path: str) -> bool:
    return path == "/healthz" or is_page_path(path)


def _refusal(code: str, detail: str) -> ProblemError:
    return problem(HTTPStatus.UNAUTHORIZED, code, detail, headers={"WWW-Authenticate": "Bearer"})


async def _owner(request: Request) -> UUID | None:
    owner: UUID | None = request.scope.get("optpipe.owner")
    return owner


Owner = Annotated[UUID | None, Depends(_owner)]
"""The id of the caller's key; None where no keys are asked for."""
