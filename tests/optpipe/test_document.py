"""Strict JSON: what is refused, and how it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from optpipe.document import MAX_DEPTH, MOST_ISSUES, parse_json, read_bounded
from optpipe.errors import InputError
from optpipe.problem import Problem


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "bad_json"),
        ("nope", "bad_json"),
        ('{"a": NaN}', "not_finite"),
        ('{"a": -Infinity}', "not_finite"),
        ('{"a": 1e400}', "not_finite"),
        ('{"a": 12.5E+0400}', "not_finite"),
        ('{"a": ' + "1" * 350 + ".0}", "not_finite"),
        ('{"a": ' + "1" * 10_000 + "}", "too_long"),
        ('{"a": 0.' + "1" * 10_000 + "}", "too_long"),
        ('{"a": 1, "a": 2}', "duplicate_key"),
        ('{"a": "\\ud800"}', "bad_text"),
        ('{"\\ud800": 1}', "bad_text"),
        ('{"\\u0061": 1, "a": 2}', "duplicate_key"),
        (b"\xff\xfe", "bad_utf8"),
        ("[" * 100_000, "too_deep"),
        ('{"a":' * 100_000, "too_deep"),
    ],
)
def test_refuses(text: str | bytes, code: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_json(text, "some.json")
    assert [issue.code for issue in caught.value.issues] == [code]
    assert caught.value.source == "some.json"


def test_one_key_twice_among_very_many_is_named_without_comparing_each_with_each() -> None:
    text = "{" + ",".join(f'"{k}":1' for k in range(300_000)) + ',"299999":2}'
    with pytest.raises(InputError, match="has the key '299999' twice in one object"):
        parse_json(text)


def test_brackets_within_strings_are_not_nesting() -> None:
    text = '{"a": "' + "[" * 100 + '\\"{"}'
    assert parse_json(text) == {"a": "[" * 100 + '"{'}


def test_nesting_is_allowed_up_to_its_limit() -> None:
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    with pytest.raises(InputError, match=f"deeper than {MAX_DEPTH} levels"):
        parse_json("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))


def test_keeps_the_kind_of_numbers() -> None:
    parsed = parse_json('{"a": 1, "b": 1.0, "c": 1e3}')
    assert [type(value) for value in parsed.values()] == [int, float, float]


def test_reads_files_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    path.write_bytes(b"x" * 11)
    with pytest.raises(InputError, match="has 11 bytes but at most 10 are read"):
        read_bounded(path, 10)
    assert read_bounded(path, 11) == b"x" * 11


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_bounded(tmp_path / "none.json", 10)
    empty = tmp_path / "empty.json"
    empty.touch()
    with pytest.raises(InputError, match="is empty"):
        read_bounded(empty, 10)


def test_a_document_that_is_no_object_is_named() -> None:
    with pytest.raises(InputError, match=r"^the document is \[\]: input should be a valid dictionary\.$"):
        Problem.from_json("[]")
    with pytest.raises(InputError, match=r"^is \[\]: ") as caught:
        Problem.from_json("[]", "a.json")
    assert caught.value.source == "a.json"


def test_of_many_faults_the_first_are_told_and_the_rest_counted() -> None:
    with pytest.raises(InputError) as caught:
        Problem.from_data({f"x{k}": 1 for k in range(1000)})
    assert len(caught.value.issues) == MOST_ISSUES + 1
    assert str(caught.value.issues[-1]) == (
        "and 954 more are wrong. Maybe this is another kind of document."  # four required fields are missing
    )
