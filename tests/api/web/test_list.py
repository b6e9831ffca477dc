"""The list of jobs: what it says when it is empty, order, filters, pages, and that it keeps up."""

from __future__ import annotations

import re

import pytest
from httpx import Client
from playwright.sync_api import Page, expect

from instances import uniform
from tests.api.harness import client_of
from tests.api.web.conftest import SlowService
from tests.api.web.jobs import post, posted

NAMES = "[data-part=jobs] [data-part=name]"


def test_an_empty_list_tells_what_to_do(page: Page) -> None:
    page.goto("/#/jobs")
    expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
    page.get_by_role("main").get_by_role("link", name="New problem").last.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("New problem")
    expect(page).to_have_title("New problem · OptPipe")


def test_nothing_moves_when_the_figures_of_the_service_come(page: Page) -> None:
    page.route("**/metrics", lambda _: None)  # held until the route is taken away
    with page.expect_request("**/metrics"):
        page.goto("/#/jobs")
    link = page.get_by_role("main").get_by_role("link", name="New problem").last
    expect(link).to_be_visible()
    before = link.bounding_box()
    page.unroute("**/metrics")
    expect(page.locator("[data-part=queue]")).to_contain_text("On this service")
    assert link.bounding_box() == before


def test_newest_first_and_by_tag_and_status(page: Page, service_url: str, key: str) -> None:
    posted(service_url, key, name="older", tags=["ci"])
    posted(service_url, key, name="newer")
    page.goto("/#/jobs")
    expect(page.locator(NAMES)).to_have_text(["newer", "older"])
    page.fill("#tag-filter", "ci")
    page.press("#tag-filter", "Enter")
    expect(page.locator(NAMES)).to_have_text(["older"])
    assert page.url.endswith("#/jobs?tag=ci")
    page.select_option("#status-filter", "failed")
    expect(page.get_by_text("No job matches")).to_be_visible()
    page.get_by_role("link", name="Show all jobs").click()
    expect(page.locator(NAMES)).to_have_text(["newer", "older"])


def test_search_by_name_and_order(page: Page, service_url: str, key: str) -> None:
    for name, microbatches in (("run 10", 4), ("run 9", 8), ("other", 2)):
        posted(service_url, key, uniform(2, microbatches, budget=8), name=name)
    page.goto("/#/jobs")
    expect(page.locator(NAMES)).to_have_text(["other", "run 9", "run 10"])
    page.select_option("#sort", "name")
    expect(page.locator(NAMES)).to_have_text(["other", "run 10", "run 9"])
    page.select_option("#sort", "submitted_at")
    expect(page.locator(NAMES)).to_have_text(["run 10", "run 9", "other"])
    page.fill("#name-filter", "RUN")
    expect(page.locator(NAMES)).to_have_text(["run 10", "run 9"])
    expect(page.locator("[data-part=count]")).to_have_text("2 jobs.")
    assert page.url.endswith("#/jobs?name=RUN&sort=submitted_at")
    page.reload()
    expect(page.locator(NAMES)).to_have_text(["run 10", "run 9"])


def test_tags_are_added_to_chosen_jobs(page: Page, service_url: str, key: str) -> None:
    for name in ("one", "two"):
        posted(service_url, key, name=name, tags=["old"])
    page.goto("/#/jobs")
    page.get_by_label("choose all shown").check()
    page.get_by_role("button", name="Tag 2 jobs").click()
    page.get_by_label("Tags to add").fill("night, old")
    page.keyboard.press("Enter")
    expect(page.locator("[data-part=jobs] .tags")).to_have_text(["oldnight", "oldnight"])


def test_size_and_bubble_stand_in_the_list(page: Page, service_url: str, key: str) -> None:
    posted(service_url, key, uniform(2, 4, budget=8), name="sized")
    page.goto("/#/jobs")
    expect(page.locator("[data-part=jobs] [data-part=size]")).to_have_text("2 \u00d7 4")
    expect(page.locator("[data-part=jobs] [data-part=bubble]")).to_contain_text("%")


def test_a_gap_has_a_colour(page: Page, service_url: str, key: str) -> None:
    posted(service_url, key, name="proved")
    page.goto("/#/jobs")
    expect(page.locator("[data-part=jobs] [data-part=gap]")).to_have_class("gap gap-proved")

    with client_of(service_url, key) as client:
        (job,) = client.get("/v1/schedules").json()["jobs"]
    wide = {"jobs": [{**job, "gap": 0.42}], "cursor": None, "total": 1}
    page.route("**/v1/schedules?*", lambda route: route.fulfill(json=wide))
    page.reload()
    expect(page.locator("[data-part=jobs] [data-part=gap]")).to_have_class("gap gap-large")
    expect(page.locator("[data-part=jobs] [data-part=gap]")).to_have_text("42.0\u00a0%")


def test_chosen_jobs_are_cancelled_and_deleted_together(slow: SlowService, slow_page: Page) -> None:
    for microbatches in (4, 5, 6):
        posted(slow.url, None, uniform(2, microbatches, budget=8), wait=0)
    slow_page.goto("/#/jobs")
    expect(slow_page.locator(NAMES)).to_have_count(3)
    expect(slow_page.locator("[data-part=queue]")).to_contain_text(re.compile("1 worker, [12] jobs? running"))
    slow_page.get_by_label("choose all shown").check()
    slow_page.get_by_role("button", name="Cancel 3 jobs").click()
    expect(slow_page.locator("[data-part=jobs] .status")).to_have_text(["cancelled"] * 3)
    slow_page.get_by_role("button", name="Delete 3 jobs").click()
    slow_page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(slow_page.get_by_text("No jobs yet")).to_be_visible()


@pytest.fixture
def many(service_url: str, key: str) -> None:
    with client_of(service_url, key) as client:
        _post_many(client)


def _post_many(client: Client) -> None:
    for number in range(53):
        post(client, wait=0, name=f"job {number:02}")


def test_more_jobs_than_a_page(page: Page, many: None) -> None:
    page.goto("/#/jobs")
    expect(page.locator(NAMES)).to_have_count(50)
    expect(page.locator(NAMES).first).to_have_text("job 52")
    expect(page.locator("[data-part=count]")).to_have_text("50 of 53 jobs.")
    page.get_by_role("button", name="Show more").click()
    expect(page.locator(NAMES)).to_have_count(53)
    expect(page.locator(NAMES).last).to_have_text("job 00")
    expect(page.get_by_role("button", name="Show more")).to_be_hidden()


def test_it_keeps_up_with_running_jobs(slow: SlowService, slow_page: Page) -> None:
    posted(slow.url, None, wait=0)
    slow_page.goto("/#/jobs")
    expect(slow_page.locator("[data-part=jobs] .status")).to_have_text("running")
    slow.step()
    slow.step()
    expect(slow_page.locator("[data-part=jobs] .status")).to_have_text("succeeded")
    expect(slow_page.locator("[data-part=jobs] [data-part=gap]")).to_have_text("0.0\u00a0%")


@pytest.mark.parametrize("address", ["/#/constructor", "/#/nothing/%"])
def test_an_address_of_nothing_shows_the_front_door(page: Page, address: str) -> None:
    page.goto(address)
    expect(page.get_by_text(f"There is nothing at {address[1:]}")).to_be_visible()
    expect(page.get_by_role("heading", name="Plan a training run")).to_be_visible()
    page.get_by_role("navigation").get_by_role("link", name="New problem").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("New problem")
