"""Rich and HTML display of documents: the mixin, and the renderer that it delegates to.

The core does not import plotting. `optpipe` registers a loader for the renderer (`optpipe.notebook`), which is imported
when the first object is displayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class Summary(NamedTuple):
    """Summary of an object: a title, named facts, and a table with text in its first column, then numbers."""

    title: str
    facts: Sequence[tuple[str, str]] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


class Renderer(Protocol):
    """Views of objects."""

    def render_html(self, shown: object) -> str:
        """Self-contained HTML fragment for a notebook."""

    def render_rich(self, shown: object) -> Any:
        """Renderable for rich."""

    def render_line(self, shown: object) -> str:
        """One line of text."""


_load_renderer: Callable[[], Renderer]


class Displayed:
    """Mixin that displays an object in notebooks (a table and any figure), in IPython (one line) and in rich."""

    def _repr_html_(self) -> str:
        return _load_renderer().render_html(self)

    def _repr_pretty_(self, printer: Any, _in_a_cycle: bool) -> None:
        printer.text(_load_renderer().render_line(self))

    def __rich__(self) -> Any:
        return _load_renderer().render_rich(self)


def set_renderer(load: Callable[[], Renderer]) -> None:
    """Display every `Displayed` object by the renderer that `load` returns."""
    global _load_renderer
    _load_renderer = load
