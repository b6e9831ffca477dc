"""The page's modules called from Python: `call(page, "units.js", "bytesText", 1024)`."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Page

_CALL = """async ([path, name, args]) => {
  const folder = document.querySelector('link[rel=icon]').getAttribute('href').replace(/[^/]*$/, '');
  const module = await import(`${folder}js/${path}`);
  return module[name](...args);
}"""


def call(page: Page, module: str, name: str, *args: Any) -> Any:
    """What a function of a module answers, as JSON values; `page` shows any view."""
    return page.evaluate(_CALL, [module, name, json.loads(json.dumps(args))])
