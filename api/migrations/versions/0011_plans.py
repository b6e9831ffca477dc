"""Jobs are solves or plans; strategies of a plan that end are events."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the kind; all jobs that are there are solves."""
    op.add_column("jobs", sa.Column("kind", sa.Text(), server_default="solve", nullable=False))
    op.create_check_constraint("ck_jobs_kind", "jobs", "kind IN ('solve', 'plan')")
    op.drop_constraint("ck_events_ck_events_kind", "events")  # as the convention of names made it of "ck_events_kind"
    op.create_check_constraint("ck_events_kind", "events", "kind IN ('incumbent', 'bound', 'strategies', 'status')")
