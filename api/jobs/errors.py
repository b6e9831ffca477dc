"""What can go wrong between the routes and the database.

JobError
├── NotFoundError              no such job or key, or it is somebody else's
├── ConflictError              the job's status does not allow it
├── IdempotencyMismatchError   the Idempotency-Key was used with another body
├── TooManyError               a cap of the caller's key is reached
├── NoScheduleError            the job has no schedule (yet)
├── BadCursorError             the cursor is none that a list gave out
└── DatabaseGoneError          no answer from the database: try again
"""

from __future__ import annotations

from optpipe.errors import OptPipeError


class JobError(OptPipeError):
    """Base of these errors."""


class NotFoundError(JobError):
    """No such job or key, or it belongs to another key; which of these is not said."""


class ConflictError(JobError):
    """The status of the job does not allow what was asked for."""


class IdempotencyMismatchError(JobError):
    """This Idempotency-Key came with another body before."""


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
