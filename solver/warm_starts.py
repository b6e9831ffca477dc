"""Warm starts: published schedules, whole or with their steady state repeated.

Making a published schedule, and timing it, takes time in proportion to its microbatches. Their warm-up, cool-down and
period show with few. So where there are many it is made for a few, in which every device does the same again for every
microbatch (or group of them), and that period is repeated.

Published schedules are tried in the order of their usual cost until they have taken the time limit together, in
processor time: how busy the machine is leaves none of them out. Schedules made for a few microbatches and repeated come
before the slow ones: they are as good in most cases, and available at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from functools import partial

import numpy as np

from optpipe.errors import DeadlockError, MethodError
from optpipe.ops import OpArray, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds.whole_forwards import forwards_before_first_backward
from solver.build import within_budgets
from solver.by_stage import ByStage, choices, keep_what_fits
from solver.kernels import WARM, are_ready, is_marked
from solver.lists.priority import list_orders, rules_for
from solver.methods import METHODS, refuse_unsupported
from solver.microbatch_orders import in_order, likely_orders, with_own_numbers
from solver.published.v_family import v_zb
from solver.published.zb_auto import zb_auto
from solver.scale import count_ops
from solver.serial import serial_orders
from solver.solution import Solution
from solver.strategy import MOST_MODEL_OPS, SharedIncumbent, has_lists

ROUNDS = 4
"""Microbatches a device of the few: a warm-up, a cool-down and a steady state between them."""

MANY = 2
"""Least ratio of all microbatches to the few: below it repeating saves nothing."""


def repeated_published(make: Callable[[Problem], Orders], problem: Problem) -> Orders:
    """Orders that `make` plans for a few microbatches, with the steady state repeated for the whole problem.

    Whether the orders keep the budgets is for the caller to find out by simulation. Raises MethodError where `make`
    does, where there are too few microbatches for this, or where nothing is periodic.
    """
    devices = len(problem.devices)
    few = ROUNDS * devices + problem.microbatches % devices
    if problem.microbatches < MANY * few:
        raise MethodError(f"{problem.microbatches} microbatches are too few to repeat a period of {few}.")
    short = problem.with_microbatches(few)
    orders = make(short)
    more = problem.microbatches - few
    for group in (1, 2, devices):
        longer = None if more % group else lengthened(short, orders, (few - group) // 2, group, more // group)
        if longer is not None:
            return longer
    raise MethodError("what is planned for few microbatches has no period to repeat.")


def lengthened(problem: Problem, orders: Orders, begin: int, group: int, copies: int) -> Orders | None:
    """Compute orders of `problem` with one period done `copies` times more, for ``copies * group`` more microbatches.

    A device's period goes from the F of microbatch `begin` to that of ``begin + group`` on its first stage. None where
    in that time some device does not run each of its passes `group` times: then that is no period.
    """
    devices = []
    for stages, device in zip(problem.stages_of, orders.devices, strict=True):
        ops = OpArray.of(device.compute)
        longer = _lengthened(ops, stages[0], begin, group, copies) if stages else ops
        if longer is None:
            return None
        devices.append(longer)
    return Orders.of_compute(devices)


def _lengthened(ops: OpArray, stage: int, begin: int, group: int, copies: int) -> OpArray | None:
    forwards = np.flatnonzero((ops.kind == 0) & (ops.stage == stage))
    first, behind = forwards[begin], forwards[begin + group]
    passes, counts = np.unique(np.stack([ops.kind, ops.stage])[:, first:behind], axis=1, return_counts=True)
    all_passes = np.unique(np.stack([ops.kind, ops.stage]), axis=1)
    if (counts != group).any() or passes.shape != all_passes.shape:
        return None
    places = np.arange(len(ops))
    period = places[first:behind]
    shift = np.repeat(group * np.arange(copies + 1), len(period))
    place = np.concatenate([places[:first], np.tile(period, copies + 1), places[behind:]])
    later = np.concatenate([np.zeros(first, np.int64), shift, np.full(len(ops) - behind, group * copies)])
    return OpArray(ops.kind[place], ops.stage[place], ops.microbatch[place] + later)


def zb_auto_of_whole_forwards(problem: Problem) -> Orders:
    """The rounds of `zb_auto` behind a warm-up in which the idle time of all devices is spread as evenly as can be.

    The heuristic takes a forward where it ends before the first B arrives, and waits for that otherwise. Down the
    pipeline all these waits add up, which one forward more on some device would end. Raises MethodError like `zb_auto`.
    """
    return zb_auto(problem, forwards_before_first_backward(problem) or None)


WITHOUT_KERNELS = (
    "1f1b",
    "gpipe",
    "seq1f1b",
    "slimpipe",
    "zb-h1",
    "zb-h2",
    "gis",
    "interleaved-1f1b",
    "dualpipe-v",
    "vocab-1",
    "vocab-2",
)
"""Published schedules made without a compiled kernel, within a tenth of a second each for 400,000 ops."""

WITH_KERNELS = (
    *("zb-v, repeated", "zb-auto, repeated", "zb-v", "v-zb, repeated", "v-min, repeated", "v-half, repeated"),
    *("ada-offload", "gis-h, repeated", "zb-auto", "v-zb", "v-min", "v-half", "gis-h", "po-h", "po-f"),
)
"""The others, by what they take for 400,000 ops: from 0.2 s to 11. Where transfers are planned, few take no less."""

MOST_LISTED_OPS = 60_000
"""Ops up to which list schedules are made one op at a time, in two seconds each."""

LEAST_S = 0.5
"""Processor time that they get however short the limit is: those of small problems need less."""

Make = Callable[[Problem], Orders]


def offer_published(
    problem: Problem, shared: SharedIncumbent, share: float = 1.0, *, adapts_to_memory: bool = True
) -> None:
    """Offer every published schedule to the shared incumbent, the cheap ones first; the floor if none fits.

    `adapts_to_memory`: also a 1F1B that does, where no published method fits its schedules to memory. Large problems
    with list schedules that do begin with one: with a million ops each published one takes a second or more, and most
    of them exceed the budgets of such problems.
    Once they have taken this share of the time limit in processor time, none is begun if something fits, or the answer
    would be late; with a share below 1 whether it does or not, since a search finds something at once. That does not
    hold while kernels are compiled as well, which says nothing of what is left.
    """
    timed = shared.limits.deterministic_limit is None
    limit_s = max(share * shared.limits.time_limit_s, LEAST_S)
    began_s = time.thread_time()
    if count_ops(problem) > MOST_MODEL_OPS and has_lists(problem) and are_ready("lists"):
        from solver.search.in_flight import first_in_memory  # loads kernels that smaller problems do not need yet

        orders = None if "first-lists" in shared.limits.without else first_in_memory(problem)
        if orders is not None:
            offer_orders(problem, shared, orders, "first-lists")
            limit_s = LEAST_S if share < 1 else limit_s
    for name, make in starts(problem, shared.limits.without, adapts_to_memory=adapts_to_memory):
        taken = timed and time.thread_time() - began_s > limit_s and is_marked(WARM)
        if shared.stop.requested or (taken and shared.best.orders is not None):
            return
        if taken and share < 1:
            break
        with suppress(MethodError, DeadlockError):
            orders = make()
            if orders is not None:
                offer_orders(problem, shared, orders, name)
    floor = None if "floor" in shared.limits.without or shared.best.orders else serial_orders(problem)
    if floor is not None:
        offer_orders(problem, shared, floor, "floor")


def offer_orders(problem: Problem, shared: SharedIncumbent, orders: Orders, name: str) -> None:
    """Offer orders that `name` made, if better than others with their order of microbatches and within every budget."""
    simulation = simulate(problem, orders)
    value = simulation.value_us
    if value < shared.start_us(orders.microbatch_order) and within_budgets(problem, orders, simulation):
        shared.begin(Solution(orders, value, shared.best.bound_us, name))


def starts(
    problem: Problem, without: Set[str] = frozenset(), *, adapts_to_memory: bool = True
) -> Iterator[tuple[str, Callable[[], Orders | None]]]:
    """Makers of the published schedules of a problem, by name; none whose name has a word of `without`.

    With modes for every choice of one variant a stage, with a free order of microbatches for every likely one.
    """
    able = [(name, make) for name, make in _published() if _is_able(name, problem)]
    lists = [("priority-lists", partial(list_orders, rule=rule)) for rule in rules_for(problem)]
    if problem.spread or problem.gates:
        yield from ((name, partial(make, problem)) for name, make in lists if name not in without)
    elif adapts_to_memory and _may_need_to_fit(problem):
        able += lists
    able = [(name, make) for name, make in able if without.isdisjoint(name.split(", "))]
    if not problem.has_modes or problem.spread:
        yield from ((name, partial(make, problem)) for name, make in able)
        if problem.has_free_order and "in-order" not in without:
            for order_name, microbatch_order in likely_orders(problem):
                for name, make in able:
                    yield f"{name}, {order_name}", partial(_in_order, make, problem, microbatch_order)
        return
    for by_stage in choices(problem) if "by-stage" not in without else ():
        for name, make in able:
            yield f"{name}, by-stage", partial(_by_stage, make, by_stage)


def _is_able(name: str, problem: Problem) -> bool:
    """True if the published schedule of this name is right for a problem; a period repeats where units are alike."""
    method, *how = name.split(", ")
    if "repeated" in how and not problem.has_equal_microbatches:
        return False
    if method in ("seq1f1b", "slimpipe") and problem.slice_count == 1:  # then it is 1F1B
        return False
    with suppress(MethodError):
        refuse_unsupported(METHODS[method], problem)
        return True
    return False


def _may_need_to_fit(problem: Problem) -> bool:
    """True if memory counts and no published method fits schedules to it: of `ada-offload` all is split and whole."""
    limited = any(device.memory_bytes is not None for device in problem.devices)
    fitted = problem.has_equal_microbatches and all(stage.split_backward for stage in problem.stages)
    return limited and not fitted and count_ops(problem) <= MOST_LISTED_OPS


def best_of_uniform_choices(problem: Problem) -> dict[str, Solution]:
    """The best published schedule with all microbatches kept, recomputed or offloaded, and with one choice a stage.

    Copies of what is kept or recomputed are optional where a stage has them. A kind of choice with which nothing
    published fits is left out.
    """
    best: dict[str, Solution] = {}
    for by_stage in choices(problem):
        recomputes = {variant.mode.recomputes for variant in by_stage.chosen}
        leaves = {variant.moved_bytes > 0 for variant in by_stage.chosen}
        kinds = ["one choice a stage"]
        if recomputes == {True}:
            kinds.append("all recomputed")
        elif recomputes == {False} and len(leaves) == 1:
            kinds.append("all offloaded" if leaves == {True} else "all kept")
        for name, make in _published():
            if not _is_able(name, problem):
                continue
            with suppress(MethodError, DeadlockError):
                orders = by_stage.with_modes(make(by_stage.plain))
                if orders is None:
                    continue
                simulation = simulate(problem, orders)
                if not within_budgets(problem, orders, simulation):
                    continue
                for kind in kinds:
                    if kind not in best or simulation.value_us < best[kind].value_us:
                        best[kind] = Solution(orders, simulation.value_us, 0.0, f"{kind}: {name}")
    return best


def _in_order(make: Make, problem: Problem, microbatch_order: Sequence[int]) -> Orders:
    return with_own_numbers(problem, make(in_order(problem, microbatch_order)), microbatch_order)


def _by_stage(make: Make, by_stage: ByStage) -> Orders | None:
    orders = by_stage.with_modes(make(by_stage.plain))
    return orders and keep_what_fits(by_stage.problem, orders)


def _published() -> Iterator[tuple[str, Make]]:
    """The published schedules with what makes them, in the order in which they are tried."""
    for name in WITHOUT_KERNELS:
        yield name, _maker(name)
    yield "v-zb, unfilled", partial(v_zb, fill=False)
    for name in WITH_KERNELS:
        whole = name.removesuffix(", repeated")
        yield name, _maker(name) if whole == name else partial(repeated_published, _maker(whole))
    yield "zb-auto, even-warm-up", zb_auto_of_whole_forwards


def _maker(name: str) -> Make:
    make = METHODS[name].orders
    assert make is not None, f"{name} is a published schedule"
    return make
