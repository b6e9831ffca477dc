"""Sizes in bytes, and shares, as people write them."""

from __future__ import annotations

import re

import typer

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?) ?(%?)", re.ASCII)
MOST_SHARE = 0.9
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


def parse_share(text: str) -> float:
    """A share such as ``10%`` or ``0.1``, from 0 to 0.9. Raises typer.BadParameter."""
    match = _SHARE.fullmatch(text.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= share <= MOST_SHARE:
        raise typer.BadParameter(f"{text!r} is not a share from 0% to {MOST_SHARE:.0%}. Maybe write it as 10% or 0.1")
    return share
