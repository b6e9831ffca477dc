"""Request and response models, and strict reading of posted documents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Annotated, Any, Literal, TypeVar
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import SchemaValidator

from api.errors import input_error, unprocessable
from api.jobs.records import (
    Event,
    EventKind,
    Job,
    JobConfig,
    JobKind,
    Page,
    PlanConfig,
    Reason,
    Status,
    StopReason,
)
from api.settings import Settings
from optpipe.cluster.machine import Machine
from optpipe.document import Document, parse_json
from optpipe.errors import InputError, MethodError, ModelTooLargeError
from optpipe.problem import Objective, Problem
from solver.layout.request import PlanRequest
from solver.methods import METHODS, refuse_unsupported
from solver.scale import count_entries, count_ops


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Termination(_Answer):
    """End of a job: the result, and the limit that stopped the search (null: it was complete)."""

    reason: Reason
    limit: StopReason | None


class JobAnswer(_Answer):
    """A job as it stands. Times are UTC; values are those of the best schedule so far."""

    id: UUID
    kind: JobKind
    name: str = Field(description="Name of the submission, else of the problem.")
    tags: list[str]
    method: str
    config: JobConfig = Field(description="As submitted, with the defaults of what was left out.")
    status: Status
    termination: Termination | None = Field(description="null: it has not ended.")
    objective: Objective
    devices: int | None = Field(description="Of the problem; null: a job of an earlier version. Of a plan: GPUs.")
    stages: int | None = Field(description="null, like the next: a plan, or a job of an earlier version.")
    microbatches: int | None
    note: str = Field(description="Free text of several lines; changed by PATCH.")
    value_us: float | None = Field(
        description="null: there is no schedule yet. Of a plan: a step of its fastest strategy."
    )
    bound_us: float | None = Field(description="Proved lower bound on the value.")
    bubble: float | None = Field(description="Of the schedule's busiest device; null: there is no schedule yet.")
    gap: float | None = Field(description="(value - bound) / value")
    revision: int = Field(description="Rises with every event.")
    attempt: int = Field(description="Number of times that a worker started it.")
    queue_place: int | None = Field(description="1: the next one; null: it does not wait.")
    submitted_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    error: str | None = Field(description="Why there is no schedule.")
    budgets_bytes: list[int | None] | None = Field(
        description="Of a job that is proved infeasible: budgets of the devices that would do; null: no limit."
    )

    @classmethod
    def of(cls, job: Job) -> JobAnswer:
        """Convert a job of the store."""
        ended = job.reason is not None
        return cls.model_construct(
            **vars(job),
            name=job.config.name or job.problem_name,
            tags=job.config.tags,
            method=job.config.method,
            termination=Termination.model_construct(reason=job.reason, limit=job.stop_reason) if ended else None,
            gap=job.gap,
        )


class JobsAnswer(_Answer):
    """Some jobs. `cursor` asks for those that follow; null: there are none."""

    jobs: list[JobAnswer]
    cursor: str | None
    total: int | None = Field(description="Jobs on all pages, where `count` asks for it.")

    @classmethod
    def of(cls, page: Page) -> JobsAnswer:
        """Convert a page of the store."""
        return cls.model_construct(jobs=[JobAnswer.of(job) for job in page.jobs], cursor=page.cursor, total=page.total)


class EventAnswer(_Answer):
    """The data of one event. `method` found the schedule, `seconds` after the attempt began."""

    job_id: UUID
    kind: EventKind = Field(description="Also the event's type.")
    revision: int = Field(description="Also the event's id in the stream of one job.")
    at: datetime
    attempt: int
    status: Status
    value_us: float | None
    bound_us: float | None
    method: str | None
    seconds: float | None

    @classmethod
    def of(cls, event: Event) -> EventAnswer:
        """Convert an event of the store."""
        return cls.model_construct(**vars(event))


class CheckedAnswer(_Answer):
    """A valid submission."""

    valid: Literal[True] = True
    name: str
    objective: Objective
    devices: int
    stages: int
    microbatches: int
    ops: int = Field(description="F, B and W of all stages and units; O, R and C where stages may have them.")

    @classmethod
    def of(cls, problem: Problem) -> CheckedAnswer:
        """Figures of a problem that was read."""
        return cls(
            name=problem.name,
            objective=problem.objective,
            devices=len(problem.devices),
            stages=len(problem.stages),
            microbatches=problem.microbatches,
            ops=count_ops(problem),
        )


class HealthAnswer(_Answer):
    """The process answers."""

    status: Literal["alive"]


class ReadyAnswer(_Answer):
    """The service can be used."""

    status: Literal["ready"]
    workers: int = Field(description="Workers that live. 0: jobs are accepted, and wait.")


class ProblemBody(Document):
    """Body with a problem only."""

    problem: Problem


class SubmissionBody(Document):
    """A problem and the configuration of its solve."""

    problem: Problem
    config: JobConfig = JobConfig()


MOST_IN_A_BATCH = 100
"""Submissions or ids of one request."""


class PlanBody(PlanRequest):
    """A job to plan and the configuration of the search."""

    config: PlanConfig = PlanConfig()


class ReadPlan(_Answer):
    """Parts of the request of a plan that was read. `text` is the request without its configuration."""

    text: str
    name: str
    gpus: int
    config: JobConfig
    body_hash: str
    equality_key: str


def read_plan(plan: PlanBody, caps: Caps) -> ReadPlan:
    """Read the model and the machine of a plan, and check it against the limits. Raises HttpError, InputError."""
    caps.check_limits(plan.config)
    job = plan.job()
    request = plan.to_data()
    request.pop("config", None)
    return ReadPlan(
        text=json.dumps(request, separators=(",", ":")),
        name=f"{job.model.name} on {plan.gpus:,} {job.machine.name}",
        gpus=plan.gpus,
        config=JobConfig(**dict(plan.config)),
        body_hash=hash_submission(plan).hex(),
        equality_key=plan.equality_key(),
    )


class LaunchFile(_Answer):
    """A file of a launch."""

    name: str
    text: str | None = Field(description="Null: the plan's schedule, which `file` fetches.")


class LaunchAnswer(_Answer):
    """Files that start a plan in a trainer."""

    files: list[LaunchFile] = Field(description="To be put into one folder; the first is started.")
    lost: list[str] = Field(description="What the trainer does otherwise than planned.")
    seconds: float = Field(description="Predicted of a step as the trainer runs it.")


class ModelsAnswer(_Answer):
    """Language models that are known by name."""

    models: list[dict[str, Any]] = Field(description="Each with `name`, `parameters` and its layers.")


class MachinesAnswer(_Answer):
    """Machines that are known by name."""

    machines: list[Machine]


class BatchBody(Document):
    """Several submissions."""

    submissions: list[SubmissionBody] = Field(min_length=1, max_length=MOST_IN_A_BATCH)


class JobIds(Document):
    """Several jobs."""

    ids: list[Annotated[UUID, Field(strict=False)]] = Field(min_length=1, max_length=MOST_IN_A_BATCH)


class BatchAnswer(_Answer):
    """Jobs of a batch, in the order of the request."""

    jobs: list[JobAnswer]


class CancelledAnswer(BatchAnswer):
    """Jobs that were to be cancelled, as they stand, and ids that name none."""

    not_found: list[UUID]


@dataclass(frozen=True)
class Caps:
    """Limits of this installation."""

    max_ops: int
    max_time_limit_s: float
    max_workers: int

    @classmethod
    def of(cls, settings: Settings) -> Caps:
        """Read the limits from the settings."""
        return cls(settings.max_ops, settings.max_time_limit_s, settings.max_workers)

    def check_problem(self, problem: Problem, pointer: str = "/problem") -> None:
        """Raise HttpError if the problem is too large, before anything is built for it. `pointer` leads to it."""
        ops = count_ops(problem)
        if ops > self.max_ops:
            raise unprocessable(
                "too_many_ops",
                f"has {ops:,} ops, and this server takes at most {self.max_ops:,} (max_ops). "
                "Maybe solve fewer microbatches: a schedule repeats itself after its warm-up.",
                pointer,
            )
        entries = count_entries(problem)
        if entries > self.max_ops:
            raise unprocessable(
                "too_many_entries",
                f"has {entries:,} devices, groups of copy channels and modes (a stage's for each kind of microbatch), "
                f"and this server takes at most {self.max_ops:,} (max_ops). Maybe leave out modes, or round "
                "microbatch_factors, so that more microbatches are alike.",
                pointer,
            )

    def check_config(self, problem: Problem, config: JobConfig, pointer: str = "/config") -> None:
        """Raise HttpError if time limit or threads exceed the limits, or the method cannot handle the problem.

        `pointer` leads to the configuration.
        """
        self.check_limits(config, pointer)
        try:
            refuse_unsupported(METHODS[config.method], problem)
        except MethodError as error:
            code = "model_too_large" if isinstance(error, ModelTooLargeError) else "unsupported_by_method"
            raise unprocessable(code, str(error), f"{pointer}/method") from None

    def check_limits(self, config: JobConfig | PlanConfig, pointer: str = "/config") -> None:
        """Raise HttpError if time limit or threads exceed the limits."""
        if config.time_limit_s > self.max_time_limit_s:
            raise _over(pointer, "time_limit_s", config.time_limit_s, self.max_time_limit_s)
        if config.workers > self.max_workers:
            raise _over(pointer, "workers", config.workers, self.max_workers)


def _over(pointer: str, name: str, asked: float, most: float) -> Exception:
    detail = f"is {asked:g} but this server allows at most {most:g} (max_{name})."
    return unprocessable("out_of_range", detail, f"{pointer}/{name}")


class LongCheckError(Exception):
    """The check of a body may take longer than an event loop may wait."""


def _refuse_long_check(problems: Sequence[Problem], most_ops: float) -> None:
    """Raise LongCheckError where units have costs of their own, which are compared, and too many ops."""
    if sum(count_ops(problem) for problem in problems if problem.has_factors) > most_ops:
        raise LongCheckError


def read_submission(
    body: bytes, caps: Caps, problem_alone: bool = False, most_ops: float = float("inf")
) -> SubmissionBody:
    """Parse a body and check it against the limits. Raises HttpError.

    `problem_alone`: a body that is a problem will do, and is solved with the default configuration. Raises
    LongCheckError for more than `most_ops` whose check takes long.
    """
    data = _read_json(body)
    if problem_alone and isinstance(data, dict) and "problem" not in data:
        problem = _validate(Problem, data, len(body))
        _refuse_long_check([problem], most_ops)
        caps.check_problem(problem, pointer="")
        submission = SubmissionBody(problem=problem)
    else:
        submission = _validate(SubmissionBody, data, len(body))
        _refuse_long_check([submission.problem], most_ops)
        caps.check_problem(submission.problem)
    caps.check_config(submission.problem, submission.config)
    return submission


def read_batch(body: bytes, caps: Caps, most_ops: float = float("inf")) -> list[SubmissionBody]:
    """Parse a batch and check each submission against the limits. Raises as `read_submission`."""
    submissions = read_document(BatchBody, body).submissions
    _refuse_long_check([submission.problem for submission in submissions], most_ops)
    for k, submission in enumerate(submissions):
        caps.check_problem(submission.problem, f"/submissions/{k}/problem")
        caps.check_config(submission.problem, submission.config, f"/submissions/{k}/config")
    return submissions


class ReadSubmission(_Answer):
    """Parts of a large submission, from the process that parsed it, next to the text of its problem.

    `equality_key` and `time_us` are those of the problem's canonical form (`solver.cache`).
    """

    name: str
    objective: Objective
    devices: int
    stages: int
    microbatches: int
    config: JobConfig
    body_hash: str
    digest: str = Field(description="`text_digest` of the problem.")
    equality_key: str
    time_us: float


def hash_submission(submission: Document) -> bytes:
    """SHA-256 of a parsed body: white space and the order of its fields make no difference."""
    return hashlib.sha256(submission.to_json().encode()).digest()


D = TypeVar("D", bound=Document)

MOST_FAULTS = 20
"""Faults of one body that are listed: to word one takes milliseconds, and nobody reads a thousand."""
MOST_COUNTED = 1000
"""Faults beyond which none is listed: pydantic has to build all of them to name the first."""
CHECKED_WHOLE_BYTES = 64 * 2**10
"""Body size beyond which the check of a list ends at its first wrong item: a million wrong items take gigabytes."""


def read_document(model: type[D], body: bytes) -> D:
    """Parse the document in a body. Raises HttpError with at most `MOST_FAULTS` faults."""
    return _validate(model, _read_json(body), len(body))


def _read_json(body: bytes) -> Any:
    try:
        return parse_json(body)
    except InputError as error:
        raise input_error(error) from None


def _validate(model: type[D], data: Any, size_bytes: int) -> D:
    try:
        if size_bytes <= CHECKED_WHOLE_BYTES:
            return model.model_validate(data)
        document: D = _fail_fast_validator(model).validate_python(data)
        return document
    except ValidationError as error:
        if (count := error.error_count()) <= MOST_COUNTED:
            raise input_error(model.input_error(error, most=MOST_FAULTS)) from None
    detail = f"the document has {count:,} faults, too many to list. Maybe it is another kind of document."
    raise unprocessable("too_many_faults", detail)


@cache
def _fail_fast_validator(model: type[Document]) -> SchemaValidator:
    """Validator of a model in which every list ends at its first wrong item."""

    def fail_fast(schema: Any) -> Any:
        if isinstance(schema, dict):
            copy = {key: fail_fast(value) for key, value in schema.items()}
            return copy | {"fail_fast": True} if copy.get("type") in ("list", "tuple") else copy
        if isinstance(schema, list):
            return [fail_fast(part) for part in schema]
        return schema

    # Without the ready validators of nested models, which would check their lists whole.
    return SchemaValidator(fail_fast(model.__pydantic_core_schema__), _use_prebuilt=False)
