"""Fixtures: Chromium for the tests of the page; `service_url` solves at once, `slow` a step at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Browser, Page

from api.app import create_app
from api.settings import Settings
from tests.api.harness import Stepwise, idle_settings, idle_url, listening, service_settings, service_url, working
from tests.browser import browser, key, open_page

__all__ = ["browser", "idle_settings", "idle_url", "key", "service_settings", "service_url"]


@pytest.fixture
def page(browser: Browser, service_url: str, key: str) -> Iterator[Page]:
    """The page of a service that solves within milliseconds."""
    with open_page(browser, service_url, key) as page:
        yield page


@dataclass(frozen=True)
class SlowService:
    """A service without keys whose worker finds one schedule at once, and the next one at each `step`."""

    url: str
    steps: threading.Semaphore

    def step(self) -> None:
        """Let the worker find one more."""
        self.steps.release()


@pytest.fixture
def slow(settings: Settings) -> Iterator[SlowService]:
    """See SlowService."""
    steps = threading.Semaphore(0)
    solve = Stepwise(lambda: steps.acquire(blocking=False))
    with working(settings, solve), listening(create_app(settings)) as url:
        yield SlowService(url, steps)


@pytest.fixture
def slow_page(browser: Browser, slow: SlowService) -> Iterator[Page]:
    """The page of that service."""
    with open_page(browser, slow.url) as page:
        yield page
