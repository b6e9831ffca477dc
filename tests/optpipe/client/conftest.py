"""Services to call."""

from __future__ import annotations

from tests.api.harness import service_settings, service_url
from tests.postgresql import database_url, postgresql, settings

__all__ = ["database_url", "postgresql", "service_settings", "service_url", "settings"]
