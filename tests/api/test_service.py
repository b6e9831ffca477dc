"""Texts that are remembered: those used last, within their bytes."""

from __future__ import annotations

from api.service import RecentTexts


def test_those_used_longest_ago_are_forgotten() -> None:
    recent = RecentTexts(10)
    for key in "abc":
        recent.put(key, key * 3)
    assert recent.get("a") == "aaa"
    recent.put("d", "dd")  # with the others 11
    assert [recent.get(key) for key in "abcd"] == ["aaa", None, "ccc", "dd"]
    recent.put("a", "a")
    recent.put("e", "eeee")
    assert [recent.get(key) for key in "acde"] == ["a", "ccc", "dd", "eeee"]


def test_one_that_is_too_long_is_not_remembered() -> None:
    recent = RecentTexts(10)
    recent.put("a", "a" * 11)
    assert recent.get("a") is None
    recent.put("b", "b" * 10)
    assert recent.get("b") == "b" * 10
