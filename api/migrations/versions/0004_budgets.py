"""Jobs that are proved infeasible keep budgets that would do."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them."""
    op.add_column("jobs", sa.Column("budgets_bytes", ARRAY(sa.BigInteger()), nullable=True))
