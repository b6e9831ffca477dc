"""`optpipe serve`: the HTTP service with its page, a worker unless told otherwise, and a PostgreSQL of its own unless
one is given."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.extras import needs_extra

if TYPE_CHECKING:
    from api.settings import Settings

DatabaseUrl = Annotated[
    str | None,
    typer.Option(help="A PostgreSQL, as postgresql://host/name; default: OPTPIPE_DATABASE_URL.", metavar="URL"),
]

OPEN_STREAMS_S = 3
"""How long those who follow a job are let go on when the service stops: they come back to the next one."""


def command(
    host: Annotated[str | None, typer.Option(help="Address to listen on; default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on; default: 8000.")] = None,
    database_url: DatabaseUrl = None,
    workers: Annotated[
        int | None, typer.Option(min=0, max=1, help="0: workers run elsewhere (optpipe worker); default: 1.")
    ] = None,
) -> int:
    """Run the HTTP service with its page and a worker.

    Without a database URL it starts a PostgreSQL of its own, which keeps its files in a folder of this user. On any
    address but a loopback one every caller needs a key (`optpipe keys create`). Settings: OPTPIPE_* in the
    environment, or a TOML file that OPTPIPE_CONFIG_FILE names.
    """
    with needs_extra("serve", "the service"):
        import structlog
        import uvicorn

        from api.app import create_app
        from api.jobs.migrate import migrate
        from api.jobs.process import kept_worker
        from api.logs import configure_logs
        from api.settings import Settings

    settings = Settings.load(host=host, port=port, database_url=database_url, serve_workers=workers)
    configure_logs(settings.log_json)
    with ExitStack() as parts:
        parts.enter_context(suppress(KeyboardInterrupt))
        parts.enter_context(_signals_interrupt())
        log = structlog.get_logger("optpipe.serve")
        if settings.database_url is None:
            log.info("starting a PostgreSQL of its own", data_folder=str(settings.data_folder))
        settings = parts.enter_context(with_database(settings))
        assert settings.database_url is not None
        url = settings.database_url.get_secret_value()
        migrate(url)
        if settings.keys_required:
            log.info("every caller needs a key; 'optpipe keys create NAME' makes one")
        if settings.serve_workers:
            parts.enter_context(kept_worker(url))
        uvicorn.run(
            create_app(settings),
            host=settings.host,
            port=settings.port,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=OPEN_STREAMS_S,
        )
    return 0


@contextmanager
def with_database(settings: Settings, shared: bool = False) -> Iterator[Settings]:
    """Settings with a database URL: the given one, or that of a PostgreSQL that runs within this context.

    `shared`: one that runs already will do. Raises InputError, DatabaseGoneError.
    """
    if settings.database_url is not None:
        yield settings
        return
    from pydantic import SecretStr

    from api.jobs.embedded import embedded_postgresql, shared_postgresql

    start = shared_postgresql if shared else embedded_postgresql
    with start(settings.data_folder) as url:
        yield settings.model_copy(update={"database_url": SecretStr(url)})


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and the end of the terminal stop the service like Ctrl-C, with all that it has started.

    What is ignored stays ignored, such as the end of the terminal under nohup.
    """

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
