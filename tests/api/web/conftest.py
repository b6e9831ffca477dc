"""Fixtures: Chromium for the tests of the page; `service_url` solves at once, `slow` a step at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from playwright.sync_api import Browser, BrowserContext, Page

from api.app import create_app
from api.settings import Settings
from tests.api.harness import Stepwise, idle_settings, idle_url, listening, service_settings, service_url, working
from tests.browser import browser, key, open_context, open_tab

__all__ = ["browser", "idle_settings", "idle_url", "key", "service_settings", "service_url"]


@contextmanager
def open_sibling(context: BrowserContext, key: str | None = None) -> Iterator[Page]:
    """A tab beside one that stays: it has that one's process and cache, and so takes half the processor time."""
    if not context.pages:
        context.new_page().goto("/healthz")
    with open_tab(context, key) as page:
        yield page


@pytest.fixture(scope="module")
def tabs(browser: Browser, service_url: str) -> Iterator[BrowserContext]:
    """Browser context that the pages of a file share."""
    with open_context(browser, service_url) as context:
        yield context


@pytest.fixture
def page(tabs: BrowserContext, key: str) -> Iterator[Page]:
    """The page of a service that solves within milliseconds."""
    with open_sibling(tabs, key) as page:
        yield page


@dataclass(frozen=True)
class SlowService:
    """A service without keys whose worker finds one schedule at once, and the next one at each `step`."""

    url: str
    steps: threading.Semaphore

    def step(self) -> None:
        """Let the worker find one more."""
        self.steps.release()


@pytest.fixture(scope="module")
def slow_port(free_tcp_port_factory: Callable[[], int]) -> int:
    """One for all slow services of a file, so that the pages of each have the same address, and share a cache."""
    return free_tcp_port_factory()


@pytest.fixture
def slow(settings: Settings, forked_pool: None, slow_port: int) -> Iterator[SlowService]:
    """See SlowService."""
    steps = threading.Semaphore(0)
    solve = Stepwise(lambda: steps.acquire(blocking=False))
    with listening(create_app(settings), slow_port) as url, working(settings, solve):
        yield SlowService(url, steps)


@pytest.fixture(scope="module")
def slow_tabs(browser: Browser, slow_port: int) -> Iterator[BrowserContext]:
    """Browser context that the pages of a file's slow services share."""
    with open_context(browser, f"http://127.0.0.1:{slow_port}") as context:
        yield context


@pytest.fixture
def slow_page(slow: SlowService, slow_tabs: BrowserContext) -> Iterator[Page]:
    """The page of that service."""
    with open_sibling(slow_tabs) as page:
        yield page
