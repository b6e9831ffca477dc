"""Searches for problems with blocks of a forward and a backward (`Problem.overlaps`).

No other search knows blocks. First come `dualpipe-v` and interleaved 1F1B. Then two searches find orders of ops apart:
of the relaxation in which every op is as short as in its best block, with backwards in one piece, and of the ops as
they are. Neighbours in what they find are joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from optpipe.errors import DeadlockError, InfeasibleError, MethodError, NoSolutionError, OrderError
from optpipe.ops import DeviceOrders, Op, OpArray, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us
from solver.bounds.blocks import block_relaxation, without_blocks
from solver.build import snapped_bound, within_budgets
from solver.limits import Limits
from solver.published.dualpipe_v import dualpipe_v
from solver.published.interleaved import interleaved_1f1b
from solver.scale import value_step_us
from solver.solution import OnProgress, Progress, Solution

MOST_OPS = 200_000
"""Ops that are timed to join neighbours: some tenths of a second of a core."""

SHARES = (0.4, 1.0)
"""Shares of the time left for the search of the relaxation, and of what is left then for that of the ops apart."""

Search = Callable[[Problem, Limits, OnProgress, Sequence[Orders]], Solution]
"""Search of a problem without blocks, from orders to begin with."""


def search_with_blocks(
    problem: Problem, limits: Limits, on_progress: OnProgress | None, starts: Sequence[Orders], search: Search
) -> Solution:
    """The best of both searches, with blocks. Raises what they raise where neither found anything."""
    found = _Found(problem, limits, on_progress)
    begun = []
    for name, make in (("dualpipe-v", dualpipe_v), ("interleaved-1f1b", interleaved_1f1b)):
        with suppress(MethodError):
            begun.append((make(problem), name))
    begun += [(orders, "neighbour") for orders in starts]
    for orders, name in begun:
        found.offer(orders, name)
    apart_starts = [replace(orders, blocks={}) for orders, _ in begun]
    relaxed, apart = block_relaxation(problem), without_blocks(problem)
    whole = relaxed.replaced(stages=[stage.replaced(split_backward=False) for stage in relaxed.stages])
    failure: InfeasibleError | MethodError | NoSolutionError | None = None
    for part_of, share in zip((whole, apart), SHARES, strict=True):
        if limits.cancel.requested or found.is_good_enough:
            break
        try:
            solution = search(part_of, limits.part(share), found.report, apart_starts if part_of is apart else ())
        except (InfeasibleError, MethodError, NoSolutionError) as error:
            failure = error if part_of is apart else failure
            continue
        if solution.orders is not None:
            found.offer(solution.orders, solution.method)
    if found.best.orders is None:
        raise failure or NoSolutionError("nothing within the budgets was found. Maybe allow more time (--time-limit).")
    return found.best


class _Found:
    """The best solution with blocks so far."""

    def __init__(self, problem: Problem, limits: Limits, on_progress: OnProgress | None) -> None:
        self.problem, self.limits = problem, limits
        self.best = Solution(bound_us=lower_bound_us(problem, limits.without))
        self._on_progress = on_progress

    @property
    def is_good_enough(self) -> bool:
        """True if the gap that was asked for is reached."""
        return self.limits.reached(self.best.value_us, self.best.bound_us)

    def report(self, progress: Progress) -> None:
        """Take what a search has found so far."""
        if progress.solution.orders is not None:
            self.offer(progress.solution.orders, progress.solution.method)

    def offer(self, orders: Orders, method: str) -> None:
        """Keep these orders, or those with every pair of neighbours joined, if they are better than what is known."""
        for some, name in ((orders, method), (joined_orders(self.problem, orders), f"{method}, joined")):
            if (value_us := value_within_budgets_us(self.problem, some)) < self.best.value_us:
                self.keep(some, value_us, name)

    def keep(self, orders: Orders, value_us: float, method: str) -> None:
        """Keep better orders, and report them."""
        bound_us = snapped_bound(value_us, self.best.bound_us, value_step_us(self.problem))
        self.best = replace(self.best, orders=orders, value_us=value_us, bound_us=bound_us, method=method)
        if self._on_progress:
            self._on_progress(Progress(self.best, self.limits.seconds))


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
