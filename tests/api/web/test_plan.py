"""The view of a plan: the front door, a table that fills, one strategy in full, links, faults, and a new question."""

from __future__ import annotations

import json
from pathlib import Path

from playwright.sync_api import Page, expect

from optpipe.cluster.model import named_models

QUESTION = "model=llama-3.1-8b&machine=h100&gpus=8&sequence=4096&batch=16&tp=2&pp=2&limit=4"
CHART = "figure[data-magnification]"


def rows(page: Page) -> list[str]:
    """Names of the strategies in the table."""
    return page.locator("[data-part=strategies] [data-part=open]").all_inner_texts()


def test_from_the_front_door_to_a_schedule(page: Page) -> None:
    page.goto("/")
    expect(page.get_by_role("heading", level=1)).to_have_text("Plan a training run")
    expect(page.locator("nav [aria-current]")).to_have_text("Plan")
    expect(page.locator("#plan-model option", has_text="llama-3.1-405b · 406 B")).to_have_count(1)
    page.select_option("#plan-model", "llama-3.1-8b")
    page.locator("[data-part=gpus-slider]").fill("3")
    page.fill("#plan-sequence", "4096")
    page.fill("#plan-batch", "16")
    page.get_by_text("Fix a part of the strategy").click()
    for name in ("tp", "pp"):
        page.fill(f"#fixed-{name}", "2")
    page.fill("#plan-limit", "4")
    page.get_by_role("button", name="Plan", exact=True).click()
    expect(page.locator("[data-part=count]")).to_contain_text("legal strategies")
    expect(page.locator(CHART)).to_be_visible()
    assert page.url.split("?")[1] == QUESTION
    assert all("tp2" in name and "pp2" in name for name in rows(page))
    expect(page.locator("[data-chosen] .taken")).to_be_visible()
    assert page.locator("[data-part=ranks] .stack").count() == 2

    opener = page.locator("[data-part=strategies] tr:not([data-chosen]) [data-part=open]").first
    name = opener.inner_text()
    opener.focus()
    page.keyboard.press("Enter")
    expect(page.locator("[data-part=opened-title]")).to_have_text(name)
    expect(page.locator("[data-part=opened-title]")).to_be_focused()
    expect(page.locator(f"{CHART}[aria-label='{name}']")).to_be_visible()
    page.reload()  # the address is the link to share
    expect(page.locator("[data-part=opened-title]")).to_have_text(name)
    expect(page.locator("#fixed-tp")).to_have_value("2")


def test_launch_files_are_shown_copied_and_downloaded(page: Page, service_url: str) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=service_url)
    page.goto(f"/#/plan?{QUESTION}")
    expect(page.locator("[data-part=cancel]")).to_be_hidden()
    expect(page.locator("[data-part=launch-of]")).to_contain_text(
        page.locator("tr:has(.taken) [data-part=open]").inner_text()
    )
    trainer = page.get_by_label("Trainer", exact=True)
    trainer.select_option("megatron")
    script = page.get_by_role("region", name="launch.sh")
    expect(script).to_contain_text("--tensor-model-parallel-size 2")
    expect(page.locator("[data-part=lost]")).to_contain_text("model: flags state its shape")
    page.get_by_role("button", name="Copy launch.sh").press("Enter")
    expect(page.get_by_role("button", name="Copy launch.sh")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == script.text_content()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download launch.sh").press("Enter")
    assert download.value.suggested_filename == "launch.sh"
    assert download.value.path().read_text() == script.text_content()
    trainer.select_option("automodel")
    expect(page.get_by_role("region", name="automodel.yaml")).to_be_visible()
    page.get_by_label("Model", exact=True).select_option("qwen3-8b")
    expect(page.locator("tr:has(.taken)")).to_be_visible()
    trainer.select_option("torchtitan")
    expect(page.locator("[data-part=launch-text]")).to_contain_text("of the plan, model is")
    expect(script).to_have_count(0)


def test_a_change_plans_anew(page: Page) -> None:
    page.goto(f"/#/plan?{QUESTION}")
    expect(page.locator("[data-part=strategies] tr").first).to_be_visible()
    before = rows(page)
    page.fill("#fixed-tp", "4")
    expect(page.locator("[data-part=strategies] [data-part=open]").first).to_contain_text("tp4")
    assert rows(page) != before
    assert "tp=4" in page.url
    page.get_by_label("Strategies to show").select_option("beaten")
    expect(page.locator("[data-part=strategies] tr:not([data-end=beaten])")).to_have_count(0)


def test_a_plan_is_cancelled(page: Page) -> None:
    page.goto("/#/plan?model=llama-3.1-70b&machine=h100&gpus=64&sequence=4096&batch=256&pp=4&limit=60")
    expect(page.locator("[data-part=strategies] tr").first).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("[data-part=state]")).to_have_text("Cancelled; this is what was found by then.")
    expect(page.get_by_role("button", name="Cancel")).to_be_hidden()


def test_faults_stand_at_their_fields(page: Page) -> None:
    page.goto("/#/plan?model=llama-3.1-8b&machine=h100&gpus=lots&sequence=4096&batch=16")
    expect(page.locator("#plan-gpus-fault")).to_contain_text("GPUs is 'lots'")
    page.fill("#plan-gpus", "8")
    page.get_by_text("Fix a part of the strategy").click()
    page.fill("#fixed-tp", "two")
    page.get_by_role("button", name="Plan", exact=True).click()
    expect(page.locator("#fixed-tp-fault")).to_contain_text("must be numbers")
    expect(page.locator("#plan-gpus-fault")).to_be_empty()


def test_a_config_json_is_planned_and_its_name_stays_text(page: Page, tmp_path: Path) -> None:
    name = "<img src=x onerror=document.title='owned'>"
    config = tmp_path / "config.json"
    config.write_text(json.dumps(dict(named_models()["llama-3.1-8b"]) | {"_name_or_path": name}))
    page.goto(f"/#/plan?{QUESTION}")
    expect(page.locator("[data-part=strategies] tr").first).to_be_visible()
    page.set_input_files("[data-part=file]", config)
    expect(page.locator("#plan-model option:checked")).to_have_text(name)
    expect(page.locator("[data-part=earlier-plans]")).to_contain_text(name)
    assert "config=" in page.url
    assert page.title() != "owned"
    config.write_text("[]")
    page.set_input_files("[data-part=file]", config)
    expect(page.locator("[data-part=file-message]")).to_contain_text("config.json is none of the files that are known")
    page.get_by_role("button", name="Change as a problem").click()
    expect(page.locator("[data-part=check]")).to_contain_text("Valid: 2 devices")


def test_nothing_fits(page: Page) -> None:
    page.goto("/#/plan?model=llama-3.1-405b&machine=h100&gpus=8&sequence=4096&batch=16&limit=5")
    expect(page.locator("[data-part=state]")).to_contain_text("Nothing fits: the least that is needed is")
    expect(page.locator("[data-part=result]")).to_be_hidden()
