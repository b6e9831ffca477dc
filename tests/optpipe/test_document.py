"""Strict JSON: what is refused, and how it is said."""

from __future__ import annotations

import gzip
import json
from codecs import BOM_UTF8
from pathlib import Path

import pytest

from optpipe.document import MAX_DIGITS, MOST_ISSUES, parse_json, read_bounded, read_document, read_toml
from optpipe.document_kinds import (
    CHROME_TRACE,
    GZIP,
    MEGATRON_LAYOUT,
    SIZE_TABLE,
    TORCH_CSV,
    TRANSFORMERS_CONFIG,
    DocumentKind,
    kind_of_text,
)
from optpipe.errors import InputError
from optpipe.problem import Problem


@pytest.mark.parametrize("as_text", [False, True])
def test_a_packed_file_is_refused_by_name_also_as_a_browser_reads_it(as_text: bool) -> None:
    packed = gzip.compress(b'{"traceEvents": []}')
    given = packed.decode("utf-8", "replace").encode() if as_text else packed
    assert kind_of_text(given) is GZIP


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


def test_nesting_has_a_limit() -> None:
    assert parse_json("[" * 100 + "]" * 100)
    with pytest.raises(InputError, match=r"^the document nests too deeply at line 1, column 202\.$"):
        parse_json("[" * 300 + "]" * 300)


def test_large_integers_and_long_floats_are_read_as_python_does() -> None:
    for text in (str(2**64 + 1), str(-(2**63) - 1), "1" * MAX_DIGITS, "0." + "1" * 400, "1e-400", "1e308", "-0.0"):
        parsed, wanted = parse_json(f"[{text}]")[0], json.loads(text)
        assert (type(parsed), repr(parsed)) == (type(wanted), repr(wanted))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a":\n 1, "a": 2}', "has the key 'a' twice in one object, at line 2, column 9. Maybe one was meant"),
        ("[1,\n NaN]", "contains NaN at line 2, column 2, but every number must be finite. Maybe a measurement"),
        ('{"a": -Infinity}', "contains Infinity at line 1, column 8, but every number must be finite."),
        ("[1, 2", "is not JSON: EOF while parsing a list at line 1, column 5."),
        ("[1,]", "is not JSON: trailing comma at line 1, column 4."),
        ("[" + "9" * 4301 + "]", "contains a number of more than 4300 digits at line 1, column 4303."),
        ('["\\udfff"]', "has a lone surrogate, half of a character, at line 1, column 8."),
        (b'["\xff"]', "is not UTF-8: invalid start byte at position 2."),
        (
            b"\x1f\x8b\x08\x00",
            "is not UTF-8: invalid start byte at position 1. Maybe it is compressed: unpack it first.",
        ),
        ("{}".encode("utf-16"), "is not UTF-8: invalid start byte at position 0. Maybe it is UTF-16, as some shells"),
        ('{"a": 1}'.encode("utf-16-le"), "is not JSON: key must be a string at line 1, column 2. Maybe it is UTF-16"),
        ("[1e400]", "contains 1e400, which is beyond every number. Maybe an exponent is wrong."),
    ],
)
def test_says_what_is_wrong_and_where(text: str | bytes, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_json(text)
    assert f"the document {message}" in str(caught.value)


def test_keeps_the_kind_of_numbers() -> None:
    parsed = parse_json('{"a": 1, "b": 1.0, "c": 1e3}')
    assert [type(value) for value in parsed.values()] == [int, float, float]


def test_reads_files_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    path.write_bytes(b"x" * 11)
    with pytest.raises(InputError, match="has 11 bytes but at most 10 are read"):
        read_bounded(path, 10)
    assert read_bounded(path, 11) == b"x" * 11


def test_the_mark_with_which_editors_begin_utf_8_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "marked.json").write_bytes(BOM_UTF8 + b'{"a": 1}\r\n')
    assert read_document(tmp_path / "marked.json", 100) == {"a": 1}
    (tmp_path / "marked.toml").write_bytes(BOM_UTF8 + b"a = 1\r\n")
    assert read_toml(tmp_path / "marked.toml", 100, SIZE_TABLE) == {"a": 1}


def test_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be read: Is a directory\. Maybe a file in it is meant\."):
        read_bounded(tmp_path, 10)


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_bounded(tmp_path / "none.json", 10)
    empty = tmp_path / "empty.json"
    for content in (b"", BOM_UTF8 + b"\r\n"):
        empty.write_bytes(content)
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
        read_toml(path, LIMIT_BYTES, SIZE_TABLE)
    assert message in str(caught.value)
    assert caught.value.source == str(path)


CONFIG = '{"num_hidden_layers": 48, "hidden_size": 1600, "vocab_size": 50257}'
NESTED_CONFIG = '{"model_type": "llava", "text_config": {"num_hidden_layers": 2, "hidden_size": 8}}'


NEEDED = DocumentKind("a file of settings", "")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (CONFIG, TRANSFORMERS_CONFIG),
        (NESTED_CONFIG, TRANSFORMERS_CONFIG),
        ('{"model_type": "gpt2", "n_layer": 12, "n_embd": 768}', TRANSFORMERS_CONFIG),
        ('{"schemaVersion": 1, "traceEvents": []}', CHROME_TRACE),
        ('[{"ph": "X", "name": "F0", "ts": 0, "dur": 1}]', CHROME_TRACE),
        ("0F0,0F1,,0B0\n,1F0,1B0", TORCH_CSV),
        (",,2F0,2I0\r\n", TORCH_CSV),
        ("0UNSHARD,0F0,0SEND_F0", TORCH_CSV),
        ("Et|(tt|)*30L\n", MEGATRON_LAYOUT),
        ("[model]\nlayers = 2\nlayers = 3\n", SIZE_TABLE),
    ],
)
def test_other_kinds_of_files_are_refused_by_name(tmp_path: Path, text: str, kind: DocumentKind) -> None:
    path = tmp_path / "given"
    path.write_text(text)
    for read in (lambda: read_document(path, LIMIT_BYTES, "problem"), lambda: read_toml(path, LIMIT_BYTES, NEEDED)):
        with pytest.raises(InputError) as caught:
            read()
        assert str(caught.value).startswith(f"is {kind.name} but ")
        assert str(caught.value).endswith(kind.maybe)
