"""Jobs have the size of their problem, the bubble of their best schedule, and a note."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them; those of jobs that are there are taken from their problems, as far as these tell."""
    for name in ("devices", "stages", "microbatches"):
        op.add_column("jobs", sa.Column(name, sa.Integer(), nullable=True))
    op.add_column("jobs", sa.Column("bubble", sa.Double(), nullable=True))
    op.add_column("answers", sa.Column("bubble", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("note", sa.Text(), server_default="", nullable=False))
    op.execute(
        "UPDATE jobs SET devices = json_array_length(problem::json -> 'devices'), "
        "stages = json_array_length(problem::json -> 'stages'), "
        "microbatches = (problem::json ->> 'microbatches')::integer WHERE problem <> ''"
    )
