"""One job, live: incumbents as they arrive, an interrupted connection, cancel, retry, delete, downloads."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import Page, Route, expect

from instances import uniform
from tests.api.harness import STEP_VALUES_US, client_of
from tests.api.web.conftest import SlowService
from tests.api.web.jobs import posted
from tests.browser import WAIT_MS

VALUE = "[data-part=value]"


def value_text(step: int) -> str:
    return f"{STEP_VALUES_US[step]}.0\u00a0µs"


def test_incumbents_arrive_while_the_page_is_open(slow: SlowService, slow_page: Page) -> None:
    job = posted(slow.url, None, wait=0)
    slow_page.goto(f"/#/jobs/{job}")
    expect(slow_page.locator(VALUE)).to_have_text(value_text(0))
    expect(slow_page.locator(".status")).to_have_text("running")
    expect(slow_page.locator(".curve-dot")).to_have_count(1)
    slow.step()
    expect(slow_page.locator(VALUE)).to_have_text(value_text(1))
    expect(slow_page.locator("[data-part=live]")).to_contain_text("better schedule")
    slow.step()
    expect(slow_page.locator(VALUE)).to_have_text(value_text(2))
    expect(slow_page.locator(".status")).to_have_text("succeeded")
    expect(slow_page.locator(".curve-dot")).to_have_count(3)
    expect(slow_page.locator("[data-part=found-by]")).to_have_text("zb-h2")
    expect(slow_page.locator(".curve-method").last).to_have_text("zb-h2")
    slow_page.get_by_text("Schedules found", exact=True).click()
    rows = slow_page.locator("[data-part=improvements] tr")
    expect(rows).to_have_count(3)
    expect(rows.first).to_contain_text(value_text(2))
    expect(slow_page.locator("[data-part=state]")).to_have_text("proved optimal")


def test_cancel_keeps_the_best_and_retry_goes_on(slow: SlowService, slow_page: Page) -> None:
    job = posted(slow.url, None, wait=0)
    slow_page.goto(f"/#/jobs/{job}")
    expect(slow_page.locator(VALUE)).to_have_text(value_text(0))
    slow_page.click("[data-part=cancel]")
    expect(slow_page.locator(".status")).to_have_text("cancelled")
    expect(slow_page.locator(VALUE)).to_have_text(value_text(0))
    expect(slow_page.locator("[data-part=cancel]")).to_be_hidden()
    slow.step()
    slow.step()
    slow_page.click("[data-part=retry]")
    expect(slow_page.locator(".status")).to_have_text("succeeded")
    expect(slow_page.locator(VALUE)).to_have_text(value_text(2))


def test_a_lost_connection_is_told_and_found_again(slow: SlowService, slow_page: Page) -> None:
    job = posted(slow.url, None, wait=0)
    positions: list[str | None] = []
    with client_of(slow.url, None).stream("GET", "/v1/events") as stream:
        position = next(line.removeprefix("id: ") for line in stream.iter_lines() if line.startswith("id: "))

    def cut_after_the_first(route: Route) -> None:
        positions.append(route.request.headers.get("last-event-id"))
        if len(positions) == 1:
            route.fulfill(status=200, content_type="text/event-stream", body=f"id: {position}\n\n")
        elif len(positions) == 2:
            route.abort()
        else:
            route.continue_()

    slow_page.route("**/v1/events", cut_after_the_first)
    slow_page.goto(f"/#/jobs/{job}")
    expect(slow_page.locator("[data-part=connection]")).to_contain_text("The connection to the server is lost")
    while len(positions) < 3:  # before the job ends: after that there is nothing to come back for
        slow_page.wait_for_timeout(50)
    slow.step()
    slow.step()
    expect(slow_page.locator(".status")).to_have_text("succeeded")
    expect(slow_page.locator("[data-part=connection]")).to_be_hidden()
    assert positions == [None, position, position]


def test_name_and_tags_can_be_changed(page: Page, service_url: str, key: str) -> None:
    page.goto(f"/#/jobs/{posted(service_url, key, name='before', tags=['one'])}")
    page.get_by_role("button", name="Rename").click()
    page.get_by_role("textbox", name="Name").fill("after")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("after")
    page.get_by_role("button", name="Tags").click()
    page.get_by_label("Separated by commas").fill("two, three")
    page.keyboard.press("Enter")
    expect(page.locator("[data-part=tags] .tag")).to_have_text(["two", "three"])
    page.get_by_role("button", name="Note").click()
    page.get_by_label("For whoever reads this job").fill("with half\nof the memory")
    page.get_by_role("dialog").get_by_role("button", name="Keep").click()
    expect(page.locator("[data-part=job-note]")).to_have_text("with half\nof the memory")
    page.reload()
    expect(page.locator("h1")).to_have_text("after")
    expect(page.locator("[data-part=job-note]")).to_have_text("with half\nof the memory")


def test_delete_asks_first(page: Page, service_url: str, key: str) -> None:
    job = posted(service_url, key, name="short-lived")
    page.goto(f"/#/jobs/{job}")
    page.click("[data-part=delete]")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Delete short-lived?")
    dialog.get_by_role("button", name="Keep").click()
    expect(page.locator("h1")).to_have_text("short-lived")
    page.click("[data-part=delete]")
    dialog.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("No jobs yet")).to_be_visible()


def test_edit_and_solve_again_begins_with_what_was_submitted(page: Page, service_url: str, key: str) -> None:
    problem = uniform(2, 3, budget=6, name="mine")
    job = posted(service_url, key, problem, time_limit_s=17, seed=5, tags=["night", "ci"])
    page.goto(f"/#/jobs/{job}")
    page.get_by_role("link", name="Edit and solve again").click()
    expect(page.locator("#time-limit")).to_have_value("17")
    assert json.loads(page.input_value("#problem")) == problem.to_data()
    expect(page.locator("#seed")).to_have_value("5")
    expect(page.locator("#tags")).to_have_value("night, ci")


def test_an_infeasible_job_offers_the_budgets_that_would_do(slow: SlowService, slow_page: Page) -> None:
    job = posted(slow.url, None, uniform(2, 4, budget=1, name="tight"), wait=0)
    # With budgets that are not those of the worker of this test.
    infeasible = {
        "status": "failed",
        "termination": {"reason": "infeasible", "limit": None},
        "error": "no schedule keeps the budgets.",
        "budgets_bytes": [3, None],
    }
    with client_of(slow.url, None) as client:
        answer = {**client.get(f"/v1/schedules/{job}").json(), **infeasible}
    slow_page.route(f"**/v1/schedules/{job}", lambda route: route.fulfill(json=answer))
    slow_page.goto(f"/#/jobs/{job}")
    slow_page.get_by_role("link", name="Apply the budgets that would do").click()
    expect(slow_page.locator("[data-part=check]")).to_contain_text("Valid: 2 devices")
    written = json.loads(slow_page.input_value("#problem"))
    assert [device["memory_bytes"] for device in written["devices"]] == [3, None]


def test_downloads(page: Page, service_url: str, key: str) -> None:
    page.goto(f"/#/jobs/{posted(service_url, key, name='../my job')}")
    expected = {
        "json": (b'{\n  "format": "optpipe.schedule/1"', "my-job.schedule.json"),
        "chrome-trace": (b"{", "my-job.trace.json"),
        "svg": (b"<?xml", "my-job.svg"),
        "png": (b"\x89PNG", "my-job.png"),
        "torch-csv": (b"0F0,", "my-job.torch.csv"),
    }
    for name, (beginning, filename) in expected.items():
        with page.expect_download(timeout=3 * WAIT_MS) as download:
            page.click(f"[data-part=download-{name}]")
        assert download.value.suggested_filename == filename
        content = download.value.path().read_bytes()
        assert content.startswith(beginning), content[:60]


def test_a_job_that_is_not_there_is_said_to_be(page: Page) -> None:
    page.goto("/#/jobs/00000000-0000-4000-8000-000000000000")
    expect(page.get_by_role("alert")).to_contain_text("There is no such job")
    expect(page.locator("[data-part=value]")).to_be_hidden()
    expect(page.get_by_role("button", name="Delete")).to_be_hidden()


def test_a_page_opened_while_the_server_is_away_finds_the_job_later(page: Page, service_url: str, key: str) -> None:
    job = posted(service_url, key, name="mine")
    page.route(f"**/v1/schedules/{job}", lambda route: route.abort(), times=1)
    page.goto(f"/#/jobs/{job}")
    expect(page.locator("h1")).to_have_text("mine")
    expect(page.locator(VALUE)).to_have_text(value_text(-1))
    expect(page.get_by_text("The server does not answer")).to_be_hidden()


@pytest.mark.parametrize("path", ["", "/schedule"])
def test_a_request_that_fails_after_the_stream_has_opened_is_sent_again(
    page: Page, service_url: str, key: str, path: str
) -> None:
    job = posted(service_url, key, name="mine")
    held: list[Route] = []
    page.route(f"**/v1/schedules/{job}{path}", lambda route: held.append(route), times=1)
    with page.expect_response("**/v1/events"):
        page.goto(f"/#/jobs/{job}")
    while not held:
        page.wait_for_timeout(10)
    held[0].abort()
    expect(page.locator("h1")).to_have_text("mine")
    expect(page.locator("[data-part=found-by]")).to_have_text(re.compile(r"\w"))
    expect(page.get_by_text("The server does not answer")).to_be_hidden()


def test_a_job_that_was_answered_at_once_shows_no_search(page: Page, service_url: str, key: str) -> None:
    posted(service_url, key)
    page.goto(f"/#/jobs/{posted(service_url, key)}")
    expect(page.locator(VALUE)).to_have_text(value_text(-1))
    expect(page.locator("[data-part=elapsed]")).to_contain_text("an equal problem was solved before")
    expect(page.locator(".curve-dot")).to_have_count(1)  # what the one event says
    expect(page.get_by_role("heading", name="Search")).to_be_hidden()
