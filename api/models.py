"""What the service answers with, as it stands in the OpenAPI document."""

from __future__ import annotations

from datetime import datetime
from typing import Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from api.jobs.records import Event, EventKind, Job, Limit, Page, Reason, Status
from optpipe.problem import Objective


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Termination(_Answer):
    """How a job ended: what is known of the problem, and what stopped the search (null: it was done)."""

    reason: Reason
    limit: Limit | None


class JobAnswer(_Answer):
    """A job as it stands. Times are UTC; values are those of the best schedule so far."""

    id: UUID
    name: str = Field(description="That of the submission, else that of the problem.")
    tags: list[str]
    method: str
    status: Status
    termination: Termination | None = Field(description="null: it has not ended.")
    objective: Objective
    value_us: float | None = Field(description="null: there is no schedule yet.")
    bound_us: float | None = Field(description="What no schedule can beat, as far as it is proved.")
    gap: float | None = Field(description="(value - bound) / value")
    revision: int = Field(description="Rises with every event.")
    attempt: int = Field(description="How often a worker took it up.")
    queue_place: int | None = Field(description="1: the next one; null: it does not wait.")
    submitted_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    error: str | None = Field(description="Why there is no schedule.")

    @classmethod
    def of(cls, job: Job) -> JobAnswer:
        """A job of the store."""
        ended = job.reason is not None
        return cls.model_construct(
            id=job.id,
            name=job.config.name or job.problem_name,
            tags=job.config.tags,
            method=job.config.method,
            status=job.status,
            termination=Termination.model_construct(reason=job.reason, limit=job.limit) if ended else None,
            objective=job.objective,
            value_us=job.value_us,
            bound_us=job.bound_us,
            gap=job.gap,
            revision=job.revision,
            attempt=job.attempt,
            queue_place=job.queue_place,
            submitted_at=job.submitted_at,
            started_at=job.started_at,
            finished_at=job.finished_at,
            error=job.error,
        )


class JobsAnswer(_Answer):
    """Some jobs, newest first. `cursor` asks for those that follow; null: there are none."""

    jobs: list[JobAnswer]
    cursor: str | None

    @classmethod
    def of(cls, page: Page) -> JobsAnswer:
        """A page of the store."""
        return cls.model_construct(jobs=[JobAnswer.of(job) for job in page.jobs], cursor=page.cursor)


class EventAnswer(_Answer):
    """The data of one event. `method` found the schedule, `seconds` after the attempt began."""

    kind: EventKind = Field(description="Also the event's type.")
    revision: int = Field(description="Also the event's id.")
    at: datetime
    attempt: int
    status: Status
    value_us: float | None
    bound_us: float | None
    method: str | None
    seconds: float | None

    @classmethod
    def of(cls, event: Event) -> EventAnswer:
        """An event of the store."""
        return cls.model_construct(**vars(event))


class CheckedAnswer(_Answer):
    """A submission that would be taken."""

    valid: Literal[True] = True
    name: str
    objective: Objective
    devices: int
    stages: int
    microbatches: int
    ops: int = Field(description="F, B and W of all stages and microbatches, O and R of those that may offload.")


class HealthAnswer(_Answer):
    """The state of the service."""

    status: Literal["alive", "ready"]
