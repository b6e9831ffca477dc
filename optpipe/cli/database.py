"""`optpipe database`: backup, restore and address of the service's database."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from optpipe.cli.console import AsJson, answer
from optpipe.cli.serve import DatabaseUrl, with_database
from optpipe.errors import needs_extra
from optpipe.units import bytes_text

database = typer.Typer(
    help="Backup and restore of the service's database, also from one major version of PostgreSQL to the next.",
    no_args_is_help=True,
)


@database.command()
def backup(
    file: Annotated[Path, typer.Argument(help="File to write, readable for its owner alone.")],
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> int:
    """Write everything that the service keeps to a file: jobs, schedules, events, keys. It may run meanwhile."""
    with needs_extra("serve", "a backup"):
        from api.jobs.backup import backup as write
        from api.settings import Settings

    with with_database(Settings.load(database_url=database_url), shared=True) as settings:
        assert settings.database_url is not None
        size_bytes = write(settings.database_url.get_secret_value(), file)
    return answer({"file": str(file), "bytes": size_bytes}, f"{bytes_text(size_bytes)} in {file}", as_json)


@database.command()
def restore(
    file: Annotated[Path, typer.Argument(help="A file that `optpipe database backup` has written.")],
    replace: Annotated[bool, typer.Option("--replace", help="Remove what the database holds.")] = False,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> int:
    """Fill an empty database from a backup, while neither a service nor a worker uses it.

    Any PostgreSQL will do, whatever version the backup comes from; tables are brought to the revision of this program.
    """
    with needs_extra("serve", "a restore"):
        from api.jobs.backup import restore as read
        from api.settings import Settings

    with with_database(Settings.load(database_url=database_url), shared=True) as settings:
        assert settings.database_url is not None
        read(settings.database_url.get_secret_value(), file, replace)
    return answer({"file": str(file)}, f"restored from {file}", as_json)


@database.command()
def upgrade(as_json: AsJson = False) -> int:
    """Bring an embedded PostgreSQL to the major version that is installed, while no service runs.

    The old files are kept next to the new ones, as `postgresql.old`.
    """
    with needs_extra("serve", "an embedded PostgreSQL"):
        from api.jobs.backup import upgrade as bring_over
        from api.settings import Settings

    before, now = bring_over(Settings.load().data_folder)
    done = f"PostgreSQL {now}: nothing to do" if before == now else f"PostgreSQL {before} upgraded to {now}"
    return answer({"before": before, "now": now}, done, as_json)


@database.command()
def url(as_json: AsJson = False) -> int:
    """Print the address of the embedded PostgreSQL that `optpipe serve` runs, for `optpipe worker` on this host."""
    with needs_extra("serve", "an embedded PostgreSQL"):
        from api.jobs.embedded import running_url
        from api.settings import Settings

    address = running_url(Settings.load().data_folder)
    return answer({"url": address}, address, as_json)
