"""The first tables, and those of pgqueuer 1.6.

pgqueuer's are made by its own statements, here and not by its installer at each start, so that one revision says
what the whole database is at. A pgqueuer that wants other tables needs a new revision here; a test says so.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from pgqueuer.adapters.persistence.qb import QueryBuilderEnvironment
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

APPEND_ONLY = """
CREATE FUNCTION events_are_appended_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'events are appended only';
END $$;
CREATE TRIGGER append_only BEFORE UPDATE ON events FOR EACH ROW EXECUTE FUNCTION events_are_appended_only();
"""


def upgrade() -> None:
    """Make them."""
    _accounts_and_cache()
    _jobs()
    _parts_of_jobs()
    _run(APPEND_ONLY)
    _run(QueryBuilderEnvironment().build_install_query())


def _run(statements: str) -> None:
    """Several statements as they are: neither SQLAlchemy nor psycopg should look for parameters in them."""
    connection = op.get_bind().connection.driver_connection
    assert connection is not None
    connection.execute(statements)


def _accounts_and_cache() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
    )
    op.create_table(
        "solved_problems",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("asked", sa.Text(), nullable=False),
        sa.Column("worker_s", sa.Double(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("bound", sa.Double(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("solve_seconds", sa.Double(), nullable=False),
        sa.Column("orders", sa.Text(), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_solved_problems"),
    )
    op.create_index("ix_solved_problems_used_at", "solved_problems", ["used_at"], unique=False)


def _jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("owner", sa.Uuid(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.Column("problem_name", sa.Text(), nullable=False),
        sa.Column("objective", sa.Text(), nullable=False),
        sa.Column("config", JSONB(), nullable=False),
        sa.Column("tags", ARRAY(sa.Text()), nullable=False),
        sa.Column("queue_id", sa.BigInteger(), nullable=True),
        sa.Column("worker", sa.Uuid(), nullable=True),
        sa.Column("attempt", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("lost", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("cancel_requested", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("revision", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("value_us", sa.Double(), nullable=True),
        sa.Column("bound_us", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("stopped_by", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("submitted_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(status = 'running') = (worker IS NOT NULL)", name="ck_jobs_one_worker_while_running"),
        sa.CheckConstraint(
            "(status IN ('succeeded', 'failed', 'cancelled')) = (finished_at IS NOT NULL)",
            name="ck_jobs_finished_when_ended",
        ),
        sa.CheckConstraint(
            "(status IN ('succeeded', 'failed', 'cancelled')) = (queue_id IS NULL)",
            name="ck_jobs_in_the_queue_until_ended",
        ),
        sa.CheckConstraint("reason IN ('optimal', 'feasible', 'infeasible', 'no_solution')", name="ck_jobs_reason"),
        sa.CheckConstraint("status <> 'succeeded' OR value_us IS NOT NULL", name="ck_jobs_success_has_a_schedule"),
        sa.CheckConstraint(
            "status IN ('queued', 'running') OR status IN ('succeeded', 'failed', 'cancelled')", name="ck_jobs_status"
        ),
        sa.CheckConstraint("stopped_by IN ('time', 'gap', 'memory', 'interrupted')", name="ck_jobs_stopped_by"),
        sa.CheckConstraint("attempt >= 0 AND lost BETWEEN 0 AND attempt AND revision >= 0", name="ck_jobs_counts"),
        sa.ForeignKeyConstraint(["owner"], ["api_keys.id"], name="fk_jobs_owner"),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
        sa.UniqueConstraint("queue_id", name="uq_jobs_queue_id"),
    )
    op.create_index("ix_jobs_finished_at", "jobs", ["finished_at"], unique=False)
    op.create_index(
        "ix_jobs_owner_newest",
        "jobs",
        ["owner", sa.literal_column("submitted_at DESC"), sa.literal_column("id DESC")],
        unique=False,
    )
    op.create_index("ix_jobs_status", "jobs", ["status"], unique=False)
    op.create_index("ix_jobs_tags", "jobs", ["tags"], unique=False, postgresql_using="gin")


def _parts_of_jobs() -> None:
    op.create_table(
        "events",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("value_us", sa.Double(), nullable=True),
        sa.Column("bound_us", sa.Double(), nullable=True),
        sa.Column("method", sa.Text(), nullable=True),
        sa.Column("seconds", sa.REAL(), nullable=True),
        sa.CheckConstraint("kind IN ('incumbent', 'bound', 'status')", name="ck_events_kind"),
        sa.CheckConstraint("revision >= 1", name="ck_events_revision"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_events_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "revision", name="pk_events"),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("owner", sa.Uuid(), nullable=True),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("body_hash", sa.LargeBinary(), nullable=False),
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_idempotency_keys_job_id", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["owner"], ["api_keys.id"], name="fk_idempotency_keys_owner"),
        sa.UniqueConstraint("owner", "key", name="uq_idempotency_keys_owner_key", postgresql_nulls_not_distinct=True),
    )
    op.create_index("ix_idempotency_keys_job_id", "idempotency_keys", ["job_id"], unique=False)
    op.create_table(
        "incumbents",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("value_us", sa.Double(), nullable=False),
        sa.Column("bound_us", sa.Double(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("orders", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_incumbents_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", name="pk_incumbents"),
    )
    op.create_table(
        "schedules",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_schedules_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", name="pk_schedules"),
    )
