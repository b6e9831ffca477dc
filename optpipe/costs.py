"""Costs of ops: the duration, and the effect on device and host memory, of each kind on each stage in each mode.

An op changes memory twice: it takes bytes at its start, and changes the level (by either sign) at its end. Which mode
the activation of a microbatch is in decides what its F leaves, whether O and R move it, and whether C, or a CB or CBW
that recomputes inside the backward, makes it anew. Where units (microbatches, or slices of them) have costs of their
own, a function of this module is given the stage with those of the unit, `Problem.stage_of`.

`task_graph` has them as arrays. `verify` and `worst_case_memory` read the rules for themselves and use nothing of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import NamedTuple

from optpipe.kinds import COPIES, KIND, SizeName, TimeName
from optpipe.mode_names import OFFLOAD
from optpipe.stage import Mode, Stage, UnitStage

FACTOR_OF_TIME: Mapping[TimeName, str] = {
    "forward": "forward", "backward_input": "backward_input", "backward_weight": "backward_weight",
    "recompute": "recompute", "recompute_inside": "recompute", "offload": "bytes", "reload": "bytes",
}  # fmt: skip
"""The field of `UnitFactors` by which each part of a duration is multiplied."""


class Effect(NamedTuple):
    """Bytes that an op takes at its start (at least 0), and the signed change at its end."""

    at_start: int
    at_end: int


def implied_mode(stage: Stage, kind: str) -> Mode:
    """The mode of a microbatch whose op this is where no mode is named: a copy is of one offloaded whole."""
    return stage.choices[stage.choice_numbers.get(OFFLOAD, 0) if kind in COPIES else 0]


def times_us(stage: Stage, mode: Mode) -> dict[TimeName, float]:
    """Times of a microbatch in a mode, of which durations of ops consist; NaN for what it does not do."""
    copy, again = mode.offload, mode.recompute_us if mode.recomputes else nan
    trained = stage.backward == "full"
    return {
        "forward": stage.forward_us,
        "backward_input": stage.backward_input_us if trained else nan,
        "backward_weight": stage.backward_weight_us if trained else nan,
        "offload": copy.offload_us if copy else nan,
        "reload": copy.reload_us if copy else nan,
        "recompute": again,
        "recompute_inside": nan if mode.segment_bytes is None else again,
    }


def sizes_bytes(stage: Stage, mode: Mode) -> dict[SizeName, int]:
    """Sizes of a microbatch in a mode, which its ops take and free."""
    work = stage.workspace_bytes
    taken, freed = (
        (stage.gradients_taken_bytes, stage.gradients_freed_bytes) if isinstance(stage, UnitStage) else (0, 0)
    )
    return {
        "kept": mode.kept_bytes,
        "activation": stage.activation_bytes,
        "backward_weight": stage.backward_weight_bytes,
        "recomputed": mode.recomputed_bytes,
        "segment": mode.segment_bytes or 0,
        "copied": mode.offload.bytes if mode.offload else 0,
        "gradients_taken": taken,
        "gradients_freed": freed,
        "forward_workspace": mode.forward_workspace_bytes,
        "recompute_workspace": mode.workspace_bytes,
        "workspace_F": work.F,
        "workspace_B": work.B,
        "workspace_W": work.W,
        "workspace_BW": work.BW,
    }


def device_effect(stage: Stage, kind: str, mode: Mode | None = None) -> Effect:
    """Effect on its device's memory of an op of `kind` for a microbatch in `mode` (default: `implied_mode`)."""
    return Effect(*KIND[kind].device_change(sizes_bytes(stage, mode or implied_mode(stage, kind))))
