"""`optpipe serve`, `optpipe worker` and `optpipe keys`: runs the HTTP service and its workers, manages API keys."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from uuid import UUID

import typer

from optpipe.cli.console import AsJson, answer, print_json, stdout, table
from optpipe.errors import InputError, Issue, needs_extra

if TYPE_CHECKING:
    from api.jobs.records import ApiKey
    from api.jobs.store import Store
    from api.settings import Settings


DatabaseUrl = Annotated[
    str | None,
    typer.Option(help="Address of a PostgreSQL database; default: OPTPIPE_DATABASE_URL.", metavar="URL"),
]


def command(
    host: Annotated[str | None, typer.Option(help="Address to listen on; default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on; default: 8000.")] = None,
    database_url: DatabaseUrl = None,
    worker: Annotated[
        bool | None,
        typer.Option("--worker/--no-worker", help="Run a worker beside the API; else run 'optpipe worker'."),
    ] = None,
) -> int:
    """Run the HTTP service with its page and a worker.

    Without a database URL it starts its own PostgreSQL, with data in a folder of this user. On any address but a
    loopback one every client needs a key (`optpipe keys create`). Settings are OPTPIPE_* environment variables, or a
    TOML file named by OPTPIPE_CONFIG_FILE.
    """
    with needs_extra("serve", "the service"):
        from api.settings import Settings

    settings = Settings.load(host=host, port=port, database_url=database_url, serve_worker=worker)
    started = True
    with ExitStack() as parts:
        parts.enter_context(suppress(KeyboardInterrupt))
        parts.enter_context(_signals_interrupt())
        # First of all: a taken port must be reported before modules are loaded and a database is made.
        sockets = [parts.enter_context(socket) for socket in listening_sockets(settings.host, settings.port)]
        with needs_extra("serve", "the service"):
            import structlog

            from api.app import create_app
            from api.jobs.migrate import migrate
            from api.jobs.worker_process import kept_worker
            from api.logging import configure_logging
            from api.server import Server, server_config

        configure_logging(settings.log_json)
        log = structlog.get_logger("optpipe.serve")
        if settings.database_url is None:
            log.info("starting an embedded PostgreSQL", data_folder=str(settings.data_folder))
        settings = parts.enter_context(with_database(settings))
        assert settings.database_url is not None
        url = settings.database_url.get_secret_value()
        migrate(url)
        if settings.keys_required:
            log.info("every client needs a key; 'optpipe keys create NAME' creates one")
        if settings.serve_worker:
            parts.enter_context(kept_worker(url))
        server = Server(server_config(create_app(settings)))
        name = f"[{settings.host}]" if ":" in settings.host else settings.host
        log.info("serving", url=f"http://{name}:{sockets[0].getsockname()[1]}")
        server.run(sockets)
        started = server.started  # if not, the log has the reason
    return 0 if started else 1


def listening_sockets(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on every address of `host`, on one port. Raises InputError if that is not possible.

    Connections that come before the service is ready wait; without `listen` two services could bind one port.
    """
    sockets: list[socket.socket] = []
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            sockets.append(listener := socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            chosen = port or sockets[0].getsockname()[1]  # port 0: the one that the first address was given
            listener.bind((address[0], chosen, *address[2:]))
            listener.listen()
    except OSError as error:
        for listener in sockets:
            listener.close()
        if error.errno == errno.EADDRINUSE:
            detail = f"is {port}, which another process uses on {host}. Maybe a service runs already, or set --port."
            raise InputError([Issue("port", "in_use", detail)]) from None
        name = "host" if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL else "port"
        value = host if name == "host" else port
        detail = f"is {value}, on which this process cannot listen: {error.strerror}. Maybe try 127.0.0.1 and 8000."
        raise InputError([Issue(name, "cannot_listen", detail)]) from None
    return sockets


@contextmanager
def with_database(settings: Settings, shared: bool = False) -> Iterator[Settings]:
    """Yield settings with a database URL: the given one, or that of an embedded PostgreSQL started for this context.

    `shared`: use an embedded PostgreSQL that is already running. Raises InputError, DatabaseGoneError.
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
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP, so that both stop the service with all its processes.

    An ignored signal stays ignored, such as SIGHUP under nohup.
    """

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    handled = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def worker(
    database_url: DatabaseUrl = None,
    until_stdin_ends: Annotated[
        bool, typer.Option("--until-stdin-ends", hidden=True, help="Stop with the process that started this one.")
    ] = False,
) -> int:
    """Run a worker of a service: it solves jobs from the queue. Ctrl-C or SIGTERM returns unfinished jobs to the queue.

    Settings: OPTPIPE_SOLVES (jobs at a time), OPTPIPE_JOB_MEMORY_BYTES (memory per job), OPTPIPE_METRICS_PORT.
    """
    with needs_extra("serve", "a worker"):
        from api.jobs.worker_process import run_worker
        from api.logging import configure_logging
        from api.settings import Settings

    settings = Settings.load(database_url=database_url)
    if settings.database_url is None:
        detail = "is not given. Maybe --database-url postgresql://..., or OPTPIPE_DATABASE_URL."
        raise InputError([Issue("database_url", "missing", detail)])
    configure_logging(settings.log_json)
    run_worker(settings, until_stdin_ends=until_stdin_ends)
    return 0


T = TypeVar("T")

keys = typer.Typer(help="API keys of the service: create, list, revoke. Only hashes are stored.", no_args_is_help=True)


@keys.command()
def create(
    name: Annotated[str, typer.Argument(help="User or program that the key is for.")],
    scope: Annotated[
        Literal["read", "submit", "admin"],
        typer.Option(
            help="read: see jobs; submit: also submit and change them; admin: also list and cancel those of all keys."
        ),
    ] = "submit",
    of: Annotated[
        UUID | None, typer.Option(help="Key whose jobs it is for, instead of its own; as `optpipe keys list` shows it.")
    ] = None,
    expires_days: Annotated[float | None, typer.Option(min=0.001, max=36500, help="Days until it expires.")] = None,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> int:
    """Create a key and print its secret, which cannot be shown again."""
    ends = None if expires_days is None else datetime.now(UTC) + timedelta(days=expires_days)
    made = _with_store(database_url, lambda store: store.create_key(name, scope, of, ends))
    return answer(_data(made.key) | {"secret": made.secret}, made.secret, as_json)


@keys.command("list")
def list_keys(database_url: DatabaseUrl = None, as_json: AsJson = False) -> int:
    """List all keys, including revoked ones."""
    keys = _with_store(database_url, lambda store: store.list_keys())
    if as_json:
        print_json([_data(key) for key in keys])
        return 0
    rows = table("id", "name", "scope", "of", "created", "last used", "expires", "revoked")
    for data in map(_data, keys):
        of = "" if data["of"] == data["id"] else data["of"]
        times = (data[name] or "" for name in ("created_at", "last_used_at", "expires_at", "revoked_at"))
        rows.add_row(data["id"], data["name"], data["scope"], of, *times)
    stdout().print(rows)
    return 0


@keys.command()
def revoke(
    key: Annotated[UUID, typer.Argument(help="Id of the key, as shown by `optpipe keys list`.")],
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> int:
    """Revoke a key. Its jobs are kept."""
    revoked = _with_store(database_url, lambda store: store.revoke_key(key))
    return answer(_data(revoked), f"revoked {revoked.id} ({revoked.name})", as_json)


def _with_store(database_url: str | None, query: Callable[[Store], Awaitable[T]]) -> T:
    """Run a query on the store of the given database, or of the embedded one, which is started if it is not running."""
    with needs_extra("serve", "a store of keys"):
        from api.jobs.migrate import migrate
        from api.jobs.store import Store
        from api.settings import Settings

    async def run(settings: Settings) -> T:
        async with Store(settings) as store:
            return await query(store)

    with with_database(Settings.load(database_url=database_url), shared=True) as settings:
        assert settings.database_url is not None
        migrate(settings.database_url.get_secret_value())
        return asyncio.run(run(settings))


def _data(key: ApiKey) -> dict[str, Any]:
    times = {name: getattr(key, name) for name in ("created_at", "last_used_at", "expires_at", "revoked_at")}
    return {
        "id": str(key.id),
        "name": key.name,
        "scope": key.scope,
        "of": str(key.owner),
        **{name: time.isoformat(timespec="seconds") if time else None for name, time in times.items()},
    }
