"""The OpenAPI document: request bodies, error responses and the key as security scheme."""

from __future__ import annotations

from functools import cache, partial
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from api.analysis import FileBody
from api.jobs.records import JobLabels
from api.models import BatchBody, EventAnswer, JobIds, PlanBody, ProblemBody, SubmissionBody
from api.problem_details import MEDIA_TYPE, ProblemDetails
from optpipe.document import Document
from optpipe.schedule import Schedule

_REFERENCE = "#/components/schemas/{model}"
_DOCUMENTS: tuple[type[BaseModel], ...] = (
    SubmissionBody,
    PlanBody,
    BatchBody,
    JobIds,
    JobLabels,
    ProblemBody,
    Schedule,
    FileBody,
    ProblemDetails,
    EventAnswer,
)


def json_request(*models: type[Document], example: Any = None) -> dict[str, Any]:
    """OpenAPI request body of a route that reads one of `models`, with an example that can be sent as it is."""
    references = [{"$ref": _REFERENCE.format(model=model.__name__)} for model in models]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    content = {"schema": schema} | ({} if example is None else {"example": example})
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def describe(app: FastAPI, keys_required: bool) -> None:
    """Set `app.openapi()` to the document of all routes, made when it is first asked for."""
    app.openapi = cache(partial(_document, app, keys_required))  # type: ignore[method-assign]


_HEADERS: dict[str, dict[str, Any]] = {
    "X-Request-ID": {
        "description": "Names this request in the server's log: the caller's own, if it sent a plain one.",
        "schema": {"type": "string"},
    },
    "Retry-After": {"description": "Seconds after which to try again.", "schema": {"type": "integer", "minimum": 1}},
    "RateLimit": {
        "description": 'Submissions that are left to this key, and seconds until the next: `"submissions";r=599;t=60`.',
        "schema": {"type": "string"},
    },
    "RateLimit-Policy": {
        "description": 'Submissions of a key in a window of seconds: `"submissions";q=600;w=60`.',
        "schema": {"type": "string"},
    },
    "ETag": {"description": "Of the content; send it as If-None-Match.", "schema": {"type": "string"}},
    "Location": {"description": "Path of the job.", "schema": {"type": "string"}},
    "WWW-Authenticate": {"description": "`Bearer`.", "schema": {"type": "string"}},
    "Allow": {"description": "The methods that the path takes.", "schema": {"type": "string"}},
}
"""Headers of responses, each described once, among the document's components."""


def headers(*names: str) -> dict[str, Any]:
    """OpenAPI headers of a response, by name."""
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


SUBMITTED = ("Location", "RateLimit", "RateLimit-Policy")
"""Headers of the answer to a submission."""


def _document(app: FastAPI, keys_required: bool) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, summary=app.summary, routes=app.routes, openapi_version="3.1.0"
    )
    _, definitions = models_json_schema([(model, "validation") for model in _DOCUMENTS], ref_template=_REFERENCE)
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(definitions["$defs"])
    components["headers"] = _HEADERS
    for methods in document["paths"].values():
        for operation in methods.values():
            for response in operation["responses"].values():
                response["headers"] = headers("X-Request-ID") | response.get("headers", {})
    if keys_required:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        document["paths"]["/healthz"]["get"]["security"] = []
    return document


Responses = dict[int | str, dict[str, Any]]

_WHY = {
    400: "The body is no strict JSON.",
    401: "A key is needed, and none that is valid was sent.",
    403: "The key's scope does not allow it, or a page of another origin asked for a change.",
    404: "There is no such job, or it is somebody else's.",
    405: "The path does not take this method.",
    408: "The body came too slowly.",
    409: "The job's status does not allow it.",
    413: "The body has more bytes than the server takes.",
    415: "The body is not application/json.",
    421: "The request names another host than this one.",
    422: "The content of body or parameters is wrong; each fault has its place.",
    429: "A cap of the key is reached; Retry-After says when to try again.",
    431: "The head of the request is too long.",
    500: "A mistake of the server.",
    503: "Too busy, or the database is gone; Retry-After says when to try again.",
}

_ERROR_HEADERS = {401: ("WWW-Authenticate",), 405: ("Allow",), 429: ("Retry-After",), 503: ("Retry-After",)}

ANYWHERE = (401, 403, 405, 413, 421, 422, 429, 431, 500, 503)
"""Error statuses of every route."""
WITH_BODY = (400, 408, 415)
"""Further error statuses of routes that read a body."""


def errors(*statuses: int) -> Responses:
    """OpenAPI responses of a route with these error statuses besides `ANYWHERE`."""
    schema = {"$ref": "#/components/schemas/ProblemDetails"}
    return {
        status: {
            "description": f"{HTTPStatus(status).phrase}. {_WHY[status]}",
            "content": {MEDIA_TYPE: {"schema": schema}},
            "headers": headers(*_ERROR_HEADERS.get(status, ())),
        }
        for status in sorted({*ANYWHERE, *statuses})
    }
