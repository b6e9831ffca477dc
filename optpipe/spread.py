"""Spread passes: work that every device does for each microbatch, behind barriers (fields `spread` and `gates`).

A vocabulary layer whose rows lie on all devices (Vocabulary Parallelism, arXiv 2411.05288), input embeddings, heads of
further tokens. A pass runs once for each device and microbatch. What comes after a pass waits for the latest end of it
over all devices: a barrier, such as an all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Discriminator, Field, Tag

from optpipe.document import UNION_TAG, Document
from optpipe.fields import MAX_DEVICES, Bytes, Index, TimeUs, at_most, reject
from optpipe.kinds import KIND, KINDS, OPTIONAL, PASSAGE
from optpipe.ops import MAX_PASS_NAME, PASS_NAME
from optpipe.stage import Stage

MAX_PASSES = 32
"""Most passes of a problem."""

MAX_WAITS = 1000
"""Most gates of a problem, and most entries of `after` in all passes and gates: each is a wait of every microbatch."""


class AfterOp(Document):
    """The end of an op of the same microbatch, and the time of the message; no time on the op's own device."""

    op: Literal["F", "B", "W"]
    stage: Index
    us: TimeUs = 0


class AfterPass(Document):
    """The latest end of a pass for the same microbatch over all devices, and the time of the collective."""

    model_config = ConfigDict(serialize_by_alias=True)

    pass_name: str = Field(alias="pass", max_length=MAX_PASS_NAME)
    us: TimeUs = 0


_OP, _PASS = UNION_TAG + "op", UNION_TAG + "pass"


def _after_tag(value: Any) -> str:
    is_pass = "pass" in value if isinstance(value, dict) else isinstance(value, AfterPass)
    return _PASS if is_pass else _OP


After = Annotated[Annotated[AfterOp, Tag(_OP)] | Annotated[AfterPass, Tag(_PASS)], Discriminator(_after_tag)]


class SpreadPass(Document):
    """A pass that every device runs for each microbatch, except those where `us` is 0.

    An op of it on device d takes `us[d]`, and `kept_bytes[d]` of memory from its start until the end of the pass that
    `frees` this one there; `workspace_bytes[d]` while it runs. It starts after everything in `after`.
    """

    name: Annotated[str, Field(pattern=PASS_NAME)]
    us: Annotated[list[TimeUs], at_most(MAX_DEVICES)]
    kept_bytes: Annotated[list[Bytes], at_most(MAX_DEVICES)] | None = None
    workspace_bytes: Annotated[list[Bytes], at_most(MAX_DEVICES)] | None = None
    frees: str | None = Field(None, max_length=MAX_PASS_NAME)
    after: Annotated[list[After], at_most(MAX_WAITS)] = []

    def kept(self, device: int) -> int:
        """Bytes that its op on a device keeps; 0 where it has none."""
        return self.kept_bytes[device] if self.kept_bytes and self.us[device] else 0

    def workspace(self, device: int) -> int:
        """Bytes that its op on a device takes while it runs."""
        return self.workspace_bytes[device] if self.workspace_bytes and self.us[device] else 0


class Gate(Document):
    """An op of a stage that also starts after everything in `after`, of every microbatch that has the op.

    B stands for BW, CB and CBW too, W for BW and CBW, C for a recomputation ahead of the backward alone.
    """

    op: Literal["F", "B", "W", "O", "R", "C"]
    stage: Index
    after: Annotated[list[After], at_most(MAX_WAITS)]

    def duty(self, stages: Sequence[Stage]) -> str:
        """The duty that is delayed: B where W is always one op with it."""
        return self.op if self.op != "W" or stages[self.stage].split_backward else "B"


class VocabularyPasses(NamedTuple):
    """The passes of a vocabulary layer behind the last stage: `logits` makes each device's part of the logits, and
    `weights` the gradient of its rows.

    `barriers`: the last stage's backward waits for every `logits` (1, Algorithm 2) or for every `weights` (2,
    Algorithm 1).
    """

    logits: str
    weights: str
    barriers: Literal[1, 2]


def two_passes(passes: Sequence[SpreadPass], stages: Sequence[Stage]) -> tuple[SpreadPass, SpreadPass] | None:
    """A pass that comes after F of the last stage, and one that comes after that pass; None where others are there."""
    if len(passes) != 2:
        return None
    first, second = sorted(passes, key=lambda one: any(isinstance(after, AfterPass) for after in one.after))
    behind = [(after.op, after.stage) for after in first.after if isinstance(after, AfterOp)]
    follows = [after.pass_name for after in second.after if isinstance(after, AfterPass)]
    return (first, second) if behind == [("F", len(stages) - 1)] and follows == [first.name] else None


def vocabulary_passes(
    passes: Sequence[SpreadPass], gates: Sequence[Gate], stages: Sequence[Stage]
) -> VocabularyPasses | None:
    """Read passes and gates as those of a vocabulary layer that lies on all devices; None where they are others."""
    last = len(stages) - 1
    ordered = two_passes(passes, stages)
    if ordered is None or not all(us for one in passes for us in one.us):
        return None
    logits, weights = ordered
    gated = {one.pass_name for gate in gates for one in gate.after if isinstance(one, AfterPass)}
    alone = len(logits.after) == len(weights.after) == 1
    of_last = all((gate.op, gate.stage) == ("B", last) for gate in gates)
    from_passes = all(isinstance(one, AfterPass) for gate in gates for one in gate.after)
    if not (alone and of_last and from_passes and gated) or logits.frees:
        return None
    return VocabularyPasses(logits.name, weights.name, 2 if weights.name in gated else 1)


def check_spread(passes: Sequence[SpreadPass], gates: Sequence[Gate], stages: Sequence[Stage], devices: int) -> None:
    """Reject passes and gates that do not fit the stages and devices, with the field at fault."""
    seen: dict[str, int] = {}
    for n, one in enumerate(passes):
        where = f"spread[{n}]"
        if one.name in KINDS:
            raise reject("kind_name", f"{where}.name is {one.name!r}, which is a kind of op: {', '.join(KINDS)}")
        if one.name in seen:
            raise reject("repeated_pass", f"{where}.name is {one.name!r}, as spread[{seen[one.name]}] is called")
        seen[one.name] = n
        for name in ("us", "kept_bytes", "workspace_bytes"):
            entries = getattr(one, name)
            if entries is not None and len(entries) != devices:
                detail = f"{where}.{name} has {len(entries)} entries but there are {devices} devices"
                raise reject("wrong_length", f"{detail}. Maybe give 0 where a device takes no part")
        if not any(one.us):
            raise reject("no_part", f"{where}.us is 0 on every device. Maybe leave the pass out")
    waits = list(_afters(passes, gates))
    if len(waits) > MAX_WAITS:
        detail = f"spread and gates have {len(waits):,} entries of after together but at most {MAX_WAITS:,} are allowed"
        raise reject("too_long", f"{detail}. Maybe some repeat others")
    for where, after in waits:
        if isinstance(after, AfterPass) and after.pass_name not in seen:
            known = ", ".join(seen) or "none"
            raise reject("unknown_pass", f"{where}.pass is {after.pass_name!r}; the passes are: {known}")
        if isinstance(after, AfterOp):
            _check_op(where, after, stages)
    for n, gate in enumerate(gates):
        _check_op(f"gates[{n}]", gate, stages)
    try:
        TopologicalSorter(_needs(passes, gates, stages, optional=True)).prepare()
    except CycleError as error:
        circle = " after ".join(reversed(error.args[1]))
        raise reject("circle", f"spread and gates wait in a circle: {circle}") from None
    _check_frees(passes, seen, _needs(passes, gates, stages, optional=False))


def _afters(passes: Sequence[SpreadPass], gates: Sequence[Gate]) -> Iterator[tuple[str, AfterOp | AfterPass]]:
    lists = [(f"spread[{n}]", one.after) for n, one in enumerate(passes)]
    lists += [(f"gates[{n}]", gate.after) for n, gate in enumerate(gates)]
    for where, afters in lists:
        for k, after in enumerate(afters):
            yield f"{where}.after[{k}]", after


def _check_op(where: str, named: AfterOp | Gate, stages: Sequence[Stage]) -> None:
    if named.stage >= len(stages):
        raise reject("unknown_stage", f"{where}.stage is {named.stage} of {len(stages)} stages, from 0")
    if named.op != "F" and stages[named.stage].backward == "none":
        raise reject("no_backward", f"{where}.op is {named.op!r}, but stages[{named.stage}].backward is 'none'")


def _needs(
    passes: Sequence[SpreadPass], gates: Sequence[Gate], stages: Sequence[Stage], *, optional: bool
) -> dict[str, set[str]]:
    """Direct predecessors of each duty (``B2``) and pass (``S``) of a microbatch, by the rules of the model.

    `optional`: also those of duties that only some microbatches of a stage have.
    """
    there = [
        (duty, s)
        for s, stage in enumerate(stages)
        for duty in PASSAGE
        if duty not in OPTIONAL or (optional and duty in _options(stage))
    ]
    names = [*(f"{duty}{s}" for duty, s in there), *(one.name for one in passes)]
    needs: dict[str, set[str]] = {name: set() for name in names}
    for duty, s in there:
        befores = [f"{need.duty}{s + need.stage}" for need in KIND[duty].needs if not need.slice]
        needs[f"{duty}{s}"].update(before for before in befores if before in needs)
    named = [(one.name, one.after) for one in passes]
    named += [(f"{gate.duty(stages)}{gate.stage}", gate.after) for gate in gates]
    for name, afters in named:
        if name in needs:
            needs[name].update(
                one.pass_name if isinstance(one, AfterPass) else f"{one.op}{one.stage}" for one in afters
            )
    return needs


def _options(stage: Stage) -> Set[str]:
    """Duties that some microbatches of a stage may have and others not."""
    leaves, again = (any(mode.offload for mode in stage.choices), any(mode.recomputes for mode in stage.choices))
    return {*("O", "R") * leaves, *("C",) * again}


def _check_frees(passes: Sequence[SpreadPass], numbers: Mapping[str, int], needs: Mapping[str, Set[str]]) -> None:
    freed_by: dict[str, int] = {}
    for n, one in enumerate(passes):
        if one.frees is None:
            continue
        where = f"spread[{n}].frees is {one.frees!r}"
        if one.frees not in numbers:
            raise reject("unknown_pass", f"{where}; the passes are: {', '.join(numbers)}")
        if one.frees in freed_by:
            raise reject("repeated_frees", f"{where}, which spread[{freed_by[one.frees]}] frees already")
        if one.frees not in _ancestors(one.name, needs):
            raise reject("freed_too_early", f"{where}, but {one.name} does not come after it. Maybe add it to after")
        freed_by[one.frees] = n
    for n, one in enumerate(passes):
        for d in range(len(one.us)):
            other = freed_by.get(one.name)
            if one.kept(d) and (other is None or not passes[other].us[d]):
                detail = f"spread[{n}].kept_bytes[{d}] is {one.kept(d)}, but no pass on device {d} frees it"
                raise reject("never_freed", f"{detail}. Maybe they are workspace_bytes")


def _ancestors(name: str, needs: Mapping[str, Set[str]]) -> set[str]:
    """All that must end before a pass or duty of a microbatch starts."""
    found, left = set[str](), [name]
    while left:
        new = needs.get(left.pop(), set()) - found
        found |= new
        left += new
    return found
