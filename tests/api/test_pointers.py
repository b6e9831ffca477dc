"""Paths of errors as JSON pointers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.pointers import json_pointer

BODY = {"problem": {"stages": [{"a.b": 1, "a": {"b": 2}, "x[0]": 3, "s/t~u": 4, "": 5}]}}


@pytest.mark.parametrize(
    ("path", "pointer"),
    [
        ("", ""),
        ("problem.stages[0].a", "/problem/stages/0/a"),
        ("problem.stages[0].a.b", "/problem/stages/0/a.b"),
        ("problem.stages[0].x[0]", "/problem/stages/0/x[0]"),
        ("problem.stages[0].s/t~u", "/problem/stages/0/s~1t~0u"),
        ("problem.stages[0].missing", "/problem/stages/0/missing"),
        ("problem.microbatches", "/problem/microbatches"),
        ("config.tags[3]", "/config/tags/3"),
    ],
)
def test_known_places(path: str, pointer: str) -> None:
    assert json_pointer(path, BODY) == pointer


def test_without_a_document_names_end_at_dots_and_brackets() -> None:
    assert json_pointer("stages[3].offload.bytes", None) == "/stages/3/offload/bytes"


@given(st.dictionaries(st.text(min_size=1), st.integers(), min_size=1))
def test_a_key_of_any_name_is_found(body: dict[str, Any]) -> None:
    for key in body:
        pointer = json_pointer(key, body)
        assert pointer.startswith("/")
        assert pointer[1:].replace("~1", "/").replace("~0", "~") in body


@given(st.text(), st.recursive(st.integers(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_any_path_ends(path: str, body: Any) -> None:
    assert json_pointer(path, body).count("/") >= (1 if path else 0)
