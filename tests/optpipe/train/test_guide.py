"""docs/train.md names every setting as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from optpipe.train.settings import SETTINGS, Setting

PAGE = (Path(__file__).parents[3] / "docs" / "train.md").read_text()
ROWS = PAGE.partition("## All settings")[2]


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.name)
def test_every_setting_is_in_the_table(setting: Setting) -> None:
    table, _, field = setting.name.rpartition(".")
    rows = ROWS.partition(f"### `[{table}]`" if table else "### Top of the file")[2].partition("\n### ")[0]
    [row] = [row for row in rows.splitlines() if row.startswith("|") and f"| `{field}` |" in row]
    name = "`--solve`, `--online`" if setting.name == "online.mode" else f"`{setting.flag}`"
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [name, f"`{field}`", setting.text, default_of(setting)]


def default_of(setting: Setting) -> str:
    if setting.default is None or "default:" in setting.text:
        return ""
    if isinstance(setting.default, bool):
        return "yes" if setting.default else "no"
    return str(setting.default)
