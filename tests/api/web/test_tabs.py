"""Many tabs of one browser: they share one stream of events, and each can act."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Request, expect

from instances import uniform
from tests.api.harness import STEP_VALUES_US
from tests.api.web.conftest import SlowService
from tests.api.web.jobs import posted
from tests.browser import WAIT_MS

TABS = 7
"""More than the six connections that a browser opens to one server."""


@pytest.fixture
def context(browser: Browser, slow: SlowService) -> Iterator[BrowserContext]:
    with browser.new_context(base_url=slow.url) as context:
        context.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        yield context


def opened(context: BrowserContext, job: str) -> Page:
    page = context.new_page()
    page.goto(f"/#/jobs/{job}")
    return page


def test_seven_tabs_live_and_each_can_cancel(context: BrowserContext, slow: SlowService) -> None:
    streams: list[Request] = []
    context.on("request", lambda request: request.url.endswith("/v1/events") and streams.append(request))
    # Problems that differ: an equal one might be answered by another job's solution.
    jobs = [posted(slow.url, None, uniform(2, 4 + number, budget=8), wait=0) for number in range(TABS)]
    tabs = [opened(context, job) for job in jobs]
    for tab in tabs:
        expect(tab.locator(".status")).to_have_text(re.compile("running|queued"))
    for tab in reversed(tabs):
        tab.get_by_role("button", name="Cancel").click()
    for tab in tabs:
        expect(tab.locator(".status")).to_have_text("cancelled")
    assert len(streams) == 1


def test_the_next_tab_takes_over_when_the_one_with_the_stream_is_closed(
    context: BrowserContext, slow: SlowService
) -> None:
    job = posted(slow.url, None, wait=0)
    first = opened(context, job)
    expect(first.locator("[data-part=value]")).to_have_text(f"{STEP_VALUES_US[0]}.0\u00a0µs")
    second = opened(context, job)
    expect(second.locator("[data-part=value]")).to_have_text(f"{STEP_VALUES_US[0]}.0\u00a0µs")
    slow.step()
    expect(second.locator("[data-part=value]")).to_have_text(f"{STEP_VALUES_US[1]}.0\u00a0µs")
    first.close()
    slow.step()
    expect(second.locator("[data-part=value]")).to_have_text(f"{STEP_VALUES_US[2]}.0\u00a0µs")
    expect(second.locator(".status")).to_have_text("succeeded")


def test_a_browser_without_locks_reads_a_stream_in_each_tab(context: BrowserContext, slow: SlowService) -> None:
    """As over plain HTTP to another machine."""
    context.add_init_script("Object.defineProperty(navigator, 'locks', {value: undefined})")
    job = posted(slow.url, None, wait=0)
    tabs = [opened(context, job) for _ in range(2)]
    for tab in tabs:
        expect(tab.locator("[data-part=value]")).to_have_text(f"{STEP_VALUES_US[0]}.0\u00a0µs")
    slow.step()
    for tab in tabs:
        expect(tab.locator("[data-part=value]")).to_have_text(f"{STEP_VALUES_US[1]}.0\u00a0µs")
