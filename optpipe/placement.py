"""Placements by name: the device of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from optpipe.errors import InputError, Issue

Kind = Literal["linear", "interleaved", "v"]


def placement(kind: Kind, devices: int, chunks: int) -> tuple[int, ...]:
    """Device of each stage, with `chunks` stages per device.

    `interleaved` assigns stages round-robin; `v` goes through the devices forth and back, which puts the first and
    the last stage on one device and balances memory (Controllable Memory, section 3). `linear` is round-robin with one
    chunk.
    """
    forth, back = tuple(range(devices)), tuple(reversed(range(devices)))
    if kind == "v":
        return tuple(device for chunk in range(chunks) for device in (back if chunk % 2 else forth))
    return forth * chunks


def placement_name(kind: Kind, chunks: int) -> str:
    """Name of a placement: `linear`, `interleaved-2`, `v`, `v-4`."""
    if kind == "linear" or (kind == "v" and chunks == 2):
        return kind
    return f"{kind}-{chunks}"


def name_of_placement(places: Sequence[int]) -> str:
    """Name of a placement in which every device has as many stages: along a V, or round-robin."""
    devices = max(places) + 1
    chunks = len(places) // devices
    is_v = chunks > 1 and devices > 1 and tuple(places) == placement("v", devices, chunks)
    return placement_name("v" if is_v else "interleaved" if chunks > 1 else "linear", chunks)


def parse_placement(name: str) -> tuple[Kind, int]:
    """Kind and chunks per device of a placement name. Raises ValueError that lists the names."""
    kind, _, chunks = name.partition("-")
    if kind == "linear" and not chunks:
        return "linear", 1
    if kind == "v" and not chunks:
        return "v", 2
    if kind in ("interleaved", "v") and chunks.isdecimal() and 2 <= int(chunks) <= 64:
        return ("v" if kind == "v" else "interleaved"), int(chunks)
    raise ValueError(
        f"{name!r} is not a placement. Maybe one of {', '.join(DEFAULT_PLACEMENTS)} (any number from 2 to 64)."
    )


DEFAULT_PLACEMENTS: Sequence[str] = ("linear", "interleaved-2", "interleaved-4", "v")
"""Placements to try by default."""


def devices_of_stages(name: str, devices: int | None, stages: int | None, prefix: str = "--") -> tuple[int, ...]:
    """Device of each stage in a named placement. One of `devices` and `stages` is enough.

    Raises InputError if the name is unknown or the numbers contradict one another; fields are named with `prefix`.
    """
    try:
        kind, chunks = parse_placement(name)
    except ValueError as error:
        raise InputError([Issue(f"{prefix}placement", "unknown", str(error))]) from None
    if stages is None and devices is None:
        detail = f"is missing. Maybe {prefix}devices 4, or {prefix}stages."
        raise InputError([Issue(f"{prefix}devices", "missing", detail)])
    count = (stages or 0) // chunks if devices is None else devices
    if stages is not None and stages != count * chunks:
        where = "each device" if devices is None else f"each of {devices} devices"
        detail = f"is {stages}, but placement {name} puts {chunks} on {where}."
        raise InputError([Issue(f"{prefix}stages", "wrong_count", detail)])
    return placement(kind, count, chunks)
