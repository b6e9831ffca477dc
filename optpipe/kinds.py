"""Kinds of op as data: a row for each, from which its stream, order, needs, costs, memory and look follow.

On each stage a unit (a microbatch, or a slice of one) goes through duties: forward, backward input, backward weight,
and, as its activation is held, offload, reload and recomputation. An op of a kind covers one duty or several: `BW` is B
and W in one op. Wherever a rule names a duty, the op that covers it is meant.

Read by ops, costs, `task_graph` and all that follow from it, by the compiler, exports and pictures. `verify` and
`worst_case_memory` take names and streams from here, and state the rules for themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from graphlib import TopologicalSorter
from operator import add
from typing import Any, Literal, NamedTuple

StreamName = Literal["compute", "offload", "reload"]
STREAMS: tuple[StreamName, ...] = ("compute", "offload", "reload")

Direction = Literal["forward", "backward"]

KindName = Literal["F", "B", "W", "BW", "O", "R", "C", "CB", "CBW"]
"""Names of the kinds, for documents and type checkers."""

TimeName = Literal["forward", "backward_input", "backward_weight", "offload", "reload", "recompute", "recompute_inside"]
"""Parts of an op's duration; `recompute_inside` is absent from activation modes without `segment_bytes`."""

SizeName = Literal[
    "kept", "activation", "backward_weight", "recomputed", "segment", "copied", "gradients_taken", "gradients_freed",
    "forward_workspace", "recompute_workspace", "workspace_F", "workspace_B", "workspace_W", "workspace_BW",
]  # fmt: skip
"""Sizes that ops take and free: of an activation in its mode, of workspaces, and of the gradients of slices."""


class Need(NamedTuple):
    """The end of another op, before which an op does not start: the one that covers `duty`, where there is one.

    `stage`: of the same stage (0), the one before (-1) or behind (1), whose result is sent. `slice`: of the same slice
    (0), or of the one before or behind it in its microbatch.
    """

    duty: str
    stage: int = 0
    slice: int = 0

    @property
    def direction(self) -> Direction | None:
        """Direction of the message between the two stages; None on one stage."""
        return None if self.stage == 0 else "forward" if self.stage < 0 else "backward"


@dataclass(frozen=True)
class Kind:
    """A kind of op.

    `label` says what it is; `colour`, and `short` next to its name in a crowded legend, how it is drawn. `covers`: its
    duties, the leading one first, with which it shares one sequence on a stage; none given: the duty of its own name.
    `needs`: those of a duty, kept with the kind of its name. `ascends`: slices run from the first, otherwise from the
    last.

    `times` add up to its duration. Of device memory it takes `takes` at its start and holds `during` as well until its
    end, where it frees `frees` and takes `leaves`; of host memory `host_takes` and `host_frees`. `torch` is its letter
    in schedules of torch.
    """

    name: str
    label: str
    colour: str
    times: tuple[TimeName, ...]
    short: str = ""
    stream: StreamName = "compute"
    covers: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    ascends: bool = False
    takes: tuple[SizeName, ...] = ()
    during: tuple[SizeName, ...] = ()
    frees: tuple[SizeName, ...] = ()
    leaves: tuple[SizeName, ...] = ()
    host_takes: tuple[SizeName, ...] = ()
    host_frees: tuple[SizeName, ...] = ()
    torch: str | None = None

    @property
    def duties(self) -> tuple[str, ...]:
        """The duties that it covers, the leading one first."""
        return self.covers or (self.name,)

    def duration(self, times: Mapping[TimeName, Any]) -> Any:
        """Duration for these times: numbers, or arrays. Added in the order of `times`, so that floats round alike."""
        return reduce(add, [times[name] for name in self.times])

    def device_change(self, sizes: Mapping[SizeName, Any]) -> tuple[Any, Any]:
        """Signed changes of device memory at the start and at the end, for these sizes: numbers, or arrays."""
        taken, during, freed, left = (
            sum(sizes[name] for name in names) for names in (self.takes, self.during, self.frees, self.leaves)
        )
        return taken + during, left - freed - during

    def host_change(self, sizes: Mapping[SizeName, Any]) -> tuple[Any, Any]:
        """Signed changes of host memory at the start and at the end, for these sizes."""
        return sum(sizes[name] for name in self.host_takes), -sum(sizes[name] for name in self.host_frees)


ROWS = (
    Kind(
        "F", "forward", "#0072B2", times=("forward",), torch="F", ascends=True,
        needs=(Need("F", slice=-1), Need("F", stage=-1)),
        takes=("kept",), during=("forward_workspace", "workspace_F"),
    ),
    Kind(
        "B", "backward input", "#E69F00", short="input", times=("backward_input",), torch="I",
        needs=(Need("F"), Need("B", slice=1), Need("R"), Need("C"), Need("B", stage=1)),
        takes=("gradients_taken",), during=("workspace_B",),
        frees=("activation", "gradients_freed"), leaves=("backward_weight",),
    ),
    Kind(
        "W", "backward weight", "#009E73", short="weight", times=("backward_weight",), torch="W",
        needs=(Need("B"),),
        during=("workspace_W",), frees=("backward_weight",),
    ),
    Kind(
        "BW", "backward, fused", "#D55E00", times=("backward_input", "backward_weight"), torch="B", covers=("B", "W"),
        takes=("gradients_taken",), during=("workspace_BW",), frees=("activation", "gradients_freed"),
    ),
    Kind(
        "O", "offload", "#CC79A7", times=("offload",), stream="offload", ascends=True,
        needs=(Need("F"),),
        frees=("copied",), host_takes=("copied",),
    ),
    Kind(
        "R", "reload", "#56B4E9", times=("reload",), stream="reload",
        needs=(Need("O"),),
        takes=("copied",), host_frees=("copied",),
    ),
    Kind(
        "C", "recompute ahead", "#F0E442", short="recompute", times=("recompute",),
        needs=(Need("F"), Need("R")),
        takes=("recomputed",), during=("recompute_workspace",),
    ),
    Kind(
        "CB", "recompute and backward input", "#B7950B", short="C + B",
        times=("backward_input", "recompute_inside"), torch="I", covers=("B", "C"),
        takes=("gradients_taken",), during=("segment", "workspace_B"),
        frees=("kept", "gradients_freed"), leaves=("backward_weight",),
    ),
    Kind(
        "CBW", "recompute and backward, fused", "#8C4A1F", short="C + BW",
        times=("backward_input", "backward_weight", "recompute_inside"), torch="B",
        covers=("B", "W", "C"),
        takes=("gradients_taken",), during=("segment", "workspace_BW"), frees=("kept", "gradients_freed"),
    ),
)  # fmt: skip
"""Every kind, in the order of their codes. Torch's own backward of a checkpointed module recomputes inside itself, so
CB and CBW have the letters of B and BW there."""

KINDS = tuple(row.name for row in ROWS)
"""Names of the kinds."""

KIND = {row.name: row for row in ROWS}
CODE = {name: code for code, name in enumerate(KINDS)}
"""Index of each kind into KINDS."""

PASS_COLOURS = ("#6A3D9A", "#1F3B73", "#9E9AC8", "#B2DF8A")
"""Colours of spread passes, by the first letters of their names: neighbours in the alphabet differ."""


@cache
def look_of(kind: str) -> Kind:
    """The row of a kind; of a spread pass one with its name and colour alone."""
    colour = PASS_COLOURS[ord(kind[0]) % len(PASS_COLOURS)]
    return KIND[kind] if kind in KIND else Kind(kind, "spread pass", colour, times=(), short="pass")


STREAM_OF_KIND = tuple(STREAMS.index(row.stream) for row in ROWS)
"""Index into STREAMS of the stream of each kind."""

DUTIES = tuple(row.name for row in ROWS if not row.covers)
"""All duties: each is a kind of its own."""

OPTIONAL = ("O", "R", "C")
"""Duties of units in some activation modes alone."""

TRAINING = tuple(duty for duty in DUTIES if duty not in OPTIONAL)
"""Duties of every unit of a stage that is trained."""


@cache
def covering(*duties: str) -> tuple[str, ...]:
    """Names of the kinds that cover all of the duties."""
    return tuple(row.name for row in ROWS if {*duties} <= {*row.duties})


BACKWARDS = covering("B")
"""Kinds that take the gradient of a stage's output and make that of its input."""

LAST_BACKWARDS = covering("W")
"""Kinds after which the weight gradients of a unit are complete."""

RECOMPUTATIONS = covering("C")
"""Kinds that make an activation anew: ahead of the backward, or inside it."""

INSIDE = covering("B", "C")
"""Backwards that recompute inside themselves."""

HALVES = tuple(row.name for row in ROWS if ("B" in row.duties) != ("W" in row.duties))
"""Kinds of a backward that is split."""

KIND_OF_TORCH = {row.torch: row.name for row in reversed(ROWS) if row.torch}
"""The kind that stands for each letter of torch: one that recomputes nothing."""

COPIES = tuple(row.name for row in ROWS if row.stream != "compute")

WITHOUT_MODES = tuple(row.name for row in ROWS if "C" not in row.duties)
"""Kinds of ops of a unit that is kept, or offloaded whole."""


def kind_of(*duties: str) -> str:
    """Name of the kind that covers these duties and no other."""
    return next(row.name for row in ROWS if {*row.duties} == {*duties})


PLAIN_BACKWARD = {name: kind_of(*(duty for duty in KIND[name].duties if duty != "C")) for name in INSIDE}
"""The plain backward of each backward that recomputes inside itself."""

WHOLE_BACKWARD = {name: kind_of(*KIND[name].duties, "W") for name in HALVES if name != "W"}
"""The fused backward of each backward input."""

PASSAGE = tuple(
    TopologicalSorter(
        {duty: [need.duty for need in KIND[duty].needs if not need.stage and not need.slice] for duty in DUTIES}
    ).static_order()
)
"""Duties in the order in which a unit goes through them on a stage."""


@cache
def needs_of(kind: str) -> tuple[Need, ...]:
    """All that an op of a kind needs: what its duties do, each once, without what it covers itself."""
    own = KIND[kind].duties
    needs = dict.fromkeys(need for duty in own for need in KIND[duty].needs)
    return tuple(need for need in needs if need.stage or need.slice or need.duty not in own)


class Precedence(NamedTuple):
    """A rule for all units: ops of the kinds `after` start no earlier than one of the kinds `before` ends.

    Kinds are codes. `need` says on which stage the op before is, and which message comes from it.
    """

    need: Need
    before: tuple[int, ...]
    after: tuple[int, ...]


def _precedences() -> Iterator[Precedence]:
    for duty in PASSAGE:
        needs = {row.name: needs_of(row.name) for row in ROWS if row.duties[0] == duty}
        for need in dict.fromkeys(need for of_kind in needs.values() for need in of_kind):
            if not need.slice:  # the order within a stage says so
                after = [kind for kind, of_kind in needs.items() if need in of_kind]
                yield Precedence(need, DOERS[need.duty], codes(after))


def codes(names: Iterable[str]) -> tuple[int, ...]:
    """Indices of kinds into KINDS."""
    return tuple(CODE[name] for name in names)


SEQUENCES = {duty: codes(row.name for row in ROWS if row.duties[0] == duty) for duty in DUTIES}
"""Codes of the kinds that share one sequence of units on a stage, by their leading duty."""

DOERS = {duty: codes(covering(duty)) for duty in DUTIES}
"""Codes of the kinds that cover each duty."""

GATED = {duty: SEQUENCES[duty] if duty in OPTIONAL else DOERS[duty] for duty in DUTIES}
"""Codes of the kinds that gates of each duty delay. A recomputation inside a backward counts as that, not as C."""

PRECEDENCES = tuple(_precedences())
"""Rules between the ops of one unit, in the order in which it goes through them, one op a leading duty."""
