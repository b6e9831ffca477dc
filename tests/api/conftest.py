"""Fixtures of the service."""

from __future__ import annotations

from tests.api.harness import idle_settings
from tests.postgresql import database_url, settings, store

__all__ = ["database_url", "idle_settings", "settings", "store"]
