"""What is missing is named, with the extra that brings it."""

from __future__ import annotations

import sys

import pytest

from optpipe import cli
from optpipe.errors import MissingExtraError
from optpipe.extras import needs_extra


def test_a_missing_package_is_named_with_its_extra() -> None:
    message = r"^the service needs not_there, .*'optpipe\[serve\]'\.$"
    with pytest.raises(MissingExtraError, match=message), needs_extra("serve", "the service"):
        import not_there  # type: ignore[import-not-found]  # noqa: F401


def test_other_errors_pass() -> None:
    with pytest.raises(ImportError, match="cannot import name"), needs_extra("serve", "the service"):
        from math import not_there  # type: ignore[attr-defined]  # noqa: F401


def test_the_command_line_ends_with_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "error: the service needs uvicorn, which is not installed. Maybe pip install 'optpipe[serve]'.\n"
    )
