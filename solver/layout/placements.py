"""Placements of stages on devices: linear, interleaved, and along a V."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Kind = Literal["linear", "interleaved", "v"]


def placement(kind: Kind, devices: int, chunks: int) -> tuple[int, ...]:
    """The device of each stage, with `chunks` stages a device.

    `interleaved` goes round the devices; `v` goes along them and back, which puts the first and the last stage on one
    device and evens out memory (Controllable Memory, section 3). `linear` is the round with one chunk.
    """
    there, back = tuple(range(devices)), tuple(reversed(range(devices)))
    if kind == "v":
        return tuple(device for chunk in range(chunks) for device in (back if chunk % 2 else there))
    return there * chunks


def name_of(kind: Kind, chunks: int) -> str:
    """`linear`, `interleaved-2`, `v`, `v-4`."""
    if kind == "linear" or (kind == "v" and chunks == 2):
        return kind
    return f"{kind}-{chunks}"


def placement_named(name: str) -> tuple[Kind, int]:
    """The kind and the chunks a device of a name. Raises ValueError that says what names there are."""
    kind, _, chunks = name.partition("-")
    if kind == "linear" and not chunks:
        return "linear", 1
    if kind == "v" and not chunks:
        return "v", 2
    if kind in ("interleaved", "v") and chunks.isdecimal() and 2 <= int(chunks) <= 64:
        return ("v" if kind == "v" else "interleaved"), int(chunks)
    raise ValueError(f"{name!r} is not a placement. Maybe one of {', '.join(USUAL)} (any number from 2 to 64).")


USUAL: Sequence[str] = ("linear", "interleaved-2", "interleaved-4", "v")
"""What is tried unless the caller says otherwise."""
