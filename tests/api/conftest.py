"""Fixtures of the service."""

from __future__ import annotations

from tests.api.harness import idle_settings
from tests.postgresql import database_url, postgresql, settings, store

__all__ = ["database_url", "idle_settings", "postgresql", "settings", "store"]
