"""axe finds nothing serious on any view, dark or light; every view fits a narrow screen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from instances import uniform
from tests.api.web.jobs import posted
from tests.browser import open_page
from tests.sample import some

PROBLEM = uniform(2, 4, budget=8, name="a name so long that it has to break somewhere on a narrow screen")
PLAN = "/#/plan?model=llama-3.1-8b&machine=h100&gpus=8&sequence=4096&batch=16&tp=2&pp=2&limit=4"
VIEWS = ("plan", "list", "new", "faults", "job", "compare", "key")


def violations(page: Page) -> list[dict[str, Any]]:
    """Violations that axe calls serious or critical, with the elements."""
    found = Axe().run(page).response["violations"]
    return [
        {"rule": entry["id"], "where": [node["html"] for node in entry["nodes"]]}
        for entry in found
        if entry["impact"] in ("serious", "critical")
    ]


def show(page: Page, view: str, job: str) -> None:
    """Bring a view to where all of it stands on the page."""
    if view == "plan":
        page.goto(PLAN)
        expect(page.locator("figure[data-magnification]")).to_be_visible()
        page.get_by_label("Trainer", exact=True).select_option("megatron")
        expect(page.get_by_role("region", name="launch.sh")).to_be_visible()
    elif view == "list":
        page.goto("/#/jobs")
        expect(page.locator("[data-part=jobs] tr")).to_have_count(1)
    elif view in ("new", "faults"):
        page.goto("/#/new")
        page.select_option("#preset", "offload")
        expect(page.locator("[data-part=check]")).to_contain_text("Valid")
        if view == "faults":
            page.fill("#time-limit", "soon")
            expect(page.locator("#time-limit-fault")).to_contain_text("soon")
    elif view == "job":
        page.goto(f"/#/jobs/{job}")
        expect(page.locator("figure[data-magnification]")).to_be_visible()
        page.get_by_text("The chart as a table").click()
    elif view == "compare":
        page.goto(f"/#/compare?ids={job},{job}")
        expect(page.locator("figure[data-magnification]")).to_have_count(2)
    else:
        page.goto("/#/jobs")
        page.evaluate("sessionStorage.clear()")
        page.select_option("#status-filter", "failed")
        expect(page.get_by_role("dialog")).to_be_visible()


@pytest.fixture
def job(service_url: str, key: str) -> str:
    return posted(service_url, key, PROBLEM, tags=["ci", "a tag"])


@pytest.fixture(params=some(["light", "dark"]))
def themed(browser: Browser, service_url: str, key: str, request: pytest.FixtureRequest) -> Iterator[Page]:
    with open_page(browser, service_url, key, color_scheme=request.param, reduced_motion="reduce") as page:
        yield page


def test_axe_finds_nothing_serious(themed: Page, job: str) -> None:
    found = {}
    for view in VIEWS:
        themed.goto("about:blank")
        show(themed, view, job)
        found[view] = violations(themed)
    assert all(not entries for entries in found.values()), json.dumps(found, indent=2)


@pytest.fixture
def narrow(browser: Browser, service_url: str, key: str) -> Iterator[Page]:
    with open_page(browser, service_url, key, viewport={"width": 360, "height": 740}) as page:
        yield page


def test_every_view_fits_360_pixels(narrow: Page, job: str) -> None:
    for view in VIEWS:
        narrow.goto("about:blank")
        show(narrow, view, job)
        assert narrow.evaluate("() => document.documentElement.scrollWidth") <= 360, view


OVERLAPPING = """() => {
  const texts = [...document.querySelectorAll("[data-part=jobs] tr > *")].map((cell) => {
    const range = document.createRange();
    range.selectNodeContents(cell);
    return [cell.textContent.trim(), range.getBoundingClientRect()];
  }).filter(([text, box]) => text && box.width);
  return texts.flatMap(([one, a], k) => texts.slice(k + 1)
    .filter(([, b]) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
    .map(([other]) => [one, other]));
}"""


def test_figures_of_a_job_lie_beside_one_another_on_a_narrow_screen(narrow: Page, job: str) -> None:
    show(narrow, "list", job)
    assert narrow.locator("[data-part=jobs] td[data-label]:visible").count() >= 5
    assert narrow.evaluate(OVERLAPPING) == []
