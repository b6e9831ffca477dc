"""Everything that is limited is counted by key: submissions, stored bytes, and solutions of problems."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them; the solutions that are there count as those of callers without a key."""
    op.add_column("jobs", sa.Column("held_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("jobs", sa.Column("schedule_bytes", sa.BigInteger(), server_default="0", nullable=False))
    op.execute(
        "UPDATE jobs SET schedule_bytes = octet_length(documents.text) FROM schedules "
        "JOIN documents ON documents.digest = schedules.document WHERE schedules.job_id = jobs.id"
    )
    stored = sa.Computed("schedule_bytes + octet_length(problem) + octet_length(note) + 200 * revision", persisted=True)
    op.add_column("jobs", sa.Column("stored_bytes", sa.BigInteger(), stored, nullable=False))
    op.create_index("ix_jobs_owner_stored", "jobs", ["owner", "stored_bytes"], unique=False)
    ended = sa.text("finished_at IS NOT NULL")
    newest = sa.text("finished_at DESC")
    op.create_index("ix_jobs_owner_ended", "jobs", ["owner", newest, "id"], unique=False, postgresql_where=ended)
    op.add_column("solved_problems", sa.Column("owner", sa.Uuid(), nullable=True))
    op.create_foreign_key("fk_solved_problems_owner", "solved_problems", "api_keys", ["owner"], ["id"])
    op.create_table(
        "submissions",
        sa.Column("owner", sa.Uuid(), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["owner"], ["api_keys.id"], name="fk_submissions_owner"),
    )
    op.create_index("ix_submissions_owner_at", "submissions", ["owner", "at"], unique=False)
