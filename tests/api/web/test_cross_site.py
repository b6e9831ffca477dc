"""Pages of other origins change nothing at a service without keys, whatever they make the browser send."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from playwright.sync_api import Browser, Page, expect

from tests.api.harness import body, client_of, listening
from tests.api.web.conftest import SlowService
from tests.api.web.jobs import posted
from tests.browser import WAIT_MS

SEND = """([url, options]) => fetch(url, options).then(() => "sent", () => "refused to the page")"""


@pytest.fixture
def stranger(browser: Browser) -> Iterator[Page]:
    """A page of another origin."""
    app = FastAPI()
    app.get("/", response_class=HTMLResponse)(lambda: "<!doctype html><title>elsewhere</title>")
    with listening(app) as url, browser.new_context(base_url=url) as context:
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        page.goto("/#/jobs")
        yield page


def statuses(slow: SlowService) -> list[str]:
    with client_of(slow.url, None) as client:
        return [job["status"] for job in client.get("/v1/schedules").json()["jobs"]]


def test_nothing_is_cancelled_removed_or_submitted(stranger: Page, slow: SlowService) -> None:
    job = f"{slow.url}/v1/schedules/{posted(slow.url, None, wait=0)}"
    attempts = [
        (f"{job}/cancel", {"method": "POST", "mode": "no-cors"}),
        (f"{slow.url}/v1/schedules", {"method": "POST", "mode": "no-cors", "body": json.dumps(body())}),
        (job, {"method": "DELETE", "mode": "cors"}),
        (job, {"method": "GET", "mode": "cors"}),
    ]
    for url, options in attempts:
        assert stranger.evaluate(SEND, [url, options]) == "refused to the page"
    assert statuses(slow) in (["running"], ["queued"])


def test_a_form_retries_nothing(stranger: Page, slow: SlowService) -> None:
    with client_of(slow.url, None) as client:
        job = posted(slow.url, None, wait=0)
        client.post(f"/v1/schedules/{job}/cancel")
        assert client.get(f"/v1/schedules/{job}", params={"wait": 50}).json()["status"] == "cancelled"
    submit = """(url) => {
      const form = Object.assign(document.createElement("form"), {method: "post", action: url});
      document.body.append(form);
      form.submit();
    }"""
    with stranger.expect_navigation():
        stranger.evaluate(submit, f"{slow.url}/v1/schedules/{job}/retry")
    expect(stranger.locator("body")).to_contain_text("cross_site")
    assert statuses(slow) == ["cancelled"]
