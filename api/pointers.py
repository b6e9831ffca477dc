"""Paths as our errors write them as JSON pointers (RFC 6901): ``stages[3].name`` is ``/stages/3/name``."""

from __future__ import annotations

import re
from typing import Any

_INDEX = re.compile(r"\[(\d+)\]")
_NAME = re.compile(r"[^.\[]+")


def json_pointer(path: str, document: Any) -> str:
    """The pointer to what `path` names in a parsed document.

    A key may itself hold dots and brackets (a field that nobody knows can have any name), so the keys that are
    there decide where a name ends.
    """
    pointer, rest, here = "", path, document
    while rest:
        step, rest = _step(rest, here)
        pointer += "/" + str(step).replace("~", "~0").replace("/", "~1")
        here = _under(here, step)
    return pointer


def _step(rest: str, here: Any) -> tuple[str | int, str]:
    """The first step of a path, and the rest of the path."""
    index = _INDEX.match(rest) if not isinstance(here, dict) else None
    if index:
        return int(index[1]), rest[index.end() :].removeprefix(".")
    names = [key for key in here if _begins(rest, key)] if isinstance(here, dict) else []
    name = max(names, key=len, default=None)
    if name is None:
        found = _NAME.match(rest)
        name = found[0] if found else rest
    return name, rest[len(name) :].removeprefix(".")


def _begins(rest: str, key: str) -> bool:
    return rest.startswith(key) and (rest[len(key) :] or ".")[0] in ".["


def _under(here: Any, step: str | int) -> Any:
    if isinstance(here, dict) and isinstance(step, str):
        return here.get(step)
    if isinstance(here, list) and isinstance(step, int) and step < len(here):
        return here[step]
    return None
