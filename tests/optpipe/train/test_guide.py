"""docs/train.md names every setting as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from optpipe.train.config.flags import Flag, all_flags

PAGE = (Path(__file__).parents[3] / "docs" / "train.md").read_text()
SETTINGS = PAGE.partition("## All settings")[2]


@pytest.mark.parametrize("flag", list(all_flags()), ids=lambda flag: ".".join(flag.place))
def test_every_setting_is_in_the_table(flag: Flag) -> None:
    table, field = flag.place
    rows = SETTINGS.partition(f"### `[{table}]`" if table else "### Top of the file")[2].partition("\n### ")[0]
    [row] = [row for row in rows.splitlines() if row.startswith("|") and f"| `{field}` |" in row]
    name = "`--solve`, `--online`" if flag.place == ("online", "mode") else f"`{flag.name}`"
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [name, f"`{field}`", flag.setting.text, default_of(flag)]


def default_of(flag: Flag) -> str:
    if flag.default is None or "default:" in flag.setting.text:
        return ""
    if isinstance(flag.default, bool):
        return "yes" if flag.default else "no"
    return str(flag.default)
