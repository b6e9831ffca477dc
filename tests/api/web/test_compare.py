"""Several schedules at one time scale, moving together."""

from __future__ import annotations

import json
import re

from playwright.sync_api import Page, expect

from instances import uniform
from tests.api.harness import PROBLEM
from tests.api.web.jobs import posted
from tests.browser import COMPILE_MS

ROWS = "[data-part=rows] tr"


def test_jobs_chosen_in_the_list(page: Page, service_url: str, key: str) -> None:
    for name in ("first", "second"):
        posted(service_url, key, name=name)
    page.goto("/#/jobs")
    button = page.get_by_role("button", name="Compare")
    expect(button).to_be_disabled()
    for name in ("first", "second"):
        page.get_by_label(f"choose {name}").check()
    button.click()
    expect(page.locator("figure[data-magnification='1.000']")).to_have_count(2)
    expect(page.locator(ROWS)).to_have_count(2)
    page.get_by_role("button", name="Zoom in").first.click()
    expect(page.locator("figure[data-magnification='1.500']")).to_have_count(2)
    page.locator("[data-part=surface]").last.focus()
    page.keyboard.press("0")
    expect(page.locator("figure[data-magnification='1.000']")).to_have_count(2)


def test_searches_on_one_axis_and_jobs_left_out(page: Page, service_url: str, key: str) -> None:
    ids = [posted(service_url, key, uniform(2, 4, budget=budget), name=f"budget {budget}") for budget in (4, 5, 6)]
    page.goto(f"/#/compare?ids={','.join(ids)}")
    expect(page.locator(ROWS)).to_have_count(3)
    expect(page.locator("[data-part=searches-legend] li")).to_have_text(
        ["budget 4", "budget 5", "budget 6", "bound of each"]
    )
    expect(page.locator("path.curve-series:not(.curve-series-bound)")).to_have_count(3)
    page.get_by_role("link", name="leave out budget 5").click()
    expect(page.locator(ROWS)).to_have_count(2)
    page.get_by_role("link", name="Choose jobs in the list").click()
    expect(page.get_by_role("button", name="Compare 2 jobs")).to_be_enabled()
    expect(page.get_by_label("choose budget 5")).not_to_be_checked()
    page.get_by_label("choose budget 5").check()
    page.get_by_role("button", name="Compare 3 jobs").click()
    expect(page.locator(ROWS)).to_have_count(3)


def test_published_schedules_of_a_new_problem(page: Page) -> None:
    page.goto("/#/new")
    page.fill("#problem", json.dumps(PROBLEM.to_data()))
    page.get_by_role("button", name="Compare published").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Published schedules of two devices")
    best = page.locator(ROWS).first
    expect(best).to_contain_text("131.0\u00a0µs", timeout=COMPILE_MS)
    expect(best).to_contain_text("best")
    expect(page.locator(ROWS, has_text="1f1b").first).to_contain_text("+")
    page.get_by_text("without a schedule, and why").click()
    expect(page.locator("[data-part=reasons]")).to_contain_text("zb-v places 2 stages")


def test_a_job_next_to_the_published_schedules_of_its_problem(page: Page, service_url: str, key: str) -> None:
    first, second = (posted(service_url, key, name=name) for name in ("first", "second"))
    page.goto(f"/#/jobs/{first}")
    page.locator("a[data-part=compare]").click()
    expect(page.locator(ROWS).first).to_contain_text("first")
    expect(page.locator(ROWS, has_text="1f1b").first).to_be_visible(timeout=COMPILE_MS)
    page.get_by_role("link", name="Leave out published schedules").click()
    expect(page.locator(ROWS)).to_have_count(1)
    page.goto(f"/#/compare?ids={first},{second}")
    page.get_by_role("link", name="Add published schedules").click()
    expect(page.locator(ROWS, has_text="gpipe")).to_be_visible()
    page.get_by_role("link", name="leave out first").click()
    expect(page.locator(ROWS, has_text="second")).to_be_visible()
    expect(page.locator(ROWS, has_text="first")).to_have_count(0)
    expect(page.locator(ROWS, has_text="gpipe")).to_be_visible()


def test_values_of_different_problems_are_not_compared(page: Page, service_url: str, key: str) -> None:
    ids = [posted(service_url, key), posted(service_url, key, uniform(2, 3))]
    page.goto(f"/#/compare?ids={','.join(ids)}")
    expect(page.get_by_text("These schedules answer different problems")).to_be_visible()
    expect(page.get_by_role("link", name="Add published schedules")).to_be_hidden()
    expect(page.locator(".best")).to_have_count(0)


def test_jobs_without_a_schedule_say_why(page: Page, service_url: str, key: str) -> None:
    page.goto(f"/#/compare?ids={posted(service_url, key, uniform(2, 4, budget=2))}")
    expect(page.locator("[data-part=reasons]")).to_have_text(re.compile("nothing published keeps the budgets"))
    expect(page.locator("[data-part=reasons]")).to_be_visible()
    expect(page.locator("[data-part=figures]")).to_be_hidden()


def test_a_long_name_leaves_room_for_the_figures(page: Page, service_url: str, key: str) -> None:
    page.goto(f"/#/compare?ids={posted(service_url, key, name='W' * 200)}")
    last = page.locator(ROWS).locator("td").last.bounding_box()
    assert last is not None
    assert last["x"] + last["width"] < 1280


def test_nothing_to_compare(page: Page) -> None:
    page.goto("/#/compare")
    expect(page.get_by_role("heading", name="Nothing to compare yet")).to_be_visible()
