"""Seq1F1B and SlimPipe: their closed forms for equal slices, valid orders for all others, and what they cannot do."""

from __future__ import annotations

import pytest

from optpipe.errors import MethodError
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import build_schedule, peak_budgets
from solver.published.one_stage import one_f_one_b
from solver.published.seq1f1b import seq1f1b, slimpipe
from solver.solve import solve
from tests.solver.exact.cp_sat.test_units import causal
from tests.unequal import times, unequal


@pytest.mark.parametrize(("p", "m", "n"), [(4, 4, 1), (4, 4, 2), (4, 4, 4), (4, 4, 8), (8, 3, 4), (2, 5, 3), (1, 2, 2)])
def test_equal_slices(p: int, m: int, n: int) -> None:
    """``(m + (p - 1) / n)(F + BW)``, and ``n + p - 1 - i`` slices in flight on stage i."""
    problem = unequal(
        p, m, slices={"count": n}, forward_us=12 / n, backward_input_us=12 / n, backward_weight_us=12 / n,
        activation_bytes=1, backward_weight_bytes=0,
    )  # fmt: skip
    orders = seq1f1b(problem)
    assert simulate(problem, orders).value_us == pytest.approx((m + (p - 1) / n) * 36, rel=1e-12)
    assert peak_budgets(problem, orders) == [min(n + p - 1 - i, n * m) for i in range(p)]


def test_without_slices_it_is_1f1b() -> None:
    problem = unequal(4, 6)
    assert seq1f1b(problem) == one_f_one_b(problem)


def test_causal_slices_of_equal_length() -> None:
    """Attention half of F: 35.0 % on four devices (docs/concepts), and memory of seven slices."""
    schedule = solve(causal(7), "seq1f1b")
    assert schedule.value_us == 1773
    assert round(schedule.bubble, 3) == 0.350
    with pytest.raises(MethodError, match="seq1f1b needs 7 B on device 0, but its budget is 6 B"):
        solve(causal(6), "seq1f1b")


def interleaved(p: int, chunks: int, m: int, n: int) -> Problem:
    data = unequal(p, m, slices={"count": n}).to_data()
    data["stages"] = [data["stages"][0] | {"device": s % p} for s in range(p * chunks)]
    return Problem.from_data(data)


@pytest.mark.parametrize(
    ("p", "chunks", "m", "n"), [(4, 2, 4, 4), (4, 2, 4, 2), (4, 3, 5, 4), (6, 2, 4, 3), (2, 2, 3, 1)]
)
def test_interleaved(p: int, chunks: int, m: int, n: int) -> None:
    """One slice a device at a time; the first device is warmed up with (v - 1) p + 2 (p - 1) + n - 1 forwards."""
    problem = interleaved(p, chunks, m, n)
    orders = seq1f1b(problem)
    build_schedule(problem, orders, 0.0, "seq1f1b", 0.0)  # which verifies it
    kinds = [op.kind for op in orders.devices[0].compute]
    ahead = (chunks - 1) * p + 2 * (p - 1) + n - 1 + 1
    assert kinds.index("BW") == min(ahead, chunks * m * n)


def test_interleaved_slices_shorten_the_bubble() -> None:
    whole, sliced = interleaved(4, 2, 8, 1), interleaved(4, 2, 8, 4)
    bubbles = [1 - max(problem.work_us) / simulate(problem, seq1f1b(problem)).value_us for problem in (whole, sliced)]
    assert bubbles[1] < bubbles[0] / 2


@pytest.mark.parametrize(("p", "m", "n"), [(4, 4, 4), (4, 4, 8), (8, 3, 8), (2, 5, 3), (1, 2, 2)])
def test_slimpipe_with_equal_slices(p: int, m: int, n: int) -> None:
    """The step of Seq1F1B, with ``n + 2 (p - 1 - i)`` slices in flight on stage i."""
    thirds = {f"{kind}_us": 12 / n for kind in ("forward", "backward_input", "backward_weight")}
    problem = unequal(p, m, slices={"count": n}, activation_bytes=1, backward_weight_bytes=0, **thirds)
    orders = slimpipe(problem)
    assert simulate(problem, orders).value_us == pytest.approx((m + (p - 1) / n) * 36, rel=1e-12)
    assert peak_budgets(problem, orders) == [min(n + 2 * (p - 1 - i), n * m) for i in range(p)]


def test_slimpipe_waits_less_for_transfers_than_seq1f1b() -> None:
    problem = unequal(4, 4, slices={"count": 8}, transfer_us=1)
    assert simulate(problem, slimpipe(problem)).value_us < simulate(problem, seq1f1b(problem)).value_us


@pytest.mark.parametrize(("p", "chunks", "m", "n"), [(4, 2, 4, 4), (4, 2, 3, 6), (4, 3, 5, 8), (3, 2, 2, 5)])
def test_slimpipe_interleaved(p: int, chunks: int, m: int, n: int) -> None:
    """``v n + 2 (p - 1)`` forwards on the first device before its first backward."""
    problem = interleaved(p, chunks, m, n)
    orders = slimpipe(problem)
    build_schedule(problem, orders, 0.0, "slimpipe", 0.0)  # which verifies it
    kinds = [op.kind for op in orders.devices[0].compute]
    assert kinds.index("BW") == min(chunks * n + 2 * (p - 1), chunks * n * m)


def test_slimpipe_interleaves_no_fewer_slices_than_devices() -> None:
    with pytest.raises(MethodError, match=r"slices\.count is 2\. Maybe cut sequences into 4 slices"):
        slimpipe(interleaved(4, 2, 4, 2))


def test_interleaved_groups_that_cut_a_microbatch_are_refused() -> None:
    with pytest.raises(MethodError, match=r"does not divide 4\. Maybe cut sequences into 2 slices"):
        seq1f1b(interleaved(4, 2, 4, 3))


def test_unequal_microbatches_in_unequal_slices() -> None:
    factors = {"forward": [1, 2, 4], "backward_input": [1, 2, 4], "bytes": [1, 1, 0.5]}
    problem = unequal(
        3, 4, microbatch_factors=times(1, 3, 2, 1), slices={"count": 3, "factors": factors}, transfer_us=1
    )
    schedule = solve(problem, "seq1f1b")
    assert schedule.bound_us <= schedule.value_us
    assert schedule.method == "seq1f1b"
