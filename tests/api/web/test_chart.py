"""The chart: by pointer, wheel, touch and keys; all of it reachable; its labels, search and descriptions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from matplotlib.colors import to_rgb
from playwright.sync_api import Browser, Locator, Page, expect

from instances import uniform
from optpipe.kinds import KIND
from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.problem import Problem
from solver.build import build_schedule
from tests.api.web.jobs import posted
from tests.browser import open_page
from tests.recomputing import one_f_one_b, ops, recomputing

PROBLEM = uniform(4, 8, name="four devices")


@pytest.fixture
def surface(page: Page, service_url: str, key: str) -> Locator:
    return opened(page, posted(service_url, key, PROBLEM))


def opened(page: Page, job: str) -> Locator:
    page.goto(f"/#/jobs/{job}")
    expect(page.locator("figure[data-magnification='1.000']")).to_be_visible()
    return page.locator("[data-part=surface]")


def magnification(page: Page) -> float:
    page.evaluate("() => new Promise(requestAnimationFrame)")
    return float(page.get_attribute("figure", "data-magnification") or 0)


def picture(page: Page) -> str:
    """Picture on the canvas, as a data URL."""
    page.evaluate("() => new Promise(requestAnimationFrame)")
    return str(page.locator("[data-part=base]").evaluate("canvas => canvas.toDataURL()"))


def test_ops_are_drawn_in_their_colours(page: Page, surface: Locator) -> None:
    count = """canvas => {
      const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      const counts = {};
      for (let i = 0; i < data.length; i += 4) {
        const colour = `${data[i]} ${data[i + 1]} ${data[i + 2]}`;
        counts[colour] = (counts[colour] ?? 0) + 1;
      }
      return counts;
    }"""
    pixels = page.locator("[data-part=base]").evaluate(count)
    forward, backward, weight = (pixels.get(colour, 0) for colour in ("0 114 178", "230 159 0", "0 158 115"))
    # Every F, B and W takes 10 us here; numbers cover a part of each.
    assert forward > 10_000
    assert backward == pytest.approx(forward, rel=0.1)
    assert weight == pytest.approx(forward, rel=0.1)


def test_keys_zoom_move_and_fit(page: Page, surface: Locator) -> None:
    whole = picture(page)
    surface.focus()
    page.keyboard.press("+")
    page.keyboard.press("+")
    assert magnification(page) == pytest.approx(2.25)
    middle = picture(page)
    assert middle != whole
    page.keyboard.press("ArrowLeft")
    assert picture(page) != middle
    page.keyboard.press("-")
    assert magnification(page) == pytest.approx(1.5)
    page.keyboard.press("0")
    assert magnification(page) == 1
    assert picture(page) == whole


def test_the_wheel_scrolls_the_page_until_the_chart_has_the_focus(page: Page, surface: Locator) -> None:
    surface.hover()
    page.mouse.wheel(0, -300)
    assert magnification(page) == 1
    surface.click()
    page.mouse.wheel(0, -300)
    expect(page.locator("figure[data-magnification='1.000']")).to_have_count(0)
    zoomed = magnification(page)
    assert zoomed > 1
    page.mouse.wheel(0, 300)
    page.wait_for_function("Number(document.querySelector('figure').dataset.magnification) === 1")


def test_dragging_moves(page: Page, surface: Locator) -> None:
    page.get_by_role("button", name="Zoom in").click()
    before = picture(page)
    box = surface.bounding_box()
    assert box
    x, y = box["x"] + box["width"] / 2, box["y"] + 60
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 120, y, steps=4)
    page.mouse.up()
    assert picture(page) != before
    page.mouse.move(x, y, steps=2)
    assert magnification(page) == pytest.approx(1.5)


def test_pointing_at_an_op_tells_about_it(page: Page, surface: Locator) -> None:
    box = surface.bounding_box()
    assert box
    page.mouse.move(box["x"] + 130, box["y"] + 46)
    tooltip = page.locator("[data-part=tooltip]")
    expect(tooltip).to_contain_text("F 0: forward of microbatch 0")
    expect(tooltip).to_contain_text("stage 0, device 0")
    expect(tooltip).to_contain_text("10.00\u00a0µs")
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    expect(tooltip).to_be_hidden()


def test_the_halves_of_a_block_are_ops_of_their_own(page: Page, service_url: str, key: str) -> None:
    """F0.1 above BW0.0, on one device."""
    overlaps = [{"forward_stage": 0, "backward_stage": 0, "us": 35}]
    problem = Problem.from_data(uniform(1, 2).to_data() | {"overlaps": overlaps})
    orders = Orders([DeviceOrders(ops("F0.0 F0.1 BW0.0 BW0.1"))], blocks={Op("F", 0, 1): Op("BW", 0, 0)})
    schedule = build_schedule(problem, orders, 0.0, "blocks", 0.0)
    page.route("**/schedule", lambda route: route.fulfill(json=schedule.to_data()))
    surface = opened(page, posted(service_url, key))
    box = surface.bounding_box()
    assert box
    tooltip = page.locator("[data-part=tooltip]")
    for down, name, other in ((4, "F 1: forward", "BW0.0"), (26, "BW 0: backward, fused", "F0.1")):
        page.mouse.move(box["x"] + 124 + 0.35 * (box["width"] - 124 - 168), box["y"] + 26 + 8 + down)
        expect(tooltip).to_contain_text(name)
        expect(tooltip).to_contain_text(f"in a block with{other}")


def test_a_pinch_zooms(browser: Browser, service_url: str, key: str) -> None:
    job = posted(service_url, key, PROBLEM)
    with open_page(browser, service_url, key, has_touch=True, viewport={"width": 390, "height": 844}) as page:
        surface = opened(page, job)
        surface.scroll_into_view_if_needed()
        box = surface.bounding_box()
        assert box
        fingers = page.context.new_cdp_session(page)
        x, y = box["x"] + 200, box["y"] + 80

        def touch(kind: str, *xs: float) -> None:
            points = [{"x": finger, "y": y, "id": number} for number, finger in enumerate(xs)]
            fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        touch("touchStart", x - 20)
        touch("touchStart", x - 20, x + 20)
        for spread in (40, 60, 80):
            touch("touchMove", x - spread, x + spread)
        touch("touchEnd")
        page.wait_for_function("Number(document.querySelector('figure').dataset.magnification) > 2")


def test_the_table_says_what_the_chart_shows(page: Page, surface: Locator) -> None:
    page.get_by_text("The chart as a table").click()
    rows = page.locator("[data-part=table] tr")
    expect(rows).to_have_count(4)
    expect(rows.first).to_contain_text("device 0")
    times = [f"{time}\u00a0µs" for time in ("240.0", "33.00", "0", "0")]  # busy, idle before, within, after
    expect(rows.last.locator("td")).to_have_text(["3", "24", *times, "8\u00a0B", "8\u00a0B", "no limit"])


def test_memory_can_be_left_out(page: Page, surface: Locator) -> None:
    expect(page.locator(".chart .legend")).to_contain_text("idle before + within + after")
    expect(page.locator(".chart .legend")).to_contain_text("memory")
    before = surface.bounding_box()
    page.get_by_label("Memory", exact=True).uncheck()
    after = surface.bounding_box()
    assert before
    assert after
    assert after["height"] < before["height"]
    expect(page.locator(".chart .legend")).not_to_contain_text("memory")


@pytest.fixture
def dark(browser: Browser, service_url: str, key: str) -> Iterator[Page]:
    with open_page(browser, service_url, key, color_scheme="dark") as page:
        yield page


def test_the_chart_follows_the_theme(dark: Page, service_url: str, key: str) -> None:
    opened(dark, posted(service_url, key, PROBLEM))
    in_the_dark = picture(dark)
    dark.get_by_role("button", name="Theme: auto").click()
    expect(dark.get_by_role("button", name="Theme: light")).to_be_visible()
    assert picture(dark) != in_the_dark
    dark.reload()
    expect(dark.get_by_role("button", name="Theme: light")).to_be_visible()


DRAWN_TEXTS = """
  const draw = CanvasRenderingContext2D.prototype.fillText;
  window.drawnTexts = [];
  CanvasRenderingContext2D.prototype.fillText = function (text, x, ...rest) {
    window.drawnTexts.push([text, x]);
    draw.call(this, text, x, ...rest);
  };
"""


def named(problem: Problem, names: list[str]) -> Problem:
    devices = [device.model_copy(update={"name": name}) for device, name in zip(problem.devices, names, strict=True)]
    return problem.model_copy(update={"devices": devices})


@pytest.mark.parametrize(
    "names", [["", "", "", ""], [f"node-17.rack-4.example.org:gpu{number}" for number in range(4)]], ids=["own", "long"]
)
def test_labels_of_devices_differ_on_a_phone(browser: Browser, service_url: str, key: str, names: list[str]) -> None:
    job = posted(service_url, key, named(PROBLEM, names))
    with open_page(browser, service_url, key, has_touch=True, viewport={"width": 390, "height": 844}) as page:
        page.add_init_script(DRAWN_TEXTS)
        opened(page, job)
        labels = page.evaluate("() => [...new Set(drawnTexts.filter(([, x]) => x < 58).map(([text]) => text))]")
        expect(page.locator(".chart .legend")).not_to_contain_text("before")  # idle times stand in the table alone
        expect(page.get_by_text("pinch to zoom")).to_be_visible()
    labels = [label for label in labels if label != "µs"]
    assert len(labels) == 4, labels
    assert sorted(label[-1] for label in labels) == ["0", "1", "2", "3"]


def test_the_headline_says_whose_bubble_it_is(page: Page, service_url: str, key: str) -> None:
    stages = PROBLEM.stages
    slow = stages[1].model_copy(update={"forward_us": 25.0})
    uneven = PROBLEM.model_copy(update={"stages": [stages[0], slow, *stages[2:]], "name": "uneven"})
    opened(page, posted(service_url, key, uneven))
    expect(page.locator("[data-part=bubble-of]")).to_have_text("bubble of device 1, the busiest")
    opened(page, posted(service_url, key, PROBLEM))
    expect(page.locator("[data-part=bubble-of]")).to_have_text("bubble of every device")


@pytest.fixture
def many_devices(page: Page, service_url: str, key: str) -> Page:
    opened(page, posted(service_url, key, uniform(32, 8, name="many devices")))
    return page


def scroll_top(page: Page) -> float:
    return float(page.locator("[data-part=surface]").evaluate("surface => surface.scrollTop"))


def test_devices_out_of_sight_are_told_and_reachable(many_devices: Page) -> None:
    page = many_devices
    clipped = page.locator("[data-part=clipped]")
    expect(clipped).to_contain_text("of 32 devices")
    minimap = page.locator("[data-part=minimap]")
    minimap.scroll_into_view_if_needed()
    box = minimap.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 1, steps=3)
    page.mouse.up()
    expect(clipped).to_contain_text("to device 31 of 32 devices")
    assert scroll_top(page) > 0
    page.get_by_role("button", name="Show all devices").click()
    expect(clipped).to_be_hidden()
    page.get_by_role("button", name="Taller rows").click()
    page.get_by_role("button", name="Taller rows").click()
    expect(clipped).to_be_visible()
    page.locator("[data-part=surface]").focus()
    page.keyboard.press("0")
    expect(clipped).to_be_hidden()


def test_the_minimap_moves_the_time(many_devices: Page) -> None:
    page = many_devices
    page.get_by_role("button", name="Zoom in").click(click_count=2)
    whole = picture(page)
    page.locator("[data-part=minimap]").click(position={"x": 3, "y": 3})
    assert picture(page) != whole
    assert magnification(page) == pytest.approx(2.25)


def test_full_screen_and_back(many_devices: Page) -> None:
    page = many_devices
    button = page.get_by_role("button", name="Full screen")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    filled = page.locator("figure.chart").bounding_box()
    assert filled
    window = page.evaluate("() => [innerWidth, innerHeight]")
    assert [filled["width"], filled["height"]] == window
    button.click()
    expect(button).to_have_attribute("aria-pressed", "false")
    page.locator("[data-part=surface]").focus()
    page.keyboard.press("f")
    expect(button).to_have_attribute("aria-pressed", "true")


def test_an_op_is_found_by_its_name(many_devices: Page) -> None:
    page = many_devices
    search = page.get_by_label("Find an op")
    page.locator("[data-part=surface]").focus()
    page.keyboard.press("/")
    expect(search).to_be_focused()
    page.keyboard.type("f 30 5")
    page.keyboard.press("Enter")
    expect(page.locator("[data-part=tooltip]")).to_contain_text("F 5: forward of microbatch 5")
    expect(page.locator("[data-part=tooltip]")).to_contain_text("stage 30, device 30")
    assert scroll_top(page) > 0
    search.fill("F99.0")
    page.keyboard.press("Enter")
    expect(page.locator("[data-part=note]")).to_contain_text("There is no op F99.0")


def test_the_critical_path_and_dependencies_are_drawn(page: Page, surface: Locator) -> None:
    overlay = "() => document.querySelector('[data-part=overlay]').toDataURL()"
    frame = "() => new Promise(requestAnimationFrame)"
    plain = page.evaluate(overlay)
    page.get_by_label("Critical path").check()
    expect(page.locator("[data-part=note]")).to_contain_text("Critical path: ")
    page.evaluate(frame)
    with_path = page.evaluate(overlay)
    assert with_path != plain
    page.get_by_label("Find an op").fill("B2.1")
    page.keyboard.press("Enter")
    expect(page.locator("[data-part=tooltip]")).to_contain_text("starts after")
    page.evaluate(frame)
    assert page.evaluate(overlay) != with_path


def test_without_an_analysis_the_ops_are_drawn(page: Page, service_url: str, key: str) -> None:
    page.add_init_script("const timeout = setTimeout; window.setTimeout = (work, ms) => timeout(work, ms / 10)")
    page.route("**/v1/analyze", lambda route: route.abort())
    opened(page, posted(service_url, key, PROBLEM))
    missing = "Memory, idle times and causes are missing. The server does not answer."
    expect(page.locator("[data-part=note]")).to_contain_text(missing)
    page.get_by_label("Find an op").fill("F0.1")
    page.keyboard.press("Enter")
    expect(page.locator("[data-part=tooltip]")).not_to_contain_text("memory in it")
    page.unroute("**/v1/analyze")
    expect(page.locator("[data-part=tooltip]")).to_contain_text("memory in it4\u00a0B")


def test_a_link_opens_the_same_part(page: Page, surface: Locator) -> None:
    page.get_by_role("button", name="Zoom in").click(click_count=2)
    page.get_by_label("Find an op").fill("W1.3")
    page.keyboard.press("Enter")
    page.get_by_label("Critical path").check()
    page.get_by_role("button", name="Link").click()
    expect(page.locator("[data-part=note]")).to_contain_text("ink")
    zoomed = page.get_attribute("figure", "data-magnification")
    page.reload()
    expect(page.locator(f"figure[data-magnification='{zoomed}']")).to_be_visible()
    expect(page.locator("[data-part=tooltip]")).to_contain_text("W 3: backward weight of microbatch 3")
    expect(page.get_by_label("Critical path")).to_be_checked()


def test_activation_modes_are_drawn_and_named(page: Page, service_url: str, key: str) -> None:
    """The schedule of a job with modes, in the place of the one that the service found."""
    problem = recomputing(2, 4)
    orders = one_f_one_b(problem, lambda s, i: ("C BW", "CBW", "B W", "CB W")[i])
    schedule = build_schedule(problem, orders, 0.0, "1f1b", 0.0)
    page.route("**/schedule?*", lambda route: route.fulfill(json=schedule.to_data()))
    page.route("**/schedule", lambda route: route.fulfill(json=schedule.to_data()))
    opened(page, posted(service_url, key))
    legend = page.locator("[data-part=chart] [data-part=legend]")
    for text in ("C recompute ahead", "CB recompute and backward input", "CBW recompute and backward, fused"):
        expect(legend).to_contain_text(text)
    swatch = page.locator(".swatch-op-c").evaluate("swatch => getComputedStyle(swatch).backgroundColor")
    assert swatch == f"rgb{tuple(round(255 * share) for share in to_rgb(KIND['C'].colour))}"
    page.get_by_label("Find an op").fill("F0.1")
    page.keyboard.press("Enter")
    expect(page.locator("[data-part=tooltip]")).to_contain_text("activationfull")
    page.get_by_label("Find an op").fill("C0.0")
    page.keyboard.press("Enter")
    expect(page.locator("[data-part=tooltip]")).to_contain_text("C 0: recompute ahead of microbatch 0")
    page.get_by_text("The chart as a table").click()
    expect(page.locator("[data-part=table] tr").first).to_contain_text("3 full, 1 kept")
