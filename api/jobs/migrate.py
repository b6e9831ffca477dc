"""Migration of the tables to this program's revision, and the check that they are there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy.exc
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, NullPool, create_engine, text

from api.errors import DatabaseGoneError
from api.jobs.database import CONNECT_S, sqlalchemy_url
from optpipe.errors import InputError, Issue

LOCK = 0x6F70747069706531
"""Key of the advisory lock under which one process at a time migrates."""

RENUMBER = """
DO $$ BEGIN
    IF EXISTS (SELECT FROM events WHERE transaction >= pg_snapshot_xmax(pg_current_snapshot())::text::bigint) THEN
        ALTER TABLE events DISABLE TRIGGER append_only;
        UPDATE events SET transaction = 0;
        ALTER TABLE events ENABLE TRIGGER append_only;
    END IF;
END $$
"""
"""Puts all events before those to come, where they were restored from a server that had counted more transactions."""

OLDEST_POSTGRESQL = 15
"""For unique constraints in which NULL equals NULL."""


def migrate(url: str) -> None:
    """Upgrade the tables to this program's revision; safe to call from several processes at once.

    Raises DatabaseGoneError; InputError where PostgreSQL is too old, or the tables are newer than this program.
    """
    with _connected(url) as connection, connection.begin():
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
        current = _revision(connection)
        if current is not None and current not in _known_revisions():
            raise _mismatch(current, "Maybe update this program")
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        connection.execute(text(RENUMBER))


def check_revision(url: str) -> None:
    """Raise InputError where the tables are at another revision than this program's; DatabaseGoneError."""
    with _connected(url) as connection:
        current = _revision(connection)
    if current == head_revision():
        return
    newer = current is not None and current not in _known_revisions()
    raise _mismatch(current, "Maybe update this program" if newer else "Maybe start 'optpipe serve' first: it migrates")


def head_revision() -> str:
    """Revision of the tables that this program needs."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    assert head is not None
    return head


def _mismatch(current: str | None, hint: str) -> InputError:
    at = f"at revision {current}" if current else "without OptPipe's tables"
    return InputError(
        [Issue("database_url", "revision", f"names a database {at}; this program needs {head_revision()}. {hint}.")]
    )


@contextmanager
def _connected(url: str) -> Iterator[Connection]:
    engine = create_engine(sqlalchemy_url(url), poolclass=NullPool, connect_args={"connect_timeout": CONNECT_S})
    try:
        with engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            version = int(driver.info.server_version) // 10_000
            if version < OLDEST_POSTGRESQL:
                detail = f"names a PostgreSQL {version}; {OLDEST_POSTGRESQL} or newer is needed."
                raise InputError([Issue("database_url", "too_old", detail)])
            yield connection
    except sqlalchemy.exc.OperationalError as error:
        raise DatabaseGoneError.unreachable(error.orig) from None


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _known_revisions() -> set[str]:
    return {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parents[1] / "migrations").replace("%", "%%"))
    return config
