"""Each schedule is stored once, however many jobs it answers; totals of all workers; an index for the caps of a key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

MOVE_DOCUMENTS = (
    """INSERT INTO documents (digest, text)
       SELECT DISTINCT ON (1) sha256(convert_to(document, 'UTF8')), document FROM schedules""",
    "UPDATE schedules SET digest = sha256(convert_to(document, 'UTF8'))",
)


def upgrade() -> None:
    """Make them, and move what is stored."""
    _documents()
    _answers_and_totals()
    op.create_index(
        "ix_jobs_owner_waiting", "jobs", ["owner"], unique=False, postgresql_where=sa.text("queue_id IS NOT NULL")
    )


def _documents() -> None:
    op.create_table(
        "documents",
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("written_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_documents"),
    )
    op.add_column("schedules", sa.Column("digest", sa.LargeBinary(), nullable=True))
    for statement in MOVE_DOCUMENTS:
        op.execute(statement)
    op.drop_column("schedules", "document")
    op.alter_column("schedules", "digest", new_column_name="document", nullable=False)
    op.create_foreign_key("fk_schedules_document", "schedules", "documents", ["document"], ["digest"])
    op.create_index("ix_schedules_document", "schedules", ["document"], unique=False)


def _answers_and_totals() -> None:
    op.create_table(
        "answers",
        sa.Column("problem", sa.LargeBinary(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("document", sa.LargeBinary(), nullable=False),
        sa.Column("value_us", sa.Double(), nullable=False),
        sa.Column("bound_us", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["key"], ["solved_problems.key"], name="fk_answers_key", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["document"], ["documents.digest"], name="fk_answers_document"),
        sa.PrimaryKeyConstraint("problem", name="pk_answers"),
        sa.UniqueConstraint("key", name="uq_answers_key"),
    )
    op.create_index("ix_answers_document", "answers", ["document"], unique=False)
    op.create_table(
        "totals",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", "label", name="pk_totals"),
    )
