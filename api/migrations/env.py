"""Run the revisions on the connection that `api.jobs.migrate` hands over, in its transaction."""

from __future__ import annotations

from alembic import context

from api.jobs.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
