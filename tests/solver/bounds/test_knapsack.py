"""The knapsacks are never below a choice of whole microbatches, and equal to the best one where stages are alike."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from solver.bounds.knapsack import Held, Piece, most_held_us


@st.composite
def stocks(draw: st.DrawFn) -> Held:
    rest_us, more_us = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    return Held(Piece(rest_us + more_us, draw(st.integers(0, 6))), Piece(rest_us, draw(st.integers(0, 7))))


def best_of_whole_ones(held: list[Held], count: int, room: int) -> float:
    choices = [(w, r) for w in range(count + 1) for r in range(count + 1 - w)]
    best = 0.0
    for numbers in product(choices, repeat=len(held)):
        chosen = [
            (n, piece) for one, pair in zip(held, numbers, strict=True) for n, piece in zip(pair, one, strict=True)
        ]
        if sum(n * piece.size_bytes for n, piece in chosen) <= room:
            best = max(best, sum(n * piece.time_us for n, piece in chosen))
    return best


@given(st.lists(stocks(), min_size=1, max_size=2), st.integers(0, 4), st.integers(0, 20))
def test_never_below_whole_microbatches(held: list[Held], count: int, room: int) -> None:
    best = best_of_whole_ones(held, count, room)
    in_parts = most_held_us(held, count, room, in_parts=True)
    assert best <= most_held_us(held, count, room) <= in_parts + 1e-9


@given(stocks(), st.integers(0, 6), st.integers(0, 30))
def test_equals_whole_microbatches_of_one_stage(held: Held, count: int, room: int) -> None:
    assert most_held_us([held], count, room) == best_of_whole_ones([held], count, room)


@given(stocks(), st.integers(0, 6))
def test_without_a_limit_everything_is_held(held: Held, count: int) -> None:
    assert most_held_us([held], count, float("inf")) == count * held.whole.time_us
