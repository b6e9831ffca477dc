"""Names of the activation modes that the runtime executes: which parts of a stage they run again.

`full` keeps the input of the stage and runs all of it again. `selective` keeps the input of every block (a layer of a
transformer) and runs the blocks again one at a time; `selective-3` does so with the first three blocks alone, and
`selective:mlp` with the part `mlp` of every block. `selective-groups-2` keeps the input of every second block, and runs
two blocks again at a time. With `+offload` what is kept leaves to the host. `offload-bf16` and `offload-fp8` run
nothing again: the activation leaves, and comes back with the precision of its copy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from optpipe.errors import InputError, Issue

KEPT, OFFLOAD = "kept", "offload"
"""Modes that need no entry in `modes`: held until the backward, and `stages[].offload`."""

FULL = "full"
SELECTIVE = "selective"
WITH_OFFLOAD = "+offload"

IN_LOW_PRECISION = {"offload-bf16": "bf16", "offload-fp8": "fp8"}
"""Modes that offload the activation in low precision, with the precision of the copies on the host."""

BLOCKS = "blocks"
"""Name that stands for `selective` with each number of blocks where modes are asked for."""

GROUPS = "groups"
"""Name that stands for `selective-groups` of each size that leaves fewer inputs than the smaller ones."""

EXAMPLES = (
    "full, selective, selective-2 (the first two blocks), selective:mlp (a part of each block), selective-groups-2 "
    "(two blocks at a time)"
)
"""Modes that recompute, for messages."""


class Recomputed(NamedTuple):
    """Modules that a mode runs again.

    `whole`: the stage from its input. Otherwise the first `blocks` blocks (None: all), each from its own input, or
    where `part` is given the submodule of that name in each of them. `group`: so many blocks in a row from one input.
    """

    whole: bool = False
    blocks: int | None = None
    part: str = ""
    group: int = 1


def without_offload(name: str) -> str:
    """The name of the mode that recomputes the same, and keeps on the device what stays."""
    name = name.removesuffix(WITH_OFFLOAD)
    return FULL if name == "recompute" else name


def parse_recomputed(name: str) -> Recomputed | None:
    """Modules that the mode of this name runs again; None if the runtime has no such mode."""
    name = without_offload(name)
    if name == FULL:
        return Recomputed(whole=True)
    if name == SELECTIVE:
        return Recomputed()
    if blocks := re.fullmatch(rf"{SELECTIVE}-([1-9]\d{{0,5}})", name, re.ASCII):
        return Recomputed(blocks=int(blocks[1]))
    if group := re.fullmatch(rf"{SELECTIVE}-{GROUPS}-([1-9]\d{{0,5}})", name, re.ASCII):
        return Recomputed(group=int(group[1]))
    if part := re.fullmatch(rf"{SELECTIVE}:(\w+(?:\.\w+)*)", name):
        return Recomputed(part=part[1])
    return None


def without_shorthand(names: Sequence[str], blocks: int) -> list[str]:
    """The modes that names asked for stand for on a stage of so many blocks, each once."""
    modes = []
    for name in names:
        shorthand = without_offload(name)
        ending = name.removeprefix(shorthand)
        if not is_shorthand(name):
            modes.append(name)
        elif shorthand == BLOCKS and blocks:
            modes += [f"{SELECTIVE}-{count}{ending}" for count in range(1, blocks)]
            modes.append(f"{SELECTIVE}{ending}")
        elif shorthand == GROUPS:
            smallest = {ceil(blocks / size): size for size in range(blocks, 1, -1)}  # by the inputs that stay
            modes += [f"{SELECTIVE}-{GROUPS}-{size}{ending}" for size in sorted(smallest.values())]
    return list(dict.fromkeys(modes))


def is_shorthand(name: str) -> bool:
    """True if the name stands for several modes, by the number of blocks of a stage."""
    return without_offload(name) in (BLOCKS, GROUPS)


def parse_modes(text: str, field: str) -> list[str]:
    """Names of activation modes between commas, `offload` among them. Raises InputError that names the field."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        copied = name in ("offload", *IN_LOW_PRECISION)
        if not copied and not is_shorthand(name) and parse_recomputed(name) is None:
            detail = (
                f"has {name!r}, but must be offload, {', '.join(IN_LOW_PRECISION)}, {EXAMPLES}, {BLOCKS} (selective "
                f"with each number of blocks), or {GROUPS} (selective-groups of each size), those from full on also "
                f"with {WITH_OFFLOAD}. Maybe {field} full."
            )
            raise InputError([Issue(field, "unknown_mode", detail)])
    return names
