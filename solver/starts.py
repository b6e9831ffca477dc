"""The published schedules as starts of a search: all that fit, the quick ones first.

Where there are many microbatches, schedules made for a few and repeated come before them: they are as good in most
cases, and there at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from optpipe.errors import DeadlockError, MethodError
from optpipe.orders import Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.board import Board
from solver.finish import within_budgets
from solver.floor import serial_orders
from solver.limits import Answer
from solver.methods import METHODS, published_orders
from solver.repeated import repeated_published
from solver.size import count_ops

SLOW = ("po-f", "po-h", "v-min", "v-half", "ada-offload")
"""Published schedules that may take a second or more on large problems: tried last, the quicker ones first."""

START_SHARE = 1 / 3
"""No further published schedule is begun after this share of the time: loading alone may take longer than that."""

SMALL_OPS = 20_000
"""Ops up to which all the quick ones together take a tenth of a second: they are tried however late it is."""

TINY_OPS = 1000
"""Ops up to which the slow ones are as quick: where loading took long, they are tried all the same."""


def offer_published(problem: Problem, board: Board) -> None:
    """Offer every published schedule that fits to the board; where none does, the floor."""
    _offer_repeated(problem, board)
    for name, orders in () if board.stop.requested else _candidates(problem, board):
        offer_orders(problem, board, orders, name)
        if board.stop.requested:
            return


def _offer_repeated(problem: Problem, board: Board) -> None:
    """Offer repeated steady states, as long as one promises to be better than the best."""
    for repeated in repeated_published(problem, board.best.bound_us):
        if board.stop.requested or repeated.promise_us >= board.best.value_us:
            return
        with suppress(DeadlockError):
            offer_orders(problem, board, repeated.orders, f"{repeated.method}, repeated")


def offer_orders(problem: Problem, board: Board, orders: Orders, name: str) -> None:
    """Offer orders that `name` made, if they are better than the best and within every budget."""
    simulation = simulate(problem, orders)
    value = simulation.value_us
    if value < board.best.value_us and within_budgets(problem, orders, simulation):
        board.offer(Answer(orders, value, board.best.bound_us), name)


def _candidates(problem: Problem, board: Board) -> Iterator[tuple[str, Orders]]:
    found = False
    ops = count_ops(problem)
    quick = [method for method in METHODS.values() if method.name not in SLOW]
    for method in (*quick, *(METHODS[name] for name in SLOW)):
        at_once = ops <= (TINY_OPS if method.name in SLOW else SMALL_OPS)
        if method.orders is None or (found and not at_once and _late(board)):
            continue
        try:
            orders = published_orders(method, problem)
        except MethodError:
            continue
        found = True
        yield method.name, orders
    floor = None if found else serial_orders(problem)
    if floor is not None:
        yield "floor", floor


def _late(board: Board) -> bool:
    limits = board.limits
    if limits.deterministic_limit is not None:
        return board.stop.requested
    return board.stop.requested or limits.seconds > START_SHARE * limits.time_limit_s
