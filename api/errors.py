"""What can be wrong with a request, as a value and as an exception: the part of errors that knows nothing of the web
framework, so that the processes that work beside the server use it too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from math import ceil

from pydantic import BaseModel, ConfigDict, Field

from optpipe.errors import InputError

UNREADABLE = frozenset(
    {"bad_json", "bad_text", "bad_utf8", "duplicate_key", "empty", "not_finite", "too_deep", "too_long"}
)
"""Codes of bodies that are no strict JSON (400); what else is wrong with a body is its content (422)."""


class Fault(BaseModel):
    """One thing that is wrong with a request."""

    model_config = ConfigDict(extra="forbid")

    pointer: str = Field(description="JSON pointer (RFC 6901) into the body; empty: the request as a whole.")
    code: str = Field(description="A short name that does not change.")
    detail: str = Field(description="The value, the limit, and what may help.")


class ProblemError(Exception):
    """A request that is answered with an error; raised anywhere within a route."""

    def __init__(self, status: HTTPStatus, faults: Sequence[Fault], headers: Mapping[str, str] | None = None) -> None:
        self.status, self.faults, self.headers = status, faults, headers
        super().__init__(status, faults)

    def __str__(self) -> str:
        return "\n".join(f"{fault.pointer} {fault.detail}".strip() for fault in self.faults)


def problem(
    status: HTTPStatus, code: str, detail: str, pointer: str = "", headers: Mapping[str, str] | None = None
) -> ProblemError:
    """An error with one fault."""
    return ProblemError(status, [Fault(pointer=pointer, code=code, detail=detail)], headers)


def unprocessable(code: str, detail: str, pointer: str = "") -> ProblemError:
    """An error of content: the request is understood, and cannot be done."""
    return problem(HTTPStatus.UNPROCESSABLE_ENTITY, code, detail, pointer)


def passing(status: HTTPStatus, code: str, detail: str, retry_after_s: float) -> ProblemError:
    """An error that passes by itself; the answer says after how many whole seconds to come again."""
    return problem(status, code, detail, headers={"Retry-After": str(max(1, ceil(retry_after_s)))})


def problem_of_input(error: InputError) -> ProblemError:
    """The answer to a document that is wrong."""
    unreadable = any(issue.code in UNREADABLE and not issue.loc for issue in error.issues)
    status = HTTPStatus.BAD_REQUEST if unreadable else HTTPStatus.UNPROCESSABLE_ENTITY
    faults = [Fault(pointer=_json_pointer(issue.loc), code=issue.code, detail=issue.detail) for issue in error.issues]
    return ProblemError(status, faults)


def _json_pointer(loc: Iterable[str | int]) -> str:
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in loc)
