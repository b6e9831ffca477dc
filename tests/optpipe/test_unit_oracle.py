"""Simulator, verifier, builder and bounds against the contract, with slices and unequal microbatches."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest

from optpipe.errors import DeadlockError
from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.worst_case_memory import worst_case_peak_bytes
from solver.bounds import lower_bound_us
from solver.build import build_schedule
from tests import mode_oracle, unit_oracle
from tests.sample import some
from tests.unequal import random_orders, random_unequal, times, unequal

COPY = {"bytes": 3, "offload_us": 0.5, "reload_us": 1}


def judged_values(problem: Problem) -> list[float | None]:
    """The makespan of every schedule, where program and contract agree on times and peaks; None where on a deadlock."""
    data = problem.to_data()
    values: list[float | None] = []
    for microbatch_order, case in unit_oracle.every_case(data):
        ops = [op for streams in case.streams for stream in streams for op in stream]
        costs = unit_oracle.costs_of(data, case.modes, ops)
        transfers = unit_oracle.edges(data, set(ops))
        start = mode_oracle.earliest(costs, [stream for streams in case.streams for stream in streams], transfers)
        numbers = [
            [mode_oracle.mode_names(stage).index(name) for name in names]
            for stage, names in zip(data["stages"], case.modes, strict=True)
        ]
        devices = [DeviceOrders(*([Op(*op) for op in stream] for stream in streams)) for streams in case.streams]
        stated = list(microbatch_order) if data.get("microbatch_order") == "free" else None
        orders = Orders(devices, modes=np.array(numbers), microbatch_order=stated)
        if start is None:
            with pytest.raises(DeadlockError):
                simulate(problem, orders)
            values.append(None)
            continue
        schedule = build_schedule(problem, orders, 0.0, "every one", 0.0)  # which verifies it
        assert schedule.microbatch_order == stated
        assert schedule.value_us == pytest.approx(max(start[op] + costs[op].us for op in costs), rel=1e-12)
        for streams, device in zip(case.streams, schedule.devices, strict=True):
            own = [op for stream in streams for op in stream]
            assert device.peak_bytes == mode_oracle.peak(costs, start, own)
            assert device.peak_bytes_any_timing == mode_oracle.worst_peak(costs, streams, {})
            assert device.busy_us == pytest.approx(sum(costs[op].us for op in streams[0]), rel=1e-12)
        values.append(schedule.value_us)
    return values


CAUSAL = {"count": 2, "factors": {"forward": [1, 2.5], "backward_input": [1, 3], "bytes": [1, 0.75]}}


@pytest.mark.parametrize(
    ("problem", "count", "deadlocks", "least_us"),
    [
        (unequal(1, 2, slices=CAUSAL, split_backward=False, offload=COPY, slice_gradient_bytes=3), 96, 0, 19),
        (unequal(1, 1, slices={"count": 3}, slice_factors={"bytes": [1, 2, 0.1]}, slice_gradient_bytes=1), 22, 0, 9),
        (unequal(2, 1, slices=CAUSAL, transfer_us=0.5), 36, 0, 16),
        (unequal(1, 3, microbatch_factors=times(1, 2, 3), microbatch_order="free", split_backward=False), 30, 0, 18),
        (unequal(2, 2, microbatch_factors=times(2, 1), microbatch_order="free", split_backward=False), 8, 2, 14),
    ],
)  # fmt: skip
def test_every_schedule(problem: Problem, count: int, deadlocks: int, least_us: float) -> None:
    values = judged_values(problem)
    assert (len(values), values.count(None)) == (count, deadlocks)
    least = min(value for value in values if value is not None)
    assert least == least_us
    assert lower_bound_us(problem) <= least


@pytest.mark.parametrize("first", some(range(0, 400, 40)))
def test_random_schedules(first: int) -> None:
    """Random plans are valid schedules, whose times, peaks and worst peaks are those of the contract."""
    for seed in range(first, first + 40):
        rng = Random(seed)
        problem = Problem.from_data(random_unequal(rng))
        data = problem.to_data()
        orders, costs, plan = random_orders(problem, rng)
        schedule = build_schedule(problem, orders, lower_bound_us(problem), "random", 0.0)  # which verifies it
        assert schedule.value_us <= max(end for _, end in plan.values()) * (1 + 1e-12)
        streams = [[tuple(map(tuple, stream)) for stream in device.streams()] for device in orders.devices]
        waits = {tuple(op): [tuple(other) for other in others] for op, others in orders.waits.items()}
        more = [(other, op, 0.0) for op, others in waits.items() for other in others]
        more += [(*pair, 0.0) for channel in orders.channels for pair in pairwise(map(tuple, channel))]
        more += unit_oracle.edges(data, set(costs))
        start = mode_oracle.earliest(costs, [stream for own in streams for stream in own], more)
        assert start is not None
        assert schedule.value_us == pytest.approx(max(start[op] + costs[op].us for op in costs), rel=1e-12)
        for own, device, plan_of in zip(streams, schedule.devices, orders.devices, strict=True):
            assert device.busy_us == pytest.approx(sum(costs[op].us for op in own[0]), rel=1e-12)
            worst = [mode_oracle.worst_peak(costs, own, kept) if any(own) else 0 for kept in (waits, {})]
            without = worst_case_peak_bytes(problem, tuple(plan_of.streams()), {}, orders.modes)
            assert [device.peak_bytes_any_timing, without] == worst
