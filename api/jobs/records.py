"""Records of the store and the configuration of a job. Times are UTC."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from pydantic import AfterValidator, Field, StrictInt

from optpipe.document import Document
from optpipe.errors import shown
from optpipe.fields import reject
from optpipe.schedule import Schedule, relative_gap
from solver.layout.plan_process import FoundPlan
from solver.methods import METHODS


def _method(name: str) -> str:
    if name not in METHODS:
        raise reject("unknown_method", f"is {shown(name)} but must be one of: {', '.join(METHODS)}")
    return name


_UNPRINTABLE = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Categories of Unicode: control characters, halves of surrogate pairs, line and paragraph separators."""

_REORDERING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Controls of bidirectional text, which reorder what stands around them: a name can look like another one."""


def is_printable(text: str) -> bool:
    """True for one line of text that can be stored and shown.

    Unlike `str.isprintable` this takes no-break spaces, joiners (in emoji, and in the scripts of India and Iran) and
    characters that are newer than Python's tables.
    """
    return not any(unicodedata.category(character) in _UNPRINTABLE or character in _REORDERING for character in text)


def _plain(text: str) -> str:
    if not is_printable(text):
        raise reject("not_printable", _NOT_PRINTABLE)
    return text


_NOT_PRINTABLE = "holds a control character, one that reorders text, or half of a surrogate pair"


Label = Annotated[str, Field(max_length=200), AfterValidator(_plain)]
Tag = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_plain)]


def _plain_lines(text: str) -> str:
    if not all(is_printable(line.replace("\t", " ")) for line in re.split("\r?\n", text)):
        raise reject("not_printable", _NOT_PRINTABLE)
    return text


Note = Annotated[str, Field(max_length=10_000), AfterValidator(_plain_lines)]


class JobLabels(Document):
    """New name, tags and note of a job; what is left out stays."""

    name: Label | None = None
    tags: Annotated[list[Tag], Field(max_length=20)] | None = None
    note: Note | None = None


JobKind = Literal["solve", "plan"]
"""A schedule of a problem is searched for, or a plan for a cluster."""


class JobConfig(Document):
    """The method and its limits. Tighter caps of an installation are in `Settings`."""

    method: Annotated[str, AfterValidator(_method)] = "auto"
    time_limit_s: float = Field(default=30.0, ge=0.01, le=1e6, allow_inf_nan=False)
    gap: float = Field(default=0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    workers: StrictInt = Field(default=1, ge=1, le=1024)
    """Threads of the solve."""
    seed: StrictInt = Field(default=0, ge=0, le=2**31 - 1)
    priority: StrictInt = Field(default=0, ge=-100, le=100)
    """Higher ones are solved first, among the jobs of one key."""
    name: Label = ""
    tags: list[Tag] = Field(default=[], max_length=20)


class PlanConfig(Document):
    """The part of `JobConfig` that a plan has, with a default time of its own."""

    time_limit_s: float = Field(default=60.0, ge=0.01, le=1e6, allow_inf_nan=False)
    workers: StrictInt = Field(default=1, ge=1, le=1024)
    """Threads of the search."""
    priority: StrictInt = Field(default=0, ge=-100, le=100)
    name: Label = ""
    tags: list[Tag] = Field(default=[], max_length=20)


Scope = Literal["read", "submit", "admin"]
"""Permissions of a key, each with those before it: read jobs; submit and change them; list and cancel those of all
keys."""

Status = Literal["queued", "running", "succeeded", "failed", "cancelled"]
Reason = Literal["optimal", "feasible", "infeasible", "no_solution"]
StopReason = Literal["time", "gap", "memory", "interrupted"]
EventKind = Literal["incumbent", "bound", "strategies", "status"]

Sort = Literal[
    "submitted_at", "-submitted_at", "finished_at", "-finished_at", "duration", "-duration",
    "gap", "-gap", "name", "-name",
]  # fmt: skip
"""Order of a list: ascending, or descending with a minus."""

STATUSES: tuple[Status, ...] = ("queued", "running", "succeeded", "failed", "cancelled")
TERMINAL: tuple[Status, ...] = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True)
class Job:
    """One job as it stands. `value_us`, `bound_us` and `bubble` are of the best schedule so far, and so is `gap`; of a
    plan, `value_us` is a step of its fastest strategy, and `devices` are GPUs.

    `revision` rises with every event. `attempt` counts the times that a worker took it up; 0: none did.
    `queue_place` is 1 for the job that is taken next, None for one that does not wait.
    `reason` and `limit` are the contract's ``termination``, None until it ended. `budgets_bytes`, of a job that is
    proved infeasible: for each device the smallest budget known to do, None for one without a limit.
    """

    id: UUID
    kind: JobKind
    status: Status
    config: JobConfig
    problem_name: str
    objective: str
    devices: int | None
    stages: int | None
    microbatches: int | None
    note: str
    value_us: float | None
    bound_us: float | None
    bubble: float | None
    reason: Reason | None
    stop_reason: StopReason | None
    error: str | None
    budgets_bytes: Sequence[int | None] | None
    revision: int
    attempt: int
    queue_place: int | None
    submitted_at: datetime
    started_at: datetime | None
    finished_at: datetime | None

    @property
    def gap(self) -> float | None:
        """``(value - bound) / value``; None before there is a schedule."""
        if self.value_us is None or self.bound_us is None:
            return None
        return relative_gap(self.value_us, self.bound_us)

    @property
    def ended(self) -> bool:
        """True if its status is terminal."""
        return self.status in TERMINAL


@dataclass(frozen=True)
class SubmissionRate:
    """Submissions of one owner: the `most` of a minute, those that are `left`, and when the oldest no longer counts."""

    most: int
    left: int
    reset_s: float


@dataclass(frozen=True)
class Submission:
    """Result of a submission. `created`: False if an Idempotency-Key named an existing job.

    A job that has ended was answered from an equal problem (``200``), unless `created` is False. `rate`: how the owner
    stands after it.
    """

    job: Job
    created: bool
    rate: SubmissionRate


@dataclass(frozen=True)
class Page:
    """Some jobs, and the cursor of those that follow (None: there are none); `total` on all pages, where counted."""

    jobs: Sequence[Job]
    cursor: str | None
    total: int | None = None


@dataclass(frozen=True)
class Event:
    """Something that happened to a job; revisions of a job count from 1 without a gap.

    `incumbent`: a better schedule (`value_us`, `bound_us`, `method`, `seconds` since the attempt began); `bound`: a
    better bound for the same one; `strategies`: more strategies of a plan have ended, none the
    fastest; `status`: a new `status`, and for a terminal one how it ended.
    """

    job_id: UUID
    revision: int
    kind: EventKind
    at: datetime
    attempt: int
    status: Status
    value_us: float | None
    bound_us: float | None
    method: str | None
    seconds: float | None


Found = Schedule | FoundPlan
"""The best that a job has found, by its kind."""


@dataclass(frozen=True)
class BestRevision:
    """State of the best schedule of a job so far: equal ones of the same job have the same document.

    `final`: the job has ended. `kept`: its document is stored; otherwise it is made of the stored orders.
    """

    revision: int
    bound_us: float
    final: bool
    kept: bool


@dataclass(frozen=True)
class BestSchedule:
    """The best schedule of a job so far as a document (`optpipe.schedule/1`), verified; or the document of its plan."""

    revision: BestRevision
    text: str


@dataclass(frozen=True)
class ApiKey:
    """A bearer key as it is listed: never with its secret. `owner`: the key whose jobs it is for, itself by default."""

    id: UUID
    name: str
    scope: Scope
    owner: UUID
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None
    revoked_at: datetime | None


@dataclass(frozen=True)
class NewApiKey:
    """A key just made. `secret` is what the caller sends; it is shown now and never again."""

    key: ApiKey
    secret: str


@dataclass(frozen=True)
class Counts:
    """Figures for metrics, over all keys.

    `jobs` has every status. `queue_age_s`: how long the job that waits longest has waited (0: none waits).
    `heartbeat_age_s`: how long the quietest running job has been without a heartbeat. `workers`: those that run a job
    now. `alive_workers`: those that were seen in the last seconds; `places`: jobs that these can solve at a time.
    `totals`: what all workers have counted, by name and label (`api.jobs.queries`).
    """

    jobs: Mapping[Status, int]
    queue_age_s: float
    heartbeat_age_s: float
    workers: int
    alive_workers: int
    places: int
    totals: Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class JobResult:
    """End of a job; what it found, where there is anything, is verified and the best that is known."""

    status: Status
    found: Found | None
    reason: Reason | None
    stop_reason: StopReason | None
    error: str | None = None
    budgets_bytes: Sequence[int | None] | None = None
    died: bool = False
    """The process of the solve ended by itself."""
