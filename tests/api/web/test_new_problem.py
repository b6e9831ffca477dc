"""The form: presets, the problem as text, faults at their fields, and what is sent in the end."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from httpx import Client
from playwright.sync_api import Page, Route, expect

from solver.solve import solve
from tests.api.harness import PROBLEM, client_of
from tests.browser import COMPILE_MS


@pytest.fixture
def form(page: Page) -> Page:
    page.goto("/#/new")
    return page


@pytest.fixture
def own(service_url: str, key: str) -> Iterator[Client]:
    """A client with the key that the page has."""
    with client_of(service_url, key) as client:
        yield client


def test_a_preset_fills_the_form_and_is_valid(form: Page) -> None:
    form.select_option("#preset", "offload")
    expect(form.locator("#microbatches")).to_have_value("12")
    expect(form.locator("[data-part=check]")).to_have_text("Valid: 4 devices, 4 stages, 12 microbatches, 216 ops.")


def test_faults_stand_at_their_fields(form: Page) -> None:
    expect(form.locator("#preset")).to_have_value("tiny")
    form.fill("#microbatches", "-3")
    form.fill("#time-limit", "soon")
    expect(form.locator("#microbatches-fault")).to_contain_text("Microbatches is -3 but must be")
    expect(form.locator("#time-limit-fault")).to_contain_text("'soon'")
    expect(form.locator("#microbatches")).to_have_attribute("aria-invalid", "true")
    form.fill("#microbatches", "3")
    form.fill("#time-limit", "5")
    expect(form.locator("[data-part=check]")).to_contain_text("Valid: 2 devices")
    expect(form.locator("[aria-invalid]")).to_have_count(0)


def test_a_fault_inside_the_problem_leads_to_its_place(form: Page) -> None:
    data = PROBLEM.to_data()
    data["stages"][1]["forward_us"] = -10
    form.fill("#problem", json.dumps(data))
    form.get_by_role("button", name="/stages/1/forward_us").click()
    selected = "document.activeElement.value.slice(problem.selectionStart, problem.selectionEnd)"
    assert form.evaluate(selected) == "-10"


def test_text_that_is_no_json_says_so(form: Page) -> None:
    form.fill("#problem", '{"format": ')
    expect(form.locator("#problem-fault")).to_contain_text("This is not JSON yet")
    expect(form.locator("[data-part=submit]")).to_be_disabled()


def test_a_field_that_stands_there_twice_is_refused(form: Page) -> None:
    form.fill("#problem", json.dumps(PROBLEM.to_data())[:-1] + ', "microbatches": 5}')
    expect(form.locator("[data-part=check], .fault")).to_contain_text(["twice"])


def test_fields_and_text_are_one_problem(form: Page) -> None:
    form.fill("#problem", json.dumps(PROBLEM.to_data()))
    form.fill("#budget", "20")
    form.fill("#microbatches", "6")
    form.select_option("#objective", "device_span")
    written = json.loads(form.input_value("#problem"))
    assert [device["memory_bytes"] for device in written["devices"]] == [20, 20]
    assert (written["microbatches"], written["objective"]) == (6, "device_span")
    form.fill("#problem", json.dumps({**written, "microbatches": 9, "host_memory_bytes": 100}))
    expect(form.locator("#microbatches")).to_have_value("9")
    form.fill("#offload", "1, none")
    form.fill("#forward", "2 ms, 10us")
    form.fill("#forward", "2, 3 ms")
    form.fill("#offload-time", "4 us")
    written = json.loads(form.input_value("#problem"))
    assert [stage["forward_us"] for stage in written["stages"]] == [2000, 3000]
    assert written["stages"][0]["offload"] == {"bytes": 1, "offload_us": 4, "reload_us": 10}
    assert "offload" not in written["stages"][1]
    assert written["host_memory_bytes"] == 100


def test_other_devices_keep_the_placement_and_what_no_field_shows(form: Page) -> None:
    v_shape = [
        {**PROBLEM.to_data()["stages"][0], "device": d, "forward_us": 10 + k} for k, d in enumerate([0, 1, 1, 0])
    ]
    problem = {**PROBLEM.to_data(), "stages": v_shape, "transfer_us": [1, 2, 3], "source": "kept"}
    form.fill("#problem", json.dumps(problem))
    for count in ("1", "", "3"):
        form.fill("#devices", count)
    written = json.loads(form.input_value("#problem"))
    assert [(stage["device"], stage["forward_us"]) for stage in written["stages"]] == [
        (0, 10), (1, 10), (2, 11), (2, 12), (1, 13), (0, 13),
    ]  # fmt: skip
    assert (written["transfer_us"], written["source"], len(written["devices"])) == ([1, 2, 3, 3, 3], "kept", 3)
    expect(form.locator("[data-part=check]")).to_contain_text("Valid: 3 devices, 6 stages")
    form.fill("#devices", "2")
    assert json.loads(form.input_value("#problem"))["stages"] == v_shape


def test_sliders_redraw_a_published_schedule_at_once(form: Page) -> None:
    form.fill("#problem", json.dumps(PROBLEM.to_data()))
    figures = form.locator("[data-part=preview-figures]")
    expect(figures).to_contain_text("131.0\u00a0µs, proved optimal", timeout=COMPILE_MS)
    expect(form.locator("figure[data-magnification]")).to_be_visible()
    form.locator("[data-part=forward-slider]").fill("1")  # a unit of the slider is a doubling
    expect(form.locator("#forward")).to_have_value(str(2 * PROBLEM.stages[0].forward_us))
    expect(figures).not_to_contain_text("131.0")
    written = json.loads(form.input_value("#problem"))
    assert [stage["forward_us"] for stage in written["stages"]] == [2 * stage.forward_us for stage in PROBLEM.stages]
    form.locator("[data-part=forward-slider]").fill("0")
    expect(figures).to_contain_text("131.0\u00a0µs")
    form.select_option("#preview-method", "1f1b")
    expect(figures).to_contain_text("1f1b: 154.0\u00a0µs, at most")
    form.locator("[data-part=microbatch-slider]").fill("7")
    expect(form.locator("#microbatches")).to_have_value("7")
    expect(form.locator("[data-part=check]")).to_contain_text("7 microbatches")
    expect(figures).to_contain_text("1f1b: 2")
    form.fill("#budget", "1")
    expect(figures).to_contain_text("No published schedule keeps these budgets")
    expect(form.locator("[data-part=preview-chart]")).to_be_hidden()


def test_the_factors_of_microbatches_repeat_where_there_are_more(form: Page) -> None:
    factors = [{"time": 1}, {"time": 2}]
    form.fill("#problem", json.dumps({**PROBLEM.to_data(), "microbatches": 2, "microbatch_factors": factors}))
    form.locator("[data-part=microbatch-slider]").fill("5")
    written = json.loads(form.input_value("#problem"))
    assert written["microbatch_factors"] == [*factors, *factors, factors[0]]
    expect(form.locator("[data-part=check]")).to_contain_text("Valid: 2 devices, 2 stages, 5 microbatches")
    form.fill("#microbatches", "1")
    assert json.loads(form.input_value("#problem"))["microbatch_factors"] == factors[:1]


def test_a_value_that_is_none_says_so(form: Page) -> None:
    form.fill("#problem", json.dumps(PROBLEM.to_data()))
    form.fill("#transfer", "twice")
    expect(form.locator("#transfer-fault")).to_have_text('"twice" is no time. Maybe 1.2 ms.')
    form.click("[data-part=submit]")
    expect(form.locator("#transfer")).to_be_focused()
    form.fill("#forward", "1, 2, 3")
    expect(form.locator("#forward-fault")).to_contain_text("3 values for 2 places")


def test_a_schedule_file_brings_its_problem(form: Page) -> None:
    content = solve(PROBLEM, "1f1b").to_json().encode()
    form.set_input_files(
        "[data-part=file]", {"name": "schedule.json", "mimeType": "application/json", "buffer": content}
    )
    expect(form.locator("[data-part=check]")).to_contain_text("Valid: 2 devices, 2 stages")


def test_what_is_submitted(form: Page, own: Client) -> None:
    form.fill("#problem", json.dumps(PROBLEM.to_data()))
    for field, text in (("#name", "nightly"), ("#tags", "ci, night "), ("#time-limit", "7.5")):
        form.fill(field, text)
    form.select_option("#method", "search")
    with form.expect_request(
        lambda request: request.method == "POST" and request.url.endswith("/v1/schedules")
    ) as sent:
        form.click("[data-part=submit]")
    assert sent.value.headers["idempotency-key"]
    assert sent.value.post_data_json["config"] == {
        "method": "search",
        "time_limit_s": 7.5,
        "gap": 0,
        "workers": 1,
        "seed": 0,
        "priority": 0,
        "name": "nightly",
        "tags": ["ci", "night"],
    }
    expect(form.locator("h1")).to_have_text("nightly")
    (job,) = own.get("/v1/schedules").json()["jobs"]
    assert form.url.endswith(f"#/jobs/{job['id']}")


def test_the_first_preset_is_not_put_where_somebody_types(page: Page) -> None:
    """It may come between the focus and the first key, or what is pasted."""
    waiting: list[Route] = []
    page.route("**/v1/demo-data/*", lambda route: waiting.append(route))
    with page.expect_request("**/v1/demo-data/*"):
        page.goto("/#/new")
    page.focus("#problem")
    with page.expect_event("requestfinished"):
        waiting.pop().continue_()
    page.evaluate("() => new Promise((done) => setTimeout(done, 100))")  # it has been read
    page.keyboard.insert_text(json.dumps(PROBLEM.to_data()))
    expect(page.locator("#problem")).to_have_value(json.dumps(PROBLEM.to_data()))
    expect(page.locator("[data-part=submit]")).to_be_enabled()


def test_an_answer_that_was_lost_makes_no_second_job(form: Page, own: Client) -> None:
    form.fill("#problem", json.dumps(PROBLEM.to_data()))
    answers = iter(["lost"])

    def lose_the_first(route: Route) -> None:
        response = route.fetch()
        if next(answers, None):
            route.abort()
        else:
            route.fulfill(response=response)

    form.route("**/v1/schedules", lose_the_first)
    form.click("[data-part=submit]")
    expect(form.locator("[data-part=check]")).to_contain_text("does not answer")
    form.click("[data-part=submit]")
    expect(form.locator("h1")).to_have_text("two devices")
    assert len(own.get("/v1/schedules").json()["jobs"]) == 1
