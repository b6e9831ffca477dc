"""S11: the page runs nothing but its own files, and a job named as markup stays text."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.api.harness import PROBLEM, body, client_of
from tests.browser import browser, key, open_page

__all__ = ["browser", "key"]

MARKUP = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script><b>bold</b>"
TAG = "<i>&lt;tag&gt;</i>"


@pytest.fixture
def job(service_url: str, key: str) -> str:
    """A job, its problem, device and tag all named as markup."""
    device = PROBLEM.devices[0].model_copy(update={"name": MARKUP})
    problem = PROBLEM.model_copy(update={"name": MARKUP, "source": MARKUP, "devices": [device, *PROBLEM.devices[1:]]})
    with client_of(service_url, key) as client:
        posted = body(problem, name=MARKUP, tags=[TAG])
        return str(client.post("/v1/schedules", params={"wait": 50}, json=posted).json()["id"])


@pytest.fixture
def page(browser: Browser, service_url: str, key: str) -> Iterator[Page]:
    with open_page(browser, service_url, key) as page:
        yield page


def test_the_policy_lets_in_own_files_alone(service_url: str) -> None:
    policy = httpx.get(service_url).headers["content-security-policy"]
    directives = dict(directive.split(maxsplit=1) for directive in policy.split("; "))
    assert directives["default-src"] == "'none'"
    assert {directives[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert directives["frame-ancestors"] == directives["base-uri"] == directives["form-action"] == "'none'"
    assert "unsafe" not in policy


def test_names_as_markup_stay_text(page: Page, job: str) -> None:
    page.goto("/#/jobs")
    expect(page.locator("[data-part=name]")).to_have_text(MARKUP)
    expect(page.locator("[data-part=jobs] .tag")).to_have_text(TAG)
    _nothing_was_made_of_it(page)

    page.goto(f"/#/jobs/{job}")
    expect(page.locator("h1")).to_have_text(MARKUP)
    expect(page.locator("[data-part=source]")).to_have_text(MARKUP)
    page.get_by_text("The chart as a table").click()
    expect(page.locator("[data-part=table] th").first).to_have_text(MARKUP)
    surface = page.locator("[data-part=surface]")
    surface.focus()
    page.keyboard.press("Shift+ArrowRight")
    expect(page.locator("[data-part=tooltip]")).to_contain_text(MARKUP)
    _nothing_was_made_of_it(page)
    page.click("[data-part=delete]")
    expect(page.locator("[data-part=confirm-question]")).to_have_text(f"Delete {MARKUP}?")
    page.keyboard.press("Escape")

    page.goto(f"/#/compare?ids={job},{job}")
    expect(page.locator("[data-part=rows] a").first).to_have_text(MARKUP)
    _nothing_was_made_of_it(page)


def _nothing_was_made_of_it(page: Page) -> None:
    assert page.locator("main").locator("img, script, b, i").count() == 0
    assert not page.title().startswith("taken")


def test_the_browser_refuses_whatever_would_become_markup_or_code(browser: Browser, service_url: str) -> None:
    refused = """() => {
      const attempts = [
        () => { document.body.innerHTML = '<b>x</b>'; },
        () => { document.createElement('script').text = 'document.title = "taken"'; },
        () => { document.body.append(document.createRange().createContextualFragment('<b>x</b>')); },
      ];
      return attempts.map((attempt) => { try { attempt(); return 'done'; } catch (error) { return error.name; } });
    }"""
    with browser.new_context(base_url=service_url) as context:
        page = context.new_page()
        page.goto("/#/jobs")
        assert page.evaluate(refused) == ["TypeError"] * 3


def test_no_request_leaves_for_elsewhere(page: Page, service_url: str, job: str) -> None:
    addresses: list[str] = []
    page.on("request", lambda request: addresses.append(request.url))
    for view in ("/#/jobs", "/#/new", f"/#/jobs/{job}", f"/#/compare?ids={job}"):
        page.goto(view)
        expect(page.get_by_role("heading", level=1)).not_to_be_empty()
    expect(page.locator("figure[data-magnification]")).to_be_visible()
    assert any("/v1/schedules/" in address for address in addresses)
    assert [address for address in addresses if not address.startswith((service_url, "blob:"))] == []
