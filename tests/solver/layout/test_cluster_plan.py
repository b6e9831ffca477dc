"""Plan of a job: rated, solved, with the simplest of equals, within its time."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from optpipe.cluster.machine import named_machines
from optpipe.cluster.model import load_model
from optpipe.cluster.software import MEGATRON
from optpipe.cluster.strategy import Strategy
from optpipe.errors import InputError
from optpipe.verify import verify
from solver.layout.cluster_plan import _placements, plan_cluster
from solver.layout.fitting import Job
from solver.layout.strategies import Fixed
from solver.limits import Limits


def job(batch: int = 64) -> Job:
    return Job(load_model("llama-3.1-70b"), named_machines()["h100"], 4096, batch, MEGATRON)


def test_the_best_families_are_cut_and_scheduled() -> None:
    seen: list[float] = []
    fixed = {"pp": [1, 4, 8], "tp": [8]}
    plan = plan_cluster(job(), 64, fixed, Limits(6.0), lambda plan: seen.append(plan.ratings[0].seconds))
    assert plan.solved
    assert seen == sorted(seen, reverse=True)
    for one in plan.solved:
        assert verify(one.schedule).ok
        assert one.rated.strategy.pipeline > 1, "one device has nothing to search"
        assert one.seconds >= one.rated.bound_s * (1 - 1e-9)
    document = plan.document()
    assert document["format"] == "optpipe.plan/1"
    assert {entry["end"] for entry in document["strategies"]} <= {"solved", "beaten", "does_not_fit"}
    for entry in document["strategies"]:
        if "solved" in entry:
            found = document["solved"][entry["solved"]]
            assert (entry["seconds"], len(entry["ranks"])) == (found["seconds"], entry["pp"])
            most = max(sum(rank.values()) for rank in entry["ranks"])
            assert entry["memory_bytes"] == round(most) <= document["device_memory_bytes"]
    assert document["best"]["seconds"] == plan.best.seconds <= plan.ratings[0].seconds * (1 + plan.error)


def test_ties_go_to_the_simplest() -> None:
    plan = plan_cluster(job(), 64, {}, Limits(0.1))
    assert not plan.solved
    assert all(one.axes >= plan.best.axes for one in plan.ratings[: plan.ties])


@pytest.mark.parametrize(
    ("virtual", "fixed", "placements"),
    [
        (1, {}, ["linear", "interleaved-2", "v"]),
        (5, {}, ["linear", "interleaved-5", "v"]),
        (1, {"vpp": [1]}, ["linear"]),
        (2, {"vpp": [2, 3]}, ["interleaved-2", "v"]),
        (3, {"vpp": [3]}, ["interleaved-3"]),
        (2, {"schedule": ["1f1b", "interleaved-1f1b"]}, ["linear", "interleaved-2"]),
        (2, {"schedule": ["zb-v"]}, ["v"]),
        (2, {"schedule": ["zb-v"], "vpp": [1]}, []),
    ],
)
def test_what_is_fixed_leaves_placements_out(virtual: int, fixed: Fixed, placements: list[str]) -> None:
    assert _placements(Strategy(pipeline=4, virtual=virtual), fixed) == placements
    assert _placements(Strategy(), {}) == ["linear"]


def test_a_plan_ends_in_time() -> None:
    began = time.perf_counter()
    plan_cluster(job(), 64, {"pp": [8]}, Limits(3.0))
    assert time.perf_counter() - began < 30
    cancelled = Limits(3.0)
    cancelled.cancel.request()
    plan = plan_cluster(job(), 64, {}, cancelled)
    assert (len(plan.ratings) > 0, plan.complete, plan.solved) == (True, False, ())


@pytest.mark.parametrize(
    ("fixed", "gpus", "batch", "sequence", "maybe"),
    [
        ({"tp": [7]}, 64, 64, 4096, "tp of 1, 2, 4, 8 in place of 7."),
        (
            {"pp": [7], "tp": [3]},
            64,
            64,
            4096,
            "tp of 1, 2, 4, 8 in place of 3 and pp of 1, 2, 4, 8, 16, 32, 64 in place of 7.",
        ),
        ({"dp": [8], "tp": [8]}, 64, 100, 4096, "dp of 1, 2, 4 in place of 8, or a global batch of 96."),
        (
            {"tp": [4], "cp": [2]},
            64,
            64,
            8190,
            "tp of 1, 2 in place of 4 and cp of 1 in place of 2, or a sequence of 8,192.",
        ),
        ({"pp": [4], "vpp": [40]}, 64, 64, 4096, "vpp of 1, 2, 3, 4, 5, 7, 10, 11 in place of 40."),
        ({"ep": [8]}, 64, 64, 4096, "ep of 1 in place of 8."),
        ({}, 1021, 512, 4096, "a global batch of 1,021, or 1,024 GPUs."),
    ],
)
def test_no_legal_strategy(fixed: Fixed, gpus: int, batch: int, sequence: int, maybe: str) -> None:
    one = replace(job(batch), sequence=sequence)
    with pytest.raises(InputError) as caught:
        plan_cluster(one, gpus, fixed, Limits(1.0))
    assert str(caught.value).endswith(f"has no legal strategy on {gpus:,} GPUs with what is fixed. Maybe {maybe}")
