"""Chromium for tests of the page: Debian's, driven by playwright."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright

from api.settings import Settings
from tests.api.harness import new_key

CHROMIUM = Path("/usr/bin/chromium-headless-shell")
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT_MS = 60_000
"""A page answers within a fraction of it, unless the machine does much else."""
COMPILE_MS = 120_000
"""The first request for all published schedules compiles kernels where none are cached."""
KEY_NAME = "optpipe.key"
"""Name under which the page keeps the key."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for the tests of one file: while it runs, asyncio takes the main thread's loop as running."""
    with running_browser() as browser:
        yield browser


@pytest.fixture
def key(service_settings: Settings) -> str:
    """A key of this test alone, and so its own jobs; made in a thread whose loop is free."""
    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(new_key, service_settings).result()


@contextmanager
def running_browser() -> Iterator[Browser]:
    """A Chromium without windows; the test fails with the way to install it where there is none."""
    if not CHROMIUM.exists():
        pytest.fail(f"{CHROMIUM} is missing. Maybe apt-get install -y chromium-headless-shell.", pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(browser: Browser, url: str, key: str | None = None, **options: Any) -> Iterator[Page]:
    """A tab in a context of its own; see `open_context` and `open_tab`."""
    with open_context(browser, url, **options) as context, open_tab(context, key) as page:
        yield page


@contextmanager
def open_context(browser: Browser, url: str, **options: Any) -> Iterator[BrowserContext]:
    """A context with the service at `url` as its base. `options` are those of a playwright context."""
    with browser.new_context(**{"base_url": url, "viewport": {"width": 1280, "height": 800}, **options}) as context:
        context.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        yield context


@contextmanager
def open_tab(context: BrowserContext, key: str | None = None) -> Iterator[Page]:
    """A tab that knows `key` already, and nothing that tabs before it have stored.

    Errors that the page does not handle fail the test.
    """
    page = context.new_page()
    if key is not None:
        # An empty page has no storage; one of a tab's own is empty where it is new.
        forget = "if (!sessionStorage.length) localStorage.clear()"
        page.add_init_script(f"if (location.host) {{ {forget}; sessionStorage.setItem('{KEY_NAME}', '{key}') }}")
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.extend(_breach(message)))
    try:
        yield page
    finally:
        page.close()
    assert errors == []


def _breach(message: ConsoleMessage) -> list[str]:
    """Messages of the browser that the content policy stopped something."""
    breaches = "Content Security Policy" in message.text or "TrustedHTML" in message.text
    return [message.text] if message.type == "error" and breaches else []
