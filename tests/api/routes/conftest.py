"""Services to call."""

from __future__ import annotations

from tests.api.harness import client, idle, idle_settings, idle_url, service_settings, service_url

__all__ = ["client", "idle", "idle_settings", "idle_url", "service_settings", "service_url"]
