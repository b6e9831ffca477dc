"""Keys have a scope, perhaps an end and the key whose jobs they are for; when each was last used."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them; keys that are there may do what they did."""
    op.add_column("api_keys", sa.Column("scope", sa.Text(), server_default="submit", nullable=False))
    op.add_column("api_keys", sa.Column("owner", sa.Uuid(), nullable=True))
    op.add_column("api_keys", sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("api_keys", sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True))
    op.create_check_constraint("ck_api_keys_scope", "api_keys", "scope IN ('read', 'submit', 'admin')")
    op.create_foreign_key("fk_api_keys_owner", "api_keys", "api_keys", ["owner"], ["id"])
