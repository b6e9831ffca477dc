"""Measurements are put between their marks, and nothing else of a document changes."""

from __future__ import annotations

import pytest

from benchmarks.marks import between, marked, replaced

DOCUMENT = f"before\n{marked('one', 'old')}\nbetween\n{marked('two', 'kept')}\nbehind\n"


def test_only_what_is_between_the_marks_is_replaced() -> None:
    changed = replaced(DOCUMENT, "one", "new\nlines | and $\\1")
    assert between(changed, "one") == "new\nlines | and $\\1"
    assert between(changed, "two") == "kept"
    assert replaced(changed, "one", "old") == DOCUMENT


def test_a_document_without_marks_is_refused() -> None:
    assert between(DOCUMENT, "three") is None
    with pytest.raises(ValueError, match="three: measured"):
        replaced(DOCUMENT, "three", "new")
