"""Equal problems have equal keys, and only they."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.problem import Problem
from solver.canonical import canonical
from tests.problems import HALF, problems, uniform

BASE = uniform(2, 3, budget=7, offload=HALF, host_memory_bytes=3)

TIMES = ("forward_us", "backward_input_us", "backward_weight_us", "offload_us", "reload_us", "transfer_us")
TIMES_OF_BOUNDARIES = ("forward", "backward")
SIZES = ("memory_bytes", "host_memory_bytes", "activation_bytes", "backward_weight_bytes", "bytes", "F", "B", "W", "BW")


def scaled(data: Any, times: float, sizes: int, name: str = "") -> Any:
    """A document with every time and every size multiplied."""
    if isinstance(data, dict):
        return {key: scaled(value, times, sizes, key) for key, value in data.items()}
    if isinstance(data, list):
        return [scaled(value, times, sizes, name) for value in data]
    if data is not None and name in (*TIMES, *TIMES_OF_BOUNDARIES):
        return data * times
    return data * sizes if data is not None and name in SIZES else data


@settings(deadline=None, max_examples=50)
@given(problems(), st.sampled_from([2, 1000, 0.5]), st.sampled_from([2, 3, 1024]))
def test_common_factors_do_not_matter(problem: Problem, times: float, sizes: int) -> None:
    """By factors with which 0.1 and 2.25 remain what they say."""
    other = Problem.from_data(scaled(problem.to_data(), times, sizes))
    assert canonical(other).data == canonical(problem).data


@settings(deadline=None, max_examples=50)
@given(problems())
def test_names_and_spelling_do_not_matter(problem: Problem) -> None:
    data = problem.to_data() | {"name": "other", "source": "measured again"}
    boundaries = zip(problem.forward_delay_us, problem.backward_delay_us, strict=True)
    data["transfer_us"] = [{"forward": float(ahead), "backward": back} for ahead, back in boundaries]
    data["devices"] = [device | {"name": f"gpu{d}"} for d, device in enumerate(data["devices"])]
    assert canonical(Problem.from_data(data)).key == canonical(problem).key


def test_decimal_fractions_are_what_they_say() -> None:
    """0.3 is three times 0.1, although the floats are not."""
    data = BASE.to_data()
    assert canonical(Problem.from_data(scaled(data, 0.1, 1) | {"transfer_us": 0.3})).data == (
        canonical(Problem.from_data(data | {"transfer_us": 3})).data
    )


def test_budgets_are_rounded_down_to_what_memory_can_be() -> None:
    doubled = scaled(BASE.to_data(), 1, 2)
    doubled["devices"] = [{"memory_bytes": 15}, {"memory_bytes": 14}]
    assert canonical(Problem.from_data(doubled)).key == canonical(BASE).key
    doubled["devices"] = [{"memory_bytes": 16}, {"memory_bytes": 14}]
    assert canonical(Problem.from_data(doubled)).key != canonical(BASE).key


@pytest.mark.parametrize(
    "change",
    [
        {"objective": "device_span"},
        {"transfer_us": 2},
        {"host_memory_bytes": None},
        {"copy_channels": {"duplex": False}},
        {"copy_channels": {"shared_by": [[1, 0]]}},
        {"devices": [{"memory_bytes": 7}, {"memory_bytes": None}]},
        {"microbatches": 4},
    ],
)
def test_what_differs_differs(change: dict[str, Any]) -> None:
    assert canonical(Problem.from_data(BASE.to_data() | change)).key != canonical(BASE).key


def test_a_family_shares_all_but_microbatches_budgets_and_objective() -> None:
    family = canonical(BASE).family_key
    data = BASE.to_data()
    assert canonical(uniform(2, 9, budget=5, offload=HALF, objective="device_span")).family_key == family
    assert canonical(Problem.from_data(data | {"transfer_us": 2})).family_key != family


def test_channels_without_transfers_do_not_matter() -> None:
    plain = uniform(2, 3, copy_channels={"duplex": False}, host_memory_bytes=5)
    assert canonical(plain).key == canonical(uniform(2, 3)).key
