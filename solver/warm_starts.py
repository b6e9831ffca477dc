"""The published schedules as starts of a search: all that fit, the cheapest to make first, before any search begins.

What they may take is counted in processor time: however busy the machine is, the same ones are tried, and none is left
out because loading or another program took the time. Where there are many microbatches, schedules made for a few and
repeated come before the slow ones: they are as good in most cases, and there at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from optpipe.errors import DeadlockError, MethodError
from optpipe.orders import Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.board import Board
from solver.finish import within_budgets
from solver.floor import serial_orders
from solver.limits import Answer
from solver.methods import METHODS
from solver.published.v_family import v_zb
from solver.repeated import repeated_published

WITHOUT_KERNELS = ("1f1b", "gpipe", "zb-h1", "zb-h2", "gis", "interleaved-1f1b")
"""Published schedules made without a compiled kernel, within a tenth of a second each for 400,000 ops."""

WITH_KERNELS = (
    *("zb-v, repeated", "zb-auto, repeated", "zb-v", "v-zb, repeated", "v-min, repeated", "v-half, repeated"),
    *("ada-offload", "gis-h, repeated", "zb-auto", "v-zb", "v-min", "v-half", "gis-h", "po-h", "po-f"),
)
"""The others, by what they take for 400,000 ops: from 0.2 s to 20. Where transfers are planned, few take no less."""

LEAST_S = 0.5
"""Processor time that the published schedules get however short the limit is: those of small problems need less."""

Make = Callable[[Problem], Orders]


def offer_published(problem: Problem, board: Board) -> None:
    """Offer every published schedule that fits to the board; where none does, the floor.

    Once one fits and they have taken the time limit in processor time, no further one is begun.
    """
    began_s, allowed_s = time.thread_time(), max(board.limits.time_limit_s, LEAST_S)
    for name, make in _published():
        if board.stop.requested:
            return
        used_up = time.thread_time() - began_s > allowed_s and board.limits.deterministic_limit is None
        if used_up and board.best.orders is not None:
            return
        with suppress(MethodError, DeadlockError):
            offer_orders(problem, board, make(problem), name)
    floor = serial_orders(problem) if board.best.orders is None else None
    if floor is not None:
        offer_orders(problem, board, floor, "floor")


def offer_orders(problem: Problem, board: Board, orders: Orders, name: str) -> None:
    """Offer orders that `name` made, if they are better than the best and within every budget."""
    simulation = simulate(problem, orders)
    value = simulation.value_us
    if value < board.best.value_us and within_budgets(problem, orders, simulation):
        board.offer(Answer(orders, value, board.best.bound_us), name)


def _published() -> Iterator[tuple[str, Make]]:
    """The published schedules with what makes them, in the order in which they are tried."""
    for name in WITHOUT_KERNELS:
        yield name, _maker(name)
    yield "v-zb, unfilled", partial(v_zb, fill=False)
    for name in WITH_KERNELS:
        whole = name.removesuffix(", repeated")
        yield name, _maker(name) if whole == name else partial(repeated_published, _maker(whole))


def _maker(name: str) -> Make:
    make = METHODS[name].orders
    assert make is not None, f"{name} is a published schedule"
    return make
