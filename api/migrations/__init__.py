"""The history of the tables, by alembic: one file a revision, applied when the service starts."""
