"""Server-sent events (HTML Living Standard, 9.2) from the lines of an answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    """One event: what kind it is, its revision, and its data."""

    kind: str
    revision: int
    data: dict[str, Any]


def read_events(lines: Iterable[str]) -> Iterator[Event]:
    """The whole events in a stream; one that was cut off is left out, comments too."""
    fields: dict[str, str] = {}
    for line in lines:
        if not line:
            if "data" in fields:
                yield Event(fields.get("event", "message"), int(fields["id"]), json.loads(fields["data"]))
            fields = {}
        name, _, value = line.partition(":")
        if name:
            value = value.removeprefix(" ")
            fields[name] = f"{fields[name]}\n{value}" if name == "data" and name in fields else value
