"""How many stages and devices there are, and which stage sits where, from what the options say of it."""

from __future__ import annotations

from optpipe.errors import InputError, Issue


def devices_of_stages(name: str, devices: int | None, stages: int | None) -> tuple[int, ...]:
    """The device of each stage. One of both numbers is enough. Raises InputError where they do not go together."""
    from solver.layout.placements import placement, placement_named

    try:
        kind, chunks = placement_named(name)
    except ValueError as error:
        raise InputError([Issue("--placement", "unknown", str(error))]) from None
    if stages is None and devices is None:
        detail = "is missing. Maybe --devices 4, or --stages."
        raise InputError([Issue("--devices", "missing", detail)])
    found = (stages or 0) // chunks if devices is None else devices
    if stages is not None and stages != found * chunks:
        of = f"{devices} devices" if devices is not None else "each device"
        detail = f"is {stages}, but placement {name} puts {chunks} on {'each of ' if devices is not None else ''}{of}."
        raise InputError([Issue("--stages", "wrong_count", detail)])
    return placement(kind, found, chunks)
