"""TOML files: what is refused, and how it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from optpipe.errors import InputError
from optpipe.toml_file import read_toml

LIMIT_BYTES = 100_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"steps = ", "is not TOML: Invalid value (at end of document)."),
        (b"\xff", "is not TOML: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte."),
        (b"a = " + b"[" * 30_000, "nests too deeply, or has a number of thousands of digits. Maybe this is another"),
        (b"a = " + b"1" * 5_000, "nests too deeply, or has a number of thousands of digits. Maybe this is another"),
        (b" ", "is empty."),
        (b"a" * (LIMIT_BYTES + 1), "has 100,001 bytes but at most 100,000 are read."),
    ],
)
def test_refused_with_its_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_toml(path, LIMIT_BYTES)
    assert message in str(caught.value)
    assert caught.value.source == str(path)


@pytest.mark.parametrize(("name", "said"), [("a.json", True), ("a.toml", False)])
def test_who_gave_json_is_told_where_it_belongs(tmp_path: Path, name: str, said: bool) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(InputError) as caught:
        read_toml(tmp_path / name, LIMIT_BYTES, "Maybe another option takes it.")
    assert str(caught.value).endswith("Maybe another option takes it.") is said
