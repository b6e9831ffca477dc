"""Strict, bounded reading and writing of JSON and TOML documents, with errors a person can act on.

JSON as Python reads it by default accepts NaN, duplicate keys, and numbers and nestings of any size. None of
these has a meaning in OptPipe's documents, and each has taken a service down somewhere, so all are refused here,
by jiter (the parser within pydantic) and, for floats that it rounds to infinity, by a second look.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, Self

import jiter
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from optpipe.errors import InputError, Issue

MAX_DIGITS = 4300
"""Digits of a number that are read: the limit of jiter for integers, and of Python for turning them to text."""
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
    content = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    try:
        data = jiter.from_json(content, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        code, detail = _why_not_json(str(error), content)
        _refuse(code, detail, source)
    if _may_have_odd_float(content):
        try:
            json.loads(content, parse_float=_finite_float)
        except _OddFloatError as error:
            _refuse(error.code, error.detail, source)
    return data


def _refuse(code: str, detail: str, source: str) -> NoReturn:
    subject = "" if source else "the document "
    raise InputError([Issue("", code, subject + detail)], source)


def _why_not_json(error: str, content: bytes) -> tuple[str, str]:
    """Code and detail of an error of jiter."""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as reason:
        return "bad_utf8", f"is not UTF-8: {reason.reason} at position {reason.start}."
    [(what, line, column)] = re.findall(r"(.*) at line (\d+) column (\d+)$", error, re.DOTALL)
    at = f"at line {line}, column {column}"
    if what.startswith("Detected duplicate key"):
        key = what.partition('"')[2][:-1]
        key = key if len(key) <= 60 else key[:57] + "..."
        return "duplicate_key", f"has the key '{key}' twice in one object, {at}. Maybe one was meant otherwise."
    if what in _JITER_ERRORS:
        code, detail = _JITER_ERRORS[what]
        return code, f"{detail} {at}."
    lines = content.split(b"\n", int(line))
    for name in ("NaN", "Infinity"):
        if lines[int(line) - 1][int(column) - 1 :].startswith(name.encode()):
            return "not_finite", f"contains {name} {at}, but every number must be finite. Maybe a measurement failed."
    return "bad_json", f"is not JSON: {what} {at}."


_JITER_ERRORS = {
    "recursion limit exceeded": ("too_deep", "nests too deeply"),
    "number out of range": ("too_long", f"contains a number of more than {MAX_DIGITS} digits"),
    "lone leading surrogate in hex escape": ("bad_text", "has a lone surrogate, half of a character,"),
    "unexpected end of hex escape": ("bad_text", "has a lone surrogate, half of a character,"),
}


def _may_have_odd_float(content: bytes) -> bool:
    """Whether a float may be beyond the largest or too long: jiter makes infinity of the one and reads the other.

    Without 300 digits in a row, and with fewer than three in an exponent, none can be.
    """
    shape = content.translate(_DIGITS_TO_0, b"+")
    return b"0" * 300 in shape or b"e000" in shape or b"E000" in shape


_DIGITS_TO_0 = bytes.maketrans(b"123456789", b"000000000")


class _OddFloatError(Exception):
    def __init__(self, code: str, detail: str) -> None:
        self.code, self.detail = code, detail


def _finite_float(digits: str) -> float:
    if len(digits) > MAX_DIGITS:
        raise _OddFloatError("too_long", f"contains a number of more than {MAX_DIGITS} digits.")
    if math.isinf(value := float(digits)):
        detail = f"contains {digits[:60]}, which is beyond every number. Maybe an exponent is wrong."
        raise _OddFloatError("not_finite", detail)
    return value


def _issues(model: type[BaseModel], error: ValidationError, source: str) -> list[Issue]:
    """What pydantic found, in our words."""
    entries = error.errors(include_url=False)
    issues = [_issue(model, entry, source) for entry in entries[:MOST_ISSUES]]
    if (more := len(entries) - MOST_ISSUES) > 0:
        issues.append(Issue("", "more", f"and {more:,} more are wrong. Maybe this is another kind of document."))
    return issues


def _issue(model: type[BaseModel], error: ErrorDetails, source: str) -> Issue:
    loc = _untagged(error["loc"])
    kind = error["type"]
    if kind == "extra_forbidden":
        return Issue(loc, "unknown_field", "is not a field." + _did_you_mean(model, loc))
    if kind == "missing":
        return Issue(loc, "missing", "is missing.")
    message = error["msg"].removeprefix("Value error, ").rstrip(".")
    if kind.startswith("optpipe."):
        return Issue(loc, kind.removeprefix("optpipe."), message + ".")
    message = message[0].lower() + re.sub(" or instance of .*", "", message[1:])  # which only Python knows
    subject = "" if loc or source else "the document "
    return Issue(loc, kind, f"{subject}is {shown(error['input'])}: {message}.")


def shown(value: Any) -> str:
    """A value as it appears in a message: JSON-like and short."""
    text = json.dumps(value, default=str) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _untagged(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The path of a field, without the tags that pydantic adds for unions."""
    return tuple(part for part in loc if isinstance(part, int) or not part.startswith(UNION_TAG))


def _did_you_mean(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    *above, name = loc
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


def read_toml(path: Path, max_bytes: int, if_json: str = "") -> dict[str, Any]:
    """Parse a TOML file of at most `max_bytes`.

    `if_json` is what to say to someone who gave a JSON document instead. Raises InputError that names the file.
    """
    content = read_bounded(path, max_bytes)
    try:
        return tomllib.loads(content.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        maybe = f" {if_json}" if if_json and path.suffix == ".json" else ""
        detail = f"is not TOML: {error}.{maybe}"
    except (RecursionError, ValueError):  # the parser recurses into brackets, and Python limits the digits of integers
        detail = "nests too deeply, or has a number of thousands of digits. Maybe this is another file."
    raise InputError([Issue("", "bad_toml", detail)], str(path))
