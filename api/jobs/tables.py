"""Tables of the service. Their constraints hold the promises for every writer; `api/migrations` creates them.

    jobs             one row a job: its request (the problem; of a plan, what is to be planned) and its state
    incumbents       the orders of each job's best schedule so far: where a lost job begins again; of a plan, its text
    schedules        which document is the final schedule, or plan, of each job that has one
    documents        schedules and plans as callers read them, each text once, under its digest; verified before they
                     are written
    events           what happened to each job, appended only; the revision counts from 1 within a job, transaction and
                     number order the events of all jobs (`api.jobs.feed`)
    idempotency_keys which job an Idempotency-Key of an owner stands for
    api_keys         bearer keys, hashed
    submissions      how many jobs of each key were submitted or tried again, and when; those of the last minute count
    solved_problems  the best schedule of each problem up to names and units, and the plan of each request
    answers          the document with which a solved problem was answered last, for when it comes again word for word
    workers          workers that live, and when each was last seen
    totals           what all workers have counted for the metrics since the tables were made

pgqueuer's own tables lie next to them: a row there for each job that waits or runs.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    REAL,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Computed,
    DateTime,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Row,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

AnyRow = Row[*tuple[Any, ...]]
"""A row of whatever was selected."""

_ENDED = "status IN ('succeeded', 'failed', 'cancelled')"


def _now(name: str) -> Column[object]:
    return Column(name, DateTime(timezone=True), nullable=False, server_default=func.now())


def _owner() -> Column[object]:
    return Column("owner", Uuid, ForeignKey("api_keys.id"))


def _of_job(primary_key: bool = True, index: bool = False) -> Column[object]:
    job = ForeignKey("jobs.id", ondelete="CASCADE")
    return Column("job_id", Uuid, job, nullable=False, primary_key=primary_key, index=index)


def _document() -> Column[object]:
    return Column("document", LargeBinary, ForeignKey("documents.digest"), nullable=False, index=True)


api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("name", Text, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    _now("created_at"),
    Column("revoked_at", DateTime(timezone=True)),
    Column("scope", Text, nullable=False, server_default="submit"),
    _owner(),
    Column("expires_at", DateTime(timezone=True)),
    Column("last_used_at", DateTime(timezone=True)),
    CheckConstraint("scope IN ('read', 'submit', 'admin')", "scope"),
)

_STORED_BYTES = "schedule_bytes + octet_length(problem) + octet_length(note) + 200 * revision"
"""Share of its key's quota that a job takes. There is an event for each revision, which takes some 200 bytes."""

jobs = Table(
    "jobs",
    metadata,
    Column("id", Uuid, primary_key=True),
    _owner(),
    Column("kind", Text, nullable=False, server_default="solve"),
    Column("status", Text, nullable=False),
    Column("problem", Text, nullable=False),
    Column("problem_name", Text, nullable=False),
    Column("objective", Text, nullable=False),
    Column("devices", Integer),
    Column("stages", Integer),
    Column("microbatches", Integer),
    Column("note", Text, nullable=False, server_default=""),
    Column("config", JSONB, nullable=False),
    Column("tags", ARRAY(Text), nullable=False),
    Column("equality", Text),
    Column("leader", Uuid),
    Column("held_at", DateTime(timezone=True)),
    Column("queue_id", BigInteger, unique=True),
    Column("worker", Uuid),
    Column("attempt", Integer, nullable=False, server_default=text("0")),
    Column("lost", Integer, nullable=False, server_default=text("0")),
    Column("cancel_requested", Boolean, nullable=False, server_default=text("false")),
    Column("revision", Integer, nullable=False, server_default=text("0")),
    Column("value_us", Double),
    Column("bound_us", Double),
    Column("bubble", Double),
    Column("reason", Text),
    Column("stopped_by", Text),
    Column("error", Text),
    Column("budgets_bytes", ARRAY(BigInteger)),
    Column("schedule_bytes", BigInteger, nullable=False, server_default=text("0")),
    Column("stored_bytes", BigInteger, Computed(_STORED_BYTES, persisted=True), nullable=False),
    _now("submitted_at"),
    Column("started_at", DateTime(timezone=True)),
    Column("finished_at", DateTime(timezone=True)),
    CheckConstraint("kind IN ('solve', 'plan')", "kind"),
    CheckConstraint(f"status IN ('queued', 'running') OR {_ENDED}", "status"),
    CheckConstraint("(status = 'running') = (worker IS NOT NULL)", "one_worker_while_running"),
    CheckConstraint(f"({_ENDED}) = (queue_id IS NULL)", "in_the_queue_until_ended"),
    CheckConstraint(f"({_ENDED}) = (finished_at IS NOT NULL)", "finished_when_ended"),
    CheckConstraint("status <> 'succeeded' OR value_us IS NOT NULL", "success_has_a_schedule"),
    CheckConstraint("attempt >= 0 AND lost BETWEEN 0 AND attempt AND revision >= 0", "counts"),
    CheckConstraint("reason IN ('optimal', 'feasible', 'infeasible', 'no_solution')", "reason"),
    CheckConstraint("stopped_by IN ('time', 'gap', 'memory', 'interrupted')", "stopped_by"),
    Index("ix_jobs_owner_newest", "owner", text("submitted_at DESC"), text("id DESC")),
    Index("ix_jobs_owner_stored", "owner", "stored_bytes"),
    Index(
        "ix_jobs_owner_ended",
        "owner",
        text("finished_at DESC"),
        "id",
        postgresql_where=text("finished_at IS NOT NULL"),
    ),
    Index("ix_jobs_finished_at", "finished_at"),
    Index("ix_jobs_equality_running", "equality", postgresql_where=text("status = 'running'")),
    Index("ix_jobs_owner_waiting", "owner", postgresql_where=text("queue_id IS NOT NULL")),
    Index("ix_jobs_status", "status"),
    Index("ix_jobs_tags", "tags", postgresql_using="gin"),
)

incumbents = Table(
    "incumbents",
    metadata,
    _of_job(),
    Column("revision", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("value_us", Double, nullable=False),
    Column("bound_us", Double, nullable=False),
    Column("method", Text, nullable=False),
    Column("seconds", Double, nullable=False),
    Column("orders", Text, nullable=False),
)

documents = Table(
    "documents",
    metadata,
    Column("digest", LargeBinary, primary_key=True),
    Column("text", Text, nullable=False),
    _now("written_at"),
)

schedules = Table(
    "schedules",
    metadata,
    _of_job(),
    Column("revision", Integer, nullable=False),
    _document(),
)

events = Table(
    "events",
    metadata,
    _of_job(),
    Column("revision", Integer, primary_key=True),
    Column("kind", Text, nullable=False),
    _now("at"),
    Column("attempt", Integer, nullable=False),
    Column("status", Text, nullable=False),
    Column("value_us", Double),
    Column("bound_us", Double),
    Column("method", Text),
    Column("seconds", REAL),
    Column("transaction", BigInteger, nullable=False, server_default=text("(pg_current_xact_id()::text)::bigint")),
    Column("number", BigInteger, nullable=False, server_default=text("nextval('events_number_seq')")),
    CheckConstraint("kind IN ('incumbent', 'bound', 'strategies', 'status')", "kind"),
    CheckConstraint("revision >= 1", "revision"),
    Index("ix_events_transaction", "transaction"),
)

submissions = Table(
    "submissions",
    metadata,
    _owner(),
    _now("at"),
    Column("count", Integer, nullable=False),
    Index("ix_submissions_owner_at", "owner", "at"),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    _owner(),
    Column("key", Text, nullable=False),
    Column("body_hash", LargeBinary, nullable=False),
    _of_job(primary_key=False, index=True),
    # Callers without a key are one owner too: NULL equals NULL here.
    UniqueConstraint("owner", "key", postgresql_nulls_not_distinct=True),
)

solved_problems = Table(
    "solved_problems",
    metadata,
    Column("key", Text, primary_key=True),
    Column("asked", Text, nullable=False),
    Column("worker_s", Double, nullable=False),
    Column("value", Double, nullable=False),
    Column("bound", Double, nullable=False),
    Column("method", Text, nullable=False),
    Column("solve_seconds", Double, nullable=False),
    Column("orders", Text, nullable=False),
    _owner(),
    _now("used_at"),
    Index("ix_solved_problems_used_at", "used_at"),
)

answers = Table(
    "answers",
    metadata,
    Column("problem", LargeBinary, primary_key=True),
    Column("key", Text, ForeignKey("solved_problems.key", ondelete="CASCADE"), nullable=False, unique=True),
    _document(),
    Column("value_us", Double, nullable=False),
    Column("bound_us", Double, nullable=False),
    Column("bubble", Double),
)

workers = Table(
    "workers",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("solves", Integer, nullable=False),
    _now("seen_at"),
)

totals = Table(
    "totals",
    metadata,
    Column("name", Text, primary_key=True),
    Column("label", Text, primary_key=True),
    Column("value", Double, nullable=False),
)
