"""What parent and child say to each other arrives as it was sent."""

from __future__ import annotations

import json

import pytest

from optpipe.errors import (
    DeadlockError,
    InfeasibleError,
    InputError,
    Issue,
    MethodError,
    NoSolutionError,
    OptPipeError,
    VerificationError,
)
from optpipe.simulate import simulate
from solver.floor import serial_orders
from solver.limits import Limits
from solver.methods import METHODS
from solver.orders_text import orders_data, read_orders
from solver.portfolio import solve
from solver.process import messages
from tests.problems import HALF, WHOLE, uniform


def sent(message: messages.Message) -> messages.Message:
    """The message after its way through the pipe."""
    text = messages.line(message)
    assert text.count(b"\n") == 1
    received: messages.Message = json.loads(text)
    return received


def test_a_request() -> None:
    problem = uniform(2, 3, budget=4, offload=HALF, v_shape=True, name="two\nlines")
    limits = Limits(7.5, 0.01, 3, 11, deterministic_limit=2.0)
    known = serial_orders(problem)
    assert known is not None
    read, method, given, starts = messages.read_request(sent(messages.request(problem, "milp", limits, [known])))
    assert read == problem
    assert method == "milp"
    assert (given.time_limit_s, given.gap, given.workers, given.seed) == (7.5, 0.01, 3, 11)
    assert (given.began, given.deterministic_limit) == (limits.began, 2.0)
    assert not given.cancel.requested
    assert [simulate(problem, orders).value_us for orders in starts] == [simulate(problem, known).value_us]


@pytest.mark.parametrize(
    "error",
    [
        InputError([Issue(("stages", 3), "negative", "is -1.")], "problem.json"),
        DeadlockError(["F0.0", "B0.0"], 7),
        MethodError("needs 5 bytes. Maybe use another."),
        InfeasibleError("proved.", [4, None]),
        NoSolutionError("nothing"),
        VerificationError("a bug"),
    ],
)
def test_every_error(error: OptPipeError) -> None:
    read = messages.read_error(sent(messages.error(error)))
    assert type(read) is type(error)
    assert str(read) == str(error)
    assert vars(read) == vars(error)


def test_orders_with_waits_and_shared_channels() -> None:
    problem = uniform(4, 8, budget=4, offload=WHOLE, copy_channels={"duplex": False, "shared_by": [[0, 1]]})
    orders = solve(problem, "ada-offload").orders
    assert orders.waits
    assert orders.channels
    read = read_orders(json.loads(json.dumps(orders_data(orders))))
    assert orders_data(read) == orders_data(orders)
    assert set(read.ops()) == set(orders.ops())


@pytest.mark.parametrize("data", [{}, {"devices": [["F0"]], "waits": {}, "channels": []}, {"devices": 3}])
def test_other_things_are_no_orders(data: messages.Message) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        read_orders(data)


def test_methods_keep_their_names() -> None:
    """The child says which method found what by its name alone."""
    assert all(method.name == name for name, method in METHODS.items())
