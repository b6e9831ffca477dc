"""A child from outside: nothing is left behind."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from instances import HALF, WHOLE, uniform
from optpipe.errors import (
    DeadlockError,
    InfeasibleError,
    InputError,
    Issue,
    MethodError,
    ModelTooLargeError,
    NoSolutionError,
    OptPipeError,
    VerificationError,
)
from optpipe.ops import DeviceOrders, Op, Orders, orders_from_data, orders_to_data
from optpipe.simulate import simulate
from solver.limits import Limits
from solver.methods import METHODS
from solver.process import Child, channel
from solver.serial import serial_orders
from solver.solution import Progress, Solution
from solver.solve import solve
from tests.recomputing import one_f_one_b, recomputing


def test_a_child_that_cannot_be_started_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-such-python"))
    with pytest.raises(FileNotFoundError):
        Child()
    assert list(tmp_path.iterdir()) == []


def sent(message: channel.Message) -> channel.Message:
    """The message after its way through the pipe."""
    text = channel.to_line(message)
    assert text.count(b"\n") == 1
    received: channel.Message = json.loads(text)
    return received


def test_a_request() -> None:
    problem = uniform(2, 3, budget=4, offload=HALF, v_shape=True, name="two\nlines")
    limits = Limits(7.5, 0.01, 3, 11, deterministic_limit=2.0)
    known = serial_orders(problem)
    assert known is not None
    read, method, given, starts = channel.read_request(sent(channel.request_message(problem, "milp", limits, [known])))
    assert read == problem
    assert method == "milp"
    assert (given.time_limit_s, given.gap, given.workers, given.seed) == (7.5, 0.01, 3, 11)
    assert (given.began, given.deterministic_limit) == (limits.began, 2.0)
    assert not given.cancel.requested
    assert starts == [known]


@pytest.mark.parametrize(
    "error",
    [
        InputError([Issue(("stages", 3), "negative", "is -1.")], "problem.json"),
        DeadlockError(["F0.0", "B0.0"], 7),
        MethodError("needs 5 bytes. Maybe use another."),
        ModelTooLargeError("would build a model of 9 ops. Maybe use another."),
        InfeasibleError("proved.", [4, None]),
        NoSolutionError("nothing"),
        VerificationError("a bug"),
    ],
)
def test_every_error(error: OptPipeError) -> None:
    read = channel.read_error(sent(channel.error_message(error)))
    assert type(read) is type(error)
    assert str(read) == str(error)
    assert vars(read) == vars(error)


def test_orders_with_waits_and_shared_channels() -> None:
    problem = uniform(4, 8, budget=4, offload=WHOLE, copy_channels={"duplex": False, "shared_by": [[0, 1]]})
    orders = solve(problem, "ada-offload").orders
    assert orders.waits
    assert orders.channels
    read = orders_from_data(json.loads(json.dumps(orders_to_data(orders))))
    assert orders_to_data(read) == orders_to_data(orders)
    assert set(read.ops()) == set(orders.ops())
    _, _, _, [start] = channel.read_request(sent(channel.request_message(problem, "auto", Limits(1.0), [orders])))
    assert start == orders


@pytest.mark.parametrize("data", [{}, {"devices": [["F0"]], "waits": {}, "channels": []}, {"devices": 3}])
def test_other_things_are_no_orders(data: channel.Message) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        orders_from_data(data)


def test_methods_keep_their_names() -> None:
    """The child says which method found what by its name alone."""
    assert all(method.name == name for name, method in METHODS.items())


def test_orders_with_modes_go_both_ways() -> None:
    problem = recomputing(2, 3)
    orders = one_f_one_b(problem, lambda s, i: "C BW" if i else "BW")
    read, _, _, [start] = channel.read_request(sent(channel.request_message(problem, "auto", Limits(1.0), [orders])))
    assert read.stages[0].choices == problem.stages[0].choices
    assert start.modes is not None
    assert start.modes.tolist() == [[0, 1, 1]] * 2
    assert simulate(read, start).value_us == simulate(problem, orders).value_us


def test_a_free_order_and_the_largest_numbers_go_both_ways() -> None:
    """Names of ops have seven digits at most; orders that a message leaves out are those of the one before."""
    devices = [
        DeviceOrders([Op("F", 9_999_999, 9_999_999), Op("CBW", 0, 9_999_999)]),
        DeviceOrders(reload=[Op("R", 7, 0)]),
    ]
    orders = Orders(devices, microbatch_order=(2, 0, 1))
    found = Solution(orders, 3.0, 2.0, "search", "states")
    first, second = (
        channel.read_solution(sent(channel.solution_message("fed", Progress(found, 1.5), with_orders=new)), found)
        for new in (True, False)
    )
    assert second == Progress(found, 1.5)
    assert first.solution.orders is not None
    assert list(first.solution.orders.ops()) == list(orders.ops())
    assert list(first.solution.orders.microbatch_order or ()) == [2, 0, 1]
