"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

import typer

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([A-Za-z]*)", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of a size such as ``8GiB``, ``512M``, ``1.5 GB`` or ``1000000``: K, M, G, T and KiB are 1024, KB is 1000.

    Raises typer.BadParameter.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size < 1:
        raise typer.BadParameter(f"{text!r} is not a size. Maybe write it as 8GiB or 512M")
    return size
