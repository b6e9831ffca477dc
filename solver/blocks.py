"""Searches for problems with blocks of a forward and a backward (`Problem.overlaps`).

First come `dualpipe-v` and interleaved 1F1B. Then two searches find orders of ops apart: of the relaxation in which
every op is as short as in its best block, with backwards in one piece, and of the ops as they are. Neighbours in what
they find are joined. The searches that know blocks, annealing and CP-SAT, begin with the best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from optpipe.errors import DeadlockError, InfeasibleError, MethodError, NoSolutionError, OrderError
from optpipe.ops import DeviceOrders, Op, OpArray, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds.blocks import block_relaxation, without_blocks
from solver.build import within_budgets
from solver.limits import Limits
from solver.methods import METHODS, refuse_unsupported
from solver.scale import costs_have_codes
from solver.searches import SEARCHES
from solver.solution import OnProgress, Progress, Solution
from solver.strategy import SharedIncumbent, TimeSlice, run_subsolvers

MOST_OPS = 200_000
"""Ops that are timed to join neighbours: some tenths of a second of a core."""

PUBLISHED = ("dualpipe-v", "interleaved-1f1b")
"""Published schedules with blocks."""

SHARES = (0.1, 0.1)
"""Shares of the time left for the search of the relaxation, and of what is left then for that of the ops apart."""

SHARES_IN_LITTLE_MEMORY = (0.0, 0.85)
"""The same where nothing published and no start keeps the budgets: there annealing gains little by blocks."""

SHARES_WITHOUT_BLOCKS = (0.4, 1.0)
"""The same where no search asked for knows blocks."""

MOST_PAIRS = {"auto": 4000, "cp-sat": 50_000}
"""Pairs that may be a block up to which a method models all of them: each is a literal, and their number grows with
microbatches squared."""

Search = Callable[[Problem, Limits, OnProgress, Sequence[Orders]], Solution]
"""Search of a problem without blocks, from orders to begin with."""


def search_with_blocks(
    problem: Problem,
    limits: Limits,
    on_progress: OnProgress | None,
    starts: Sequence[Orders],
    search: Search,
    method: str,
) -> Solution:
    """The best of both searches, with blocks, and of those that know blocks, as far as the method has them.

    Raises what the first two raise where nothing was found.
    """
    shared = SharedIncumbent(problem, limits, on_progress)
    begun = []
    for published in map(METHODS.__getitem__, PUBLISHED):
        assert published.orders is not None
        with suppress(MethodError):
            refuse_unsupported(published, problem)
            begun.append((published.orders(problem), published.name))
    begun += [(orders, "neighbour") for orders in starts]
    for orders, name in begun:
        _offer(shared, orders, name)

    def report(progress: Progress) -> None:  # joined in the end alone: that takes longer than finding the next one
        if progress.solution.orders is not None:
            _offer(shared, progress.solution.orders, progress.solution.method, joins=False)

    apart_starts = [replace(orders, blocks={}) for orders, _ in begun]
    relaxed, apart = block_relaxation(problem), without_blocks(problem)
    whole = relaxed.replaced(stages=[stage.replaced(split_backward=False) for stage in relaxed.stages])
    knowing = [name for name in _knowing_blocks(problem, method) if name not in limits.without]
    shares = SHARES if knowing else SHARES_WITHOUT_BLOCKS
    if knowing == ["search"] and shared.best.orders is None:
        shares = SHARES_IN_LITTLE_MEMORY
    failure: InfeasibleError | MethodError | NoSolutionError | None = None
    with limits.cancel.calling(shared.stop.request):
        for part_of, share in zip((whole, apart), shares, strict=True):
            if shared.stop.requested or not share:
                continue
            part = replace(limits.part(share), cancel=shared.stop)
            try:
                solution = search(part_of, part, report, apart_starts if part_of is apart else ())
            except (InfeasibleError, MethodError, NoSolutionError) as error:
                failure = error if part_of is apart else failure
                continue
            if solution.orders is not None:
                _offer(shared, solution.orders, solution.method)
        if knowing and shared.best.orders is not None and not shared.stop.requested:
            share = 1.0 if limits.deterministic_limit is None else 1 - sum(shares)
            run_subsolvers(problem, shared, _in_turn(knowing, share, limits.workers))
    if shared.best.orders is None:
        raise failure or NoSolutionError("nothing within the budgets was found. Maybe allow more time (--time-limit).")
    return shared.best


def _knowing_blocks(problem: Problem, method: str) -> list[str]:
    """Names of the searches of a method that know blocks, where the problem has nothing that they do not know."""
    anneals = costs_have_codes(problem) and not (problem.has_modes or problem.spread or problem.gates)
    models = len(problem.block_us) * problem.units**2 <= MOST_PAIRS.get(method, 0)
    return [name for name, can in (("search", anneals), ("cp-sat", models)) if can and method in ("auto", name)]


def _in_turn(names: Sequence[str], share: float, workers: int) -> list[list[TimeSlice]]:
    """These searches on so many cores: in turn on one, at the same time on more."""
    if len(names) == 1 or workers > 1:
        cores = [workers] if len(names) == 1 else [1, workers - 1]
        slices = zip(names, cores, strict=True)
        return [[TimeSlice(name, SEARCHES[name], share, of_search, once=True)] for name, of_search in slices]
    return [[TimeSlice(name, SEARCHES[name], share / len(names)) for name in names]]


def _offer(shared: SharedIncumbent, orders: Orders, method: str, *, joins: bool = True) -> None:
    """Offer these orders, and those with every pair of neighbours joined."""
    offered = [(orders, method)]
    if joins:
        offered.append((joined_orders(shared.problem, orders), f"{method}, joined"))
    for some, name in offered:
        value_us = value_within_budgets_us(shared.problem, some)
        if value_us < shared.best.value_us:
            shared.offer(Solution(some, value_us, method=name))


def value_within_budgets_us(problem: Problem, orders: Orders) -> float:
    """Value of orders; infinite for those that cannot run or exceed a budget."""
    try:
        simulation = simulate(problem, orders)
    except (OrderError, DeadlockError):
        return float("inf")
    return simulation.value_us if within_budgets(problem, orders, simulation) else float("inf")


def joined_orders(problem: Problem, orders: Orders) -> Orders:
    """The orders with neighbours joined, one pair after the other in order of time, where that makes nothing longer.

    A block waits for what either of its ops waits for, so that all pairs at once may wait for one another. At most
    `MOST_OPS` ops are timed.
    """
    best_us = value_within_budgets_us(problem, orders)
    lists, blocks = [[*device.compute] for device in orders.devices], dict(orders.blocks)
    joined = {*blocks, *blocks.values()}
    left = MOST_OPS // (1 + sum(map(len, lists)))
    for _, d, op in sorted((k / len(ops), d, op) for d, ops in enumerate(lists) for k, op in enumerate(ops)):
        k = lists[d].index(op) if left and op not in joined and op in lists[d] else len(lists[d])
        before = next((ops for n in (2, 3) if _block(problem, ops := lists[d][k : k + n])), None)
        if before is None or not joined.isdisjoint(before):
            continue
        left -= 1
        pair = _block(problem, before)
        assert pair is not None, "as was just seen"
        lists[d][k : k + len(before)] = pair
        changed = _ordered(orders, lists, blocks | dict([pair]))
        if (value_us := value_within_budgets_us(problem, changed)) <= best_us:
            best_us, blocks = value_us, dict(changed.blocks)
            joined.update(pair)
        else:
            lists[d][k : k + len(pair)] = before
    return _ordered(orders, lists, blocks)


def _block(problem: Problem, ops: Sequence[Op]) -> tuple[Op, Op] | None:
    """The F and the BW of neighbours in any order, where B and W of one unit count as BW; None if they are no block."""
    forward = next((op for op in ops if op.kind == "F"), None)
    others = [op for op in ops if op is not forward]
    if forward is None or [op.kind for op in others] not in (["BW"], ["B", "W"]) or len({op[1:] for op in others}) > 1:
        return None
    if len(ops) == 3 and ops[1] is forward:
        return None
    backward = others[0]._replace(kind="BW")
    return None if problem.block_of_units_us(forward, backward) is None else (forward, backward)


def _ordered(orders: Orders, lists: Sequence[Sequence[Op]], blocks: dict[Op, Op]) -> Orders:
    """The orders with other compute ops and blocks."""
    pairs = zip(lists, orders.devices, strict=True)
    devices = [DeviceOrders(OpArray.of(ops), device.offload, device.reload) for ops, device in pairs]
    return replace(orders, devices=devices, blocks=blocks)
