"""Fixtures: two services for all tests of a process, one with a worker and one without; every test has its own keys,
and so sees its own jobs alone.

idle       a client of the service whose jobs stay in the queue
client     a client of the service whose jobs are solved within milliseconds
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import count

import psycopg
import pytest
from httpx import Client
from sqlalchemy import make_url

from api.app import create_app
from api.jobs.store import Store
from api.settings import Settings
from tests.api.server import listening, working
from tests.api.solves import at_once
from tests.postgresql import TEMPLATE

NewClient = Callable[[], Client]
_numbers = count()


@pytest.fixture(scope="session")
def idle_settings(postgresql: str) -> Settings:
    """Settings of the service without a worker."""
    return _settings(postgresql, "idle")


@pytest.fixture(scope="session")
def idle_url(idle_settings: Settings) -> Iterator[str]:
    """The address of the service without a worker."""
    with listening(create_app(idle_settings)) as url:
        yield url


@pytest.fixture(scope="session")
def service_settings(postgresql: str) -> Settings:
    """Settings of the service with a worker."""
    return _settings(postgresql, "worked")


@pytest.fixture(scope="session")
def service_url(service_settings: Settings) -> Iterator[str]:
    """The address of the service with a worker."""
    with working(service_settings, at_once), listening(create_app(service_settings)) as url:
        yield url


@pytest.fixture
def idle(idle_url: str, idle_settings: Settings) -> Iterator[Client]:
    """A client of the service without a worker, with a key of its own."""
    with client_of(idle_url, new_key(idle_settings)) as client:
        yield client


@pytest.fixture
def client(service_url: str, service_settings: Settings) -> Iterator[Client]:
    """A client of the service with a worker, with a key of its own."""
    with client_of(service_url, new_key(service_settings)) as client:
        yield client


def client_of(url: str, key: str | None) -> Client:
    """A client that sends a key. It reads no certificates, which takes longer than most tests' calls."""
    return Client(base_url=url, timeout=30, verify=False, headers={"Authorization": f"Bearer {key}"} if key else {})


def new_key(settings: Settings) -> str:
    """The secret of a new key."""

    async def create() -> str:
        async with Store(settings) as store:
            return (await store.create_key("test")).secret

    return asyncio.run(create())


def _settings(postgresql: str, database: str) -> Settings:
    """Settings of a service on a database of its own, which asks for keys.

    Every folder of tests that imports these fixtures has services of its own, hence the number.
    """
    database = f"{database}_{next(_numbers)}"
    with psycopg.connect(postgresql, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {database} TEMPLATE {TEMPLATE}".encode())
    url = make_url(postgresql).set(database=database).render_as_string(hide_password=False)
    return Settings.load(database_url=url, require_keys=True, max_workers=2, max_body_bytes=2**20)
