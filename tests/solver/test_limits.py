"""Limits: what is refused, and copies for other processes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from instances import uniform
from optpipe.errors import InputError
from solver.limits import Limits
from solver.solve import solve


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"time_limit_s": -1}, "time_limit_s is -1 but must be a number of at least 0."),
        ({"time_limit_s": float("nan")}, "time_limit_s is NaN but must be a number of at least 0."),
        ({"time_limit_s": "3"}, "time_limit_s is '3' but must be a number of at least 0."),
        ({"gap": 5}, "gap is 5 but must be a number of at least 0 and at most 1."),
        ({"deterministic_limit": -1}, "deterministic_limit is -1 but must be a number of at least 0."),
        ({"workers": 0}, "workers is 0 but must be an integer of at least 1."),
        ({"workers": 1.5}, "workers is 1.5 but must be an integer of at least 1."),
        ({"seed": -1, "workers": -2}, "workers is -2 but must be an integer of at least 1.\nseed is -1 but must be"),
    ],
)
def test_values_that_are_no_limits(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        solve(uniform(2, 3), "1f1b", Limits(**given))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x.json",), "problem is 'x.json' but must be of type Problem. Maybe Problem.load(path)."),
        ((uniform(2, 3), "1f1b", 10), "limits is 10 but must be of type Limits. Maybe Limits(time_limit_s=10)."),
        ((uniform(2, 3), None), "method is None; the methods are auto"),
    ],
)
def test_arguments_of_other_types(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError) as caught:
        solve(*arguments)
    assert message in str(caught.value)


def test_no_limit_of_time() -> None:
    assert solve(uniform(2, 3), "1f1b", Limits(float("inf"), gap=1)).value_us > 0


def test_a_copy_for_another_process_has_requests_of_its_own() -> None:
    limits = Limits(3, workers=1, seed=2)
    copied = pickle.loads(pickle.dumps(limits))
    assert (copied.time_limit_s, copied.began, copied.seed) == (3, limits.began, 2)
    copied.cancel.request()
    assert not limits.cancel.requested
    assert pickle.loads(pickle.dumps(copied)).cancel.requested
