"""The page's modules called from Python: `call(page, "units.js", "bytesText", 1024)`."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Page

_CALL = "async ([url, name, args]) => (await import(url))[name](...args)"


def call(page: Page, module: str, name: str, *args: Any) -> Any:
    """Result of a function of a module, as JSON values; `page` shows any view."""
    return page.evaluate(_CALL, [address(page, module), name, json.loads(json.dumps(args))])


def address(page: Page, module: str) -> str:
    """Address of a module of the page, such as ``gantt/labels.js``."""
    icon = page.get_attribute("link[rel=icon]", "href")
    assert icon is not None
    return f"{icon.rpartition('/')[0]}/js/{module}"
