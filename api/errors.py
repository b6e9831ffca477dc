"""Errors of the service, as values and exceptions, independent of the web framework.

JobError
├── NotFoundError              no such job or key, or it is somebody else's
├── ConflictError              the job's status does not allow it
├── IdempotencyMismatchError   the Idempotency-Key was used with another body
├── KeyEndedError              the caller's key was revoked or expired while it waited
├── TooManyError               a cap of the caller's key is reached
├── NoScheduleError            the job has no schedule (yet)
├── BadCursorError             the cursor is none that a list gave out
└── DatabaseGoneError          no answer from the database: try again
    └── DatabaseFullError      its disk is full
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from math import ceil

from pydantic import BaseModel, ConfigDict, Field

from optpipe.errors import InputError, OptPipeError

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


class HttpError(Exception):
    """A request that is answered with an error; raised anywhere within a route."""

    def __init__(
        self,
        status: HTTPStatus,
        faults: Sequence[Fault],
        headers: Mapping[str, str] | None = None,
        budgets_bytes: Sequence[int | None] | None = None,
    ) -> None:
        self.status, self.faults, self.headers = status, faults, headers
        self.budgets_bytes = None if budgets_bytes is None else list(budgets_bytes)
        super().__init__(status, faults)

    def __str__(self) -> str:
        return "\n".join(f"{fault.pointer} {fault.detail}".strip() for fault in self.faults)


def http_error(
    status: HTTPStatus, code: str, detail: str, pointer: str = "", headers: Mapping[str, str] | None = None
) -> HttpError:
    """An error with one fault."""
    return HttpError(status, [Fault(pointer=pointer, code=code, detail=detail)], headers)


def unprocessable(code: str, detail: str, pointer: str = "") -> HttpError:
    """An error of content: the request is understood, and cannot be done."""
    return http_error(HTTPStatus.UNPROCESSABLE_ENTITY, code, detail, pointer)


def unauthorized(code: str, detail: str) -> HttpError:
    """An error of the caller's key, or of its absence."""
    return http_error(HTTPStatus.UNAUTHORIZED, code, detail, headers={"WWW-Authenticate": "Bearer"})


def retry_later(status: HTTPStatus, code: str, detail: str, retry_after_s: float) -> HttpError:
    """An error that passes by itself; the answer says after how many whole seconds to come again."""
    return http_error(status, code, detail, headers={"Retry-After": str(max(1, ceil(retry_after_s)))})


def input_error(error: InputError) -> HttpError:
    """The answer to a document that is wrong."""
    unreadable = any(issue.code in UNREADABLE and not issue.loc for issue in error.issues)
    status = HTTPStatus.BAD_REQUEST if unreadable else HTTPStatus.UNPROCESSABLE_ENTITY
    faults = [Fault(pointer=_json_pointer(issue.loc), code=issue.code, detail=issue.detail) for issue in error.issues]
    return HttpError(status, faults)


def _json_pointer(loc: Iterable[str | int]) -> str:
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in loc)


class JobError(OptPipeError):
    """Base of these errors."""


class NotFoundError(JobError):
    """No such job or key, or it belongs to another key; which of these is not said."""


class ConflictError(JobError):
    """The status of the job does not allow what was asked for."""


class IdempotencyMismatchError(JobError):
    """This Idempotency-Key came with another body before."""


class KeyEndedError(JobError):
    """The key of a call was revoked, or expired, while the call waited."""


class TooManyError(JobError):
    """A cap of the caller's key is reached; `retry_after_s` says when to try again, `code` which cap it was."""

    def __init__(self, code: str, detail: str, retry_after_s: float) -> None:
        self.code = code
        self.retry_after_s = retry_after_s
        super().__init__(detail)


class NoScheduleError(JobError):
    """The job has no schedule, or none yet."""


class BadCursorError(JobError):
    """A cursor that no list gave out."""


class LeaseLostError(JobError):
    """The job was given to another worker, or ended, since this one took it up; nothing was written."""


class DatabaseGoneError(JobError):
    """The database did not answer; nothing that was asked for may count as done. Asking again is safe."""

    retry_after_s = 2.0

    @classmethod
    def unreachable(cls, error: BaseException | None) -> DatabaseGoneError:
        """Make the error of a connection that failed with psycopg's `error`, whose indented lines only ask back."""
        reason = "; ".join(line for line in str(error).strip().splitlines() if not line.startswith("\t"))
        return cls(f"the database cannot be reached: {reason}. Maybe database_url is wrong.")


class DatabaseFullError(DatabaseGoneError):
    """The disk of the database is full: nothing can be written until there is room."""

    retry_after_s = 30.0
