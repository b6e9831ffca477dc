"""Simulator, verifier and builder against the rules of the contract, on every schedule of tiny problems with modes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations
from random import Random
from typing import Any

import numpy as np
import pytest

from optpipe.errors import DeadlockError, OrderError
from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.worst_case_memory import worst_case_peak_bytes
from solver.build import build_schedule, orders_from_times
from tests import mode_oracle as oracle
from tests.recomputing import COPY, FULL, LEAVES, random_case, random_plan, random_problem, recomputing
from tests.sample import some

WORK = {
    "workspace_bytes": {"F": 1, "B": 2, "W": 1, "BW": 3},
    "backward_weight_bytes": 4,
    "offload": COPY | {"bytes": 10},
}


def orders_of(problem: Problem, data: dict[str, Any], case: oracle.Case) -> Orders:
    numbers = [
        [oracle.mode_names(stage).index(name) for name in names]
        for stage, names in zip(data["stages"], case.modes, strict=True)
    ]
    devices = [DeviceOrders(*([Op(*op) for op in stream] for stream in streams)) for streams in case.streams]
    return Orders(devices, modes=np.array(numbers))


def judge(problem: Problem, data: dict[str, Any], case: oracle.Case) -> None:
    """Assert that program and contract agree on the makespan of a case and on its peaks, or both see a deadlock."""
    costs = {
        op: oracle.cost(data["stages"][op[1]], case.modes[op[1]][op[2]], op[0])
        for streams in case.streams
        for stream in streams
        for op in stream
    }
    start = oracle.earliest(costs, [stream for streams in case.streams for stream in streams])
    orders = orders_of(problem, data, case)
    if start is None:
        with pytest.raises(DeadlockError):
            simulate(problem, orders)
        return
    schedule = build_schedule(problem, orders, 0.0, "every one", 0.0)  # which verifies it
    ends = [start[op] + costs[op].us for op in costs]
    assert schedule.value_us == max(ends) - min(start.values())
    for streams, device in zip(case.streams, schedule.devices, strict=True):
        own = [op for stream in streams for op in stream]
        assert device.peak_bytes == oracle.peak(costs, start, own)
        assert device.peak_bytes_any_timing == oracle.worst_peak(costs, streams, {})
        assert device.busy_us == sum(costs[op].us for op in streams[0])
    assert schedule.orders.modes is None or (schedule.orders.modes == orders.modes).all()


@pytest.mark.parametrize(
    ("problem", "count"),
    [(recomputing(1, 2, [FULL, LEAVES], **WORK), 728), (recomputing(2, 2, [FULL], split_backward=False), 625)],
    ids=["one stage", "two stages"],
)
def test_every_schedule_of_two_microbatches(problem: Problem, count: int) -> None:
    data = problem.to_data()
    cases = list(oracle.every_case(data))
    assert len(cases) == count
    for case in some(cases):
        judge(problem, data, case)


@pytest.mark.parametrize("first", some(range(0, 1000, 100)))
def test_worst_case_memory_of_random_schedules_with_modes(first: int) -> None:
    """The peak under any timing is exact, no random timing exceeds it, and most reach it."""
    reached = []
    for seed in range(first, first + 100):
        rng = Random(seed)
        data = random_problem(rng)
        problem = Problem.from_data(data)
        modes, costs = random_case(data, rng)
        plan = random_plan(problem, costs, rng)
        orders = orders_from_times(problem, plan, modes=modes)
        schedule = build_schedule(problem, orders, 0.0, "random", 0.0)  # which verifies it
        assert schedule.value_us <= max(end for _, end in plan.values())
        streams = [[tuple(map(tuple, stream)) for stream in device.streams()] for device in orders.devices]
        waits = {tuple(op): [tuple(other) for other in others] for op, others in orders.waits.items()}
        limits = [device.peak_bytes_any_timing for device in schedule.devices]
        without = [worst_case_peak_bytes(problem, tuple(device.streams()), {}, modes) for device in orders.devices]
        for peaks, kept in ((limits, waits), (without, {})):
            assert peaks == [oracle.worst_peak(costs, own, kept) if any(own) else 0 for own in streams]
        more = [(other, op, 0.0) for op, others in waits.items() for other in others]
        more += [(*pair, 0.0) for channel in orders.channels for pair in pairwise(map(tuple, channel))]
        if all(cost.end <= 0 for cost in costs.values()):  # else a backward may grow at its end, when no wait helps
            start = {tuple(op): times[0] for op, times in plan.items()}
            planned = [oracle.peak(costs, start, [op for stream in own for op in stream]) for own in streams]
            assert all(np.array(limits) <= np.maximum(planned, [device.peak_bytes for device in schedule.devices]))
        peaks = []
        for _ in range(4):
            drawn = {
                op: cost._replace(us=rng.choice([0.01, 1.0, 100.0]) * (0.001 + rng.random()))
                for op, cost in costs.items()
            }
            start = oracle.earliest(drawn, [stream for own in streams for stream in own], more)
            assert start is not None
            peaks.append([oracle.peak(drawn, start, [op for stream in own for op in stream]) for own in streams])
        highest = np.max(peaks, axis=0)
        assert (highest <= limits).all(), seed
        reached += (highest == limits).tolist()
    assert np.mean(reached) > 0.9


KINDS = ("F", "B", "W", "BW", "C", "CB", "CBW")


@pytest.mark.parametrize("mode", ["kept", "offload", "full", "half", "whole"])
def test_what_is_no_schedule_of_a_mode_is_refused(mode: str) -> None:
    """Sequences of at most four different ops of one microbatch, with and without copies: the valid and some others."""
    whole = {"name": "whole", "kept_bytes": 1, "recompute_us": 1}
    problem = recomputing(1, 1, [FULL, LEAVES, whole], offload=COPY | {"bytes": 10})
    data = problem.to_data()
    number = oracle.mode_names(data["stages"][0]).index(mode)
    valid = {(case.streams[0][0], case.streams[0][1]) for case in oracle.every_case(data) if case.modes == ((mode,),)}
    accepted = set()
    sequences = [order for length in range(1, 5) for order in permutations(KINDS, length)]
    for copies in ((), ("O",)):
        for order in {*some(sequences), *(tuple(kind for kind, _, _ in compute) for compute, _ in valid)}:
            streams = _streams(order, copies)
            try:
                simulate(problem, Orders([DeviceOrders(*streams)], modes=np.array([[number]])))
            except (OrderError, DeadlockError):
                continue
            accepted.add((tuple(map(tuple, streams[0])), tuple(map(tuple, streams[1]))))
    assert accepted == valid


def _streams(order: Sequence[str], copies: Sequence[str]) -> list[list[Op]]:
    return [[Op(kind, 0, 0) for kind in kinds] for kinds in (order, copies, ["R"] * len(copies))]
