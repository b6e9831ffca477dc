"""Documents with slices and with costs of microbatches: what they say, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from optpipe.errors import InputError
from optpipe.fields import MAX_TIME_US
from optpipe.ops import orders_from_data, orders_to_data
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.stage import UnitStage
from solver.cache import canonical_form
from tests.optpipe.test_verify_units import reordered
from tests.recomputing import FULL
from tests.unequal import times, unequal


def test_costs_of_units_are_products_of_decimals() -> None:
    """0.1 three times over is 0.3, and 1.1 times 100 bytes are 110, not a byte more."""
    factors = [{"time": 3, "bytes": 1.1}, {"transfer": 0.5}]
    slices = {"count": 2, "factors": {"forward": [1, 2.5], "bytes": [1, 0.001]}}
    problem = unequal(
        2, 2, microbatch_factors=factors, slices=slices, forward_us=0.1, activation_bytes=100, transfer_us=0.3
    )
    assert problem.units == 4
    assert [problem.stage_of(0, unit).forward_us for unit in range(4)] == [0.3, 0.75, 0.1, 0.25]
    assert [problem.stage_of(1, unit).activation_bytes for unit in range(4)] == [110, 1, 100, 1]
    assert problem.unit_delays_us["forward"].tolist() == [[0.3, 0.3, 0.15, 0.15]]
    assert problem.unit_delays_us["backward"].tolist() == [[0.3, 0.3, 0.15, 0.15]]
    assert problem.work_us[0] == pytest.approx(0.3 + 0.75 + 0.1 + 0.25 + 2 * (3 + 3 + 1 + 1))


def test_transfers_are_by_the_stage_that_sends() -> None:
    data = unequal(2, 1, slices={"count": 2}, transfer_us=4).to_data()
    data["stages"][0]["slice_factors"] = {"transfer": [1, 2]}
    data["stages"][1]["slice_factors"] = {"transfer": [0.5, 0]}
    delays = Problem.from_data(data).unit_delays_us
    assert (delays["forward"].tolist(), delays["backward"].tolist()) == ([[4, 8]], [[2, 0]])


def test_a_mode_recomputes_however_few_bytes_there_are() -> None:
    """Rounded up, what is kept of one byte in ten may be all of it: the recomputation still takes place."""
    problem = unequal(1, 2, microbatch_factors=[{"bytes": 0.01, "time": 2}, {}], modes=[FULL], activation_bytes=9)
    small, plain = (problem.stage_of(0, unit).choices[1] for unit in range(2))
    assert (small.kept_bytes, small.recomputed_bytes, small.recomputes, small.recompute_us) == (1, 0, True, 2)
    assert (plain.kept_bytes, plain.recomputed_bytes, plain.recomputes, plain.recompute_us) == (1, 8, True, 1)


def test_gradients_of_keys_and_values() -> None:
    problem = unequal(
        1, 1, slices={"count": 3, "factors": {"bytes": [1, 0.5, 2]}}, slice_gradient_bytes=5, activation_bytes=10
    )
    stages = [problem.stage_of(0, unit) for unit in range(3)]
    assert all(isinstance(stage, UnitStage) for stage in stages)
    found = [(s.gradients_taken_bytes, s.gradients_freed_bytes) for s in stages if isinstance(s, UnitStage)]
    assert found == [(0, 5), (0, 3), (5 + 3, 0)]


def test_units_in_order() -> None:
    problem = unequal(1, 2, slices={"count": 3})
    assert problem.units_in_order("F").tolist() == problem.units_in_order("O").tolist() == [0, 1, 2, 3, 4, 5]
    for kind in ("B", "W", "BW", "R", "C", "CB", "CBW"):
        assert problem.units_in_order(kind).tolist() == [2, 1, 0, 5, 4, 3]
    assert problem.units_in_order("F", [1, 0]).tolist() == [3, 4, 5, 0, 1, 2]
    assert problem.units_in_order("B", [1, 0]).tolist() == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("fields", "code", "detail"),
    [
        ({"microbatch_factors": times(1)}, "wrong_length", "microbatch_factors has 1 entries but microbatches is 2"),
        ({"slices": {"count": 2, "factors": {"bytes": [1]}}}, "wrong_length", "slices.factors.bytes has 1 entries"),
        (
            {"slices": {"count": 2}, "slice_factors": {"forward": [1]}},
            "wrong_length",
            "stages[0].slice_factors.forward has 1 entries but slices.count is 2",
        ),
        ({"slice_factors": {}}, "missing_slices", "stages[0].slice_factors is given but slices is not"),
        ({"slice_gradient_bytes": 1}, "missing_slices", "stages[0].slice_gradient_bytes is given"),
        ({"slices": {"count": 0}}, "out_of_range", "from 1 to"),
        ({"slices": {"count": 10**6}}, "too_large", "at most 1000000 slices"),
        (
            {"slices": {"count": 2, "factors": {"forward": [1, -1]}}},
            "not_a_factor",
            "is -1 but must be a number from 0",
        ),
        ({"microbatch_factors": times(1, "2")}, "not_a_factor", "must be a number from 0"),  # type: ignore[arg-type]
        ({"microbatch_order": "any"}, "literal_error", "given"),
        ({"microbatch_factors": times(1, 2), "forward_us": MAX_TIME_US}, "too_large", "2e+12 us"),
        ({"microbatch_factors": [{}, {"bytes": 2}], "activation_bytes": 2**53 - 1}, "too_large", "1.80144e+16 bytes"),
        ({"slices": {"count": 3}, "slice_gradient_bytes": 2**53 - 1}, "too_large", "1.80144e+16 bytes"),
        (
            {"slices": {"count": 3, "factors": {"bytes": [1, 2, 1]}}, "slice_gradient_bytes": 2**52},
            "too_large",
            "1.35108e+16 bytes",
        ),
        ({"microbatch_factors": [{}, {"length": 2}]}, "unknown_field", "length"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], code: str, detail: str) -> None:
    with pytest.raises(InputError) as caught:
        unequal(1, 2, **fields)
    assert code in {issue.code for issue in caught.value.issues}
    assert detail in str(caught.value)


def test_a_count_of_slices_builds_nothing() -> None:
    """A few words may ask for a million: services compare the number of ops with their limit first."""
    problem = unequal(1, 1, slices={"count": 10**6}, slice_gradient_bytes=1)
    assert problem.has_factors
    assert "_slice_factors" not in vars(problem)


def test_trivial_factors_change_nothing() -> None:
    """Neither costs, classes nor the key by which equal problems are found."""
    plain = unequal(2, 3)
    ones = {"forward": [1.0], "bytes": [1]}
    other = unequal(
        2, 3, microbatch_factors=[{}] * 3, microbatch_order="free", slices={"count": 1, "factors": ones},
        slice_factors={}, slice_gradient_bytes=7,
    )  # fmt: skip
    assert not other.has_factors
    assert not other.has_free_order
    assert other.unit_stages == [[stage] for stage in other.stages]
    assert canonical_form(other).key == canonical_form(plain).key


def test_keys_of_problems_that_differ_differ_and_those_of_equal_ones_do_not() -> None:
    forms = [
        unequal(2, 2),
        unequal(2, 2, slices={"count": 2}),
        unequal(2, 4),
        unequal(2, 2, microbatch_factors=times(1, 2)),
        unequal(2, 2, microbatch_factors=times(2, 1)),
        unequal(2, 2, microbatch_factors=times(2, 1), microbatch_order="free"),
        unequal(2, 2, slices={"count": 2}, slice_gradient_bytes=2),
        unequal(2, 2, slices={"count": 2, "factors": {"transfer": [1, 2]}}, transfer_us=1),
        unequal(2, 2, slices={"count": 2, "factors": {"transfer": [1, 3]}}, transfer_us=1),
    ]
    assert len({canonical_form(problem).key for problem in forms}) == len(forms)
    same = [
        unequal(2, 2, slices={"count": 2, "factors": {"forward": [2, 4]}}, microbatch_factors=times(1, 2)),
        unequal(
            2, 2, slices={"count": 2, "factors": {"forward": [1, 2]}}, microbatch_factors=times(1, 2), forward_us=2
        ),
    ]
    assert len({canonical_form(problem).key for problem in same}) == 1


def test_the_order_of_microbatches_survives_documents() -> None:
    schedule = reordered()
    assert Schedule.from_data(schedule.to_data()) == schedule
    assert orders_from_data(orders_to_data(schedule.orders)).microbatch_order == [2, 0, 1]
    with pytest.raises(InputError, match="each of 3 microbatches once"):
        Schedule.from_data(schedule.to_data() | {"microbatch_order": [0, 1, 1]})
