"""Fixtures of the service, and the promises that take minutes: `pytest -m chaos` keeps those at full size."""

from __future__ import annotations

import pytest

from tests.api.harness import client, idle, idle_settings, idle_url, service_settings, service_url
from tests.postgresql import database_url, postgresql, settings, store

__all__ = [
    "client",
    "database_url",
    "idle",
    "idle_settings",
    "idle_url",
    "postgresql",
    "service_settings",
    "service_url",
    "settings",
    "store",
]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "chaos: a promise at full size; left out unless asked for by -m chaos")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "chaos" in config.option.markexpr:
        return
    for item in items:
        if item.get_closest_marker("chaos"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: pytest -m chaos"))
