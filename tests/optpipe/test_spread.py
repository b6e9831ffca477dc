"""Spread passes: the document, its errors, and what simulation and verifier say of them, on random problems too."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instances import uniform
from optpipe.errors import DeadlockError, InputError, OrderError
from optpipe.ops import DeviceOrders, Op, OpArray, Orders, orders_from_data, orders_to_data
from optpipe.problem import Problem
from optpipe.schedule import Schedule, schedule_text
from optpipe.simulate import simulate
from optpipe.verify import find_causes, verify
from optpipe.worst_case_memory import worst_case_peak_bytes
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


MODES = (
    {"name": "ahead", "kept_bytes": 1, "recompute_us": 2},
    {"name": "either", "kept_bytes": 0, "recompute_us": 1, "segment_bytes": 1},
    {"name": "leaves", "kept_bytes": 1, "recompute_us": 1, "offload": {"bytes": 1, "offload_us": 1, "reload_us": 2}},
)


def random_options(rng: Random) -> Data:
    """Choice of offload, recomputation or neither for a stage of two bytes or more."""
    options: Data = {"activation_bytes": rng.randint(2, 4)}
    if rng.random() < 0.6:
        options["offload"] = {"bytes": rng.randint(1, 2), "offload_us": rng.randint(1, 3), "reload_us": 1}
    if rng.random() < 0.5:
        options["modes"] = rng.sample(MODES, rng.randint(1, 2))
    return options


def random_spread(rng: Random, *, microbatches: int | None = None, options: bool = False) -> Data:
    """Passes, some not on all devices, after any op or pass, with memory; gates; factors.

    `options`: stages may offload and recompute, and gates delay that too.
    """
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
    if options:
        data["stages"] = [stage | random_options(rng) for stage in data["stages"]]
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
        {"op": rng.choice("FBW"), "stage": rng.randrange(stages), "after": [{"pass": rng.choice(names), "us": 1}]}
        for _ in range(rng.randint(0, 2))
    ]
    for _ in range(rng.randint(1, 4) if options else 0):
        after = rng.choice([{"pass": rng.choice(names)}, {"op": rng.choice("FBW"), "stage": rng.randrange(stages)}])
        gate = {"op": rng.choice("ORC"), "stage": rng.randrange(stages), "after": [after | {"us": rng.randint(0, 2)}]}
        data["gates"].append(gate)
    if rng.random() < 0.3:
        data["microbatch_factors"] = [{"time": rng.choice([1, 2]), "bytes": rng.choice([1, 1.5])} for _ in range(m)]
    return data


def random_problem(rng: Random, *, microbatches: int | None = None, options: bool = False) -> Problem:
    """The next of these that does not wait in a circle."""
    while True:
        with suppress(InputError):
            return Problem.from_data(random_spread(rng, microbatches=microbatches, options=options))


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


def test_a_pass_may_wait_for_an_offload_that_makes_room() -> None:
    """S keeps 4 bytes beside an activation of 4, which has left before it begins, whatever passes are numbered."""
    data = uniform(1, 1, activation_bytes=4, backward_weight_bytes=0).to_data()
    data["stages"][0]["offload"] = {"bytes": 4, "offload_us": 5, "reload_us": 5}
    data["spread"] = [
        {"name": "E", "us": [1]},
        {"name": "S", "us": [1], "kept_bytes": [4], "after": [{"op": "F", "stage": 0}]},
        {"name": "T", "us": [1], "frees": "S", "after": [{"pass": "S"}]},
    ]
    compute = OpArray.parse("F0.0 S0.0 E0.0 T0.0 B0.0 W0.0")
    device = DeviceOrders(compute, OpArray.parse("O0.0"), OpArray.parse("R0.0"))
    waits = {Op("S", 0, 0): [Op("O", 0, 0)], Op("R", 0, 0): [Op("T", 0, 0)]}
    schedule = build_schedule(Problem.from_data(data), Orders([device], waits), 0.0, "by hand", 0.0)
    assert [op.waits for op in schedule.devices[0].compute] == [[], ["O0.0"], [], [], [], []]
    assert schedule.devices[0].peak_bytes_any_timing == 4


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
        (lambda data: data["gates"][0].update(op="CB"), r"gates\[0\].op is 'CB': input should be 'F', 'B', 'W', 'O'"),
        (lambda data: data["gates"][0].update(stage=2), r"gates\[0\].stage is 2 of 2 stages"),
        (lambda data: data["gates"].extend(1000 * data["gates"]), "gates has 1,001 entries but at most 1,000"),
        (
            lambda data: data["gates"][0]["after"].extend(999 * [{"pass": "S"}]),
            "have 1,00[1-9] entries of after",
        ),
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


def test_a_gate_between_a_backward_and_its_weights_wants_a_stage_that_splits() -> None:
    data = vocabulary(2, 2)
    data["spread"][1]["after"].append({"op": "B", "stage": 1})
    data["gates"].append({"op": "W", "stage": 1, "after": [{"pass": "T"}]})
    assert Problem.from_data(data).gates
    data["stages"][1]["split_backward"] = False
    with pytest.raises(InputError, match="in a circle: B1 after T after B1"):
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


def copied_and_recomputed(gates: list[Data], kinds: str = "O R C B W") -> Schedule:
    """One microbatch, which stage 0 offloads and recomputes unless `kinds` says otherwise, and a pass of 5 us."""
    data = uniform(2, 1, transfer_us=1, activation_bytes=2, backward_weight_bytes=0).to_data()
    copy = {"bytes": 1, "offload_us": 1, "reload_us": 1}
    mode = {"name": "both", "kept_bytes": 1, "recompute_us": 1, "segment_bytes": 0, "offload": copy}
    for stage in data["stages"]:
        stage.update(forward_us=1, backward_input_us=1, backward_weight_us=1)
    data["stages"][0]["modes"] = [mode]
    data["spread"] = [{"name": "S", "us": [5, 5], "after": [{"op": "F", "stage": 1, "us": 1}]}]
    data["gates"] = gates
    names = kinds.split()
    compute = ["F0.0", *(f"{kind}0.0" for kind in names if kind == "C"), "S0.0"]
    if gates:  # which hold C back, if only through O or R
        compute[1:] = reversed(compute[1:])
    compute += [f"{kind}0.0" for kind in names if kind not in "ORC"]
    copies = [OpArray.parse(" ".join(f"{kind}0.0" for kind in names if kind == one)) for one in "OR"]
    devices = [
        DeviceOrders(OpArray.parse(" ".join(compute)), *copies),
        DeviceOrders(OpArray.parse("F1.0 S1.0 B1.0 W1.0")),
    ]
    orders = Orders(devices, modes=np.array([[1 if "O" in names else 0], [0]]))
    return build_schedule(Problem.from_data(data), orders, 0.0, "by hand", 0.0)


@pytest.mark.parametrize(("op", "without_us", "with_us"), [("O", 1, 11), ("R", 2, 11), ("C", 3, 11)])
def test_gates_delay_copies_and_recomputation(op: str, without_us: float, with_us: float) -> None:
    """F0 ends at 1, F1 at 3; S of device 0 runs from 4 to 9, or behind C: and 2 us after its end the gate is open."""

    def start_us(schedule: Schedule) -> float:
        device = schedule.devices[0]
        return next(
            one.start_us for ops in (device.compute, device.offload, device.reload) for one in ops if one.op == op
        )

    gate = {"op": op, "stage": 0, "after": [{"pass": "S", "us": 2}]}
    assert start_us(copied_and_recomputed([])) == without_us
    gated = copied_and_recomputed([gate])
    assert start_us(gated) == with_us
    early = gated.to_data()
    early["problem"]["gates"][0]["after"][0]["us"] = 3
    assert ("dependency", f"{op}0.0") in {(one.rule, one.where) for one in verify(Schedule.from_data(early)).violations}


def test_a_gate_of_an_op_that_is_not_there_delays_nothing() -> None:
    """A microbatch that is kept has no op to delay, and one that is recomputed within its backward none called C."""
    gates = [{"op": op, "stage": 0, "after": [{"pass": "S", "us": 50}]} for op in "ORC"]
    kept = copied_and_recomputed(gates, "B W")
    assert kept.value_us == copied_and_recomputed([], "B W").value_us < 50
    inside = copied_and_recomputed([gates[2]], "O R CB W")
    assert inside.value_us == copied_and_recomputed([], "O R CB W").value_us < 50
    never = vocabulary(2, 2)
    never["gates"] += [{"op": op, "stage": 1, "after": [{"op": "B", "stage": 0}]} for op in "ORC"]
    problem = Problem.from_data(never)
    floor = serial_orders(problem)
    assert floor is not None
    assert simulate(problem, floor).value_us == simulate(Problem.from_data(vocabulary(2, 2)), floor).value_us


@pytest.mark.parametrize("op", ["O", "R", "C"])
def test_gates_of_ops_that_could_never_run_are_refused(op: str) -> None:
    """A backward waits for what it needs: none of it may wait for the backward, nor for a pass behind that."""
    data = copied_and_recomputed([]).problem.to_data()
    data["spread"].append({"name": "T", "us": [1, 0], "after": [{"op": "B", "stage": 0}]})
    data["gates"] = [{"op": op, "stage": 0, "after": [{"pass": "T"}]}]
    with pytest.raises(InputError, match="spread and gates wait in a circle: "):
        Problem.from_data(data)


def test_what_only_some_microbatches_wait_for_frees_nothing() -> None:
    """T comes after S where stage 0 reloads, not where it keeps."""
    data = copied_and_recomputed([{"op": "R", "stage": 0, "after": [{"pass": "S"}]}]).problem.to_data()
    data["spread"][0]["kept_bytes"] = [1, 1]
    data["spread"].append({"name": "T", "us": [1, 1], "frees": "S", "after": [{"op": "B", "stage": 0}]})
    with pytest.raises(InputError, match="T does not come after it"):
        Problem.from_data(data)


def test_a_gated_reload_takes_memory_behind_the_pass_that_it_waits_for() -> None:
    """Whatever the timing, R comes after S of its own device, whose workspace it would exceed the budget beside."""
    gate = {"op": "R", "stage": 0, "after": [{"pass": "S"}]}
    schedule = copied_and_recomputed([gate])
    data = schedule.problem.to_data()
    data["spread"][0]["workspace_bytes"] = [7, 7]
    compute, offload, reload = schedule.orders.devices[0].streams()
    waits = {Op("S", 0, 0): [Op("O", 0, 0)]}
    for gates, peak in (([], 8), ([gate], 7)):
        problem = Problem.from_data(data | {"gates": gates})
        assert worst_case_peak_bytes(problem, (compute, offload, reload), waits, schedule.orders.modes) == peak


@settings(max_examples=examples(150))
@given(st.integers(0, 10**6), st.booleans())
def test_the_floor_of_any_problem_is_valid(seed: int, options: bool) -> None:
    problem = random_problem(Random(seed), options=options)
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
