"""The errors that calls answer with, for the OpenAPI document."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from api.problems import MEDIA_TYPE

Responses = dict[int | str, dict[str, Any]]

_WHY = {
    400: "The body is no strict JSON.",
    401: "A key is needed, and none that is valid was sent.",
    404: "There is no such job, or it is somebody else's.",
    405: "The path does not take this method.",
    409: "The job's status does not allow it.",
    413: "The body has more bytes than the server takes.",
    415: "The body is not application/json.",
    421: "The request names another host than this one.",
    422: "The content of body or parameters is wrong; each fault has its place.",
    429: "A cap of the key is reached; Retry-After says when to try again.",
    500: "A mistake of the server.",
    503: "Too busy, or the database is gone; Retry-After says when to try again.",
}

ANYWHERE = (401, 405, 413, 421, 429, 500, 503)
"""What every call may answer."""
WITH_BODY = (400, 415, 422)
"""And those that read a body."""


def errors(*statuses: int) -> Responses:
    """The responses of a call with these errors of its own."""
    schema = {"$ref": "#/components/schemas/ProblemDetails"}
    return {
        status: {
            "description": f"{HTTPStatus(status).phrase}. {_WHY[status]}",
            "content": {MEDIA_TYPE: {"schema": schema}},
        }
        for status in sorted({*ANYWHERE, *statuses})
    }
