"""`optpipe keys`: who may use a service from elsewhere than its own host."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from uuid import UUID

import typer

from optpipe.cli.output import AsJson, print_json, stdout, table
from optpipe.cli.serve import DatabaseUrl, with_database
from optpipe.extras import needs_extra

if TYPE_CHECKING:
    from api.jobs.records import ApiKey
    from api.jobs.store import Store

T = TypeVar("T")

app = typer.Typer(
    help="Keys of the service's callers: create, list, revoke. Only hashes are stored.", no_args_is_help=True
)


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Who or what it is for.")],
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> int:
    """Make a key and print its secret, now and never again."""
    made = _with_store(database_url, lambda store: store.create_key(name))
    if as_json:
        print_json(_data(made.key) | {"secret": made.secret})
    else:
        print(made.secret)
    return 0


@app.command("list")
def list_keys(database_url: DatabaseUrl = None, as_json: AsJson = False) -> int:
    """All keys, revoked ones too."""
    keys = _with_store(database_url, lambda store: store.list_keys())
    if as_json:
        print_json([_data(key) for key in keys])
        return 0
    rows = table("id", "name", "created", "revoked")
    for data in map(_data, keys):
        rows.add_row(data["id"], data["name"], data["created_at"], data["revoked_at"] or "")
    stdout().print(rows)
    return 0


@app.command()
def revoke(
    key: Annotated[UUID, typer.Argument(help="Its id, as `optpipe keys list` shows it.")],
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> int:
    """Make a key useless from now on. Its jobs stay."""
    revoked = _with_store(database_url, lambda store: store.revoke_key(key))
    if as_json:
        print_json(_data(revoked))
    else:
        print(f"revoked {revoked.id} ({revoked.name})")
    return 0


def _with_store(database_url: str | None, ask: Callable[[Store], Awaitable[T]]) -> T:
    """What a store answers: on the given database, or the service's own one, whether it runs or not."""
    with needs_extra("serve", "a store of keys"):
        from api.jobs.migrate import migrate
        from api.jobs.store import Store
        from api.settings import Settings

    async def answer(settings: Settings) -> T:
        async with Store(settings) as store:
            return await ask(store)

    with with_database(Settings.load(database_url=database_url), shared=True) as settings:
        assert settings.database_url is not None
        migrate(settings.database_url.get_secret_value())
        return asyncio.run(answer(settings))


def _data(key: ApiKey) -> dict[str, Any]:
    return {
        "id": str(key.id),
        "name": key.name,
        "created_at": key.created_at.isoformat(timespec="seconds"),
        "revoked_at": key.revoked_at.isoformat(timespec="seconds") if key.revoked_at else None,
    }
