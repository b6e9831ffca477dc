"""Room by releases and copies, by hand."""

from __future__ import annotations

from math import inf

from optpipe.problem import Problem
from solver.bounds.unit_costs import UnitCosts
from solver.bounds.unit_order import op_times
from solver.bounds.unit_room import InFlight, Waiting, copies_by, room_us, tail_room_us


def test_copies_run_one_at_a_time_from_when_they_may() -> None:
    assert copies_by(9, [0, 1, 20], 4) == (2, 24)
    assert copies_by(7.5, [1, 0, 20], 4) == (1, 8)
    assert copies_by(30, [0, 1, 20], 4) == (3, inf)


def test_room_comes_from_the_release_or_the_copy_that_is_first() -> None:
    units = [Waiting(2, 1, [(50, 1), (60, 1)]), Waiting(2, 3, [])]
    assert room_us(units, 2, 5, 0) == 6  # one copy, from 1 on
    assert room_us(units, 3, 5, 0) == 11  # both
    assert room_us(units, 2, 100, 0) == 60  # the first is released before
    assert room_us(units, 3, 100, 0) == 103
    assert room_us(units, 5, 5, 7) == 7  # never: nothing is said


def test_what_is_away_when_a_backward_starts_comes_back_before_its_own() -> None:
    """Two units in flight for sure, one whose F may come after; room for one activation beside that of B."""
    units = [InFlight(4, 4, inf, 10), InFlight(4, 4, inf, 20), InFlight(4, 0, 35, 30)]
    # The two are back in 6 each, before the last 10 and 20, so within 26 from the start of B.
    assert tail_room_us(units, 8, 6, 2, 0) == 24
    assert tail_room_us(units[:2], 8, 6, 2, 0) == 24
    # Without a byte for the third its F comes after B.
    assert tail_room_us(units, 12, 6, 2, 0) == 35
    assert tail_room_us(units[:2], 8, 15, 2, 0) == 38
    assert tail_room_us(units[:2], 9, 6, 2, 5) == 5  # never: nothing is said


def pair(offload_us: float, reload_us: float) -> UnitCosts:
    """Two devices with room for one activation on the first, all of which may leave; times of 10 us."""
    stage = dict.fromkeys(("forward_us", "backward_input_us", "backward_weight_us"), 10) | {"activation_bytes": 1}
    copy = {"bytes": 1, "offload_us": offload_us, "reload_us": reload_us}
    problem = Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": 3,
            "devices": [{"memory_bytes": 1}, {"memory_bytes": None}],
            "stages": [
                stage | {"device": 0, "backward_weight_bytes": 0, "offload": copy},
                stage | {"device": 1, "backward_weight_bytes": 0},
            ],
        }
    )
    return UnitCosts.of(problem)


def test_forwards_wait_for_copies() -> None:
    """A forward every 10 + 5 us; with slow copies after the backwards, of which the first ends at 40 us."""
    quick, slow = op_times(pair(5, 7)), op_times(pair(100, 100))
    assert quick is not None
    assert slow is not None
    assert quick.forward_heads[0].tolist() == [0, 15, 30]
    assert slow.forward_heads[0].tolist() == [0, 40, 80]


def test_backwards_leave_time_for_reloads() -> None:
    """After the first B, 2 B and 3 W of 10 us; or both others come back in 25 us each, the last before B and W."""
    quick, slow = op_times(pair(5, 7)), op_times(pair(5, 25))
    assert quick is not None
    assert slow is not None
    assert quick.backward_tails[0].tolist() == [50, 30, 10]
    assert slow.backward_tails[0].tolist() == [10 + 10 + 2 * 25 - 10, 10 + 10 + 25 - 10, 10]
