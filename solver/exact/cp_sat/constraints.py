"""Constraints of the CP-SAT model, one method a family: rules, memory, cuts (docs/math/cp-sat.md).

A disjunctive constraint for each device and channel and a cumulative constraint for each memory (Baptiste, Le Pape and
Nuijten, *Constraint-Based Scheduling*, 2001): unlike the mixed-integer program of Zero Bubble (appendix G) and OptPipe
(section 4) the model has no binary for each pair of ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise, product
from math import ceil, inf
from typing import Literal, NamedTuple

from ortools.sat.python import cp_model

from optpipe.kinds import CODE, KIND, OPTIONAL, SizeName, kind_of
from optpipe.task_graph import Lag
from solver.bounds.unit_costs import UnitCosts
from solver.bounds.unit_order import OpTimes, from_stage, op_times
from solver.exact.cp_sat.variables import IntervalTask, Moment, OptionTasks, Variables
from solver.exact.rules import least_work_around, like_pairs


class Held(NamedTuple):
    """A number of bytes held from one moment to another, if `presence` (None: always); for `least` ticks at least."""

    size: int
    first: Moment
    last: Moment
    presence: cp_model.BoolVarT | None = None
    least: int = 0


class _Span(NamedTuple):
    """Two moments of a unit on a stage: a kind of task, with ``<`` for its start or ``>`` for its end.

    `backward`: "split" or "fused" where only such a backward holds bytes from the one to the other.
    """

    first: str
    last: str
    backward: Literal["split", "fused"] | None


def held(variables: Variables, s: int, i: int, *, ends_at_backward: bool = False) -> Iterator[Held]:
    """All pieces of microbatch i on stage s; with `ends_at_backward` those that outlive B in two.

    What every option of the activation holds between two moments is there always, the rest with its literal:
    the cumulative constraint reasons best about intervals that are never absent.
    """
    fused, options = variables.fused.get((s, i)), variables.options_of(s, i)
    backwards = {None: None, "split": None if fused is None else ~fused, "fused": fused}
    sizes: list[dict[_Span, int]] = [defaultdict(int) for _ in options]
    for own, option in zip(sizes, options, strict=True):
        for span, size in _pieces(variables, s, i, option):
            keys = [span]
            if ends_at_backward and span.last == "W>" and not span.backward and span.first in ("F<", "R<", "C<"):
                keys = [span._replace(last="B>"), span._replace(first="B>")]
            for key in keys:
                own[key] += size
    common = {
        key: min(own[key] for own in sizes)
        for key in sizes[0]
        if all(key in own for own in sizes) and {key.first[:-1], key.last[:-1]} <= {*variables.passes[s]}
    }
    for option, own in [(options[0], common)] + [
        (option, {key: size - common.get(key, 0) for key, size in own.items()})
        for option, own in zip(options, sizes, strict=True)
    ]:
        for (first, last, backward), size in own.items():
            if size == 0 or (backward == "fused" and fused is None):
                continue
            presence = variables.both(
                None if own is common or len(options) == 1 else option.literal, backwards[backward]
            )
            begin, end = (_moment(variables, s, i, option, name) for name in (first, last))
            yield Held(size, begin, end, presence, _least_ticks(variables, s, i, option, first, last))
    yield from _gradients_held(variables, s, i)


def held_by_pass(variables: Variables, number: int, device: int, i: int) -> Iterator[Held]:
    """Bytes that an op of a spread pass keeps until the pass that frees them has ended, and its workspace."""
    one, own = variables.graph.passes[number], variables.graph.unit_class[i]
    task = variables.task(one.name, device, i)
    if one.freed_by is not None and (kept := int(one.kept_bytes[device, own])):
        yield Held(
            kept, hold_start(task), hold_end(variables.task(variables.graph.passes[one.freed_by].name, device, i))
        )
    if work := int(one.workspace_bytes[device, own]):
        yield Held(work, hold_start(task), hold_end(task))


def _gradients_held(variables: Variables, s: int, i: int) -> Iterator[Held]:
    """Gradients of the keys and values of a slice, from the backward of its microbatch's last slice to its own.

    A recomputation inside that backward counts to it. A fused backward frees them at the end of W.
    """
    count = variables.problem.slice_count
    size = _size(variables, "gradients_freed", s, i)
    if not size:
        return
    last = i - i % count + count - 1
    inside = [option for option in variables.options.get((s, last), ()) if "CB" in option.tasks]
    begins: list[tuple[IntervalTask, cp_model.BoolVarT | None]] = [
        (option.tasks["CB"], option.literal) for option in inside
    ]
    if inside:
        others = (option.literal for option in variables.options[s, last] if option not in inside)
        begins += [(variables.task("B", s, last), literal) for literal in others]
    else:
        begins.append((variables.task("B", s, last), None))
    fused = variables.fused.get((s, i))
    ends = [("B", None)] if fused is None else [("B", ~fused), ("W", fused)]
    least = sum(variables.length("B", s, unit) for unit in range(i, last + 1))
    for begin, begins_so in begins:
        for kind, ends_so in ends:
            presence = variables.both(begins_so, ends_so)
            yield Held(size, hold_start(begin), hold_end(variables.task(kind, s, i)), presence, least)


def _size(variables: Variables, name: SizeName, s: int, i: int, option: int = 0) -> int:
    graph = variables.graph
    return int(graph.sizes_bytes[name][s, option, graph.unit_class[i]])


def _pieces(variables: Variables, s: int, i: int, option: OptionTasks) -> Iterator[tuple[_Span, int]]:
    """Spans for which a unit holds bytes on a stage, by what its ops take and free; without gradients of slices.

    What an op frees was taken last. If it holds more at its end than before, the difference counts from its start: no
    wait could keep it from ending before another op has freed memory. A fused backward holds everything until its end,
    in addition to what it takes itself: the model keeps B and W as two tasks.
    """
    inside = ("C",) if "CB" in option.tasks else ()
    forward, *backward = variables.passes[s]
    kinds = [forward, *(kind for kind in option.tasks if kind != "CB"), *backward]
    tasks = ["CB" if kind == "B" and inside else kind for kind in kinds]
    stack: list[tuple[str, int]] = []
    found: dict[_Span, int] = {}
    for task, kind in zip(tasks, kinds, strict=True):
        taken, left = _changes(variables, "CB" if task == "CB" else kind, s, i, option.number)
        stack.append((task, taken + max(left, 0)))
        freed = max(-left, 0)
        while freed:
            first, size = stack.pop()
            released = min(size, freed)
            freed -= released
            if size > released:
                stack.append((first, size - released))
            if released:
                found[_Span(f"{first}<", f"{kind}>", "split" if first in ("CB", "B", "W") else None)] = released
    yield from sorted(found.items(), key=lambda piece: _place(piece[0], tasks))
    if backward:
        until_backward = sum(size for span, size in found.items() if span.last == "B>" and not span.backward)
        yield _Span("W<", "W>", "fused"), until_backward
        taken, _ = _changes(variables, kind_of("B", "W", *inside), s, i, option.number)
        yield _Span("CB<" if inside else "B<", "W>", "fused"), taken


def _changes(variables: Variables, kind: str, s: int, i: int, option: int) -> tuple[int, int]:
    """Changes of device memory at the start and at the end of an op, without gradients of slices."""
    graph = variables.graph
    taken, left = graph.device_bytes[graph.type_of(kind, s, option, i)].tolist()
    if "B" not in KIND[kind].duties:
        return taken, left
    return taken - _size(variables, "gradients_taken", s, i), left + _size(variables, "gradients_freed", s, i)


def _place(span: _Span, places: Sequence[str]) -> tuple[int, bool, int]:
    """Place of a span among those of a unit: by its first op, those within one op before others."""
    first, last = span.first[:-1], span.last[:-1]
    return places.index(first), first != last, CODE[last]


def _moment(variables: Variables, s: int, i: int, option: OptionTasks, name: str) -> Moment:
    kind = name[:-1]
    task = option.tasks[kind] if kind in option.tasks else variables.task(kind, s, i)
    return Moment(task, is_end=name.endswith(">"))


def _least_ticks(variables: Variables, s: int, i: int, option: OptionTasks, first: str, last: str) -> int:
    """The least time from one moment of a microbatch (`_Span`) to another.

    No activation lives for less than the round trip through the stages behind and its backward: with this least length
    the cumulative constraint can reason about energy (bytes times ticks) before any start is fixed.
    """
    ticks = {kind: variables.length(kind, s, i) for kind in variables.passes[s]}
    ticks |= {kind: task.ticks for kind, task in option.tasks.items()}
    begin, end = first[:-1], last[:-1]
    if begin == "F" and end in ("B", "W"):
        return variables.round_trips[s][i] + sum(ticks[kind] for kind in "BW"[: "BW".index(end) + 1])
    chain = [str(kind) for kind in ("F", "O", "R", "C", "CB", "B", "W") if kind in ticks]
    return sum(ticks[kind] for kind in chain[chain.index(begin) + first.endswith(">") : chain.index(end) + 1])


def hold_start(task: IntervalTask) -> Moment:
    """The moment at which a task starts."""
    return Moment(task, is_end=False)


def hold_end(task: IntervalTask) -> Moment:
    """The moment at which a task ends."""
    return Moment(task, is_end=True)


class Constraints:
    """Adds every rule of the contract to the model of `variables`."""

    def __init__(self, variables: Variables) -> None:
        self.variables = variables
        self.model = variables.model
        self.problem = variables.problem
        self.task = variables.task

    def add_all(self) -> None:
        """All families."""
        self.dataflow()
        self.microbatch_order()
        self.fused_backwards()
        self.offload_round_trip()
        self.options()
        self.spread()
        self.one_op_at_a_time()
        self.channels()
        self.device_memory()
        self.host_memory()

    def dataflow(self) -> None:
        """F and B wait for the neighbouring stage and its transfer, B for F, W for B (Zero Bubble, appendix G)."""
        ticks, last = self.variables.grid.ticks, len(self.problem.stages) - 1
        forward_us, backward_us = (self.variables.graph.delays_us[name].tolist() for name in ("forward", "backward"))
        for s, passes in enumerate(self.variables.passes):
            for i in range(self.problem.units):
                for before, after in pairwise(self.task(kind, s, i) for kind in passes):
                    self._after(after, before)
                if s < last:
                    self._after(self.task("F", s + 1, i), self.task("F", s, i), ticks(forward_us[s][i]))
                    if "B" in passes:
                        gradient = self.task("B", s + 1, i).end + ticks(backward_us[s][i])
                        self.model.add(self._backward_start(s, i) >= gradient)

    def _after(self, task: IntervalTask, before: IntervalTask, delay: int = 0) -> None:
        self.model.add(task.start >= before.end + delay)

    def _backward_start(self, s: int, i: int) -> cp_model.LinearExprT:
        """Start of the backward of a microbatch, with the recomputation inside it."""
        inside = [option for option in self.variables.options.get((s, i), ()) if "CB" in option.tasks]
        return self.task("B", s, i).start - sum(option.tasks["CB"].ticks * option.literal for option in inside)

    def microbatch_order(self) -> None:
        """Units keep their order within one op type of one stage (absent transfers take no time in it)."""
        for s, passes in enumerate(self.variables.passes):
            for kind in (*passes, "O", "R"):
                for before, i, literals in self.consecutive(kind):
                    if kind in ("F", "B") or (kind == "W" and (s, i) not in self.variables.fused):
                        after = self.model.add(self.task(kind, s, i).start >= self.task(kind, s, before).end)
                    elif kind in ("O", "R") and (s, i) in self.variables.leaves:
                        # The start of an absent copy stays a variable, so the chain holds through it: were it skipped,
                        # copies on its two sides would need a rule of their own for each pair.
                        earlier = self.task(kind, s, before)
                        length = earlier.ticks * self.variables.leaves[s, before]
                        after = self.model.add(self.task(kind, s, i).start >= earlier.start + length)
                    else:
                        continue
                    if literals:
                        after.only_enforce_if(literals)

    def consecutive(self, kind: str) -> Iterator[tuple[int, int, list[cp_model.BoolVarT]]]:
        """Pairs of units of which the first is before the second in the order of a kind, if the literals hold.

        Where the order of microbatches is given these are the pairs without a unit between them; where it is free also
        those of every two microbatches, as the literal says which of them is first.
        """
        count = self.problem.slice_count
        if not self.problem.has_free_order:
            yield from ((a, b, []) for a, b in pairwise(self.problem.units_in_order(kind).tolist()))
            return
        for i in range(self.problem.microbatches):
            yield from ((a, b, []) for a, b in pairwise(self.problem.units_in_order(kind, [i]).tolist()))
            for j in range(self.problem.microbatches):
                literals = self.variables.is_first(i, j) if i != j else None
                if literals is not None:
                    before, after = (self.problem.units_in_order(kind, [one]).tolist() for one in (i, j))
                    yield before[count - 1], after[0], literals

    def earlier(self, kind: str, unit: int) -> Iterator[tuple[int, list[cp_model.BoolVarT]]]:
        """The units that are or may be before one in the order of a kind, each with the literals by which it is."""
        count, own = self.problem.slice_count, unit // self.problem.slice_count
        units = self.problem.units_in_order(kind).tolist()
        own_place = units.index(unit)
        for place, other in enumerate(units):
            literals: list[cp_model.BoolVarT] | None
            if other // count == own or not self.problem.has_free_order:
                literals = [] if place < own_place else None
            else:
                literals = self.variables.is_first(other // count, own)
            if literals is not None:
                yield other, literals

    def fused_backwards(self) -> None:
        """A fused backward is W right behind B and hands its gradient over at the end of W.

        It is one op, BW, and so not part of the order of W (docs/adr/0006).
        """
        delays_us = self.variables.graph.delays_us["backward"].tolist()
        for (s, i), fused in self.variables.fused.items():
            backward, weight = self.task("B", s, i), self.task("W", s, i)
            self.model.add(weight.start == backward.end).only_enforce_if(fused)
            if s > 0 and "B" in self.variables.passes[s - 1]:
                handed_over = weight.end + self.variables.grid.ticks(delays_us[s - 1][i])
                self.model.add(self._backward_start(s - 1, i) >= handed_over).only_enforce_if(fused)
            for j, earlier in self.earlier("W", i):
                both_split = [~fused, ~self.variables.fused[s, j], *earlier]
                self.model.add(weight.start >= self.task("W", s, j).end).only_enforce_if(both_split)

    def offload_round_trip(self) -> None:
        """O after F, R after O, B after R, where the activation leaves (OptPipe, section 4)."""
        for (s, i), leaves in self.variables.leaves.items():
            for before, after in pairwise(self.task(kind, s, i) for kind in "FORB"):
                self.model.add(after.start >= before.end).only_enforce_if(leaves)

    def options(self) -> None:
        """O after F, R after O, C after both, B after them, in the option taken; microbatches in order in each.

        The start of an op that is absent stays a variable, as that of an absent copy does.
        """
        for (s, i), options in self.variables.options.items():
            for option in options:
                chain = [self.task("F", s, i), *option.tasks.values(), self.task("B", s, i)]
                for before, after in pairwise(chain):
                    self.model.add(after.start >= before.end).only_enforce_if(option.literal)
        for s, kind in product(range(len(self.problem.stages)), ("O", "R", "C")):
            for unit, i, literals in self.consecutive(kind):
                now = [option.tasks[kind] for option in self.variables.options.get((s, i), ()) if kind in option.tasks]
                earlier = [option for option in self.variables.options.get((s, unit), ()) if kind in option.tasks]
                if now:
                    length = sum(option.tasks[kind].ticks * option.literal for option in earlier)
                    rule = self.model.add(now[0].start >= earlier[0].tasks[kind].start + length)
                    if literals:
                        rule.only_enforce_if(literals)

    def spread(self) -> None:
        """Barriers behind spread passes, what passes and gated ops wait for, and microbatches in order in a pass."""
        graph = self.variables.graph
        for n, one in enumerate(graph.passes):
            for d, i in product(one.devices, range(self.problem.units)):
                self.model.add(self.variables.barriers[n, i] >= self.task(one.name, d, i).end)
                for lag in one.after:
                    self._lag(self.task(one.name, d, i).start, lag, d, i)
            for before, i, literals in self.consecutive("F"):
                for d in one.devices:
                    rule = self.model.add(self.task(one.name, d, i).start >= self.task(one.name, d, before).end)
                    if literals:
                        rule.only_enforce_if(literals)
        for (kind, s), lags in graph.gates.items():
            for lag, i in product(lags, range(self.problem.units)):
                if kind in OPTIONAL:
                    for option in self.variables.options_of(s, i):
                        if kind in option.tasks:
                            self._lag(option.tasks[kind].start, lag, int(graph.device[s]), i, option.literal)
                    continue
                start = self._backward_start(s, i) if kind == "B" else self.task(kind, s, i).start
                self._lag(start, lag, int(graph.device[s]), i)
                if kind == "W" and (fused := self.variables.fused.get((s, i))) is not None:
                    self._lag(self._backward_start(s, i), lag, int(graph.device[s]), i, fused)

    def _lag(self, start: cp_model.LinearExprT, lag: Lag, device: int, i: int, *literals: cp_model.BoolVarT) -> None:
        """A start on a device that waits for a barrier, or for the end of an op, if the literals hold."""
        ticks = self.variables.grid.ticks(float(lag.us[i]))
        if lag.spread is not None:
            self.model.add(start >= self.variables.barriers[lag.spread, i] + ticks).only_enforce_if(*literals)
            return
        own = device == self.variables.graph.device[lag.stage]
        ends = [(self.task(lag.duty, lag.stage, i), literals)]
        if lag.duty == "B" and (fused := self.variables.fused.get((lag.stage, i))) is not None:
            ends.append((self.task("W", lag.stage, i), (*literals, fused)))
        for task, conditions in ends:
            self.model.add(start >= task.end + (0 if own else ticks)).only_enforce_if(*conditions)

    def one_op_at_a_time(self) -> None:
        """A device runs one compute op, or one block, at a time."""
        for d, stages in enumerate(self.problem.stages_of):
            places = product(stages, range(self.problem.units))
            tasks = [self.task(kind, s, i) for s, i in places for kind in self.variables.passes[s]]
            tasks += self._of_options(stages, ("C", "CB"))
            tasks += [
                self.task(one.name, d, i)
                for one in self.variables.graph.passes
                for i in range(self.problem.units if d in one.devices else 0)
            ]
            self.model.add_no_overlap([self.variables.apart.get(task.op, task.interval) for task in tasks])

    def _of_options(self, stages: Collection[int], kinds: Collection[str]) -> Iterator[IntervalTask]:
        """Tasks of these kinds that are there in some option of an activation of these stages."""
        for (s, _), options in self.variables.options.items():
            if s in stages:
                yield from (task for option in options for kind, task in option.tasks.items() if kind in kinds)

    def channels(self) -> None:
        """A channel carries one transfer at a time; devices behind one switch, or both directions, may share it."""
        for group, kinds in self.variables.graph.channels:
            stages = {s for d in group for s in self.problem.stages_of[d]}
            tasks = [self.task(kind, s, i) for s, i in self.variables.leaves if s in stages for kind in kinds]
            tasks += self._of_options(stages, kinds)
            self.model.add_no_overlap([task.interval for task in tasks])

    def device_memory(self) -> None:
        """Activations and workspace stay within each device's budget.

        The level rises only at starts, and at an instant ends count before starts, as intervals that are open at their
        end do.
        """
        for d, stages in enumerate(self.problem.stages_of):
            budget = self.problem.devices[d].memory_bytes
            if budget is not None:
                pieces = [
                    piece
                    for s, i in product(stages, range(self.problem.units))
                    for piece in held(self.variables, s, i, ends_at_backward=self._alone(s, i, budget))
                ]
                pieces += [
                    piece
                    for n, one in enumerate(self.variables.graph.passes)
                    for i in range(self.problem.units if d in one.devices else 0)
                    for piece in held_by_pass(self.variables, n, d, i)
                ]
                intervals = [
                    piece.first.task.interval  # a workspace: the op's own interval serves
                    if piece.first.task is piece.last.task and piece.presence is None
                    else self.variables.span(f"held{d}.{n}", piece.first, piece.last, piece.presence, piece.least)
                    for n, piece in enumerate(pieces)
                ]
                self.model.add_cumulative(intervals, [piece.size for piece in pieces], budget)

    def _alone(self, s: int, i: int, budget: int) -> bool:
        """True if an activation that may leave has no room next to one like it.

        In one piece until its B, it shows CP-SAT that no two such pieces overlap; those that B and W free do not.
        """
        return (s, i) in self.variables.leaves and 2 * _size(self.variables, "activation", s, i) > budget

    def host_memory(self) -> None:
        """The host holds what is offloaded, from O's start to R's end, all devices together."""
        limit = self.problem.host_memory_bytes
        journeys = [
            (f"host{s}.{i}.{n}", option, _size(self.variables, "copied", s, i, option.number))
            for s, i in {**self.variables.leaves, **self.variables.options}
            for n, option in enumerate(self.variables.options_of(s, i))
            if "O" in option.tasks
        ]
        if limit is None or not journeys:
            return
        intervals = [
            self.variables.span(name, hold_start(option.tasks["O"]), hold_end(option.tasks["R"]), option.literal)
            for name, option, _ in journeys
        ]
        self.model.add_cumulative(intervals, [size for _, _, size in journeys], limit)


SLACK = 1e-6
"""Ticks by which float sums may exceed a whole number."""


def add_work_that_memory_holds_back(variables: Variables) -> None:
    """An op begins no sooner than its device can have done what it must, and leaves time for what is left.

    An interval model propagates memory and the order of a device apart from one another. Together they say more: a
    device can only run ahead, and only put off work, as far as its memory goes (docs/math/bounds.md). The cuts hold for
    the memory of split backwards: devices that may fuse some are left out.
    """
    problem, model, device = variables.problem, variables.model, variables.graph.device.tolist()
    fusing = {device[s] for s in variables.fusing_stages}
    for op, before, after in least_work_around(problem, variables.length):
        if device[op.stage] in fusing:
            continue
        task = variables.tasks[op]
        begin = variables.task("F", problem.stages_of[device[op.stage]][0], 0).start
        if before < inf:
            model.add(task.start >= begin + ceil(before - SLACK))
        counted_from = begin if problem.objective == "device_span" else 0
        model.add(variables.objective >= task.start - counted_from + ceil(after - SLACK))


MOST_BETWEEN = 20_000
"""Pairs of a stage and two microbatches, on all devices, up to which heads between microbatches are added."""


def add_heads_and_tails(variables: Variables) -> None:
    """Each F and B begins no sooner than its head, and the value is no less than its tail beyond its end.

    For spans this holds of each device: from its first F on, and to the end of its last W, in the pipeline of all
    stages from its lowest on (docs/math/bounds.md).
    """
    problem, grid, graph = variables.problem, variables.grid, variables.graph
    spans = problem.objective == "device_span"
    lowest = sorted({stages[0] for stages in problem.stages_of if stages})
    alike = problem.has_equal_microbatches
    between = alike and len(lowest) * len(problem.stages) * problem.microbatches**2 <= MOST_BETWEEN
    for low in lowest if spans or between else [0]:
        known = op_times(UnitCosts.of(from_stage(problem, low)))
        if known is None:
            continue
        if between:
            _add_between_microbatches(variables, low, known)
        if low and not spans:
            continue
        begin = variables.task("F", low, int(problem.units_in_order("F")[0])).start
        sides = {"F": (known.forward_heads, known.forward_tails), "B": (known.backward_heads, known.backward_tails)}
        for (kind, s, i), task in variables.tasks.items():
            if kind in sides and s >= low:
                head, tail = (grid.bound_ticks(side[s - low][i]) for side in sides[kind])
                own_us = graph.duration_us[graph.type_of(kind, s, 0, i)]
                ticks = grid.ticks(float(own_us))  # none for what takes no time
                variables.model.add(task.start >= begin + head)
                variables.model.add(variables.objective >= task.start + ticks + tail - begin)


def _add_between_microbatches(variables: Variables, low: int, known: OpTimes) -> None:
    """Heads hold from F of stage `low` of any microbatch on, since all are alike: leave out those before.

    Tails up to the last B of that stage hold to that of any microbatch: leave out those after. Only what does not
    follow from others is added.
    """
    grid, graph, last = variables.grid, variables.graph, variables.problem.microbatches - 1
    times_us = graph.of_stages(graph.duration_us)[..., 0, 0]
    forward_us, backward_us = (times_us[CODE[graph.kind_with(duty, low).name], low] for duty in "FB")
    heads = {"F": known.forward_heads, "B": known.backward_heads}
    to_go = {"F": known.forward_to_go, "B": known.backward_to_go}
    for kind, s in product("FB", range(len(known.forward_heads))):
        own_us = times_us[CODE[kind], low + s]
        for k in range(1, last + 1):
            if heads[kind][s][k] > heads[kind][s][k - 1] + max(own_us, forward_us) + SLACK:
                head = grid.bound_ticks(heads[kind][s][k])
                for x in range(last - k + 1):
                    start = variables.task(kind, low + s, x + k).start
                    variables.model.add(start >= variables.task("F", low, x).start + head)
            tail_us = to_go[kind][s][last - k]
            if tail_us > to_go[kind][s][last - k + 1] + max(own_us, backward_us) + SLACK:
                tail = grid.bound_ticks(own_us + tail_us - backward_us)
                for x in range(last - k + 1):
                    start = variables.task("B", low, x + k).start
                    variables.model.add(start >= variables.task(kind, low + s, x).start + tail)


def add_weight_order(variables: Variables) -> None:
    """W of like stages run in the order of their B, where none is fused with it: a symmetry (`solver.exact.rules`).

    Each schedule has an equal one in which this holds, so that the others need not be searched or excluded.
    """
    model = variables.model
    for pairs in like_pairs(variables.problem, variables.fusing_stages):
        first = model.new_bool_var(f"{pairs[0][0]}first{pairs[0][1]}")
        variables.firsts.append((first, *pairs[1]))
        for pair in pairs:
            one, other = (variables.tasks[op] for op in pair)
            model.add(other.start >= one.end).only_enforce_if(first)
            model.add(one.start >= other.end).only_enforce_if(~first)
