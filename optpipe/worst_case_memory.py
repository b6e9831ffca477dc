"""Worst-case memory peak of a device: the maximum over all durations that keep order and waits.

The events (starts and ends of ops) that have happened by some moment form a closed set: with each event it contains all
its predecessors. Every closed set can occur, since durations are free. So the peak is the largest weight of a closed
set (maximum closure problem). A device runs three streams, each in order, so a closed set is three prefixes, and
dependencies through other devices add nothing (they leave and reach the compute stream, which is totally ordered).
Offloads only free memory, so for given prefixes of compute and reload the shortest prefix of offloads that these
require is the worst case, and a scan finds the closure without a minimum cut.

Where units (microbatches, or slices of them) have sizes of their own, these are constants of their events as well.
Activation modes change none of this. The document states the mode of each microbatch, so what each event takes or frees
is a constant, whatever the durations. C, CB and CBW run on the compute stream, and C needs nothing of another device:
the closed sets are three prefixes as before, with the weights of these ops among those of the compute stream, of which
every prefix is tried. Reloads still only take memory and offloads only free it, of whatever size their modes say.

A gate of a copy is a rule as well: an O or R comes after what its gate names on its own device, ops of a pass there
included. What other devices do before a barrier might forbid more closed sets. That is left aside, so the peak is an
upper bound where gates delay copies.

The verifier depends on this module, so it shares no code with the simulator or the solvers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import product
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optpipe.errors import DeadlockError
from optpipe.kinds import KINDS
from optpipe.ops import Op, OpArray, WaitArray
from optpipe.problem import Problem
from optpipe.spread import AfterOp, SpreadPass
from optpipe.stage import Stage

Ints = NDArray[np.int64]

Streams = tuple[Sequence[Op], Sequence[Op], Sequence[Op]]
"""Ops of the compute, offload and reload streams of one device, in order."""

Waits = Mapping[Op, Sequence[Op]]


def worst_case_peak_bytes(
    problem: Problem,
    streams: Streams,
    waits: Waits,
    modes: Ints | None = None,
    blocks: Mapping[Op, Op] | None = None,
) -> int:
    """Largest activation memory of a device over every choice of durations.

    `modes`: for each stage and unit the number of its mode, counted over `kept`, the `offload` of the stage if it
    has one, and its `modes`; None where each is kept, or offloaded whole if it has an O. `blocks`: the backward of each
    F that runs as one block with the op behind it. Raises DeadlockError if orders and waits contradict one another on
    this device.
    """
    columns = [OpArray.of(ops) for ops in streams]
    joined = np.array([k for k, op in enumerate(columns[0]) if op in blocks] if blocks else [], np.int64)
    compute, offload, reload = (
        _levels(problem, ops, modes, joined[: joined.size * (not n)]) for n, ops in enumerate(columns)
    )
    if not columns[1] and not columns[2]:
        return int(compute.max())
    ops = OpArray.joined(columns)
    lengths = np.array([len(stream) for stream in columns])
    clocks, happened = _required_prefixes(lengths, *_direct(problem, ops, lengths, waits, joined))
    if (happened < 2 * lengths).any():
        raise _deadlock(columns, happened // 2)
    compute_clocks, _, reload_clocks = np.split(clocks, np.cumsum(2 * lengths + 1)[:-1])
    return int(_largest(compute, offload, reload, compute_clocks, reload_clocks))


def _levels(problem: Problem, ops: OpArray, modes: Ints | None, joined: Ints) -> Ints:
    """Memory of this stream alone after each prefix of its events (start, end, start, end, ...).

    The two ops of a block, of which `joined` holds the first, both start before they end.
    """
    if not len(ops):
        return np.zeros(1, np.int64)
    unit_sort, sorts = unit_sorts(problem)
    of_ops = np.zeros((len(ops), 2), np.int64)
    passes, others = np.flatnonzero(ops.spread), np.flatnonzero(~ops.spread)
    for k, op in zip(passes.tolist(), ops[passes], strict=True):
        of_ops[k] = pass_changes(problem, op.kind, op.stage, sorts[unit_sort[op.microbatch]])
    of_ops[others] = _stage_changes(problem, ops[others], modes, unit_sort, sorts)
    of_ops[joined, 1], of_ops[joined + 1, 0] = of_ops[joined + 1, 0], of_ops[joined, 1]
    return np.concatenate([[0], np.cumsum(of_ops)])


def _stage_changes(
    problem: Problem, ops: OpArray, modes: Ints | None, unit_sort: Ints, sorts: Sequence[UnitSort]
) -> Ints:
    """Changes of memory of ops of stages: an array (ops, 2)."""
    numbers, stage = np.unique(ops.stage, return_inverse=True)
    if not len(ops):
        return np.zeros((0, 2), np.int64)
    names = [[None] if modes is None else mode_names(problem.stages[s]) for s in numbers]
    changes = np.zeros((len(KINDS), len(numbers), max(map(len, names)), len(sorts), 2), np.int64)
    kinds = np.flatnonzero(np.bincount(ops.kind)).tolist()
    for n, (s, of_stage) in enumerate(zip(numbers.tolist(), names, strict=True)):
        for u, sort in enumerate(sorts):
            sizes = unit_sizes(problem, s, sort)
            for k, (m, name) in product(kinds, enumerate(of_stage)):
                changes[k, n, m, u] = memory_changes(problem.stages[s], KINDS[k], name, sizes)
    mode = 0 if modes is None else modes[ops.stage, ops.microbatch]
    of_ops: Ints = changes[ops.kind, stage, mode, unit_sort[ops.microbatch]]
    return of_ops


class UnitSort(NamedTuple):
    """Determinants of a unit's costs: the factors of its microbatch as written, and the number of its slice.

    `time` is that of spread passes.
    """

    forward: float = 1
    backward_input: float = 1
    backward_weight: float = 1
    recompute: float = 1
    bytes: float = 1
    transfer: float = 1
    slice: int = 0
    time: float = 1


def unit_sorts(problem: Problem) -> tuple[Ints, Sequence[UnitSort]]:
    """Number of each unit's sort, and the sorts by number."""
    slices = problem.slices.count if problem.slices else 1
    factors = problem.microbatch_factors
    if factors is None and slices == 1:
        return np.zeros(problem.units, np.int64), [UnitSort()]
    numbers: dict[UnitSort, int] = {}
    unit_sort = []
    for unit in range(problem.units):
        sort = UnitSort(slice=unit % slices)
        if factors:
            own = factors[unit // slices]
            times = [own.forward, own.backward_input, own.backward_weight, own.recompute]
            forward, backward, weight, again = (own.time if factor is None else factor for factor in times)
            of_passes = own.time if problem.spread else 1
            sort = UnitSort(forward, backward, weight, again, own.bytes, own.transfer, sort.slice, of_passes)
        unit_sort.append(numbers.setdefault(sort, len(numbers)))
    return np.array(unit_sort), list(numbers)


def slice_factor(problem: Problem, stage: int, name: str, number: int) -> float:
    """The factor of this name of a slice on a stage."""
    if problem.slices is None:
        return 1
    own = problem.stages[stage].slice_factors
    given = problem.slices.factors if own is None else own
    values: Sequence[float] | None = getattr(given, name)
    return values[number] if values else 1


class UnitSizes(NamedTuple):
    """Sizes of a unit: those of its stage times `factor`, and the gradients of keys and values of its microbatch.

    Its backward takes `taken_bytes` of these at its start, and frees `freed_bytes` at its end.
    """

    factor: Fraction = Fraction(1)
    taken_bytes: int = 0
    freed_bytes: int = 0

    def size(self, size: int) -> int:
        """A size of the stage for this unit, rounded up."""
        if self.factor == 1:
            return size
        product = size * self.factor
        return -(-product.numerator // product.denominator)


WHOLE_UNIT = UnitSizes()
"""A unit of the stage's own sizes."""


def unit_sizes(problem: Problem, stage: int, sort: UnitSort) -> UnitSizes:
    """The sizes of a unit on a stage."""
    if problem.slices is None and problem.microbatch_factors is None:
        return WHOLE_UNIT

    def of_slice(number: int) -> UnitSizes:
        return UnitSizes(Fraction(str(sort.bytes)) * Fraction(str(slice_factor(problem, stage, "bytes", number))))

    own, gradient = of_slice(sort.slice), problem.stages[stage].slice_gradient_bytes
    last = (problem.slices.count if problem.slices else 1) - 1
    if sort.slice < last:
        return own._replace(freed_bytes=own.size(gradient))
    return own._replace(taken_bytes=sum(of_slice(earlier).size(gradient) for earlier in range(last)))


def mode_names(stage: Stage) -> Sequence[str]:
    """Names of the activation modes of this stage, in the order in which they are numbered."""
    if stage.backward == "none":
        return ("kept",)
    return ("kept", *(("offload",) if stage.offload else ()), *(mode.name for mode in stage.modes))


def memory_changes(stage: Stage, kind: str, mode: str | None = None, unit: UnitSizes = WHOLE_UNIT) -> tuple[int, int]:
    """Signed changes of device memory (bytes) at the start and at the end of an op of a unit in this mode.

    Without a mode the unit is kept or, if this is a copy, offloaded whole.
    """
    own = next((entry for entry in stage.modes if entry.name == mode), None)
    size = unit.size
    if kind in ("O", "R"):
        offload = own.offload if own else stage.offload if mode in (None, "offload") else None
        moved = size(offload.bytes) if offload else 0
        return (0, -moved) if kind == "O" else (moved, 0)
    whole, left = size(stage.activation_bytes), size(stage.backward_weight_bytes)
    if stage.backward == "none":
        taken = whole + size(stage.workspace_bytes.F)
        return taken, -taken
    kept = whole if own is None or own.kept_bytes is None else size(own.kept_bytes)
    if kind == "C":
        work = size(own.workspace_bytes) if own else 0
        return whole - kept + work, -work
    if kind == "F":
        given = own.forward_workspace_bytes if own else None
        extra = (whole - kept if given is None else size(given)) + size(stage.workspace_bytes.F)
        return kept + extra, -extra
    if kind == "W":
        work = size(stage.workspace_bytes.W)
        return work, -work - left
    work = size(stage.workspace_bytes.BW if kind in ("BW", "CBW") else stage.workspace_bytes.B)
    if kind in ("CB", "CBW"):
        work += size((own.segment_bytes if own else None) or 0)
    held = kept if kind in ("CB", "CBW") else whole
    return work + unit.taken_bytes, -work - held + (left if kind in ("B", "CB") else 0) - unit.freed_bytes


def pass_changes(problem: Problem, name: str, device: int, sort: UnitSort) -> tuple[int, int]:
    """Signed changes of device memory at the start and at the end of an op of a spread pass.

    It takes what it keeps and its workspace; at its end that leaves, and what the pass that it frees keeps.
    """
    passes = {one.name: one for one in problem.spread or ()}
    size = UnitSizes(Fraction(str(sort.bytes))).size

    def kept(one: SpreadPass) -> int:
        return size(one.kept_bytes[device]) if one.kept_bytes and one.us[device] else 0

    own = passes[name]
    work = size(own.workspace_bytes[device]) if own.workspace_bytes and own.us[device] else 0
    freed = kept(passes[own.frees]) if own.frees and own.us[device] else 0
    return kept(own) + work, -work - freed


def _direct(problem: Problem, ops: OpArray, lengths: Ints, waits: Waits, joined: Ints) -> tuple[Ints, Ints, Ints]:
    """Direct predecessors of each op on its own device, by rules and waits, in compressed sparse row form.

    A block, whose first op `joined` holds, starts with its first op and has ended with its second.

    `ops` are those of all three streams, one stream after another. Returns `first`, `stream`, `events`: the entries of
    op k are `first[k]` to `first[k + 1]`; entry e says that `events[e]` events of `stream[e]` must have happened.
    """
    stages, units = len(problem.stages), problem.units
    if problem.spread:  # the stage of a pass is its device
        stages = max(stages, len(problem.devices))
    key = (ops.kind * stages + ops.stage) * units + ops.microbatch
    order = np.argsort(key)
    sorted_key = key[order]

    def pairs(after: Ints, before_key: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Pairs (op, predecessor) for the predecessors that are in the streams."""
        slot = np.minimum(np.searchsorted(sorted_key, before_key), len(key) - 1)
        present = sorted_key[slot] == before_key
        yield after[present], order[slot[present]]

    edges: list[tuple[Ints, Ints]] = []
    for kind, earlier in _EARLIER.items():
        after = np.flatnonzero(ops.kind == KINDS.index(kind))
        for before in earlier:
            edges += pairs(after, key[after] + (KINDS.index(before) - KINDS.index(kind)) * stages * units)
    for copy, stage, awaited, place in _before_gated_copies(problem, ops.passes):
        after = np.flatnonzero((ops.kind == copy) & (ops.stage == stage))
        edges += pairs(after, (awaited * stages + place) * units + ops.microbatch[after])
    if waits:
        if not isinstance(waits, WaitArray):
            waits = WaitArray.of({op: waits[op] for op in ops if op in waits})
        # Outside the problem a key would be that of another op.
        chosen = np.isin(waits.op.stage, np.unique(ops.stage)) & (waits.op.microbatch < units)
        chosen &= (waits.before.stage < stages) & (waits.before.microbatch < units)
        here = np.flatnonzero(chosen)
        op_key, before_key = (  # spread passes have the numbers of `ops`
            (column.kind * stages + column.stage) * units + column.microbatch
            for column in (
                one[here].numbered([*dict.fromkeys(ops.passes + one.passes)]) for one in (waits.op, waits.before)
            )
        )
        for wait, op in pairs(np.arange(len(op_key)), op_key):
            edges += pairs(op, before_key[wait])
    target, source = (np.concatenate(column) for column in zip(*edges, strict=True))
    target = np.where(np.isin(target, joined + 1), target - 1, target)
    source = np.where(np.isin(source, joined), source + 1, source)
    by_target = np.argsort(target, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(target, minlength=len(key)))])
    stream = np.repeat(np.arange(len(lengths)), lengths)[source[by_target]]
    index = source[by_target] - (np.cumsum(lengths) - lengths)[stream]
    return first, stream, 2 * index + 2


def _before_gated_copies(problem: Problem, passes: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    """The kind and stage of each copy that gates delay, and of an op that it comes after; of a pass the own device."""
    for gate in problem.gates or ():
        for after in gate.after if gate.op in ("O", "R") else ():
            copy = KINDS.index(gate.op), gate.stage
            if isinstance(after, AfterOp):
                yield from ((*copy, KINDS.index(kind), after.stage) for kind in KINDS if after.op in _DONE_BY[kind])
            elif after.pass_name in passes:
                yield *copy, len(KINDS) + passes.index(after.pass_name), problem.stages[gate.stage].device


_DONE_BY = dict.fromkeys(KINDS, "") | {"F": "F", "B": "B", "W": "W", "BW": "BW", "CB": "B", "CBW": "BW"}
"""Duties that `after` of a gate may name, for each kind that covers them."""

_EARLIER = {
    **dict.fromkeys(("B", "BW", "CB", "CBW"), ("F", "R", "C")),
    **{"W": ("B", "CB"), "C": ("F", "R"), "O": ("F",), "R": ("O",)},
}
"""Kinds of ops of the same stage and microbatch that must end before an op of a kind starts."""


@njit(cache=True)
def _required_prefixes(lengths: Ints, first: Ints, stream: Ints, events: Ints) -> tuple[Ints, Ints]:
    """Vector clock of each event, and the number of events of each stream that can happen at all.

    Row e of a stream's clocks: how many events of each stream are in the smallest closed set with the first e events of
    this one. The clocks have three columns and, for each stream, events + 1 rows, one stream after another. Executes
    the three streams in any valid order; events that never happen are in a deadlock.
    """
    begin = np.zeros(3, np.int64)
    row = np.zeros(3, np.int64)
    for x in range(1, 3):
        begin[x] = begin[x - 1] + lengths[x - 1]
        row[x] = row[x - 1] + 2 * lengths[x - 1] + 1
    clocks = np.zeros((row[2] + 2 * lengths[2] + 1, 3), np.int64)
    happened = np.zeros(3, np.int64)
    progress = True
    while progress:
        progress = False
        for x in range(3):
            while happened[x] < 2 * lengths[x]:
                op = begin[x] + happened[x] // 2
                low, high = (first[op], first[op + 1]) if happened[x] % 2 == 0 else (0, 0)
                blocked = False
                for entry in range(low, high):
                    blocked = blocked or happened[stream[entry]] < events[entry]
                if blocked:
                    break
                happened[x] += 1
                clock = clocks[row[x] + happened[x]]
                clock[:] = clocks[row[x] + happened[x] - 1]
                for entry in range(low, high):
                    other = clocks[row[stream[entry]] + events[entry]]
                    for y in range(3):
                        clock[y] = max(clock[y], other[y])
                clock[x] = happened[x]
                progress = True
    return clocks, happened


@njit(cache=True)
def _largest(compute: Ints, offload: Ints, reload: Ints, compute_clocks: Ints, reload_clocks: Ints) -> int:
    """Largest sum of levels over all combinations of prefixes that can occur together."""
    peak = 0
    most_reloads = 0
    for done in range(len(compute)):
        while most_reloads + 1 < len(reload) and reload_clocks[most_reloads + 1, 0] <= done:
            most_reloads += 1
        for reloads in range(compute_clocks[done, 2], most_reloads + 1):
            offloads = max(compute_clocks[done, 1], reload_clocks[reloads, 1])
            peak = max(peak, compute[done] + offload[offloads] + reload[reloads])
    return peak


def _deadlock(columns: Sequence[OpArray], happened: Ints) -> DeadlockError:
    stuck = [str(ops[done]) for ops, done in zip(columns, happened.tolist(), strict=True) if done < len(ops)]
    return DeadlockError(stuck, sum(map(len, columns)) - int(happened.sum()))
