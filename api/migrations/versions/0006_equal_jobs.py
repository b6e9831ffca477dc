"""Jobs keep the equality key of their problem, and the running job of an equal problem whose end they wait for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add both; jobs that are there lead and follow nobody."""
    op.add_column("jobs", sa.Column("equality", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("leader", sa.Uuid(), nullable=True))
    op.create_index(
        "ix_jobs_equality_running", "jobs", ["equality"], unique=False, postgresql_where=sa.text("status = 'running'")
    )
