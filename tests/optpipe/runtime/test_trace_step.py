"""Clocks are estimated to within the error that is claimed, whatever the way there and back took."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from optpipe.runtime.trace_step import Clock, estimate

DELAYS_NS = st.tuples(st.integers(1, 10**6), st.integers(1, 10**6))


def rounds(offset_ns: int, delays_ns: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Round trips to a clock that is ahead by the offset, with these times there and back."""
    found, now_ns = [], 10**12
    for there, back in delays_ns:
        found.append((now_ns, now_ns + there + offset_ns, now_ns + there + back))
        now_ns += there + back + 1000
    return found


@given(st.integers(-(10**15), 10**15), st.lists(DELAYS_NS, min_size=1, max_size=20))
def test_the_true_offset_is_within_the_error(offset_ns: int, delays_ns: list[tuple[int, int]]) -> None:
    clock = estimate(rounds(offset_ns, delays_ns), same_host=False)
    assert abs(clock.offset_ns - offset_ns) <= clock.error_ns
    assert clock.error_ns <= min(there + back for there, back in delays_ns) // 2 + 1


@given(st.lists(DELAYS_NS, min_size=1, max_size=20))
def test_processes_on_one_host_share_its_clock(delays_ns: list[tuple[int, int]]) -> None:
    assert estimate(rounds(0, delays_ns), same_host=True) == Clock(0, 0)


def test_a_host_whose_processes_see_other_clocks_is_measured() -> None:
    """As in containers with time namespaces of their own."""
    clock = estimate(rounds(5 * 10**9, [(100, 300)]), same_host=True)
    assert (clock.offset_ns, clock.error_ns) == (5 * 10**9 - 100, 200)


def test_where_a_clock_drifts_the_quickest_round_counts() -> None:
    early, late = rounds(0, [(100, 100)])[0], rounds(10_000, [(10, 30)])[0]
    assert estimate([early, late], same_host=False) == Clock(10_000 - 10, 20)
