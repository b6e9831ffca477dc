"""Memory as an order of ops: what is on a device when an op starts follows from which ops have ended before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from ortools.sat.python import cp_model

from optpipe.kinds import CODE
from optpipe.ops import Op
from solver.exact.cp_sat.variables import Variables
from solver.exact.memory_order import devices_with_order_literals, memory_precedences


def add_memory_precedences(variables: Variables) -> None:
    """Ops that memory forces apart follow one another, as along a chain (`solver.exact.memory_order`)."""
    for before, after in memory_precedences(variables.problem):
        variables.model.add(variables.tasks[after].start >= variables.tasks[before].end)


def add_memory_order(variables: Variables) -> None:
    """Room for the activation of each F beside what other ops have taken and not freed when it starts.

    A cumulative resource concludes little while intervals may still lie anywhere. Here the budget is a sum over
    literals that say which of two ops comes first, which a search branches on and learns from. Only starts of F are
    looked at (those of B gave nothing where activations leave), and what leaves counts as away whenever it may be, so
    the resource is still needed.
    """
    order = _Order(variables)
    for numbers, budget in devices_with_order_literals(variables.problem):
        for s, j in product(numbers, range(variables.problem.units)):
            order.add_room(Op("F", s, j), numbers, budget)


class _Order:
    """Literals for the order of ops on a device, each made when it is first asked for."""

    def __init__(self, variables: Variables) -> None:
        self.variables, self.model = variables, variables.model
        self.literals: dict[tuple[Op, Op], cp_model.BoolVarT] = {}

    def add_room(self, forward: Op, numbers: Sequence[int], budget: int) -> None:
        """The activation of F `forward` fits beside what is there when it starts."""
        graph = self.variables.graph
        changes = graph.of_stages(graph.device_bytes)
        terms: list[cp_model.LinearExprT] = [int(changes[CODE["F"], forward.stage, 0, 0, 0])]
        for t, i in product(numbers, range(self.variables.problem.units)):
            left = {kind: int(changes[CODE[kind], t, 0, 0].sum()) for kind in self.variables.passes[t]}
            terms += [size * self.first(Op(kind, t, i), forward) for kind, size in left.items()]
            if (t, i) in self.variables.leaves:
                copied = int(graph.sizes_bytes["copied"][t, graph.whole_option[t], 0])
                terms.append(-copied * self.away(t, i, forward))
        self.model.add(sum(terms) <= budget)

    def first(self, one: Op, forward: Op) -> cp_model.LiteralT:
        """True if `one` ends before F `forward` starts, False if it starts after that has ended.

        A constant where the rules say so: a microbatch runs F on the stages of a device in ascending order, then B in
        descending order, each W after its B, and microbatches keep their order.
        """
        if one == forward or self._precedes(forward, one):
            return False
        return self._precedes(one, forward) or self._literal(one, forward)

    def _precedes(self, one: Op, other: Op) -> bool:
        """True for two ops of which the first, an F, precedes the second in every schedule."""
        return one.kind == "F" and one.microbatch <= other.microbatch and self._place(one) <= self._place(other)

    def _place(self, op: Op) -> int:
        """Place of an op on the way of a microbatch; for a W, which comes after it, that of its B."""
        return op.stage if op.kind == "F" else 2 * len(self.variables.problem.stages) - 1 - op.stage

    def _literal(self, one: Op, other: Op) -> cp_model.LiteralT:
        if (other, one) in self.literals:
            return self.literals[other, one].negated()
        if (one, other) not in self.literals:
            first = self.literals[one, other] = self.model.new_bool_var(f"{one}first{other}")
            before, after = self.variables.tasks[one], self.variables.tasks[other]
            self.model.add(after.start >= before.end).only_enforce_if(first)
            self.model.add(before.start >= after.end).only_enforce_if(~first)
            self.variables.firsts.append((first, one, other))
        return self.literals[one, other]

    def away(self, s: int, i: int, forward: Op) -> cp_model.LiteralT:
        """May be true only if microbatch i of stage s has left when F `forward` starts, and is still away then."""
        if self.first(Op("F", s, i), forward) is False:
            return False
        away = self.model.new_bool_var(f"away{s}.{i}.{forward}")
        start = self.variables.tasks[forward].start
        offload, reload = (self.variables.task(kind, s, i) for kind in "OR")
        self.model.add_implication(away, self.variables.leaves[s, i])
        self.model.add(start >= offload.end).only_enforce_if(away)
        self.model.add(reload.start >= start).only_enforce_if(away)
        self.variables.aways.append((away, forward, s, i))
        return away
