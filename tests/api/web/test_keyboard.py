"""The whole way with the keyboard alone: from the skip link to the ops of a schedule."""

from __future__ import annotations

from playwright.sync_api import Page, expect

MOST_TABS = 60


def tab_to(page: Page, name: str) -> None:
    """Press Tab until the element whose id or data-part is `name` has the focus; it must be seen that it has."""
    focused = "() => { const at = document.activeElement; return [at.id, at.getAttribute('data-part')]; }"
    for _ in range(MOST_TABS):
        page.keyboard.press("Tab")
        if name in page.evaluate(focused):
            outline = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none", f"{name} shows no focus"
            return
    raise AssertionError(f"{MOST_TABS} presses of Tab do not lead to {name}")


def test_from_the_first_key_to_an_op(page: Page) -> None:
    page.goto("/#/new")
    expect(page.locator("#preset option")).not_to_have_count(1)
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#view")).to_be_focused()
    expect(page.get_by_role("heading", level=1)).to_have_text("New problem")
    tab_to(page, "preset")
    page.keyboard.type("tiny")
    expect(page.locator("[data-part=check]")).to_contain_text("Valid: 2 devices")
    tab_to(page, "submit")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_be_focused()
    expect(page.locator("figure[data-magnification='1.000']")).to_be_visible()
    tab_to(page, "surface")
    page.keyboard.press("Shift+ArrowRight")
    live = page.locator("[data-part=live]")
    expect(live).to_contain_text("F 0: forward of microbatch 0; on stage 0")
    page.keyboard.press("Shift+ArrowRight")
    expect(live).to_contain_text("F 1: forward of microbatch 1; on stage 0")
    page.keyboard.press("Shift+ArrowDown")
    expect(live).to_contain_text("on stage 1")
    expect(page.locator("[data-part=tooltip]")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("[data-part=tooltip]")).to_be_hidden()
    tab_to(page, "download-json")
