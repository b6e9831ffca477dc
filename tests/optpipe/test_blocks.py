"""Blocks of a forward and a backward, from documents to their simulation, memory and verdict, against naive oracles."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from instances import uniform
from optpipe.errors import DeadlockError, InputError, OrderError
from optpipe.ops import DeviceOrders, Op, Orders, orders_from_data, orders_to_data
from optpipe.plot.panel import Lane, boxes_on
from optpipe.problem import Problem
from optpipe.schedule import Schedule, schedule_text
from optpipe.simulate import simulate
from optpipe.verify import verify
from optpipe.worst_case_memory import worst_case_peak_bytes
from solver.build import build_schedule
from solver.cache import canonical_form
from solver.process.channel import _pack, _unpack
from tests import unit_oracle
from tests.mode_oracle import Key, needs
from tests.random_plans import random_orders
from tests.sample import examples

SEEDS = st.integers(0, 10**6)
WORK = ("forward_us", "backward_input_us", "backward_weight_us")
Data = dict[str, Any]


def random_problem(rng: Random, microbatches: int = 4) -> Data:
    """One stage or two on each of up to two devices, with blocks of most pairs, factors, transfers and offload."""
    devices = rng.choice([[0], [0, 1], [0, 0], [0, 1, 1, 0], [0, 1, 0, 1]])
    stages: list[Data] = [
        {name: rng.randint(1, 6) for name in WORK}
        | {
            "device": device,
            "activation_bytes": rng.randint(1, 6),
            "backward_weight_bytes": rng.randint(0, 3),
            "workspace_bytes": {kind: rng.randint(0, 3) for kind in ("F", "B", "W", "BW")},
            "split_backward": rng.random() < 0.3,
            "offload": {"bytes": 1, "offload_us": rng.randint(1, 4), "reload_us": 2} if rng.random() < 0.4 else None,
        }
        for device in devices
    ]
    overlaps = []
    for f, b in [(f, b) for f in range(len(devices)) for b in range(len(devices)) if devices[f] == devices[b]]:
        forward, backward = stages[f]["forward_us"], stages[b]["backward_input_us"] + stages[b]["backward_weight_us"]
        longer = max(forward, backward)
        if rng.random() < 0.8:
            us = longer + rng.randint(0, forward + backward - longer + 1)
            overlaps.append({"forward_stage": f, "backward_stage": b, "us": us})
    data: Data = uniform(1, rng.randint(2, microbatches)).to_data() | {
        "objective": rng.choice(["makespan", "device_span"]),
        "devices": [{"memory_bytes": None}] * (1 + max(devices)),
        "stages": stages,
        "overlaps": overlaps,
        "transfer_us": rng.choice([0, 2, {"forward": 1, "backward": 3}]),
    }
    if rng.random() < 0.5:
        names = ("forward", "backward_input", "backward_weight", "bytes", "transfer")
        of_each = [{name: rng.choice([0.5, 1, 2]) for name in names} for _ in range(data["microbatches"])]
        data["microbatch_factors"] = of_each
    return data


def random_blocks(problem: Problem, rng: Random) -> Orders:
    """Random orders in which most neighbours that may be a block are one, as long as the ops can run."""
    orders, blocks = random_orders(problem, rng), dict[Op, Op]()
    for device in orders.devices:
        for forward, backward in pairwise(device.compute):
            if problem.block_of_units_us(forward, backward) is not None and rng.random() < 0.8:
                blocks[forward] = backward
                try:
                    simulate(problem, joined(orders, blocks))
                except DeadlockError:
                    del blocks[forward]
    return joined(orders, blocks)


def joined(orders: Orders, blocks: Mapping[Op, Op]) -> Orders:
    return Orders(orders.devices, orders.waits, orders.channels, blocks=dict(blocks))


class Oracle:
    """One task for each block and for each other op, with the precedences of the contract between tasks."""

    def __init__(self, data: Data, orders: Orders) -> None:
        self.task = {op: op for op in orders.ops()}
        self.task |= {backward: forward for forward, backward in orders.blocks.items()}
        there: set[Key] = {(op.kind, op.stage, op.microbatch) for op in orders.ops()}
        last = len(data["stages"]) - 1
        names = {key: "offload" if ("O", *key[1:]) in there else "kept" for key in there}
        costs = {key: unit_oracle.cost(data, key[1], key[2], names[key], key[0]) for key in there}
        self.effects = {Op(*key): cost[1:] for key, cost in costs.items()}
        self.duration = {Op(*key): Decimal(str(cost.us)) for key, cost in costs.items()}
        for forward, backward in orders.blocks.items():
            pair = {"forward_stage": forward.stage, "backward_stage": backward.stage}
            us = next(one["us"] for one in data["overlaps"] if one | pair == one)
            factors = [
                unit_oracle.factor(data, op.stage, op.microbatch, name)
                for op, names in ((forward, ("forward",)), (backward, ("backward_input", "backward_weight")))
                for name in names
            ]
            self.duration[forward] = us * max(factors)
        pairs = [(Op(*a), Op(*b), Decimal(str(us))) for a, b, us in unit_oracle.edges(data, there)]
        pairs += [(Op(*a), Op(*b), Decimal(0)) for b in there for a in needs(b, there, last) if a[1] == b[1]]
        lists = [stream for device in orders.devices for stream in device.streams()]
        pairs += [(*two, Decimal(0)) for ops in (*lists, *orders.channels) for two in pairwise(ops)]
        pairs += [(before, op, Decimal(0)) for op, waits in orders.waits.items() for before in waits]
        tasks = {(self.task[a], self.task[b], us) for a, b, us in pairs}
        self.edges = {(a, b, us) for a, b, us in tasks if a != b}
        self.tasks = sorted({*self.task.values()})

    def starts_us(self) -> dict[Op, Decimal]:
        """Earliest start of each task, by naive relaxation."""
        start = dict.fromkeys(self.tasks, Decimal(0))
        for _ in range(len(self.tasks)):
            for before, task, delay in self.edges:
                start[task] = max(start[task], start[before] + self.duration[before] + delay)
        return start

    def least_span_us(self, orders: Orders) -> float:
        """The smallest largest span of a device, as a linear program over the starts of tasks."""
        column = {task: k for k, task in enumerate(self.tasks)}
        spans = [(self.task[d.compute[0]], self.task[d.compute[-1]]) for d in orders.devices if d.compute]
        rows, limits = np.zeros((len(self.edges) + len(spans), len(column) + 1)), []
        for row, (before, task, delay) in zip(rows, self.edges, strict=False):
            row[column[before]], row[column[task]] = 1, -1
            limits.append(float(-self.duration[before] - delay))
        for row, (first, end) in zip(rows[len(self.edges) :], spans, strict=True):
            row[column[end]] += 1
            row[column[first]] -= 1
            row[-1] = -1
            limits.append(-float(self.duration[end]))
        return float(linprog([0.0] * len(column) + [1.0], A_ub=rows, b_ub=limits).fun)

    def peak_bytes(self, data: Data, device: int) -> int:
        """The largest memory of a device over every set of started and ended tasks that can be."""
        mine = [task for task in self.tasks if data["stages"][task.stage]["device"] == device]
        parts = {task: [op for op, whole in self.task.items() if whole == task] for task in mine}
        before = {task: {a for a, b, _ in self.edges if b == task and a in parts} for task in mine}

        @cache
        def most(begun: frozenset[Op], ended: frozenset[Op]) -> int:
            level = sum(self.effects[op][0] for task in begun for op in parts[task])
            level += sum(self.effects[op][1] for task in ended for op in parts[task])
            later = [most(begun | {task}, ended) for task in mine if task not in begun and before[task] <= ended]
            return max([level, *later, *(most(begun, ended | {task}) for task in begun - ended)])

        return most(frozenset(), frozenset())


@settings(max_examples=examples(150))
@given(SEEDS)
def test_times_and_documents(seed: int) -> None:
    """A block is one task; the schedule passes the verifier, and its document keeps the blocks."""
    rng = Random(seed)
    data = random_problem(rng)
    problem = Problem.from_data(data)
    orders = random_blocks(problem, rng)
    assume(orders.blocks)
    oracle = Oracle(data, orders)
    simulation = simulate(problem, orders)
    if problem.objective == "makespan":
        start = oracle.starts_us()
        for op, k in simulation.index.items():
            task = oracle.task[op]
            assert math.isclose(simulation.start_us[k], start[task], abs_tol=1e-9)
            assert math.isclose(simulation.end_us[k], start[task] + oracle.duration[task], abs_tol=1e-9)
    else:
        assert math.isclose(simulation.value_us, oracle.least_span_us(orders), rel_tol=1e-6)
    schedule = build_schedule(problem, orders, 0.0, "by hand", 0.0)
    assert not verify(schedule).violations
    again = Schedule.from_data(schedule.to_data())
    assert again.orders.blocks == schedule.orders.blocks == orders.blocks
    assert schedule_text(again) == schedule_text(schedule)
    assert orders_from_data(orders_to_data(orders)) == orders
    assert _unpack(_pack(orders)).blocks == orders.blocks


@settings(max_examples=examples(60))
@given(SEEDS)
def test_memory_under_any_timing(seed: int) -> None:
    rng = Random(seed)
    data = random_problem(rng, microbatches=2 + (seed % 2))
    problem = Problem.from_data(data)
    orders = random_blocks(problem, rng)
    assume(orders.blocks)
    for waits in (orders.waits, {}):
        oracle = Oracle(data, Orders(orders.devices, waits, blocks=orders.blocks))
        for d, device in enumerate(orders.devices):
            streams = device.compute, device.offload, device.reload
            assert worst_case_peak_bytes(problem, streams, waits, None, orders.blocks) == oracle.peak_bytes(data, d)


def example() -> Data:
    """A valid schedule: two stages on two devices, and on the first two blocks of a forward and a backward."""
    data = uniform(2, 3, transfer_us=0).to_data()
    data["overlaps"] = [{"forward_stage": 0, "backward_stage": 0, "us": 25}]
    rows = ("F0.0 F0.1 BW0.0 F0.2 BW0.1 BW0.2", "F1.0 BW1.0 F1.1 BW1.1 F1.2 B1.2 W1.2")
    devices = [DeviceOrders([Op.parse(name) for name in row.split()]) for row in rows]
    blocks = {Op("F", 0, 1): Op("BW", 0, 0), Op("F", 0, 2): Op("BW", 0, 1)}
    return build_schedule(Problem.from_data(data), Orders(devices, blocks=blocks), 1.0, "by hand", 0.1).to_data()


def compute(data: Data, place: int, device: int = 0) -> Data:
    return data["devices"][device]["compute"][place]  # type: ignore[no-any-return]


def swap(data: Data, first: int, second: int) -> None:
    ops = data["devices"][0]["compute"]
    ops[first], ops[second] = ops[second], ops[first]


def renumber(data: Data, place: int, microbatch: int) -> None:
    compute(data, place).update(microbatch=microbatch)
    compute(data, place - 1).update({"with": f"BW0.{microbatch}"})


def test_a_valid_example_has_its_partners_in_the_document() -> None:
    data = example()
    assert not verify(Schedule.from_data(data)).violations
    partners = [op.get("with") for op in data["devices"][0]["compute"]]
    assert partners == [None, "BW0.0", "F0.1", "BW0.1", "F0.2", None]
    assert not any("with" in op for op in data["devices"][1]["compute"])


@pytest.mark.parametrize(
    ("edit", "rule", "text"),
    [
        (lambda d: compute(d, 2).pop("with"), "block", "F0.1 .*one block with BW0.0, which names another op or none"),
        (lambda d: compute(d, 1).update({"with": "BW0.1"}), "block", "F0.1 .*with BW0.1, which names another op"),
        (lambda d: compute(d, 1).update({"with": "BW0.2"}), "block", "F0.1 .*with BW0.2, which names another op"),
        (lambda d: compute(d, 1).update({"with": "B0.0"}), "block", "F0.1 .*with B0.0, which is not in the schedule"),
        (lambda d: compute(d, 1).update({"with": "BW9.9"}), "block", "F0.1 .*with BW9.9, which is not in the schedule"),
        (lambda d: compute(d, 1).update({"with": "F0.1"}), "block", "a block is of an F and a BW"),
        (lambda d: compute(d, 2).update(op="B"), "block", "F0.1 .*with BW0.0, which is not in the schedule"),
        (
            lambda d: [compute(d, 2).update(op="B"), compute(d, 1).update({"with": "B0.0"})],
            "block",
            "F0.1 .*with B0.0, but a block is of an F and a BW",
        ),
        (lambda d: renumber(d, 2, 1), "block", "F0.1 .*with BW0.1, of the same microbatch"),
        (lambda d: swap(d, 1, 2), "block", "but the F is not right before the BW"),
        (lambda d: swap(d, 0, 1), "block", "but the F is not right before the BW"),
        (lambda d: d["problem"].pop("overlaps"), "block", "F0.1 .*with BW0.0, of which overlaps has none"),
        (
            lambda d: d["problem"]["overlaps"][0].update(us=24),
            "duration",
            "takes 25.00 µs instead of 24.00 µs",
        ),
        (lambda d: compute(d, 2).update(end_us=66.0), "duration", "takes 26.00 µs instead of 25.00 µs"),
        (
            lambda d: [compute(d, 2).update({name: compute(d, 2)[name] + 1}) for name in ("start_us", "end_us")],
            "block",
            "F0.1 .*with BW0.0, but they do not start and end together",
        ),
        (lambda d: [compute(d, k).pop("with") for k in (1, 2)], "overlap", "BW0.0"),
        (lambda d: [compute(d, 3, 1).update({"with": "BW0.0"})], "block", "BW1.1 .*with BW0.0, which names another op"),
    ],
)
def test_what_is_no_block_is_found(edit: Callable[[Data], Any], rule: str, text: str) -> None:
    data = example()
    edit(data)
    found = [violation for violation in verify(Schedule.from_data(data)).violations if violation.rule == rule]
    assert re.search(text, "\n".join(map(str, found)))


@pytest.mark.parametrize("value", ["F0", 3, ""])
def test_a_partner_that_is_no_op_is_refused(value: object) -> None:
    data = example()
    compute(data, 1)["with"] = value
    with pytest.raises(InputError, match=r"devices\[0\].compute\[1\].with"):
        Schedule.from_data(data)


def test_a_block_starts_when_both_can_and_its_forward_ends_with_it() -> None:
    """On device 0 F0.1 could start at 10, but BW0.0 must wait for BW1.0, which ends at 40."""
    schedule = Schedule.from_data(example())
    spans = [(str(op.key), op.start_us, op.end_us) for op in schedule.devices[0].compute]
    assert spans[:3] == [("F0.0", 0, 10), ("F0.1", 40, 65), ("BW0.0", 40, 65)]
    assert schedule.devices[1].compute[2].start_us == 65
    assert schedule.devices[0].busy_us == 10 + 2 * 25 + 20
    assert schedule.devices[0].peak_bytes == 4


@pytest.mark.parametrize(
    ("overlap", "edit", "message"),
    [
        ({"forward_stage": 2}, {}, r"overlaps\[0\].forward_stage is 2 of 2 stages"),
        ({"backward_stage": 7}, {}, r"overlaps\[0\].backward_stage is 7 of 2 stages"),
        ({"backward_stage": 1}, {}, r"overlaps\[0\] has stages 0 and 1 on devices 0 and 1, but a block runs on one"),
        ({"us": 19}, {}, r"overlaps\[0\].us is 19 but the longer of the two takes 20. Maybe"),
        ({"us": -1}, {}, r"overlaps\[0\].us"),
        ({"us": None}, {}, r"overlaps\[0\].us"),
        ({"forward_stage": True}, {}, r"overlaps\[0\].forward_stage"),
        ({"factor": 2}, {}, r"overlaps\[0\].factor"),
        ({}, {"backward": "none"}, r"overlaps\[0\].backward_stage is 0, whose backward is 'none'"),
    ],
)
def test_overlaps_are_refused_by_name(overlap: Data, edit: Data, message: str) -> None:
    data = uniform(2, 3).to_data()
    data["overlaps"] = [{"forward_stage": 0, "backward_stage": 0, "us": 25} | overlap]
    data["stages"][0] |= edit
    with pytest.raises(InputError, match=message):
        Problem.from_data(data)


def test_a_pair_of_stages_is_named_once() -> None:
    pair = {"forward_stage": 0, "backward_stage": 0, "us": 25}
    with pytest.raises(InputError, match=r"overlaps\[1\] names the stages \(0, 0\), which overlaps\[0\] names"):
        uniform(2, 3, overlaps=[pair, pair | {"us": 26}])


def test_the_key_of_a_problem_tells_its_overlaps_apart() -> None:
    def keys(overlaps: list[Data] | None) -> tuple[str, str]:
        form = canonical_form(uniform(2, 3, overlaps=overlaps))
        return form.key, form.family_key

    pairs = [{"forward_stage": s, "backward_stage": s, "us": 25 + s} for s in (0, 1)]
    seen = [keys(None), keys(pairs[:1]), keys(pairs), keys([pairs[0] | {"us": 26}])]
    assert len({key for key, _ in seen}) == len({family for _, family in seen}) == 4
    assert keys(pairs) == keys(pairs[::-1])


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"F0.1": "BW0.1"}, "F0.1 and BW0.1 are one block, but no overlap of the problem"),
        ({"F1.1": "BW1.0"}, "F1.1 and BW1.0 are one block, but no overlap of the problem"),
        ({"F0.2": "BW0.0"}, "F0.2 and BW0.0 are one block, but not right behind each other"),
        ({"F0.1": "BW0.7"}, "BW0.7"),
    ],
)
def test_orders_with_other_blocks_are_refused(blocks: dict[str, str], message: str) -> None:
    schedule = Schedule.from_data(example())
    parsed = {Op.parse(forward): Op.parse(backward) for forward, backward in blocks.items()}
    with pytest.raises(OrderError, match=message):
        simulate(schedule.problem, joined(schedule.orders, parsed))


def test_a_picture_has_the_forward_of_a_block_above_its_backward() -> None:
    schedule, lane = Schedule.from_data(example()), Lane(1.0, 0.5)
    boxes = {str(box.op): box.lane for box in boxes_on(schedule.problem, 0, schedule.devices[0].compute, lane)}
    assert (boxes["F0.1"], boxes["BW0.0"], boxes["BW0.2"]) == (Lane(1.0, 0.25), Lane(1.25, 0.25), lane)


def test_idle_times_and_blocks_fill_the_step() -> None:
    schedule = Schedule.from_data(example())
    for d, device in enumerate(schedule.devices):
        assert sum(schedule.idle_us(d)) + device.busy_us == pytest.approx(np.ptp(schedule.time_span_us))
    assert schedule.bubble_with_recomputation == schedule.bubble >= 0
