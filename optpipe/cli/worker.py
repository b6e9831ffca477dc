"""`optpipe worker`: one more worker for a service, on any host."""

from __future__ import annotations

from typing import Annotated

import typer

from optpipe.cli.serve import DatabaseUrl
from optpipe.errors import InputError, Issue
from optpipe.extras import needs_extra


def command(
    database_url: DatabaseUrl = None,
    until_stdin_ends: Annotated[
        bool, typer.Option("--until-stdin-ends", hidden=True, help="Stop with the process that started this one.")
    ] = False,
) -> int:
    """Solve jobs of a service, beside its other workers. Ctrl-C or SIGTERM gives back what is not done.

    How many jobs at a time: OPTPIPE_SOLVES; their memory: OPTPIPE_JOB_MEMORY_BYTES; metrics: OPTPIPE_METRICS_PORT.
    """
    with needs_extra("serve", "a worker"):
        from api.jobs.process import run_worker
        from api.logs import configure_logs
        from api.settings import Settings

    settings = Settings.load(database_url=database_url)
    if settings.database_url is None:
        detail = "is not given. Maybe --database-url postgresql://..., or OPTPIPE_DATABASE_URL."
        raise InputError([Issue("database_url", "missing", detail)])
    configure_logs(settings.log_json)
    run_worker(settings, until_stdin_ends=until_stdin_ends)
    return 0
