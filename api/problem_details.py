"""Every error of the service as `application/problem+json` (RFC 9457), those of the framework too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute

from api.errors import (
    BadCursorError,
    ConflictError,
    DatabaseFullError,
    DatabaseGoneError,
    Fault,
    HttpError,
    IdempotencyMismatchError,
    JobError,
    KeyEndedError,
    NoScheduleError,
    NotFoundError,
    TooManyError,
    http_error,
    input_error,
    retry_later,
    unauthorized,
)
from optpipe.errors import InputError

MEDIA_TYPE = "application/problem+json"
LONGEST_ECHO = 100
"""Characters of a path or parameter that an error repeats."""


class ProblemDetails(BaseModel):
    """An error (RFC 9457)."""

    model_config = ConfigDict(extra="forbid")

    type: str = Field(description="Always about:blank: `status` and the codes of `errors` tell errors apart.")
    title: str = Field(description="The status in words.")
    status: int = Field(ge=400, le=599)
    detail: str = Field(description="All that is wrong, a line each.")
    errors: list[Fault] = Field(description="Each thing that is wrong, with its place.")
    request_id: str = Field(description="Names this request in the server's log.")
    budgets_bytes: list[int | None] | None = Field(
        default=None, description="Where a problem is proved infeasible: budgets of its devices that would do."
    )


def problem_response(error: HttpError, request_id: str) -> JSONResponse:
    """Problem+json response of a failed request."""
    details = ProblemDetails(
        type="about:blank",
        title=error.status.phrase,
        status=error.status,
        detail=str(error),
        errors=list(error.faults),
        request_id=request_id,
        budgets_bytes=error.budgets_bytes,
    )
    data = details.model_dump(exclude={"budgets_bytes"} if error.budgets_bytes is None else None)
    return JSONResponse(data, error.status, dict(error.headers or {}), MEDIA_TYPE)


def answer_errors_as_problems(app: FastAPI, routes: Iterable[BaseRoute]) -> None:
    """Have `app` answer its own errors, those of the framework and those of documents and jobs in this one form.

    `routes` are all that have a method: the framework names only those of the first route at a path.
    """
    allowed: dict[str, set[str]] = defaultdict(set)
    for route in routes:
        methods = getattr(route, "methods", None) or set()
        allowed[getattr(route, "path", "")] |= methods | ({"HEAD"} if "GET" in methods else set())

    def answer(request: Request, error: HttpError) -> JSONResponse:
        return problem_response(error, request.scope["optpipe.request_id"])

    @app.exception_handler(HttpError)
    async def of_request(request: Request, error: HttpError) -> JSONResponse:
        return answer(request, error)

    @app.exception_handler(InputError)
    async def of_input(request: Request, error: InputError) -> JSONResponse:
        return answer(request, input_error(error))

    @app.exception_handler(JobError)
    async def of_job(request: Request, error: JobError) -> JSONResponse:
        return answer(request, job_error(error))

    @app.exception_handler(RequestValidationError)
    async def of_parameters(request: Request, error: RequestValidationError) -> JSONResponse:
        # Parameters stand outside the body: the detail names them, the pointer is empty.
        faults = []
        for entry in error.errors():
            kind, *name = entry["loc"]
            if kind == "path":  # an id that is no UUID names no job, like one that is made up
                return answer(request, http_error(HTTPStatus.NOT_FOUND, "not_found", "there is no such job."))
            message = entry["msg"][:1].lower() + entry["msg"][1:]
            given = str(entry["input"])[:LONGEST_ECHO]
            detail = f"the {kind} parameter {'.'.join(map(str, name))} is {given!a}: {message}."
            faults.append(Fault(pointer="", code="bad_parameter", detail=detail))
        return answer(request, HttpError(HTTPStatus.UNPROCESSABLE_ENTITY, faults))

    @app.exception_handler(HTTPException)
    async def of_framework(request: Request, error: HTTPException) -> JSONResponse:
        status = HTTPStatus(error.status_code)
        path = ascii(request.url.path[:LONGEST_ECHO])
        if status == HTTPStatus.NOT_FOUND:
            return answer(
                request, http_error(status, "not_found", f"there is nothing at {path}. Maybe see /openapi.json.")
            )
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            route = getattr(request.scope.get("route"), "path", "")
            methods = ", ".join(sorted(allowed.get(route, ("GET", "HEAD"))))
            detail = f"{path} does not take {request.method[:LONGEST_ECHO]!a}. Maybe use {methods}."
            return answer(request, http_error(status, "method_not_allowed", detail, headers={"Allow": methods}))
        detail = f"{error.detail}".rstrip(".") + "."
        return answer(request, http_error(status, status.name.lower(), detail, headers=error.headers))


_STATUS_OF: dict[type[JobError], tuple[HTTPStatus, str]] = {
    NotFoundError: (HTTPStatus.NOT_FOUND, "not_found"),
    NoScheduleError: (HTTPStatus.NOT_FOUND, "no_schedule"),
    ConflictError: (HTTPStatus.CONFLICT, "wrong_status"),
    IdempotencyMismatchError: (HTTPStatus.UNPROCESSABLE_ENTITY, "idempotency_mismatch"),
    BadCursorError: (HTTPStatus.UNPROCESSABLE_ENTITY, "bad_cursor"),
}


def job_error(error: JobError) -> HttpError:
    """HTTP error for an error of the job store."""
    if isinstance(error, TooManyError):
        return retry_later(HTTPStatus.TOO_MANY_REQUESTS, error.code, str(error), error.retry_after_s)
    if isinstance(error, DatabaseGoneError):
        code = "database_full" if isinstance(error, DatabaseFullError) else "database_gone"
        return retry_later(HTTPStatus.SERVICE_UNAVAILABLE, code, str(error), error.retry_after_s)
    if isinstance(error, KeyEndedError):
        return unauthorized("bad_key", str(error))
    status, code = _STATUS_OF[type(error)]
    return http_error(status, code, str(error))
