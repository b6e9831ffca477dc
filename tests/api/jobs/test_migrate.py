"""The tables: as the program describes them, and refused at another revision."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from pgqueuer.queries import Queries
from sqlalchemy import create_engine, make_url

from api import migrations
from api.errors import DatabaseGoneError
from api.jobs.database import listening_connection, sqlalchemy_url
from api.jobs.migrate import check_revision, migrate
from api.jobs.records import JobConfig
from api.jobs.store import Store
from api.jobs.tables import metadata
from api.settings import Settings
from optpipe.errors import InputError
from tests.api.harness import PROBLEM


def test_the_revisions_make_what_the_tables_say(database_url: str) -> None:
    engine = create_engine(sqlalchemy_url(database_url))
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"include_name": lambda name, *_: _is_ours(name)})
        assert compare_metadata(context, metadata) == []
    engine.dispose()


def _is_ours(name: str | None) -> bool:
    return name is None or not name.startswith("pgqueuer")


async def test_pgqueuer_finds_its_tables_as_it_wants_them(database_url: str) -> None:
    async with await listening_connection(database_url) as connection:
        plan = await Queries.from_psycopg_connection(connection).plan_upgrade()
    assert list(plan.statements) == []  # else a new revision must bring them there


async def test_another_revision_is_refused(settings: Settings, database_url: str) -> None:
    migrate(database_url)
    check_revision(database_url)
    _run(database_url, "UPDATE alembic_version SET version_num = '9999'")
    for refuse in (check_revision, migrate):
        with pytest.raises(InputError, match=r"at revision 9999.*Maybe update this program"):
            refuse(database_url)
    async with Store(settings) as store:
        with pytest.raises(DatabaseGoneError, match="9999"):
            await store.ping()
    _run(database_url, "DROP TABLE alembic_version")
    with pytest.raises(InputError, match=r"without OptPipe's tables.*optpipe serve"):
        check_revision(database_url)


def _run(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://root:secret@localhost/x", "only PostgreSQL"),
        ("secret", "is not an address"),
        ("postgresql://u:secret@localhost:1/x", r"cannot be reached: .*Connection refused\. Maybe database_url"),
    ],
)
def test_what_is_wrong_with_an_address_is_said_without_it(url: str, said: str) -> None:
    with pytest.raises((InputError, DatabaseGoneError), match=said) as raised:
        migrate(url)
    assert "secret" not in str(raised.value)


def test_a_database_that_is_not_there(database_url: str) -> None:
    elsewhere = make_url(database_url).set(database="nowhere").render_as_string(hide_password=False)
    with pytest.raises(DatabaseGoneError, match='"nowhere" does not exist'):
        migrate(elsewhere)


async def test_events_of_another_server_come_before_all_others(store: Store, database_url: str) -> None:
    """Another server counts its transactions anew, and a restored event keeps the number that the old one gave it."""
    await store.submit(PROBLEM, JobConfig())
    after = await store.newest_position()
    _run(database_url, "ALTER TABLE events DISABLE TRIGGER append_only")
    _run(database_url, "UPDATE events SET transaction = transaction + 1000000")
    _run(database_url, "ALTER TABLE events ENABLE TRIGGER append_only")
    assert (await store.all_events(None, after)).more
    migrate(database_url)
    batch = await store.all_events(None, after)
    assert (batch.events, batch.more) == ([], False)
    with pytest.raises(psycopg.errors.RaiseException, match="appended only"):
        _run(database_url, "UPDATE events SET number = 0")


def test_documents_of_the_first_revision_are_kept_and_counted(postgresql: str) -> None:
    _run(postgresql, "CREATE DATABASE first_revision")
    url = make_url(postgresql).set(database="first_revision").render_as_string(hide_password=False)
    engine = create_engine(sqlalchemy_url(url))
    with engine.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(Path(migrations.__file__).parent))
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
    engine.dispose()
    jobs = [uuid4() for _ in range(3)]
    texts = ["{}", "{}", '{"é": 1}']
    with psycopg.connect(url) as connection:
        for job_id, document in zip(jobs, texts, strict=True):
            connection.execute(
                "INSERT INTO jobs (id, status, problem, problem_name, objective, config, tags, value_us, finished_at)"
                " VALUES (%s, 'succeeded', '', '', 'makespan', '{}', '{}', 1, now())",
                (job_id,),
            )
            connection.execute(
                "INSERT INTO schedules (job_id, revision, document) VALUES (%s, 1, %s)", (job_id, document)
            )
    migrate(url)
    with psycopg.connect(url) as connection:
        joined = "SELECT job_id, text FROM schedules JOIN documents ON digest = document"
        assert dict(connection.execute(joined).fetchall()) == dict(zip(jobs, texts, strict=True))
        assert connection.execute("SELECT count(*) FROM documents").fetchone() == (2,)
        stored = dict(connection.execute("SELECT id, stored_bytes FROM jobs").fetchall())
        assert stored == {job_id: len(text.encode()) for job_id, text in zip(jobs, texts, strict=True)}
