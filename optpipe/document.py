"""Reading and writing the JSON documents: strict, bounded, with errors that a person can act on.

JSON as Python reads it by default accepts NaN, duplicate keys, and numbers and nestings of any size. None of
these has a meaning in OptPipe's documents, and each has taken a service down somewhere, so all are refused here,
before anything else looks at the text.
"""

from __future__ import annotations

import json
import math
import re
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


class Document(BaseModel):
    """A frozen model that refuses unknown fields, reads strict JSON and writes what was read.

    Fields left out of the input stay out of the output, so that reading and writing a document changes nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @classmethod
    def from_data(cls, data: Any, source: str = "") -> Self:
        """Check `data` (parsed JSON). Raises InputError that lists everything wrong; `source` names the document."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise InputError([_issue(cls, entry) for entry in error.errors()], source) from None

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
        size = path.stat().st_size
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
        key = next(key for k, (key, _) in enumerate(pairs) if key in dict(pairs[:k]))
        raise _BadValueError(
            "duplicate_key", f"has the key {key!r} twice in one object. Maybe one was meant otherwise."
        )
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


def _issue(model: type[BaseModel], error: ErrorDetails) -> Issue:
    """One pydantic error as an Issue in our words."""
    pointer = _pointer(error["loc"])
    kind = error["type"]
    if kind == "extra_forbidden":
        return Issue(pointer, "unknown_field", "is not a field." + _did_you_mean(model, error["loc"]))
    if kind == "missing":
        return Issue(pointer, "missing", "is missing.")
    message = error["msg"].removeprefix("Value error, ").rstrip(".")
    if kind.startswith("optpipe."):
        return Issue(pointer, kind.removeprefix("optpipe."), message + ".")
    return Issue(pointer, kind, f"is {shown(error['input'])}: {message[0].lower()}{message[1:]}.")


def shown(value: Any) -> str:
    """A value as it appears in a message: JSON-like and short."""
    text = json.dumps(value, default=str) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _pointer(loc: tuple[int | str, ...]) -> str:
    """A path such as ``stages[3].offload.bytes``; tags that pydantic adds for unions are dropped."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("as-"):
            path += f".{part}" if path else part
    return path


def _did_you_mean(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    names = _field_names(model)
    close = get_close_matches(str(loc[-1]), sorted(names), n=1)
    return f" Maybe you meant {close[0]}." if close else ""


@cache
def _field_names(model: type[BaseModel]) -> frozenset[str]:
    """The names of all fields in a model and in the models under it. Kept: making a schema takes milliseconds."""
    schema = model.model_json_schema()
    parts = [schema, *schema.get("$defs", {}).values()]
    return frozenset(name for part in parts for name in part.get("properties", {}))
