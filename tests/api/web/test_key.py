"""The page asks its user for a key where the server asks for one, and keeps it no longer than the tab."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.api.web.jobs import posted
from tests.browser import open_page


@pytest.fixture
def stranger(browser: Browser, service_url: str) -> Iterator[Page]:
    """A page that knows no key."""
    with open_page(browser, service_url) as page:
        yield page


def test_a_key_is_asked_for_once(stranger: Page, service_url: str, key: str) -> None:
    posted(service_url, key, name="mine")
    stranger.goto("/#/jobs")
    dialog = stranger.get_by_role("dialog")
    expect(dialog).to_contain_text("This server asks for a key")
    dialog.get_by_label("Key").fill("wrong")
    stranger.keyboard.press("Enter")
    expect(dialog).to_contain_text("The key was not accepted")
    dialog.get_by_label("Key").fill(f" {key} ")
    stranger.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(stranger.get_by_role("link", name="mine")).to_be_visible()
    assert stranger.evaluate("() => [Object.values(sessionStorage), Object.values(localStorage)]") == [[key], ["auto"]]
    stranger.reload()
    expect(stranger.get_by_role("link", name="mine")).to_be_visible()


def test_a_key_can_be_forgotten(stranger: Page, key: str) -> None:
    stranger.goto("/#/jobs")
    stranger.get_by_label("Key", exact=True).fill(key)
    stranger.keyboard.press("Enter")
    stranger.get_by_role("button", name="Forget key").click()
    expect(stranger.get_by_role("dialog")).to_contain_text("This server asks for a key")


def test_the_description_of_the_interface_is_asked_for_with_the_key(page: Page) -> None:
    page.goto("/#/jobs")
    with page.expect_download() as downloaded:
        page.get_by_role("link", name="openapi.json").click()
    assert json.loads(downloaded.value.path().read_text())["openapi"] == "3.1.0"


def test_the_command_for_a_terminal_sends_the_key(page: Page, service_url: str, key: str) -> None:
    page.goto(f"/#/jobs/{posted(service_url, key)}")
    command = page.locator("[data-part=command]")
    expect(command).to_contain_text("/schedule")
    shown = ["sh", "-c", f"{command.inner_text()} -sS"]
    answer = subprocess.run(shown, capture_output=True, env=os.environ | {"OPTPIPE_KEY": key}, check=True).stdout
    assert json.loads(answer)["format"] == "optpipe.schedule/1"


def test_without_a_key_the_page_says_why_it_is_empty(stranger: Page) -> None:
    stranger.goto("/#/jobs")
    stranger.get_by_role("button", name="Cancel").click()
    expect(stranger.get_by_role("alert")).to_contain_text("this needs a key")


def test_who_has_no_key_is_asked_once(stranger: Page) -> None:
    stranger.clock.install()
    stranger.goto("/#/jobs")
    stranger.get_by_role("button", name="Cancel").click()
    expect(stranger.get_by_role("alert")).to_contain_text("this needs a key")
    stranger.clock.run_for(60_000)
    expect(stranger.get_by_role("dialog")).to_be_hidden()
