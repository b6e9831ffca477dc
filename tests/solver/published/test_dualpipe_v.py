"""DualPipeV: the values of its source, torch's own order op by op, unequal costs, and what is refused with a reason."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from instances import uniform
from optpipe.errors import MethodError
from optpipe.kinds import KIND
from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.published.dualpipe_v import dualpipe_v
from solver.solve import solve


def v_blocks(p: int, m: int, block_us: float, times_us: tuple[float, ...] = (1, 1, 1), **more: Any) -> Problem:
    """Equal chunks along a V of one byte each, where both pairs of a device may be a block."""
    data = uniform(p, m, v_shape=True, transfer_us=0, activation_bytes=1, backward_weight_bytes=0).to_data()
    names = ("forward_us", "backward_input_us", "backward_weight_us")
    pairs = [pair for r in range(p) for pair in ((r, 2 * p - 1 - r), (2 * p - 1 - r, r))]
    data["stages"] = [stage | dict(zip(names, times_us, strict=True)) for stage in data["stages"]]
    data["overlaps"] = [{"forward_stage": f, "backward_stage": b, "us": block_us} for f, b in pairs]
    return Problem.from_data(data | more)


@pytest.mark.parametrize(
    ("devices", "m", "block_us", "times_us", "makespan_us"),
    [
        (4, 8, 3, (1, 1, 1), 54),
        (4, 10, 3, (1, 1, 1), 66),
        (4, 10, 2.4, (1, 1, 1), 57.6),
        (4, 20, 2.4, (1, 1, 1), 105.6),
        (8, 20, 3, (1, 1, 1), 134),
        (8, 32, 2.5, (1, 1, 1), 179),
        (4, 16, 4.6, (2, 2.2, 1.5), 167.9),
    ],
)
def test_makespan_and_memory_of_its_source(
    devices: int, m: int, block_us: float, times_us: tuple[float, ...], makespan_us: float
) -> None:
    problem = v_blocks(devices, m, block_us, times_us)
    simulation = simulate(problem, dualpipe_v(problem))
    assert simulation.makespan_us == pytest.approx(makespan_us, rel=1e-12)
    assert [simulation.device_memory(d).peak_bytes for d in range(devices)] == [2 * devices + 1] * devices


def torch_rank(devices: int, m: int, rank: int) -> tuple[list[str], dict[str, str]]:
    """Names of the ops of a rank in torch's schedule, and its blocks."""
    own: Any = SimpleNamespace(pp_group_size=devices, _n_microbatches=m)
    actions = ScheduleDualPipeV._calculate_single_rank_operations(own, rank)
    parts = [action.sub_actions or (action,) for action in actions if action]
    blocks = {str(pair[0]): str(pair[-1]) for pair in parts if len(pair) == 2}
    return [str(action) for pair in parts for action in pair], blocks


def torch_name(op: Op) -> str:
    """An op as torch writes it."""
    return f"{op.stage}{KIND[op.kind].torch}{op.microbatch}"


@pytest.mark.parametrize("devices", range(1, 6))
def test_torchs_order_op_by_op(devices: int) -> None:
    for m in range(2 * devices, 4 * devices + 1):
        orders = dualpipe_v(v_blocks(devices, m, 2))
        blocks = {torch_name(forward): torch_name(backward) for forward, backward in orders.blocks.items()}
        of_torch: dict[str, str] = {}
        for rank, device in enumerate(orders.devices):
            ops, of_rank = torch_rank(devices, m, rank)
            assert [torch_name(op) for op in device.compute] == ops
            of_torch |= of_rank
        assert blocks == of_torch


def test_without_overlaps_its_ops_run_apart() -> None:
    """A block that saves nothing makes its forward end later and its backward start earlier, so it gains nothing."""
    apart, joined = v_blocks(3, 8, 3, overlaps=None), v_blocks(3, 8, 3)
    orders = dualpipe_v(apart)
    assert not orders.blocks
    assert orders.devices == dualpipe_v(joined).devices
    assert simulate(apart, orders).value_us <= simulate(joined, dualpipe_v(joined)).value_us


def test_any_costs_run() -> None:
    """Unequal stages, pairs that are no block, backwards in one piece, transfers."""
    rng = Random(0)
    for _ in range(30):
        devices = rng.randint(1, 4)
        data = v_blocks(devices, rng.randint(2 * devices, 3 * devices), 20, transfer_us=rng.choice([0, 1, 7])).to_data()
        for stage in data["stages"]:
            times = {name: rng.randint(0, 9) for name in ("forward_us", "backward_input_us", "backward_weight_us")}
            stage |= times | {"split_backward": rng.random() < 0.6}
        data["overlaps"] = rng.sample(data["overlaps"], rng.randint(1, len(data["overlaps"])))
        problem = Problem.from_data(data)
        orders = dualpipe_v(problem)
        assert {(f.stage, b.stage) for f, b in orders.blocks.items()} <= {*problem.block_us}
        assert simulate(problem, orders).value_us >= max(apart_us(problem, orders, d) for d in range(devices))


def apart_us(problem: Problem, orders: Orders, d: int) -> float:
    """Time that a device works: a block counts once."""
    joined = {*orders.blocks, *orders.blocks.values()}
    alone = [op for op in orders.devices[d].compute if op not in joined]
    blocks = [problem.block_us[f.stage, b.stage] for f, b in orders.blocks.items() if f in orders.devices[d].compute]
    return sum(problem.stages[op.stage].duration_us(op.kind) for op in alone) + sum(blocks)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (uniform(2, 8), "dualpipe-v places 2 stages on each of 2 devices, from device 0 to 1 and back"),
        (v_blocks(4, 7, 3), "dualpipe-v needs at least as many microbatches as stages, 8, but there are 7. Maybe use"),
    ],
)
def test_refusals(problem: Problem, message: str) -> None:
    with pytest.raises(MethodError, match=message):
        dualpipe_v(problem)


def test_a_budget_below_its_peak_is_refused() -> None:
    problem = v_blocks(4, 8, 3, devices=[{"memory_bytes": 8}] * 4)
    with pytest.raises(MethodError, match="dualpipe-v needs 9 B on device 0, but its budget is 8 B"):
        solve(problem, "dualpipe-v")
