"""Lists of names as options give them."""

from __future__ import annotations


def names_in(text: str) -> list[str]:
    """The names in a list such as ``a, b``, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",")))
