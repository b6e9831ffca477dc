"""Ops as columns read like the list that they stand for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.kinds import KINDS
from optpipe.ops import Op, OpArray, Orders, is_op_name

OPS = [Op("F", 0, 0), Op("BW", 3, 1), Op("O", 2, 7), Op("R", 2, 7)]


def test_columns_read_like_a_list() -> None:
    array = OpArray.of(OPS)
    assert array == OPS
    assert Orders.of_compute([OPS]).devices[0].compute == array  # a list asks the columns
    assert list(array) == OPS
    assert [array[0], array[-1]] == [OPS[0], OPS[-1]]
    assert array[1:3] == OPS[1:3]
    assert Op("O", 2, 7) in array
    assert array.kind.tolist() == [0, 3, 4, 5]
    assert all(type(value) is int for op in array for value in op[1:])


def test_columns_differ_where_lists_do() -> None:
    assert OpArray.of(OPS) != OpArray.of(OPS[:3])
    assert OpArray.of(OPS) != [*OPS[:3], Op("R", 2, 8)]


def test_columns_are_joined_in_order() -> None:
    assert OpArray.joined([OpArray.of(OPS[2:]), OpArray.of([]), OpArray.of(OPS[:2])]) == OPS[2:] + OPS[:2]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(KeyError, match="x"):
        OpArray.of([Op("x", 0, 0)])


def test_orders_hold_lists_and_columns_alike() -> None:
    assert Orders.of_compute([OPS]) == Orders.of_compute([OpArray.of(OPS)])


@pytest.mark.parametrize(("text", "right"), [("B2.7", True), ("BW0.0", True), ("x0.0", False), ("F01.0", False)])
def test_names_of_ops(text: str, right: bool) -> None:
    assert is_op_name(text) is right


NAMES = st.builds(Op, st.sampled_from(KINDS), st.integers(0, 9_999_999), st.integers(0, 9_999_999))


@given(st.lists(NAMES, max_size=20))
def test_names_are_read_as_they_are_written(ops: list[Op]) -> None:
    names = OpArray.of(ops).names
    assert names == " ".join(map(str, ops))
    assert OpArray.parse(names) == ops


@pytest.mark.parametrize("wrong", ["x0.0", "F0", "F00.1", "F1.2.3", "F-1.2", "F1.12345678", "F1. 2", "F1.\u0662", " "])
def test_one_wrong_name_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="is not the name of an op"):
        OpArray.parse(f"F0.0 {wrong} W0.0")
