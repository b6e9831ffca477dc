"""Marks around the measured parts of a Markdown document, whose other parts are written by hand."""

from __future__ import annotations

import re


def between(document: str, name: str) -> str | None:
    """Return the text between the marks of `name`; None if the document has no such marks."""
    match = re.search(f"{_begin(name)}\n(.*?)\n{_end(name)}", document, re.DOTALL)
    return match[1] if match else None


def marked(name: str, body: str) -> str:
    """Put a body between the marks of `name`."""
    return f"{_begin(name)}\n{body}\n{_end(name)}"


def replaced(document: str, name: str, body: str) -> str:
    """Replace the body between the marks of `name`. Raises ValueError if the document has no such marks."""
    old = between(document, name)
    if old is None:
        raise ValueError(
            f"the document has no {_begin(name)}. Maybe add it, and {_end(name)}, where the table belongs."
        )
    return document.replace(marked(name, old), marked(name, body))


def _begin(name: str) -> str:
    """Mark before the measured part."""
    return f"<!-- {name}: measured -->"


def _end(name: str) -> str:
    """Mark after the measured part."""
    return f"<!-- {name}: end -->"
