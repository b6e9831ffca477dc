"""Spread passes: the document, its errors, and what simulation and verifier say of them, on random problems too."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instances import uniform
from optpipe.errors import DeadlockError, InputError, OrderError
from optpipe.ops import Op, OpArray, Orders, orders_from_data, orders_to_data
from optpipe.problem import Problem
from optpipe.schedule import Schedule, schedule_text
from optpipe.simulate import simulate
from optpipe.verify import find_causes, verify
from solver.build import build_schedule
from solver.serial import known_budgets_bytes, serial_orders
from tests.sample import examples

Data = dict[str, Any]


def vocabulary(p: int, m: int, *, barriers: int = 1, lag_us: float = 0, times: tuple[int, int] = (2, 1)) -> Data:
    """Equal stages of 3 us an op and two units of memory, with S and T of a vocabulary layer on every device."""
    data = uniform(p, m, transfer_us=lag_us, activation_bytes=2, backward_weight_bytes=1).to_data()
    for stage in data["stages"]:
        stage.update(forward_us=3, backward_input_us=3, backward_weight_us=3)
    after_forward, after_s = {"op": "F", "stage": p - 1, "us": lag_us}, {"pass": "S", "us": lag_us}
    first, second = times if barriers == 1 else times[::-1]
    data["spread"] = [
        {"name": "S", "us": [first] * p, "after": [after_forward]},
        {"name": "T", "us": [second] * p, "frees": "S", "after": [after_s]},
    ]
    data["gates"] = [{"op": "B", "stage": p - 1, "after": [{"pass": "ST"[barriers - 1], "us": lag_us}]}]
    return data


def random_spread(rng: Random, *, microbatches: int | None = None) -> Data:
    """Passes, some not on all devices, after any op or pass, with memory; gates; factors."""
    devices = rng.randint(1, 3)
    stages, m = rng.randint(devices, 4), microbatches or rng.randint(1, 4)
    data = uniform(devices, m).to_data()
    data["stages"] = [
        data["stages"][0]
        | {name: rng.randint(0, 5) for name in ("forward_us", "backward_input_us", "backward_weight_us")}
        | {"device": s % devices, "split_backward": rng.random() < 0.7, "activation_bytes": rng.randint(1, 4)}
        | {"backward_weight_bytes": 1}
        for s in range(stages)
    ]
    data["transfer_us"] = rng.choice([0, 2])
    names = ["E", "S", "T"][: rng.randint(1, 3)]
    passes: list[Data] = []
    for n, name in enumerate(names):
        us = [rng.choice([0, 1, 3, 4]) for _ in range(devices)]
        us[rng.randrange(devices)] = 2
        after: list[Data] = [{"pass": other, "us": rng.choice([0, 1])} for other in names[:n] if rng.random() < 0.6]
        if rng.random() < 0.7:
            after.append({"op": rng.choice("FB"), "stage": rng.randrange(stages), "us": rng.choice([0, 1])})
        passes.append({"name": name, "us": us, "after": after})
        if rng.random() < 0.5:
            passes[-1]["workspace_bytes"] = [rng.randint(0, 2) for _ in range(devices)]
        freed = next((one["pass"] for one in after if "pass" in one), None)
        if freed is not None and all(one.get("frees") != freed for one in passes):
            passes[-1]["frees"] = freed
            passes[names.index(freed)]["kept_bytes"] = [rng.randint(0, 3) * (us[d] > 0) for d in range(devices)]
    data["spread"] = passes
    data["gates"] = [
        {"op": rng.choice("FB"), "stage": rng.randrange(stages), "after": [{"pass": rng.choice(names), "us": 1}]}
        for _ in range(rng.randint(0, 2))
    ]
    if rng.random() < 0.3:
        data["microbatch_factors"] = [{"time": rng.choice([1, 2]), "bytes": rng.choice([1, 1.5])} for _ in range(m)]
    return data


def random_problem(rng: Random, *, microbatches: int | None = None) -> Problem:
    """The next of these that does not wait in a circle."""
    while True:
        with suppress(InputError):
            return Problem.from_data(random_spread(rng, microbatches=microbatches))


TWO_DEVICES = "F0.0 F0.1 S0.0 S0.1 T0.0 T0.1 B0.0 W0.0 B0.1 W0.1", "F1.0 S1.0 F1.1 S1.1 B1.0 W1.0 T1.0 B1.1 W1.1 T1.1"


def orders_of(*lists: str) -> Orders:
    return Orders.of_compute([OpArray.parse(names) for names in lists])


def two_devices() -> Schedule:
    """A schedule with transfers, and logits that T frees."""
    data = vocabulary(2, 2, lag_us=1)
    data["spread"][0]["kept_bytes"] = [1, 1]
    return build_schedule(Problem.from_data(data), orders_of(*TWO_DEVICES), 0.0, "by hand", 0.0)


def test_times_and_memory_by_hand() -> None:
    schedule = two_devices()
    times = {str(op.key): op.start_us for device in schedule.devices for op in device.compute}
    # F1.0 ends at 7: S there at once, on the other device with the message; both S have ended at 10.
    assert (times["S1.0"], times["S0.0"]) == (7, 8)
    # The second S of device 0 ends at 15, T follows the barrier by the collective's time.
    assert (times["S0.1"], times["T0.0"], times["B1.0"]) == (13, 15, 14)
    assert schedule.value_us == 31
    assert [device.peak_bytes for device in schedule.devices] == [6, 6]


def test_documents_and_orders_read_back() -> None:
    schedule = two_devices()
    assert schedule.to_data()["devices"][0]["compute"][2] == {
        **{"op": "S", "part": 0, "microbatch": 0, "start_us": 8.0, "end_us": 10.0, "waits": []}
    }
    for text in (schedule.to_json(), schedule_text(schedule)):
        again = Schedule.from_json(text)
        assert again == schedule
        assert again.problem == schedule.problem
        assert verify(again).ok
    read = orders_from_data(json.loads(json.dumps(orders_to_data(schedule.orders))))
    assert read.devices == schedule.orders.devices


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (lambda data: data["spread"][0].update(name="B"), "is 'B', which is a kind of op"),
        (lambda data: data["spread"][1].update(name="S"), r"spread\[1\].name is 'S', as spread\[0\] is called"),
        (lambda data: data["spread"][0].update(us=[1]), r"spread\[0\].us has 1 entries but there are 2 devices"),
        (lambda data: data["spread"][0].update(us=[0, 0]), r"spread\[0\].us is 0 on every device"),
        (lambda data: data["spread"][0].update(kept_bytes=[1, 1]) or data["spread"][1].pop("frees"), "no pass on"),
        (lambda data: data["spread"][1].update(after=[]), "T does not come after it. Maybe add it to after"),
        (lambda data: data["spread"][0].update(after=[{"pass": "T"}]), "in a circle: S after T after S"),
        (lambda data: data["gates"].append({"op": "F", "stage": 1, "after": [{"pass": "S"}]}), "in a circle: F1 after"),
        (lambda data: data["gates"][0].update(after=[{"pass": "Q"}]), "'Q'; the passes are: S, T"),
        (lambda data: data["gates"][0].update(stage=2), r"gates\[0\].stage is 2 of 2 stages"),
        (lambda data: data["spread"][1].update(frees="Q"), "frees is 'Q'; the passes are: S, T"),
        (lambda data: data.update(slices={"count": 2}), "for whole microbatches, but slices is given"),
        (
            lambda data: data.update(overlaps=[{"forward_stage": 1, "backward_stage": 1, "us": 9}]),
            r"overlaps\[0\] names stage 1, an op of which gates delay",
        ),
    ],
)
def test_wrong_passes_are_refused(change: Callable[[Data], object], detail: str) -> None:
    data = vocabulary(2, 2)
    change(data)
    with pytest.raises(InputError, match=detail):
        Problem.from_data(data)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda ops: ops.pop(2), "presence"),
        (lambda ops: ops[2].update(part=1), "placement"),
        (lambda ops: ops[2].update(start_us=7), "dependency"),
        (lambda ops: ops[4].update(start_us=7, end_us=8), "dependency"),
        (lambda ops: ops[2].update(end_us=11), "duration"),
        (lambda ops: (ops[2].update(microbatch=1), ops[3].update(microbatch=0)), "microbatch-order"),
    ],
)
def test_the_verifier_names_what_is_broken(change: Callable[[list[Data]], object], rule: str) -> None:
    data = two_devices().to_data()
    change(data["devices"][0]["compute"])
    assert rule in {violation.rule for violation in verify(Schedule.from_data(data)).violations}


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"part": 2}, r"compute\[2\].part is 2 of 2 devices"),
        ({"op": "Q"}, "has an op 'Q'; the problem's spread passes are: S, T"),
        ({"stage": 0}, r"compute\[2\].stage is not a field\.$"),
        ({"waits": ["Q0.0"]}, "has an op 'Q'"),
    ],
)
def test_ops_of_no_pass_are_refused(change: Data, detail: str) -> None:
    data = two_devices().to_data()
    data["devices"][0]["compute"][2].update(change)
    with pytest.raises(InputError, match=detail):
        Schedule.from_data(data)


def test_a_barrier_is_no_cause_but_the_op_that_ended_last() -> None:
    causes = find_causes(two_devices())
    names = [*map(str, causes.ops)]
    of = {name: names[k] for name, k in zip(names, causes.starts_after.tolist(), strict=True) if k >= 0}
    assert (of["S0.0"], of["B1.0"], of["T0.0"]) == ("F1.0", "S1.1", "S0.1")
    assert ("B1.0", "S0.0") in {(names[k], names[before]) for k, before in zip(*causes.needs, strict=True)}


def test_wrong_orders_are_named() -> None:
    problem = Problem.from_data(vocabulary(2, 2))
    late = TWO_DEVICES[0].replace("S0.0 S0.1 T0.0", "T0.0 S0.0 S0.1")
    with pytest.raises(DeadlockError, match=r"S0\.0 -> all S of microbatch 0 -> T0\.0 -> S0\.0"):
        simulate(problem, orders_of(late, TWO_DEVICES[1]))
    with pytest.raises(OrderError, match=r"S0\.0 is missing"):
        simulate(problem, orders_of(TWO_DEVICES[0].replace("S0.0 ", ""), TWO_DEVICES[1]))
    with pytest.raises(OrderError, match="CB, CBW, S, T"):
        simulate(problem, orders_of(TWO_DEVICES[0].replace("S0.0", "Q0.0"), TWO_DEVICES[1]))
    with pytest.raises(OrderError, match=r"S0\.1 comes before S0\.0"):
        simulate(problem, orders_of(TWO_DEVICES[0].replace("S0.0 S0.1", "S0.1 S0.0"), TWO_DEVICES[1]))


@settings(max_examples=examples(150))
@given(st.integers(0, 10**6))
def test_the_floor_of_any_problem_is_valid(seed: int) -> None:
    problem = random_problem(Random(seed))
    orders = serial_orders(problem)
    assert orders is not None
    schedule = build_schedule(problem, orders, 0.0, "floor", 0.0)
    assert Schedule.from_json(schedule.to_json()) == schedule
    within = problem.replaced(
        devices=[
            device.replaced(memory_bytes=size)
            for device, size in zip(problem.devices, known_budgets_bytes(problem), strict=True)
        ]
    )
    assert serial_orders(within) is not None


@settings(max_examples=examples(100))
@given(st.integers(0, 10**6))
def test_neighbours_that_change_places_are_valid_or_refused(seed: int) -> None:
    """Whatever simulation accepts, the verifier does, and it computes the same peaks."""
    rng = Random(seed)
    problem = random_problem(rng)
    orders = serial_orders(problem)
    assert orders is not None
    lists = [list(device.compute) for device in orders.devices]
    for _ in range(6):
        ops = lists[rng.randrange(len(lists))]
        if len(ops) > 1:
            k = rng.randrange(len(ops) - 1)
            ops[k : k + 2] = ops[k + 1], ops[k]
            try:
                build_schedule(problem, Orders.of_compute(lists), 0.0, "by chance", 0.0)
            except (DeadlockError, OrderError):
                ops[k : k + 2] = ops[k + 1], ops[k]


def test_an_op_says_where_it_is() -> None:
    assert str(Op("S", 2, 5)) == "S2.5"
    assert Op.parse("S2.5") == Op("S", 2, 5)
    assert Op("S", 2, 5).stream == "compute"
