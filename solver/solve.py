"""Problem -> Schedule: what every caller uses. Published schedules at once, then the searches that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import current_thread, main_thread

from optpipe.errors import InfeasibleError, InputError, Issue, NoSolutionError, shown
from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from solver.blocks import search_with_blocks
from solver.bounds import lower_bound_us
from solver.build import snapped_bound
from solver.by_stage import drop_needless
from solver.frozen import orders_with_backwards, solution_without_backwards, with_backwards
from solver.kernels import forget_stale, load_compiler
from solver.limits import Limits, until_interrupted
from solver.methods import ADA_OFFLOAD, method_named, published_orders, refuse_unsupported
from solver.scale import value_step_us
from solver.serial import impossible_budgets, known_budgets_bytes, with_statable_peaks
from solver.solution import Feed, OnProgress, Progress, Solution
from solver.strategy import (
    SharedIncumbent,
    Subsolver,
    TimeSlice,
    auto_subsolvers,
    has_lists,
    run_subsolvers,
    with_trials,
)
from solver.variants import without_unusable_offloads
from solver.warm_starts import offer_orders, offer_published

PUBLISHED_SHARE = 0.15
"""Share of the time limit for published schedules, in processor time, where `auto` makes better list schedules."""


def solve(
    problem: Problem,
    method: str = "auto",
    limits: Limits | None = None,
    on_progress: OnProgress | None = None,
    starts: Sequence[Orders] = (),
) -> Schedule:
    """The best schedule that `method` finds within `limits`, verified.

    `starts` are orders for this problem from elsewhere, such as `solver.cache`; those within the budgets help a
    search. A cancelled search returns the best schedule so far. Raises InputError for arguments of other types, unknown
    methods and limits out of range, MethodError where the method cannot handle the problem, InfeasibleError where no
    schedule keeps the budgets, NoSolutionError where none was found in time.
    """
    limits = Limits() if limits is None else limits
    for name, given, kind, maybe in (
        ("problem", problem, Problem, "Problem.load(path)"),
        ("limits", limits, Limits, "Limits(time_limit_s=10)"),
    ):
        if not isinstance(given, kind):
            detail = f"is {shown(given)} but must be of type {kind.__name__}. Maybe {maybe}."
            raise InputError([Issue(name, "wrong_type", detail)])
    limits.check()
    if current_thread() is main_thread():  # the one that Ctrl-C interrupts
        load_compiler()
    solution = search(problem, method, limits, on_progress, starts)
    # Where the result must be the same in every run, the work that was allowed.
    seconds = limits.seconds if limits.deterministic_limit is None else limits.deterministic_limit
    return solution.to_schedule(problem, seconds)


def search(
    problem: Problem,
    method: str,
    limits: Limits,
    on_progress: OnProgress | None = None,
    starts: Sequence[Orders] = (),
    on_searching: Callable[[], None] = lambda: None,
    feed: Feed | None = None,
) -> Solution:
    """`solve` without its last step: the orders, which it always has, are still to be verified. Raises the same.

    `on_searching` is called when the published schedules were tried and the searches begin. `feed`: what other solves
    of this problem find meanwhile; a search that runs keeps its start, and the next one begins with it.
    """
    chosen = method_named(method)
    forget_stale()
    if with_backwards(problem) is not problem:
        return _search_frozen(problem, method, limits, on_progress, starts, on_searching, feed)
    problem = with_statable_peaks(problem)
    if problem.overlaps and chosen.orders is None:

        def apart(whole: Problem, part: Limits, on_progress: OnProgress | None, begun: Sequence[Orders]) -> Solution:
            return search(whole, method, part, on_progress, begun, on_searching)

        return search_with_blocks(problem, limits, on_progress, starts, apart, chosen.name)
    if chosen.orders is not None:
        orders = published_orders(chosen, problem)
        if chosen.name == ADA_OFFLOAD:  # the others copy and recompute by rules of their own
            orders = drop_needless(problem, orders)
        value_us = simulate(problem, orders).value_us
        bound_us = snapped_bound(value_us, lower_bound_us(problem), value_step_us(problem))
        return Solution(orders, value_us, bound_us, chosen.name)
    refuse_unsupported(chosen, problem)
    given, problem = problem, without_unusable_offloads(problem)
    short = impossible_budgets(problem)
    if short:
        device, needed, budget = short[0]
        text = f"devices[{device}].memory_bytes is {budget}, but one microbatch alone needs {needed}."
        raise InfeasibleError(text, known_budgets_bytes(problem))
    shared = SharedIncumbent(problem, limits, on_progress)
    with limits.cancel.calling(shared.stop.request), (feed or Feed()).into(shared.offer):
        offer_published(problem, shared, PUBLISHED_SHARE if chosen.search is None and has_lists(problem) else 1.0)
        for orders in starts:
            offer_orders(given, shared, orders, "neighbour")
        if chosen.search is not None:
            tries_orders = chosen.name == "search" and problem.has_free_order
            # Trials take a share of the time from it, which further turns use.
            alone = TimeSlice(chosen.name, chosen.search, 1.0, limits.workers, once=not tries_orders)
            subsolvers: Sequence[Subsolver] = with_trials([[alone]]) if tries_orders else [[alone]]
        else:
            subsolvers = auto_subsolvers(problem, limits.workers, limits.lane, limits.without)
        if not shared.stop.requested:
            on_searching()
            run_subsolvers(problem, shared, subsolvers)
    best = shared.best
    if best.orders is None:
        raise _no_solution(problem, limits, best.infeasible)
    orders = drop_needless(problem, best.orders)
    if orders is not best.orders:
        value_us = simulate(problem, orders).value_us
        bound_us = snapped_bound(value_us, best.bound_us, value_step_us(problem))
        best = replace(best, orders=orders, value_us=value_us, bound_us=bound_us)
    return best if chosen.search is None else replace(best, method=chosen.name)


def _search_frozen(
    problem: Problem,
    method: str,
    limits: Limits,
    on_progress: OnProgress | None,
    starts: Sequence[Orders],
    on_searching: Callable[[], None],
    feed: Feed | None,
) -> Solution:
    """`search` where stages have no backward: that of the problem in which theirs costs nothing."""
    whole, own = with_backwards(problem), Feed()

    def report(progress: Progress) -> None:
        if on_progress:
            on_progress(replace(progress, solution=solution_without_backwards(problem, progress.solution)))

    def offer(solution: Solution) -> None:
        orders = solution.orders and orders_with_backwards(problem, solution.orders)
        own.offer(replace(solution, orders=orders))

    begun = [orders_with_backwards(problem, orders) for orders in starts]
    with (feed or Feed()).into(offer):
        found = search(whole, method, limits, report, begun, on_searching, own)
    return solution_without_backwards(problem, found)


def _no_solution(problem: Problem, limits: Limits, proved: bool) -> InfeasibleError | NoSolutionError:
    """The error of a solve that ended without orders."""
    if proved:
        return InfeasibleError("proved: no schedule keeps the memory budgets.", known_budgets_bytes(problem))
    work = limits.deterministic_limit
    spent = f"in {limits.seconds:.1f} s. Maybe allow more time (--time-limit)"
    if work is not None:
        spent = f"with {work:g} units of work. Maybe allow more (--deterministic-limit)"
    return NoSolutionError(
        f"nothing within the budgets was found {spent}, or raise devices[].memory_bytes to "
        f"{known_budgets_bytes(problem)}, which is known to do."
    )


def solve_until_interrupted(problem: Problem, method: str, limits: Limits, on_progress: OnProgress | None) -> Schedule:
    """`solve` for a command line: Ctrl-C cancels the search and the best schedule so far is returned.

    Whether it came is `limits.cancel.requested`.
    """
    return until_interrupted(lambda: solve(problem, method, limits, on_progress), limits.cancel)
