"""How an object shows itself in a notebook and on a rich console: what it says of itself, and who makes a view of it.

The core knows no pictures, so a `Displayed` object asks a room that it does not know. `optpipe` names that room
(`optpipe.notebook`) as it is imported; the room itself is imported when the first object is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class Summary(NamedTuple):
    """An object in a few words: a title, facts by name, and a table with words in its first column, then numbers."""

    title: str
    facts: Sequence[tuple[str, str]] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


class Room(Protocol):
    """Who turns objects into views."""

    def html_of(self, shown: object) -> str:
        """A fragment of HTML that stands alone: for a notebook's output."""

    def renderable_of(self, shown: object) -> Any:
        """What rich prints."""

    def line_of(self, shown: object) -> str:
        """One line of text."""


_room: Callable[[], Room]


class Displayed:
    """Shows itself in notebooks (a table, and a picture where there is one), in IPython (one line) and in rich."""

    def _repr_html_(self) -> str:
        return _room().html_of(self)

    def _repr_pretty_(self, printer: Any, _in_a_cycle: bool) -> None:
        printer.text(_room().line_of(self))

    def __rich__(self) -> Any:
        return _room().renderable_of(self)


def show_in(room: Callable[[], Room]) -> None:
    """Have every `Displayed` object show itself in the room that `room` gives, from now on."""
    global _room
    _room = room
