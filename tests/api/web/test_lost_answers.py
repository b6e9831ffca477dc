"""Answers that are lost, late or overtaken: in whatever order the network delivers them, the page is right."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from playwright.sync_api import APIResponse, Page, Route, expect

from solver.solve import solve
from tests.api.harness import PROBLEM, client_of
from tests.api.web.conftest import SlowService
from tests.api.web.jobs import posted
from tests.browser import COMPILE_MS

COMPARED = {
    "methods": [{"method": "1f1b", "summary": "", "why_not": None, "schedule": solve(PROBLEM, "1f1b").to_data()}]
}
"""An answer that takes no processes and no compiled kernels to make."""
NAMES = "[data-part=jobs] [data-part=name]"
STATUS = "[data-part=jobs] .status"

NO_CALM_RELOAD = """
  const timeout = window.setTimeout;
  window.setTimeout = (work, ms, ...rest) => (ms >= 30_000 ? 0 : timeout(work, ms, ...rest));
"""
"""Without the reload of every thirty seconds, which mends everything in the end."""


def wait_until(page: Page, condition: Callable[[], bool]) -> None:
    until = time.monotonic() + COMPILE_MS / 1000
    while not condition():
        assert time.monotonic() < until
        page.wait_for_timeout(10)


class Held:
    """Holds the answers of the requests that a pattern names, from the first one on until `release`."""

    def __init__(self, page: Page, pattern: str, times: int = 1, method: str = "GET") -> None:
        self.page, self.method = page, method
        self.answers: list[tuple[Route, APIResponse]] = []
        page.route(pattern, self._hold, times=times)

    def _hold(self, route: Route) -> None:
        if route.request.method == self.method:
            self.answers.append((route, route.fetch(timeout=COMPILE_MS)))
        else:
            route.continue_()

    def wait(self) -> None:
        """Until the server has answered one of them."""
        wait_until(self.page, lambda: bool(self.answers))

    def release(self) -> None:
        """Let the page have them."""
        for route, answer in self.answers:
            route.fulfill(response=answer)


def test_an_event_while_the_list_is_read_is_not_lost(slow: SlowService, slow_page: Page) -> None:
    slow_page.add_init_script(NO_CALM_RELOAD)
    job = posted(slow.url, None, wait=0)
    slow_page.goto("/#/jobs")
    expect(slow_page.locator(STATUS)).to_have_text("running")
    held = Held(slow_page, "**/v1/schedules?*")
    slow.step()
    held.wait()
    slow.step()
    with client_of(slow.url, None) as client:
        assert client.get(f"/v1/schedules/{job}", params={"wait": 50}).json()["status"] == "succeeded"
    slow_page.wait_for_timeout(1000)  # for the events, which otherwise find the list read
    held.release()
    expect(slow_page.locator(STATUS)).to_have_text("succeeded")


def test_the_list_is_asked_for_again_where_it_did_not_come(page: Page, service_url: str, key: str) -> None:
    page.add_init_script(NO_CALM_RELOAD)
    posted(service_url, key, name="mine")
    page.route("**/v1/schedules?*", lambda route: route.abort(), times=2)  # at the start and when the stream opens
    page.goto("/#/jobs")
    expect(page.locator(NAMES)).to_have_text(["mine"])
    expect(page.get_by_text("The server does not answer")).to_be_hidden()


def test_events_that_overtake_the_answer_to_a_change_count(slow: SlowService, slow_page: Page) -> None:
    job = posted(slow.url, None, wait=0)
    slow_page.goto(f"/#/jobs/{job}")
    expect(slow_page.locator(".status")).to_have_text("running")
    held = Held(slow_page, f"**/v1/schedules/{job}", times=1000, method="PATCH")
    slow_page.get_by_role("button", name="Rename").click()
    slow_page.get_by_role("textbox", name="Name").fill("renamed")
    slow_page.keyboard.press("Enter")
    held.wait()
    slow.step()
    slow.step()
    expect(slow_page.locator(".status")).to_have_text("succeeded")
    held.release()
    expect(slow_page.locator("h1")).to_have_text("renamed")
    expect(slow_page.locator(".status")).to_have_text("succeeded")
    expect(slow_page.get_by_role("button", name="Solve again")).to_be_visible()


@pytest.mark.parametrize(("path", "microbatches"), [("", 11), ("/schedule", 12), ("/events", 13)])
def test_what_is_compared_is_asked_for_again(
    page: Page, service_url: str, key: str, path: str, microbatches: int
) -> None:
    problem = PROBLEM.model_copy(update={"microbatches": microbatches})  # one that no other test has had solved
    jobs = [posted(service_url, key, problem) for _ in range(2)]
    page.route(f"**/v1/schedules/{jobs[0]}{path}", lambda route: route.abort(), times=1)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"/#/compare?ids={','.join(jobs)}")
    wait_until(page, lambda: sum(url.endswith(f"{jobs[0]}{path}") for url in asked) == 2)
    expect(page.locator("[data-part=rows] tr")).to_have_count(2)
    expect(page.get_by_text("The server does not answer")).to_be_hidden()


def test_presets_and_checks_are_asked_for_again(page: Page) -> None:
    page.route("**/v1/compare?*", lambda route: route.fulfill(json=COMPARED))
    patterns = ("**/v1/demo-data", "**/v1/demo-data/offload", "**/v1/schedules?operation=validate", "**/v1/compare?*")
    for pattern in patterns:
        page.route(pattern, lambda route: route.abort(), times=1)
    page.goto("/#/new")
    page.select_option("#preset", "offload")
    expect(page.locator("[data-part=check]")).to_contain_text("Valid: 4 devices")
    expect(page.locator("[data-part=preview-figures]")).to_contain_text("1f1b: ")


def test_what_is_chosen_last_is_shown(page: Page) -> None:
    page.goto("/#/new")
    expect(page.locator("#preset option")).not_to_have_count(1)
    held = Held(page, "**/v1/demo-data/tiny")
    page.select_option("#preset", "tiny")
    held.wait()
    page.select_option("#preset", "offload")
    expect(page.locator("[data-part=check]")).to_contain_text("Valid: 4 devices")
    held.release()
    page.wait_for_timeout(300)
    assert len(json.loads(page.input_value("#problem"))["devices"]) == 4
    expect(page.locator("#preset")).to_have_value("offload")


def test_typed_text_is_not_replaced_by_a_preset_that_comes_late(page: Page) -> None:
    page.goto("/#/new")
    expect(page.locator("#preset option")).not_to_have_count(1)
    held = Held(page, "**/v1/demo-data/offload")
    page.select_option("#preset", "offload")
    held.wait()
    page.fill("#problem", json.dumps(PROBLEM.to_data()))
    held.release()
    expect(page.locator("[data-part=check]")).to_contain_text("Valid: 2 devices")
    page.wait_for_timeout(300)
    assert json.loads(page.input_value("#problem")) == PROBLEM.to_data()


def test_no_schedule_is_drawn_of_a_problem_that_is_gone(page: Page) -> None:
    held: list[Route] = []
    page.route("**/v1/compare?*", lambda route: held.append(route), times=1)
    page.goto("/#/new")
    page.fill("#problem", json.dumps(PROBLEM.to_data()))
    wait_until(page, lambda: bool(held))
    page.fill("#problem", "{")
    expect(page.locator("#problem-fault")).to_contain_text("This is not JSON yet")
    held[0].fulfill(json=COMPARED)
    page.wait_for_timeout(300)
    expect(page.locator("[data-part=preview]")).to_be_hidden()
