"""The parts of `auto` by name, each of which a measurement may leave out (`Limits.without`).

Names alone, so that the command line can list them without loading what they are of.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from optpipe.errors import InputError, Issue

COMPONENTS = {
    "search": (*("search", "windows", "pattern", "mode-rounds", "lists", "cp-sat", "states", "relaxation", "parts"),),
    "list kind": ("offloading-lists", "recomputing-lists", "planned-lists", "random-lists"),
    "bound": (
        *("chain", "release-order", "warmup-cooldown", "memory-time", "rounds", "shared-channel", "whole-forwards"),
        *("modes", "unit-device", "free-order", "blocks", "spread"),
    ),
    "start": (
        *("gpipe", "1f1b", "interleaved-1f1b", "seq1f1b", "slimpipe", "zb-h1", "zb-h2", "zb-auto", "zb-v"),
        *("v-min", "v-half", "v-zb", "gis", "gis-h", "po-h", "po-f", "dualpipe-v", "vocab-1", "vocab-2", "ada-offload"),
        *("repeated", "unfilled", "even-warm-up", "by-stage", "in-order", "first-lists"),
        *("priority-lists", "floor"),
    ),
}
"""Their names by kind. Those of starts are words of the names in `solver.warm_starts`: a published schedule, or how."""

NAMES = [name for names in COMPONENTS.values() for name in names]


def components_named(names: Iterable[str], field: str) -> frozenset[str]:
    """The set of these names. Raises InputError for each that no component has, with all that some has."""
    chosen = frozenset(names)
    issues = []
    for name in sorted(chosen.difference(NAMES)):
        close = "".join(f" Maybe {one}." for one in get_close_matches(name.lower(), NAMES, 1))
        issues.append(Issue(field, "unknown_component", f"names {name!r}; there are {', '.join(NAMES)}.{close}"))
    if issues:
        raise InputError(issues)
    return chosen
