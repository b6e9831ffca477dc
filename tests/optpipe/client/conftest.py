"""Services to call."""

from __future__ import annotations

from tests.api.harness import service_settings, service_url
from tests.postgresql import database_url, settings

__all__ = ["database_url", "service_settings", "service_url", "settings"]
