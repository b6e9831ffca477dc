"""What is measured stands between two comments in a document; the rest of it is written by hand."""

from __future__ import annotations

import re


def between(document: str, name: str) -> str | None:
    """What stands between the marks of `name`; None where the document has no such marks."""
    found = re.search(f"{_begin(name)}\n(.*?)\n{_end(name)}", document, re.DOTALL)
    return found[1] if found else None


def marked(name: str, body: str) -> str:
    """A body between the marks of `name`."""
    return f"{_begin(name)}\n{body}\n{_end(name)}"


def replaced(document: str, name: str, body: str) -> str:
    """The document with another body between the marks of `name`. Raises ValueError where it has no such marks."""
    known = between(document, name)
    if known is None:
        raise ValueError(
            f"the document has no {_begin(name)}. Maybe add it, and {_end(name)}, where the table belongs."
        )
    return document.replace(marked(name, known), marked(name, body))


def _begin(name: str) -> str:
    """The mark before what is measured."""
    return f"<!-- {name}: measured -->"


def _end(name: str) -> str:
    """The mark behind it."""
    return f"<!-- {name}: end -->"
