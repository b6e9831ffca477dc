"""Strategies whose activations leave to the host: their time and memory against schedules, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from optpipe.cluster.costs import work
from optpipe.cluster.layers import strategy_layers, strategy_partition
from optpipe.cluster.machine import named_machines
from optpipe.cluster.memory import MemoryModel
from optpipe.cluster.model import load_model
from optpipe.cluster.software import MEGATRON
from optpipe.cluster.strategy import Strategy
from optpipe.errors import InputError, MethodError
from optpipe.partition import Batching, build_problem
from solver.layout.cluster_plan import plan_cluster
from solver.layout.fitting import Job, published_schedule
from solver.layout.strategies import Rater
from solver.limits import Limits
from solver.solve import solve
from tests.sample import some
from tests.solver.layout.test_strategies import useful_s

LINEAR = Strategy(pipeline=8, offload="yes")
LOOPED = Strategy(pipeline=4, virtual=2, data=2, schedule="interleaved-1f1b", offload="yes")


def job(machine: str, sequence: int = 8192) -> Job:
    return Job(load_model("llama-3.1-8b"), named_machines()[machine], sequence, 64, MEGATRON)


def seconds(one: Job, strategy: Strategy) -> float:
    """The closed form of a strategy."""
    return Rater(one, {}).rate(strategy, 0.0).seconds


@pytest.mark.parametrize(("machine", "strategy"), some([("h100", LINEAR), ("a100-80", LOOPED)]))
def test_schedules_reach_the_closed_form_within_its_memory(machine: str, strategy: Strategy) -> None:
    one = job(machine)
    held = max(device.total for device in one.held(strategy))
    assert held < 0.7 * max(device.total for device in one.held(replace(strategy, offload="no")))
    layers = strategy_layers(one.model, one.machine, strategy, one.sequence, MEGATRON)
    layers = layers.model_copy(update={"memory_bytes": int(held)})
    microbatches = strategy.microbatches(one.global_batch)
    problem = build_problem(layers, strategy_partition(one.model, strategy), Batching(1, microbatches), offload=True)
    assert problem is not None
    found = []
    for method in ("ada-offload", "po-f"):
        try:
            found.append(solve(problem, method, Limits(60.0)).value_us / 1e6)
        except MethodError:
            assert strategy is LINEAR  # po-f is for several stages on a device
    slowdowns = one.slowdowns(strategy)
    once = float((one.costs(strategy).replicas(microbatches) + work(step=1)) @ slowdowns)
    assert min(found) + once == pytest.approx(seconds(one, strategy), rel=0.08)
    assert min(found) + once <= seconds(one, strategy)


def test_a_slow_copy_is_waited_for() -> None:
    """Where a microbatch takes longer to leave than to compute, a step takes its copies, and the way in and out."""
    one = job("h100")
    slow = one.machine.facts.model_copy(update={"host_bytes_per_s": 1e9, "host_shared_by": 1})
    slowed = replace(one, machine=one.machine.model_copy(update={"facts": slow}))
    kept = 4 * MemoryModel(one.model, LINEAR, 8192, 64, MEGATRON).layer(one.model.layers[0])
    copy_s = kept / 1e9
    passes = one.costs(LINEAR).devices() @ one.slowdowns(LINEAR)
    total_s = passes.sum(1)
    ends = np.minimum(64, 8 - np.arange(8)) * (2 * copy_s - total_s)
    assert slowed.copies_s(LINEAR) == pytest.approx((64 * (copy_s - total_s) + ends).max())
    assert seconds(slowed, LINEAR) == pytest.approx(
        seconds(one, replace(LINEAR, offload="no")) + slowed.copies_s(LINEAR)
    )
    assert one.copies_s(replace(LINEAR, offload="no")) == 0.0


def test_its_schedule_offloads() -> None:
    one = job("a100-40", 4096)
    strategy = replace(LOOPED, pipeline=8, data=1)
    schedule = published_schedule(one, strategy)
    assert any(device.offload for device in schedule.devices)
    states = [device.weights + device.gradients + device.optimizer for device in one.held(strategy)]
    for device, held in zip(schedule.devices, states, strict=True):
        assert held + device.peak_bytes_any_timing <= MEGATRON.usable_bytes(one.machine.facts.memory_bytes)


def test_what_is_lost_adds_up() -> None:
    rater = Rater(job("h100"), {})
    for strategy in (LINEAR, LOOPED):
        rated = rater.rate(strategy, 0.0)
        lost = rater.lost_s(rated)
        assert lost["offload"] == rater.job.copies_s(strategy) > 0
        assert sum(lost.values()) + useful_s(rater, strategy) == pytest.approx(rated.seconds)


def test_a_plan_with_offload() -> None:
    plans = {
        offload: plan_cluster(job("a100-40"), 8, {"tp": [1], "pp": [2, 4, 8], "offload": offload}, Limits(0.1))
        for offload in (("yes",), ("no",), ("no", "yes"))
    }
    assert {one.strategy.offload for one in plans["yes",].ratings} == {"yes"}
    assert all(one.strategy.pipeline > 1 for one in plans["yes",].ratings)
    assert plans["yes",].ratings[0].seconds < plans["no",].ratings[0].seconds
    assert plans["no", "yes"].ratings[0].strategy == plans["yes",].ratings[0].strategy
    assert plans["yes",].document()["best"]["offload"] == "yes"
    assert "offload" in plans["yes",].best.name.split()


def test_what_cannot_leave_is_refused() -> None:
    one = job("h100")
    with pytest.raises(InputError, match="offload is yes but pp is 1: the backward follows at once"):
        plan_cluster(one, 8, {"pp": [1], "offload": ["yes"]}, Limits(0.1))
    unknown = one.machine.facts.model_copy(update={"host_bytes_per_s": None})
    nowhere = replace(one, machine=one.machine.model_copy(update={"facts": unknown}))
    with pytest.raises(InputError, match=r"offload is yes but host_bytes_per_s of h100 is not known\. Maybe add it"):
        plan_cluster(nowhere, 8, {"offload": ["yes"]}, Limits(0.1))
