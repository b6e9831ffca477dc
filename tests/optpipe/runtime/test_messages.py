"""Trees of tensors are taken apart and put together in one order."""

from __future__ import annotations

from typing import NamedTuple

import torch

from optpipe.runtime.messages import MessageSpec, leaves, map_leaves, message_spec, rebuild, size_bytes, spec_text


class Pair(NamedTuple):
    first: object
    second: object


NESTED = (1, [2, {"b": 4, "a": 3}], Pair(5, (6,)), {})


def test_leaves_come_from_left_to_right_and_by_key() -> None:
    assert leaves(NESTED) == [1, 2, 3, 4, 5, 6]


def test_a_tree_is_rebuilt_in_its_form() -> None:
    doubled = rebuild(NESTED, [10, 20, 30, 40, 50, 60])
    assert doubled == (10, [20, {"b": 40, "a": 30}], Pair(50, (60,)), {})
    assert type(doubled[2]) is Pair
    assert list(doubled[1][1]) == ["b", "a"], "keys stay in the order in which they were"
    assert map_leaves(lambda leaf: 10 * leaf, NESTED) == doubled


def test_a_leaf_is_a_tree() -> None:
    assert leaves(7) == [7]
    assert map_leaves(str, 7) == "7"


def test_a_spec_says_shape_dtype_and_bytes() -> None:
    tree = (torch.zeros(3, 5, dtype=torch.float64), {"mask": torch.zeros(2, dtype=torch.bool)})
    spec = message_spec(tree)
    assert spec == (MessageSpec((3, 5), torch.float64), {"mask": MessageSpec((2,), torch.bool)})
    assert size_bytes(spec) == 122
    assert spec_text(spec) == "(float64[3, 5], {mask: bool[2]})"
    assert [leaf.has_gradient for leaf in leaves(spec)] == [True, False]
