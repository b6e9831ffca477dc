"""What the server says of a job, as far as a client needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from optpipe.errors import InfeasibleError, NoSolutionError, OptPipeError, ServiceError
from optpipe.gap import gap_of
from optpipe.schedule import Schedule

ENDED = frozenset({"succeeded", "failed", "cancelled"})


@dataclass(frozen=True)
class JobState:
    """A job as it stands. `reason` and `limit` say how it ended; `error` why there is no schedule."""

    id: str
    status: str
    value_us: float | None
    bound_us: float | None
    reason: str | None
    limit: str | None
    error: str | None

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Self:
        """The job in an answer of the server. Raises ServiceError where there is none in it."""
        if missing := {"id", "status", "value_us", "bound_us", "termination", "error"} - answer.keys():
            text = f"an answer lacks {', '.join(sorted(missing))}. Maybe it comes from another server than OptPipe's."
            raise ServiceError(text)
        termination = answer["termination"] or {}
        return cls(
            id=answer["id"],
            status=answer["status"],
            value_us=answer["value_us"],
            bound_us=answer["bound_us"],
            reason=termination.get("reason"),
            limit=termination.get("limit"),
            error=answer["error"],
        )

    @property
    def ended(self) -> bool:
        """Whether the job is over, however it ended."""
        return self.status in ENDED

    @property
    def why_no_schedule(self) -> OptPipeError:
        """The error that an ended job without a schedule stands for, in the server's words."""
        text = self.error or f"the job {self.id} ended as {self.status} without a schedule."
        if self.reason == "infeasible":
            # The constructor composes the message from budgets; here the server has composed it.
            infeasible = InfeasibleError.__new__(InfeasibleError, text)
            infeasible.budgets_bytes = ()
            return infeasible
        if self.reason == "no_solution" or self.status == "cancelled":
            return NoSolutionError(text)
        return ServiceError(text)


@dataclass(frozen=True)
class ServerResult:
    """How a job ended, with its schedule if it has one."""

    job: JobState
    schedule: Schedule | None

    @property
    def limit(self) -> str | None:
        """What stopped the search; None where it was done."""
        return self.job.limit

    def schedule_or_error(self) -> Schedule:
        """The schedule. Raises InfeasibleError, NoSolutionError or ServiceError where there is none."""
        if self.schedule is None:
            raise self.job.why_no_schedule
        return self.schedule


@dataclass(frozen=True)
class Progress:
    """A better value or bound, `seconds` after the solve began; `method` found the schedule."""

    seconds: float
    value_us: float
    bound_us: float
    method: str

    @property
    def gap(self) -> float:
        """``(value - bound) / value``."""
        return gap_of(self.value_us, self.bound_us)


OnProgress = Callable[[Progress], None]
