"""Strict, bounded reading and writing of JSON and TOML documents, with errors that name the fault.

Python's own JSON parser accepts NaN, duplicate keys, and numbers and nesting of any size. None of these has a meaning
in OptPipe's documents, and each is known to take services down. jiter, the parser of pydantic, rejects all but
floats that it rounds to infinity; these are rejected by a second check.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, Self

import jiter
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from optpipe.document_kinds import FORMATS, DocumentKind, kind_of_data, kind_of_text
from optpipe.errors import InputError, Issue, shown

MAX_DIGITS = 4300
"""Longest number in digits: the limit of jiter for integers, and of Python for their conversion to text."""
UNION_TAG = "as-"
"""Prefix of union tags, which pydantic puts into the paths of errors; `_issue` removes them."""
MOST_ISSUES = 50
"""Most issues that an error lists; a document of the wrong kind can have millions."""


class Document(BaseModel):
    """Frozen model that rejects unknown fields and reads and writes strict JSON.

    Fields left out of the input stay out of the output, so that reading and writing a document changes nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @classmethod
    def from_data(cls, data: Any, source: str = "") -> Self:
        """Validate `data` (parsed JSON); `source` names the document.

        Raises InputError with every issue, or the first MOST_ISSUES and the number of further ones.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise cls.input_error(error, source) from None

    @classmethod
    def input_error(cls, error: ValidationError, source: str = "", most: int = MOST_ISSUES) -> InputError:
        """Build the error for a failed validation: its first `most` issues and the number of further ones."""
        entries = error.errors(include_url=False)
        issues = [_issue(cls, entry, source) for entry in entries[:most]]
        if (more := len(entries) - most) > 0:
            issues.append(Issue("", "more", f"and {more:,} more are wrong. Maybe this is another kind of document."))
        return InputError(issues, source)

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "") -> Self:
        """Read strict JSON text. Raises InputError."""
        return cls.from_data(parse_json(text, source), source)

    def to_data(self) -> dict[str, Any]:
        """The document as plain JSON values, with only the fields that were given."""
        return self.model_dump(mode="json", exclude_unset=True)

    def replaced(self, **changes: Any) -> Self:
        """The document with other values of some fields, unchecked: derived values may exceed the limits of fields."""
        return self.model_construct(**{name: getattr(self, name) for name in self.model_fields_set} | changes)

    def to_json(self) -> str:
        """The document as compact JSON, in the order of the fields."""
        return json.dumps(self.to_data(), separators=(",", ":"), allow_nan=False)


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Read a file of at most `max_bytes`, without the mark with which some editors begin UTF-8.

    Raises InputError if it cannot be read, is too large or empty.
    """
    source = str(path)
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and (kind := kind_of_text(source.encode())):
            _refuse("unreadable", f"is no file but {kind.name}. {kind.maybe}", source)
        maybe = {FileNotFoundError: " Maybe the path is misspelt.", IsADirectoryError: " Maybe a file in it is meant."}
        _refuse("unreadable", f"cannot be read: {error.strerror}.{maybe.get(type(error), '')}", source)
    if len(content) > max_bytes:
        size = max(path.stat().st_size, len(content))  # st_size of a pipe is 0
        _refuse(
            "too_large",
            f"has {size:,} bytes but at most {max_bytes:,} are read. Maybe this is another file.",
            source,
        )
    content = content.removeprefix(BOM_UTF8)
    if not content.strip():
        _refuse("empty", "is empty. Maybe the program that wrote it was stopped.", source)
    return content


def read_document(path: str | Path, max_bytes: int, *formats: str) -> Any:
    """Parse a JSON file of at most `max_bytes`.

    `formats`: names of the formats that are needed, such as ``problem``; a file of another known kind is refused.
    Raises InputError.
    """
    content, source = read_bounded(Path(path), max_bytes), str(path)
    needed = [FORMATS[name] for name in formats]
    try:
        data = parse_json(content, source)
    except InputError:
        refuse_kind(kind_of_text(content), needed, source)
        raise
    refuse_kind(kind_of_data(data), needed, source)
    return data


def refuse_kind(found: DocumentKind | None, needed: Sequence[DocumentKind], source: str) -> None:
    """Raise InputError for a file of a known kind that is not needed."""
    if found is not None and needed and found not in needed:
        names = " or ".join(kind.name for kind in needed)
        _refuse("wrong_format", f"is {found.name} but {names} is needed. {found.maybe}", source)


def known_kind(content: bytes) -> DocumentKind | None:
    """The kind of a file, JSON or not; None where it is unknown."""
    with suppress(InputError):
        return kind_of_data(parse_json(content))
    return kind_of_text(content)


def parse_json(text: str | bytes, source: str = "") -> Any:
    """Parse JSON; reject bad UTF-8, duplicate keys, NaN, infinities, huge numbers and deep nesting.

    Raises InputError with the line and column where there is one.
    """
    content = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    content = content.removeprefix(BOM_UTF8)
    try:
        data = jiter.from_json(content, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        code, detail = _json_fault(str(error), content)
        _refuse(code, detail, source)
    if _may_have_odd_float(content):
        try:
            json.loads(content, parse_float=_finite_float)
        except _OddFloatError as error:
            _refuse(error.code, error.detail, source)
    return data


def utf8_text(content: bytes, source: str) -> str:
    """Text of a file. Raises InputError where it is not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse("bad_utf8", _not_utf8(error), source)


def _refuse(code: str, detail: str, source: str) -> NoReturn:
    subject = "" if source else "the document "
    raise InputError([Issue("", code, subject + detail)], source)


def _json_fault(error: str, content: bytes) -> tuple[str, str]:
    """Code and detail of an error of jiter."""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as reason:
        return "bad_utf8", _not_utf8(reason)
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
    return "bad_json", f"is not JSON: {what} {at}.{_maybe_encoded(content)}"


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"is not UTF-8: {error.reason} at position {error.start}.{_maybe_encoded(error.object)}"


def _maybe_encoded(content: bytes) -> str:
    """Hint at the form of a file that is no UTF-8 text, by its first bytes; empty where they tell nothing."""
    if content.startswith(COMPRESSED):
        return " Maybe it is compressed: unpack it first."
    is_every_other_zero = content[:2].count(0) == content[2:4].count(0) == 1
    if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or is_every_other_zero:
        return " Maybe it is UTF-16, as some shells write it: save it as UTF-8."
    return ""


COMPRESSED = (b"\x1f\x8b", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00", b"BZh")
"""First bytes of gzip, zip, zstd, xz and bzip2."""


_JITER_ERRORS = {
    "recursion limit exceeded": ("too_deep", "nests too deeply"),
    "number out of range": ("too_long", f"contains a number of more than {MAX_DIGITS} digits"),
    "lone leading surrogate in hex escape": ("bad_text", "has a lone surrogate, half of a character,"),
    "unexpected end of hex escape": ("bad_text", "has a lone surrogate, half of a character,"),
}


def _may_have_odd_float(content: bytes) -> bool:
    """True if a float may overflow or be too long, which jiter does not reject: it reads infinity, or all digits.

    Neither is possible without 300 digits in a row or an exponent of three digits.
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


def _issue(model: type[BaseModel], error: ErrorDetails, source: str) -> Issue:
    """Reword an error of pydantic, and strip union tags from its path."""
    loc = tuple(part for part in error["loc"] if isinstance(part, int) or not part.startswith(UNION_TAG))
    kind = error["type"]
    if kind == "extra_forbidden":
        *parents, name = loc
        # An alternative of another kind may have a field of this very name.
        others = [field for field in _fields_at(model, tuple(parents)) if field != name]
        same_unit = [field for field in others if field.rpartition("_")[2] == str(name).rpartition("_")[2]]
        close = get_close_matches(str(name), same_unit, n=1) or get_close_matches(str(name), others, n=1)
        return Issue(loc, "unknown_field", "is not a field." + (f" Maybe you meant {close[0]}." if close else ""))
    if kind == "missing":
        known = _json_schema(model).get("properties", {}).get("format", {}).get("const") if loc == ("format",) else None
        return Issue(loc, "missing", f"is missing. Maybe {known}." if known else "is missing.")
    message = error["msg"].removeprefix("Value error, ").rstrip(".")
    if kind.startswith("optpipe."):
        return Issue(loc, kind.removeprefix("optpipe."), message + ".")
    python_words = " or instance of .*| after validation, not .*"
    message = message[0].lower() + re.sub(python_words, "", message[1:])
    subject = "" if loc or source else "the document "
    return Issue(loc, kind, f"{subject}is {shown(error['input'])}: {message}.")


@cache  # making a schema takes milliseconds
def _json_schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


def _fields_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Names of the fields that the object at `path` can have."""
    schema = _json_schema(model)
    nodes = [*_alternatives(schema, schema)]
    for part in path:
        below = (node.get("items" if isinstance(part, int) else "properties", {}) for node in nodes)
        chosen = (each if isinstance(part, int) else each.get(part, {}) for each in below)
        nodes = [node for each in chosen for node in _alternatives(schema, each)]
    return sorted({name for node in nodes for name in node.get("properties", {})})


def _alternatives(schema: dict[str, Any], node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Nodes that a node of a JSON schema stands for: references followed, each branch of a union by itself."""
    if "$ref" in node:
        yield from _alternatives(schema, schema["$defs"][node["$ref"].rpartition("/")[2]])
        return
    yield node
    for branch in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from _alternatives(schema, branch)


def read_toml(path: Path, max_bytes: int, needed: DocumentKind) -> dict[str, Any]:
    """Parse a TOML file of at most `max_bytes`. Raises InputError that names the file, and its kind if it is known."""
    content, source = read_bounded(path, max_bytes), str(path)
    try:
        return tomllib.loads(content.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        refuse_kind(known_kind(content), [needed], source)
        detail = f"is not TOML: {error}.{_maybe_encoded(content)}"
    except (RecursionError, ValueError):  # tomllib recurses into brackets, and Python limits the digits of integers
        detail = "nests too deeply, or has a number of thousands of digits. Maybe this is another file."
    _refuse("bad_toml", detail, source)
