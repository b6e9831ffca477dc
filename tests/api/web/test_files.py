"""Files that are dropped anywhere on the page: each opens where it is looked at, or is refused by name."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from solver.solve import solve
from tests.api.harness import PROBLEM
from tests.api.web.jobs import posted
from tests.browser import COMPILE_MS

DROP = """(files) => {
  const dataTransfer = new DataTransfer();
  for (const [name, text] of Object.entries(files)) dataTransfer.items.add(new File([text], name));
  const event = (kind) => new DragEvent(kind, {dataTransfer, bubbles: true});
  for (const kind of ["dragover", "drop"]) document.body.dispatchEvent(event(kind));
}"""
ROWS = "[data-part=rows] tr"


def test_schedules_stand_next_to_a_job_and_published_ones(page: Page, service_url: str, key: str) -> None:
    page.goto("/#/jobs")
    page.evaluate(DROP, {"own.json": solve(PROBLEM, "1f1b").to_json()})
    expect(page.locator(ROWS)).to_contain_text(["own.json"])
    expect(page.locator("[data-part=notes]")).to_have_text("The verifier finds nothing wrong.")
    page.get_by_role("link", name="Add published schedules").click()
    expect(page.locator(ROWS, has_text="zb-h2")).to_be_visible(timeout=COMPILE_MS)
    page.goto(f"/#/compare?ids={posted(service_url, key, name='job')}")
    expect(page.locator(ROWS)).to_contain_text(["job"])
    page.evaluate(DROP, {"own.json": solve(PROBLEM, "1f1b").to_json()})
    expect(page.locator(ROWS)).to_contain_text(["job", "own.json"])
    page.get_by_role("link", name="Add published schedules").click()
    expect(page.locator(ROWS, has_text="gpipe")).to_be_visible(timeout=COMPILE_MS)
    page.evaluate(DROP, {"other.json": solve(PROBLEM, "1f1b").to_json()})
    expect(page.locator(ROWS)).to_contain_text(["job", "other.json"])
    expect(page.locator(ROWS, has_text="gpipe")).to_be_visible(timeout=COMPILE_MS)
    page.get_by_role("link", name="leave out job").click()
    expect(page.locator(ROWS).first).to_contain_text("other.json")
    expect(page.locator(ROWS, has_text="gpipe")).to_be_visible(timeout=COMPILE_MS)
    page.goto(f"/#/compare?ids={posted(service_url, key, name='job')}")
    expect(page.locator(ROWS)).to_contain_text(["job"])
    page.evaluate(DROP, {name: solve(PROBLEM, name).to_json() for name in ("gpipe", "zb-h1")})
    expect(page.locator(ROWS)).to_contain_text(["job", "gpipe", "zb-h1"])
    page.evaluate(DROP, {"gpipe": solve(PROBLEM, "gpipe").to_json(), "problem.json": PROBLEM.to_json()})
    expect(page.locator("[data-part=file-message]")).to_contain_text("problem.json is a problem; several files open")


def test_a_csv_has_the_costs_of_the_problem_in_the_form(page: Page) -> None:
    page.goto("/#/new")
    page.fill("#problem", PROBLEM.replaced(microbatches=1).to_json())
    page.evaluate(DROP, {"ranks.csv": "0F0,0B0\n1F0,1B0\n"})
    expect(page.locator(ROWS)).to_contain_text(["ranks.csv"])
    expect(page.locator("[data-part=notes] li")).to_have_count(1)
    page.goto("/#/jobs")
    page.evaluate(DROP, {"ranks.csv": "0F0,0B0\n1F0,1B0\n"})
    expect(page.locator("[data-part=notes]")).to_contain_text("It has no costs")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "optpipe.layers/1"}', "x.json is a layer profile; what opens here is"),
        ('{"format": "optpipe.problem/1",', "x.json: "),
    ],
)
def test_what_does_not_open_says_why(page: Page, text: str, message: str) -> None:
    page.goto("/#/jobs")
    page.evaluate(DROP, {"x.json": text})
    expect(page.locator("[data-part=file-message]")).to_contain_text(message)
    page.evaluate(DROP, {"problem.json": PROBLEM.to_json()})
    expect(page.locator("[data-part=check]")).to_contain_text("Valid: 2 devices")
    expect(page.locator("[data-part=file-message]")).to_be_empty()
