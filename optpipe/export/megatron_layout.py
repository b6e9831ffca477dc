"""Layout strings of Megatron-LM (`--pipeline-model-parallel-layout`), written and read.

A letter a layer: embedding E, transformer layers t, multi-token prediction m, loss and head L; a bar between stages, in
the order of the model; ``t*3`` and ``(tt|)*30`` repeat, and commas mean nothing. Stage s is on rank s mod p.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from optpipe.errors import InputError, Issue, shown
from optpipe.layers import MAX_LAYERS, LayerProfile
from optpipe.partition import Partition, predicted_in_name

LETTERS = "EtmL"

_REPEATED = (re.compile(r"\(([^()]+)\)\*0*(\d{1,9})", re.ASCII), re.compile(r"([EtmL|])\*0*(\d{1,9})", re.ASCII))
"""Parts that repeat, in the order in which Megatron-LM unrolls them; of a longer number nine digits say too much."""

MOST_LETTERS = 2 * MAX_LAYERS
"""Most letters and bars of a layout."""


def parse_layout(text: str, field: str) -> list[str]:
    """The letters of each stage. Raises InputError that names the field."""
    layout = re.sub(r"[,\s]", "", text)
    for pattern in _REPEATED:
        unrolled = len(layout) + sum(len(match[1]) * int(match[2]) for match in pattern.finditer(layout))
        if unrolled > MOST_LETTERS:
            detail = f"is {shown(text)}, which is too long: at most {MOST_LETTERS} letters and bars are read"
            raise InputError([Issue(field, "too_large", f"{detail}. Maybe a number has a digit too many.")])
        layout = pattern.sub(lambda match: match[1] * int(match[2]), layout)
    if wrong := sorted(set(layout) - {*LETTERS, "|"}):
        detail = (
            f"is {shown(text)}, in which {shown(' '.join(wrong))} has no meaning: layers are E, t, m and L, "
            "bars divide stages, t*3 and (tt|)*30 repeat. Maybe Et|(tt|)*30L."
        )
        raise InputError([Issue(field, "no_layout", detail)])
    order = layout.replace("|", "")
    if not re.fullmatch("Et+m*L", order):
        detail = f"is {shown(text)}: in the order of the model a layout is one E, layers t, perhaps m, and one L"
        raise InputError([Issue(field, "no_layout", f"{detail}. Maybe Et*{max(1, order.count('t'))}L, with bars.")])
    return layout.split("|")


_COUNTED = ("EtmL", "EtL", "tmL", "Etm", "tL", "Et", "tm", "t")
"""Letters that may be the layers of a profile, the likely ones first: a profile often lacks multi-token prediction."""


def _has_embedding_and_head(profile: LayerProfile) -> tuple[bool, bool]:
    """True for each of them that a profile has by the names of its first and last layer."""
    first, last = (profile.each_layer[k].name.lower() for k in (0, -1))
    return "emb" in first, "head" in last


def partition_of_layout(text: str, profile: LayerProfile, devices: int, field: str) -> Partition:
    """Cut the layers of a profile as a layout says; its E, m and L may have no layers of their own there.

    E and L have one where the profile names it. Raises InputError where layers, stages and devices do not fit.
    """
    stages = parse_layout(text, field)
    letters, layers = "".join(stages), len(profile.each_layer)
    named = {letter for letter, has in zip("EL", _has_embedding_and_head(profile), strict=True) if has}
    fitting = (of for of in _COUNTED if named <= {*of} and sum(map(letters.count, of)) == layers)
    counted = next(fitting, None)
    if len(stages) % devices:
        detail = f"has {len(stages)} stages, which {devices} devices do not divide. Maybe --devices"
        likely = next((n for n in range(devices, 0, -1) if len(stages) % n == 0), 1)
        raise InputError([Issue(field, "other_devices", f"{detail} {likely}.")])
    if counted is None:
        numbers = ", ".join(f"{letters.count(letter)} {letter}" for letter in LETTERS)
        detail = f"has {len(letters)} layers ({numbers}), but the profile has {layers}. Maybe it is of another model."
        raise InputError([Issue(field, "other_layers", detail)])
    sizes = [sum(letter in counted for letter in stage) for stage in stages]
    if 0 in sizes:
        s = sizes.index(0)
        what = f"only {stages[s]}, which the profile has not" if stages[s] else "no layers"
        detail = f"gives stage {s} {what}, but each stage needs a layer of the profile. Maybe join it to the next one."
        raise InputError([Issue(field, "empty_stage", detail)])
    return Partition(tuple(sizes), tuple(s % devices for s in range(len(stages))))


def layout_text(sizes: Sequence[int], *, has_embedding: bool = True, has_head: bool = True, predicted: int = 0) -> str:
    """Layout of stages with so many layers, of which the first is the embedding and the last the head if they exist.

    `predicted`: layers of multi-token prediction, the last ones in front of the head.
    """
    layers = sum(sizes) - has_embedding - has_head - predicted
    letters = "E" * has_embedding + "t" * layers + "m" * predicted + "L" * has_head
    stages, begin = [], 0
    for size in sizes:
        stages.append(letters[begin : begin + size])
        begin += size
    stages[0], stages[-1] = "E" * (not has_embedding) + stages[0], stages[-1] + "L" * (not has_head)
    return _shortened(stages)


def layout_of_partition(partition: Partition, profile: LayerProfile) -> str | None:
    """Layout string of a cut; None where Megatron-LM has no such placement, or the model no embedding and head."""
    stages = len(partition.sizes)
    in_a_loop = stages % partition.devices == 0 and all(
        s % partition.devices == d for s, d in enumerate(partition.placement)
    )
    if len(profile.each_layer) < 3 or not all(_has_embedding_and_head(profile)) or not in_a_loop:
        return None
    return layout_text(partition.sizes, predicted=predicted_in_name(profile.name))


def _shortened(stages: Sequence[str]) -> str:
    """Stages with bars between them, runs of equal ones as ``(tt|)*30``."""
    runs = [(stage, len([*equal])) for stage, equal in groupby(stages[:-1])]
    short = [f"({stage}|)*{count}" if count > 1 else f"{stage}|" for stage, count in runs]
    return re.sub("t{4,}", lambda run: f"t*{len(run[0])}", "".join([*short, stages[-1]]))
