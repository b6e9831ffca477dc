"""Bearer keys: 256 random bits each, of which a hash is stored. Fast hashing is enough: there is nothing to guess."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import bindparam, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from api.jobs.direct import Statement
from api.jobs.errors import NotFoundError
from api.jobs.records import ApiKey, NewApiKey
from api.jobs.tables import api_keys
from optpipe.errors import InputError, Issue

_SECRET = re.compile(r"optpipe_([0-9a-f]{32})_[A-Za-z0-9_-]{43}", re.ASCII)
_NO_HASH = bytes(32)

LONGEST_NAME = 200


async def create(connection: AsyncConnection, name: str) -> NewApiKey:
    """Make a key and store its hash. Raises InputError for a name that cannot be shown."""
    if not name.isprintable() or not 1 <= len(name) <= LONGEST_NAME:
        detail = f"is {name!r:.80} but must be 1 to {LONGEST_NAME} characters that can be shown."
        raise InputError([Issue("name", "bad_name", detail)])
    key_id = uuid4()
    secret = f"optpipe_{key_id.hex}_{secrets.token_urlsafe(32)}"
    made = insert(api_keys).values(id=key_id, name=name, hash=_hash(secret)).returning(api_keys)
    return NewApiKey(_key((await connection.execute(made)).one()), secret)


async def listed(connection: AsyncConnection) -> list[ApiKey]:
    """All keys, oldest first."""
    return [_key(row) for row in await connection.execute(select(api_keys).order_by(api_keys.c.created_at))]


async def revoke(connection: AsyncConnection, key_id: UUID) -> ApiKey:
    """End a key. Raises NotFoundError."""
    ended = func.coalesce(api_keys.c.revoked_at, func.now())
    revoked = update(api_keys).where(api_keys.c.id == key_id).values(revoked_at=ended).returning(api_keys)
    row = (await connection.execute(revoked)).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no key {key_id}. Maybe see 'optpipe keys list'.")
    return _key(row)


_KEY = Statement(select(api_keys).where(api_keys.c.id == bindparam("key_id")))


async def verified(connection: AsyncConnection, secret: str) -> ApiKey | None:
    """The key of a secret, if there is one that is not revoked. How long it takes says nothing about the secret."""
    match = _SECRET.fullmatch(secret)
    key_id = UUID(match[1]) if match else UUID(int=0)
    row = await _KEY.one_or_none(connection, key_id=key_id)
    same = hmac.compare_digest(row.hash if row else _NO_HASH, _hash(secret))
    return _key(row) if row is not None and same and row.revoked_at is None else None


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="replace")).digest()


def _key(row: Any) -> ApiKey:
    return ApiKey(row.id, row.name, row.created_at, row.revoked_at)
