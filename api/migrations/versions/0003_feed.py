"""Events get what a stream of all jobs of an owner resumes by: the transaction that wrote them, and a running number.

The defaults come in a second step, so that the rows that are there need not be rewritten: they share one place before
all that follow.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add both."""
    op.execute("CREATE SEQUENCE events_number_seq")
    defaults = {"transaction": "(pg_current_xact_id()::text)::bigint", "number": "nextval('events_number_seq')"}
    for name, default in defaults.items():
        op.add_column("events", sa.Column(name, sa.BigInteger(), server_default="0", nullable=False))
        op.alter_column("events", name, server_default=sa.text(default))
    op.execute("ALTER SEQUENCE events_number_seq OWNED BY events.number")
    op.create_index("ix_events_transaction", "events", ["transaction"], unique=False)
