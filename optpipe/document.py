"""Reading and writing the JSON documents: strict, bounded, with errors that a person can act on.

JSON as Python reads it by default accepts NaN, duplicate keys, and numbers and nestings of any size. None of
these has a meaning in OptPipe's documents, and each has taken a service down somewhere, so all are refused here,
before anything else looks at the text.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from optpipe.errors import InputError, Issue

MAX_DEPTH = 32
MAX_DIGITS = 400
UNION_TAG = "as-"
"""How the tags of unions begin: pydantic puts them into the paths of errors, where users should not see them."""
MOST_ISSUES = 50
"""Nobody reads more, and a wrong kind of document can have millions."""


class Document(BaseModel):
    """A frozen model that refuses unknown fields, reads strict JSON and writes what was read.

    Fields left out of the input stay out of the output, so that reading and writing a document changes nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @classmethod
    def from_data(cls, data: Any, source: str = "") -> Self:
        """Check `data` (parsed JSON); `source` names the document.

        Raises InputError that lists what is wrong: everything, or the first MOST_ISSUES with how many more there are.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise InputError(_issues(cls, error, source), source) from None

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "") -> Self:
        """Read strict JSON text. Raises InputError."""
        return cls.from_data(parse_json(text, source), source)

    def to_data(self) -> dict[str, Any]:
        """The document as plain JSON values, only with the fields that were given."""
        return self.model_dump(mode="json", exclude_unset=True)

    def to_json(self) -> str:
        """The document as compact JSON, in the order of the fields."""
        return json.dumps(self.to_data(), separators=(",", ":"), allow_nan=False)


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The bytes of a file of at most `max_bytes`. Raises InputError if it cannot be read, is too large or empty."""
    source = str(path)
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        maybe = ". Maybe the path is misspelt." if isinstance(error, FileNotFoundError) else "."
        _refuse("unreadable", f"cannot be read: {error.strerror}{maybe}", source)
    if len(content) > max_bytes:
        size = max(path.stat().st_size, len(content))  # a pipe has none
        _refuse(
            "too_large",
            f"has {size:,} bytes but at most {max_bytes:,} are read. Maybe this is another file.",
            source,
        )
    if not content.strip():
        _refuse("empty", "is empty. Maybe the program that wrote it was stopped.", source)
    return content


def read_document(path: str | Path, max_bytes: int, not_meant: dict[str, str]) -> Any:
    """Parse a JSON file of at most `max_bytes`.

    `not_meant` maps the begin of another document's `format` to what to say to someone who gave that one.
    Raises InputError.
    """
    data = parse_json(read_bounded(Path(path), max_bytes), str(path))
    found = str(data.get("format", "")) if isinstance(data, dict) else ""
    for prefix, detail in not_meant.items():
        if found.startswith(prefix):
            _refuse("wrong_format", detail, str(path))
    return data


def parse_json(text: str | bytes, source: str = "") -> Any:
    """Parse JSON, refusing bad UTF-8, duplicate keys, NaN, infinities, huge numbers and deep nesting.

    Raises InputError with the line and column where there is one.
    """
    text = _decode(text, source)
    _refuse_deep(text, source)
    checks: dict[str, Any] = {"parse_int": _bounded_int, "parse_float": _finite_float} if _has_odd_number(text) else {}
    keys = _clean_unique_keys if "\\u" in text else _unique_keys
    try:
        return json.loads(text, object_pairs_hook=keys, parse_constant=_refuse_constant, **checks)
    except json.JSONDecodeError as error:
        _refuse("bad_json", f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}.", source)
    except _BadValueError as error:
        _refuse(error.code, error.detail, source)


class _BadValueError(Exception):
    def __init__(self, code: str, detail: str) -> None:
        self.code, self.detail = code, detail


def _refuse(code: str, detail: str, source: str) -> NoReturn:
    subject = "" if source else "the document "
    raise InputError([Issue("", code, subject + detail)], source)


def _decode(text: str | bytes, source: str) -> str:
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        decoded.encode("utf-8")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        _refuse("bad_utf8", f"is not UTF-8: {error.reason} at position {error.start}.", source)
    return decoded


def _refuse_deep(text: str, source: str) -> None:
    """Refuse nesting before the parser recurses into it; brackets within strings do not count.

    Escapes have a meaning in strings alone, and the parser stops at one elsewhere, so all of them can go first.
    """
    encoded = text.encode()
    if b"\\" in encoded:
        encoded = _ESCAPE.sub(b"", encoded)
    marks = np.frombuffer(encoded.translate(None, _NO_MARKS), np.uint8)
    outside = np.cumsum(marks == ord('"')) % 2 == 0
    step = np.select([(marks == ord("[")) | (marks == ord("{")), marks != ord('"')], [1, -1])
    if np.cumsum(step * outside).max(initial=0) > MAX_DEPTH:
        _refuse("too_deep", f"nests deeper than {MAX_DEPTH} levels.", source)


_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_NO_MARKS = bytes(set(range(256)) - set(b'"[]{}'))


def _has_odd_number(text: str) -> bool:
    """Whether a number may be too long or beyond every float: whether to look at each, which takes time.

    Without a hundred digits in a row, and with fewer than three in an exponent, none can be.
    """
    shape = text.translate(_DIGITS_TO_0).replace("+", "")
    return "0" * 100 in shape or "e000" in shape or "E000" in shape


_DIGITS_TO_0 = str.maketrans("123456789", "000000000")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        detail = f"has the key {shown(twice)} twice in one object. Maybe one was meant otherwise."
        raise _BadValueError("duplicate_key", detail)
    return result


def _clean_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The same where the text has escapes, which can make text that is none."""
    for key, value in pairs:
        try:
            key.encode("utf-8")
            if isinstance(value, str):
                value.encode("utf-8")
        except UnicodeError:
            raise _BadValueError("bad_text", f"has a lone surrogate in or under the key {key!a}.") from None
    return _unique_keys(pairs)


def _refuse_constant(name: str) -> NoReturn:
    raise _BadValueError("not_finite", f"contains {name}, but every number must be finite. Maybe a measurement failed.")


def _bounded_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _BadValueError("too_long", f"contains a number of {len(digits)} digits; at most {MAX_DIGITS} are read.")
    return int(digits)


def _finite_float(digits: str) -> float:
    if len(digits) > MAX_DIGITS:
        raise _BadValueError("too_long", f"contains a number of {len(digits)} digits; at most {MAX_DIGITS} are read.")
    value = float(digits)
    if not math.isfinite(value):
        raise _BadValueError(
            "not_finite", f"contains {digits}, which is beyond every number. Maybe an exponent is wrong."
        )
    return value


def _issues(model: type[BaseModel], error: ValidationError, source: str) -> list[Issue]:
    """What pydantic found, in our words."""
    entries = error.errors(include_url=False)
    issues = [_issue(model, entry, source) for entry in entries[:MOST_ISSUES]]
    if (more := len(entries) - MOST_ISSUES) > 0:
        issues.append(Issue("", "more", f"and {more:,} more are wrong. Maybe this is another kind of document."))
    return issues


def _issue(model: type[BaseModel], error: ErrorDetails, source: str) -> Issue:
    pointer = _pointer(error["loc"])
    kind = error["type"]
    if kind == "extra_forbidden":
        return Issue(pointer, "unknown_field", "is not a field." + _did_you_mean(model, error["loc"]))
    if kind == "missing":
        return Issue(pointer, "missing", "is missing.")
    message = error["msg"].removeprefix("Value error, ").rstrip(".")
    if kind.startswith("optpipe."):
        return Issue(pointer, kind.removeprefix("optpipe."), message + ".")
    message = message[0].lower() + re.sub(" or instance of .*", "", message[1:])  # which only Python knows
    subject = "" if pointer or source else "the document "
    return Issue(pointer, kind, f"{subject}is {shown(error['input'])}: {message}.")


def shown(value: Any) -> str:
    """A value as it appears in a message: JSON-like and short."""
    text = json.dumps(value, default=str) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _pointer(loc: tuple[int | str, ...]) -> str:
    """A path such as ``stages[3].offload.bytes``, without the tags that pydantic adds for unions."""
    path = ""
    for part in _untagged(loc):
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path


def _untagged(loc: tuple[int | str, ...]) -> Iterator[int | str]:
    return (part for part in loc if isinstance(part, int) or not part.startswith(UNION_TAG))


def _did_you_mean(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    *above, name = _untagged(loc)
    close = get_close_matches(str(name), _fields_at(model, tuple(above)), n=1)
    return f" Maybe you meant {close[0]}." if close else ""


def _fields_at(model: type[BaseModel], above: tuple[int | str, ...]) -> list[str]:
    """The names of the fields that an object at this place of a document can have."""
    schema = _schema_of(model)
    nodes = [*_alternatives(schema, schema)]
    for part in above:
        below = (node.get("items" if isinstance(part, int) else "properties", {}) for node in nodes)
        chosen = (each if isinstance(part, int) else each.get(part, {}) for each in below)
        nodes = [node for each in chosen for node in _alternatives(schema, each)]
    return sorted({name for node in nodes for name in node.get("properties", {})})


def _alternatives(schema: dict[str, Any], node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a node of a JSON schema stands for, with references followed and each branch of a union by itself."""
    if "$ref" in node:
        yield from _alternatives(schema, schema["$defs"][node["$ref"].rpartition("/")[2]])
        return
    yield node
    for branch in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from _alternatives(schema, branch)


@cache
def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """Kept: making a schema takes milliseconds."""
    return model.model_json_schema()
