"""Placements of stages on devices: linear, interleaved, and along a V."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from optpipe.errors import InputError, Issue

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


def devices_of_stages(name: str, devices: int | None, stages: int | None, prefix: str = "--") -> tuple[int, ...]:
    """The device of each stage in the placement of that name. One of both numbers is enough.

    Raises InputError where the name is none or the numbers do not go together; it names the fields after `prefix`.
    """
    try:
        kind, chunks = placement_named(name)
    except ValueError as error:
        raise InputError([Issue(f"{prefix}placement", "unknown", str(error))]) from None
    if stages is None and devices is None:
        detail = f"is missing. Maybe {prefix}devices 4, or {prefix}stages."
        raise InputError([Issue(f"{prefix}devices", "missing", detail)])
    found = (stages or 0) // chunks if devices is None else devices
    if stages is not None and stages != found * chunks:
        of = f"{devices} devices" if devices is not None else "each device"
        detail = f"is {stages}, but placement {name} puts {chunks} on {'each of ' if devices is not None else ''}{of}."
        raise InputError([Issue(f"{prefix}stages", "wrong_count", detail)])
    return placement(kind, found, chunks)
