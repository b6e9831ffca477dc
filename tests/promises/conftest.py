"""Fixtures of the service."""

from __future__ import annotations

from tests.api.harness import client, idle, idle_settings, idle_url, service_settings, service_url
from tests.postgresql import database_url, settings, store

__all__ = [
    "client",
    "database_url",
    "idle",
    "idle_settings",
    "idle_url",
    "service_settings",
    "service_url",
    "settings",
    "store",
]
