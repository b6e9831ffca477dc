"""Rows of the queue carry the key whose job they are, so that keys take turns."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Name the owners of the jobs that wait or run."""
    op.execute(
        "UPDATE pgqueuer SET entrypoint = 'solve ' || coalesce(jobs.owner::text, '') "
        "FROM jobs WHERE jobs.queue_id = pgqueuer.id"
    )
