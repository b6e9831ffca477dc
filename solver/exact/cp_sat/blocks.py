"""Blocks of a forward and a backward in the CP-SAT model: a literal for each pair that may be one.

A block is its backward, lengthened to the time of both: B and W as two tasks, W up to the end of the block. Its F lasts
from the start of B to the end of W and has no place of its own on the device then. So all that waits for a backward in
one piece, which ends with its W, waits for the block, and so does all that waits for the F.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product

from ortools.sat.python import cp_model

from optpipe.ops import Op
from optpipe.problem import Overlap, Problem
from solver.exact.cp_sat.variables import Stretch, Variables

TICK_US = 2.0**-10
"""Duration of a tick when known orders are timed on the grid: sums of it are exact, and no op becomes too long."""


def all_pairs(problem: Problem) -> Iterator[tuple[Op, Op]]:
    """Every F and BW that may be one block."""
    for f, b in problem.block_us:
        for i, j in product(range(problem.units), repeat=2):
            pair = Op("F", f, i), Op("BW", b, j)
            if problem.block_of_units_us(*pair) is not None:
                yield pair


def add_blocks(variables: Variables, pairs: Iterable[tuple[Op, Op]]) -> None:
    """Add the literals of these blocks, and what holds of the two ops of one."""
    model, tasks = variables.model, variables.tasks
    stretched: dict[Op, list[tuple[cp_model.IntVar, int]]] = defaultdict(list)
    for pair in pairs:
        forward, backward, weight = (tasks[op] for op in (pair[0], *(pair[1]._replace(kind=kind) for kind in "BW")))
        apart = forward.ticks, backward.ticks + weight.ticks
        ticks = _ticks(variables, variables.problem.block_of_units_us(*pair), *apart)
        literal = variables.blocks[pair] = model.new_bool_var(f"{pair[0]}with{pair[1]}")
        model.add(forward.start == backward.start).only_enforce_if(literal)
        model.add_implication(literal, variables.fused[pair[1][1:]])
        for option in variables.options.get(pair[1][1:], ()):
            if "CB" in option.tasks:
                model.add_implication(literal, ~option.literal)
        for task, of in ((forward, apart[0]), (weight, apart[1])):
            stretched[task.op].append((literal, ticks - of))
    for op, own in stretched.items():
        _stretch(variables, op, own)


def _stretch(variables: Variables, op: Op, blocks: list[tuple[cp_model.IntVar, int]]) -> None:
    """Let an op take so many ticks more in each of these blocks, of which it is in one or in none."""
    model, task = variables.model, variables.tasks[op]
    apart = model.new_bool_var(f"{op}apart")
    model.add_exactly_one(apart, *(literal for literal, _ in blocks))
    length = model.new_int_var(task.ticks, task.ticks + max(more for _, more in blocks), f"{op}length")
    model.add(length == task.ticks + sum(more * literal for literal, more in blocks))
    end = model.new_int_var(0, variables.horizon, f"{op}end")
    interval = model.new_interval_var(task.start, length, end, f"{op}stretched")
    variables.stretches[op] = Stretch(apart, length, end, blocks)
    variables.tasks[op] = replace(task, interval=interval, stretched_end=end)
    if op.kind == "F":
        variables.apart[op] = model.new_optional_fixed_size_interval_var(task.start, task.ticks, apart, f"{op}apart")


def add_block_hints(variables: Variables, blocks: Mapping[Op, Op], starts: Mapping[Op, int]) -> dict[Op, int]:
    """Hint at the blocks of known orders. Returns the ticks that ops take more in them."""
    model, more_ticks = variables.model, dict[Op, int]()
    for (forward, backward), literal in variables.blocks.items():
        model.add_hint(literal, blocks.get(forward) == backward)
    taken = {variables.blocks[pair].index for pair in blocks.items()}
    for op, (apart, length, end, own) in variables.stretches.items():
        ticks = variables.tasks[op].ticks + sum(more for literal, more in own if literal.index in taken)
        more_ticks[op] = ticks - variables.tasks[op].ticks
        model.add_hint(apart, all(literal.index not in taken for literal, _ in own))
        model.add_hint(length, ticks)
        model.add_hint(end, starts[op] + ticks)
    return more_ticks


def overlaps_in_ticks(variables: Variables) -> list[Overlap] | None:
    """The problem's overlaps as they are in the model, a tick taking `TICK_US`."""
    problem, length = variables.problem, variables.length
    if problem.overlaps is None:
        return None
    return [
        one.replaced(us=TICK_US * _ticks(variables, one.us, length("F", f), length("B", b) + length("W", b)))
        for one, (f, b) in zip(problem.overlaps, problem.block_us, strict=True)
    ]


def _ticks(variables: Variables, time_us: float | None, *apart: int) -> int:
    """Ticks of a block: no fewer than those of its ops, which have one where they take no time."""
    assert time_us is not None, "only pairs that may be a block are asked for"
    return max(variables.grid.length(time_us), *apart)
