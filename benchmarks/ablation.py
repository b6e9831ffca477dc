"""Worth of each part of `auto`: every one left out in turn, at equal counted work.

`python -m benchmarks.ablation ablation --size full` measures the table. Work is counted, not timed, so a run is the
same on any machine; the work of a search that is left out goes to the others of its recipe. A part is left out where it
takes part: a search or list kind where the recipe has it and published schedules prove nothing, a start where its
schedule was the best for a while, a bound where no other is as good.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.markdown import machine, table
from benchmarks.section import Section, Size, main, say
from instances import INSTANCES
from optpipe.errors import NoSolutionError
from optpipe.problem import Problem
from solver.bounds.lower_bound import lower_bound_us
from solver.components import COMPONENTS
from solver.limits import Limits
from solver.regression.run import Entry
from solver.search.in_flight import list_kinds
from solver.searches import load_searches
from solver.solution import Solution
from solver.solve import search
from solver.strategy import SharedIncumbent, auto_subsolvers
from solver.warm_starts import offer_published

COMMAND = "python -m benchmarks.ablation ablation"

UNITS = {"quick": 0.2, "full": 0.5}
"""Work of a run, in units of about a second of one core."""

One = str | tuple[str, Mapping[str, float]]
"""A file of `instances` by its name, with the changes of `Entry`."""

SAMPLE: dict[Size, Sequence[Sequence[One]]] = {
    "quick": [["d-p4-m8-o1-mo1-b1o2-linear-make"], ["zb-1.5b-p8-m24-mem1"]],
    "full": [
        *(["d-p8-m16-o1-mo1-b1o4-linear-make"], ["d-p16-m32-o1-mo1-b1o4-interleaved2-make"]),
        [f"suites/problems/four-by-eight/{seed:02}" for seed in (0, 21)],
        *(["a-p8-m16-c0-b1o3-linear-make"], ["po-10.5b-4k-d8-v5-m64-mem0.25"], ["c-p8-m16-f1-l2-b1-vshape-make"]),
        *(["r-14.6b-p16-m48-mem0.25"], ["q-p4-m4-n4-fused-b8"], ["u-p4-m16-lognormal"], ["r-14.6b-p16-m48-mem0.5"]),
        *(["zbv-6.2b-p16-m48-vmin"], ["d-p8-m16-o1-mo0.5-b1o2-vshape-make"], ["a-p16-m32-c0-b1o2-linear-span"]),
        *(["zb-14.6b-p16-m48-mem1.5"], [("zb-1.5b-p8-m24-mem1", {"memory_share": 1.25})]),
        *(["zbv-14.6b-p24-m72-mem1"], ["c-real8-m32-b2-vshape-make"], ["suites/problems/uniform-p64-m64-vshape"]),
        *(["zb-28.3b-p32-m96-mem1"], [("zb-28.3b-p32-m96-mem1", {"microbatches": 512})]),
        *(["u-p8-m32-bimodal"], ["q-p4-m4-n4-causal-b20"]),
    ],
}
"""Rows of equal weight, each an instance or the mean over some; p from 4 to 64, m from 16 to 512."""

EXACT, SEARCH, LISTS = "solver/exact/", "solver/search/", "solver/lists/"
BOUNDS, PUBLISHED = "solver/bounds/", "solver/published/"

CODE: dict[str, Sequence[str]] = {
    "search": [f"{SEARCH}annealing"],
    "windows": [f"{SEARCH}lns"],
    "pattern": [f"{SEARCH}modulo"],
    "mode-rounds": [f"{SEARCH}modulo/mode_rounds.py"],
    "lists": [f"{SEARCH}in_flight.py", f"{LISTS}memory.py"],
    "cp-sat": [f"{EXACT}cp_sat"],
    "states": [f"{EXACT}states.py", f"{EXACT}state_bound.py", f"{EXACT}progress.py"],
    "relaxation": [f"{EXACT}relaxation.py:relaxation_bound"],
    "parts": [f"{EXACT}relaxation.py:proof_by_parts _proof_by_parts_from"],
    "offloading-lists": [f"{SEARCH}in_flight.py:ListScheduler"],
    "recomputing-lists": [f"{SEARCH}in_flight.py:ListScheduler _recomputing"],
    "planned-lists": [f"{LISTS}memory.py:_planned_shares"],
    "random-lists": [f"{SEARCH}in_flight.py:varied _varied"],
    "chain": [f"{BOUNDS}device.py:longest_chain_us"],
    "release-order": [f"{BOUNDS}unit_order.py"],
    "warmup-cooldown": [f"{BOUNDS}warmup_cooldown.py"],
    "memory-time": [f"{BOUNDS}units.py"],
    "rounds": [f"{BOUNDS}rounds.py"],
    "shared-channel": [f"{BOUNDS}shared_channel.py"],
    "whole-forwards": [f"{BOUNDS}whole_forwards.py"],
    "modes": [f"{BOUNDS}modes.py"],
    "unit-device": [f"{BOUNDS}lower_bound.py:_work_bounds_us"],
    "free-order": [f"{BOUNDS}free_order.py"],
    "blocks": [f"{BOUNDS}blocks.py"],
    "spread": [f"{BOUNDS}spread.py"],
    **{name: [f"{PUBLISHED}one_stage.py"] for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")},
    "interleaved-1f1b": [f"{PUBLISHED}interleaved.py"],
    **{name: [f"{PUBLISHED}seq1f1b.py"] for name in ("seq1f1b", "slimpipe")},
    "zb-auto": [f"{PUBLISHED}zb_auto.py"],
    "zb-v": [f"{PUBLISHED}zb_v.py"],
    "dualpipe-v": [f"{PUBLISHED}dualpipe_v.py"],
    **{name: [f"{PUBLISHED}vocab.py"] for name in ("vocab-1", "vocab-2")},
    **{name: [f"{PUBLISHED}v_family.py"] for name in ("v-min", "v-half", "v-zb", "unfilled")},
    **{name: [f"{PUBLISHED}pipe_offload.py"] for name in ("gis", "gis-h", "po-h", "po-f")},
    "ada-offload": [f"{PUBLISHED}ada_offload.py"],
    "repeated": ["solver/warm_starts.py:repeated_published lengthened _lengthened"],
    "even-warm-up": ["solver/warm_starts.py:zb_auto_of_whole_forwards"],
    "by-stage": ["solver/by_stage.py"],
    "in-order": ["solver/microbatch_orders.py:likely_orders in_order"],
    "first-lists": [f"{SEARCH}in_flight.py:first_in_memory"],
    "priority-lists": [f"{LISTS}priority.py"],
    "floor": ["solver/serial.py"],
}
"""The code of each part: files, folders, or functions and classes of a file. Some have code in common."""

ROOT = INSTANCES.parent


@cache
def code_lines(places: tuple[str, ...]) -> int:
    """Count the lines of files, folders, and functions and classes, each given as in `CODE`."""
    count = 0
    for place in places:
        name, _, parts = place.partition(":")
        for path in (ROOT / name).rglob("*.py") if (ROOT / name).is_dir() else [ROOT / name]:
            text = path.read_text()
            found = [node for node in ast.walk(ast.parse(text)) if getattr(node, "name", "") in parts.split()]
            assert len(found) >= len(parts.split()), f"{path} has not all of {parts}"
            count += len(text.splitlines()) if not parts else sum(map(_length, found))
    return count


def _length(node: ast.AST) -> int:
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    return (node.end_lineno or node.lineno) - node.lineno + 1


@dataclass
class Loss:
    """Losses without a part: by row of the sample the sum of gaps, and the proofs."""

    rows: int = 0
    gap: float = 0.0
    most: float = 0.0
    proofs: int = 0

    def add(self, weight: float, whole: Solution, left: Solution) -> None:
        """Take in an answer without the part, and that with all of them."""
        lost = weight * (left.gap - whole.gap)
        self.rows += 1
        self.gap += lost
        self.most = max(self.most, lost, key=abs)
        self.proofs += (whole.gap == 0) - (left.gap == 0)


def measure_parts(size: Size, _pictures: Path) -> str:
    """Solve the sample, and again without each part that takes part."""
    losses: dict[str, Loss] = {}
    gaps, proofs, count = 0.0, 0, 0
    load_searches()
    for row in SAMPLE[size]:
        for one in row:
            name, problem = instance_of(one)
            begun, names = _started(problem)
            whole = _searched(problem, size, begun)
            say(f"{name}: gap {whole.gap:.2%}, by {whole.method or begun.method} and {whole.proved_by}")
            weight = 1 / len(row)
            gaps, proofs, count = gaps + weight * whole.gap, proofs + (whole.gap == 0), count + 1
            for part in _taking_part(problem, names, begun.gap == 0):
                again = _started(problem, {part})[0] if part in COMPONENTS["start"] else begun
                same = again is not begun and again.value_us == begun.value_us
                left = whole if same else _searched(problem, size, again, {part})
                losses.setdefault(part, Loss()).add(weight, whole, left)
                say(f"  {name} without {part}: gap {left.gap:.2%}, {left.gap - whole.gap:+.3%}")
    return report(size, losses, gaps, proofs, count)


def report(size: Size, losses: Mapping[str, Loss], gaps: float, proofs: int, count: int) -> str:
    """The table of what is lost, of `count` instances with these `gaps` in all and so many `proofs`."""
    sample = SAMPLE[size]
    kinds = {name: kind for kind, names in COMPONENTS.items() for name in names}
    rows = [
        [
            name,
            kinds[name],
            f"{100 * loss.gap / len(sample):.3f}",
            f"{100 * loss.most:.2f}",
            f"{loss.proofs}",
            f"{loss.rows}",
            f"{code_lines(tuple(CODE[name]))}",
        ]
        for name, loss in sorted(losses.items(), key=lambda entry: (-entry[1].proofs, -entry[1].gap))
    ]
    head = ["without", "kind", "mean gap lost", "most on one row", "proofs lost", "takes part on", "lines"]
    unused = [name for name in kinds if name not in losses]
    command = COMMAND + (" --size full" if size == "full" else "")
    return (
        f"{table(head, rows, 2)}\n\nGaps are in points of a hundred, over {len(sample)} rows of {count} instances: "
        f"{100 * gaps / len(sample):.2f} on average with all parts, {proofs} proved. Negative: better without, as the "
        f"work goes to others. Took part on none: {', '.join(unused) or 'none'}.\n\n`{command}`: {machine()}, one "
        f"thread, {UNITS[size]:g} units of work a run; rows are {', '.join(_label(row) for row in sample)}."
    )


def _taking_part(problem: Problem, starts: Set[str], proved: bool) -> Iterator[str]:
    """The parts without which an answer may differ; `starts` were the best for a while."""
    bound_us = lower_bound_us(problem)
    names = {*starts, *(name for name in COMPONENTS["bound"] if lower_bound_us(problem, {name}) < bound_us)}
    if not proved:
        recipe = {time_slice.method for slices in auto_subsolvers(problem, 1) for time_slice in slices}
        names |= recipe
        if "lists" in recipe:
            names.update(list_kinds(problem))
        if "pattern" in recipe and problem.has_modes:
            names.add("mode-rounds")
    yield from (name for of_kind in COMPONENTS.values() for name in of_kind if name in names)


def _started(problem: Problem, without: Set[str] = frozenset()) -> tuple[Solution, set[str]]:
    """The best start, and the words of the names of all that were the best for a while."""
    names: set[str] = set()
    limits = Limits(float("inf"), workers=1, deterministic_limit=1.0, without=frozenset(without))
    shared = SharedIncumbent(problem, limits, lambda found: names.update(found.solution.method.split(", ")))
    offer_published(problem, shared)
    return shared.best, names.intersection(COMPONENTS["start"])


def _searched(problem: Problem, size: Size, begun: Solution, without: Set[str] = frozenset()) -> Solution:
    """The answer of the searches of `auto` from a start."""
    left_out = frozenset(without).union(COMPONENTS["start"])  # they are made once, not for every part
    limits = Limits(float("inf"), workers=1, deterministic_limit=UNITS[size], without=left_out)
    try:
        return search(problem, "auto", limits, starts=[begun.orders] if begun.orders else [])
    except NoSolutionError:
        return Solution(None, 1.0, 0.0)


def instance_of(one: One) -> tuple[str, Problem]:
    """Load an instance of the sample; its name says what was changed."""
    name, changes = (one, {}) if isinstance(one, str) else one
    entry = Entry.from_data({"problem": f"{name}.json", **changes})
    return entry.instance, entry.load_problem(INSTANCES)


def _label(row: Sequence[One]) -> str:
    if len(row) > 1:
        return f"four-by-eight ({len(row)} of 100)"
    return instance_of(row[0])[0]


SECTIONS = (
    Section(
        "ablation",
        "What each part is worth",
        "`auto` on a sample of the suites without each of its parts in turn, at equal counted work.",
        COMMAND,
        measure_parts,
    ),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
