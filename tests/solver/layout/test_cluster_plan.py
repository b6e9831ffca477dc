"""Plan of a job: rated, solved, with the simplest of equals, within its time."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace

import pytest

from optpipe.cluster.machine import named_machines
from optpipe.cluster.model import load_model
from optpipe.cluster.software import MEGATRON
from optpipe.cluster.strategy import Strategy
from optpipe.errors import InputError
from optpipe.spread import vocabulary_passes
from optpipe.verify import verify
from solver.layout import cluster_plan
from solver.layout.cluster_plan import _placements, plan_cluster, solve_family
from solver.layout.fitting import Job
from solver.layout.strategies import Fixed, rate_all
from solver.limits import Limits
from tests.heavy_head import heavy_job
from tests.sample import some

pytestmark = pytest.mark.usefixtures("forked_children")


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


def test_progress_begins_with_the_first_rated_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_plan, "PROGRESS_S", -1.0)
    monkeypatch.setattr(cluster_plan, "rate_all", lambda *asked: iter([[], *rate_all(*asked)]))
    seen: list[int] = []
    plan = plan_cluster(job(), 64, {"pp": [4], "tp": [8]}, Limits(0), lambda plan: seen.append(len(plan.ratings)))
    assert min(seen) > 0
    assert max(seen) <= len(plan.ratings)


PIPELINE: Fixed = {"pp": [8], "tp": [1], "cp": [1], "microbatch_size": [1]}
EVERYWHERE = {"vocabulary": ["last", "own", "spread"]}


def test_a_large_vocabulary_is_spread_where_that_is_asked_for() -> None:
    """A layer four times as long as each of 16, of which a cut on 8 devices evens out 2.3 at most."""
    plan = plan_cluster(heavy_job(), 8, PIPELINE | EVERYWHERE, Limits(3.0))
    [found] = [one for one in plan.solved if one.strategy == plan.best.strategy]
    assert found.strategy.vocabulary == "spread"
    assert verify(found.schedule).ok
    problem = found.schedule.problem
    assert vocabulary_passes(problem.spread or (), problem.gates or (), problem.stages) == ("S", "T", 1)
    others = min(one.seconds for one in plan.ratings if one.strategy.vocabulary != "spread")
    assert found.judged.bound_us / 1e6 <= found.seconds < 0.85 * others
    document = plan.document()
    best = document["best"]
    assert (best["vocabulary"], best["published"]["schedule"], best["in_1f1b"]) == ("spread", "vocab-2", None)
    assert sum(best["cut"]) == 18, "embedding, layers, and the head's module in the last stage"
    assert all(rank["activations"] for rank in best["ranks"])
    weights = [rank["weights"] for rank in best["ranks"]]
    assert sum(weights) == 2 * heavy_job().model.parameters
    assert max(weights) == weights[0]


def test_a_small_vocabulary_stays_in_the_last_stage() -> None:
    plan = plan_cluster(heavy_job(8192), 8, PIPELINE | EVERYWHERE, Limits(2.0))
    assert plan.best.strategy.vocabulary == "last"
    assert plan.spread is None


def test_a_plan_says_what_passes_on_all_devices_would_take() -> None:
    """By default no plan needs them. That of the strategy to take was cut and scheduled for the comparison."""
    plan = plan_cluster(heavy_job(), 8, PIPELINE, Limits(8.0))
    assert {one.strategy.vocabulary for one in plan.ratings} == {"last", "own"}
    assert plan.best.strategy.vocabulary == "own"
    assert plan.best.strategy.stage_layers[-1] == 0, "a search of cuts with layers beside it found that"
    assert plan.spread is not None
    layer = plan.document()["best"]["output_layer"]
    assert layer["layers"] > layer["most_layers"] == 16 / 7
    assert layer["spread"]["searched_s"] == plan.spread.seconds < plan.best.seconds
    assert plan.spread.rated.bound_s <= layer["spread"]["searched_bound_s"] <= plan.spread.seconds
    assert layer["last"]["seconds"] > layer["own"]["seconds"] > layer["spread"]["seconds"]


@pytest.mark.parametrize(("place", "layers"), some([("last", range(1, 17)), ("own", range(1))]))
def test_a_fixed_place_of_the_output_layer_leaves_cuts_out(place: str, layers: Collection[int]) -> None:
    fixed = PIPELINE | {"vocabulary": [place], "vpp": [1]}
    [rated, *_] = plan_cluster(heavy_job(), 8, fixed, Limits(0)).ratings
    found = solve_family(heavy_job(), rated, fixed, Limits(3.0))
    assert found is not None
    assert (found.strategy.vocabulary, found.strategy.stage_layers[-1] in layers) == (place, True)


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
    plan_cluster(job(), 64, {"pp": [8]}, Limits(1.0))
    assert time.perf_counter() - began < 30
    cancelled = Limits(1.0)
    cancelled.cancel.request()
    plan = plan_cluster(job(), 64, {}, cancelled)
    assert (len(plan.ratings) > 0, plan.complete, plan.solved) == (True, False, ())


@pytest.mark.parametrize(
    ("fixed", "gpus", "batch", "sequence", "rule", "maybe"),
    [
        (
            {"pp": [32], "tp": [8]},
            64,
            64,
            4096,
            "gpus is 64 but tp x cp x pp = 256 must divide it",
            "pp of 1, 2, 4, 8 in place of 32.",
        ),
        (
            {"dp": [8], "tp": [8]},
            64,
            100,
            4096,
            "global_batch is 100 but dp x microbatch size = 8 must divide it",
            "dp of 1, 2, 4 in place of 8, or a global batch of 96.",
        ),
        (
            {"tp": [4], "cp": [2]},
            64,
            64,
            8190,
            "cp is 2: 2 x tp x cp = 16 must divide the sequence of 8,190 tokens",
            "tp of 1, 2 in place of 4 and cp of 1 in place of 2, or a sequence of 8,192.",
        ),
        (
            {"pp": [4], "vpp": [40]},
            64,
            64,
            4096,
            "pp is 4, with 40 stages a device, but 80 layers, embedding and head fill 82 stages",
            "vpp of 1, 2, 3, 4, 5, 7, 10, 11 in place of 40.",
        ),
        (
            {},
            1021,
            512,
            4096,
            "global_batch is 512 but dp x microbatch size = 1,021 must divide it",
            "a global batch of 1,021, or 1,024 GPUs.",
        ),
    ],
)
def test_no_legal_strategy(fixed: Fixed, gpus: int, batch: int, sequence: int, rule: str, maybe: str) -> None:
    one = replace(job(batch), sequence=sequence)
    with pytest.raises(InputError) as caught:
        plan_cluster(one, gpus, fixed, Limits(1.0))
    what = f"has no legal strategy on {gpus:,} GPUs with what is fixed: {rule}. Maybe {maybe}"
    assert str(caught.value).endswith(what)


@pytest.mark.parametrize(
    ("fixed", "rule"),
    [
        ({"pp": [4], "schedule": ["zb-v"], "vpp": [3]}, "schedule is zb-v, which runs with vpp 2, but vpp is 3"),
        (
            {"pp": [4], "schedule": ["1f1b"], "vocabulary": ["spread"]},
            "schedule is 1f1b, which has the output layer's rows in one stage, but vocabulary is spread",
        ),
        (
            {"pp": [4], "schedule": ["1f1b"], "overlap": ["yes"]},
            "schedule is 1f1b, which has no blocks on a pipeline of 4 devices, but overlap is yes",
        ),
        (
            {"pp": [4], "dp": [8], "schedule": ["dualpipe-v"]},
            "schedule is dualpipe-v, which needs 2 x pp = 8 microbatches, but a step has 2",
        ),
        ({"pp": [1], "vpp": [2]}, "vpp is 2 but pp is 1: one device has all layers"),
    ],
)
def test_a_schedule_that_runs_no_strategy(fixed: Fixed, rule: str) -> None:
    """Its own rule is named, whatever degrees were left open."""
    one = Job(load_model("qwen3-30b-a3b"), named_machines()["h100"], 4096, 16, MEGATRON)
    with pytest.raises(InputError) as caught:
        plan_cluster(one, 32, fixed, Limits(1.0))
    assert f"has no legal strategy on 32 GPUs with what is fixed: {rule}. Maybe " in str(caught.value)


def test_a_precision_without_a_peak_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"^precision is fp4 but operations_fp4_per_s of h100 is not known\. Maybe bf16"
    ):
        plan_cluster(job(), 64, {"precision": ["bf16", "fp4"]}, Limits(1.0))


def test_utilization_says_what_it_counts() -> None:
    """Six operations for each token and element of a matrix, and half of causal attention three times."""
    one = job()
    plan = plan_cluster(one, 64, {"pp": [8], "tp": [8]}, Limits(0.1))
    layer = one.model.layers[0]
    elements = 80 * (layer.attention.products + layer.feed_forward.products) + 8192 * 128256
    attention = 80 * 3 * 2 * (4096**2 / 2) * 64 * (128 + 128)
    assert plan.operations == pytest.approx(one.global_batch * (6 * 4096 * elements + attention))
    best = plan.document()["best"]
    assert best["operations"] == plan.operations
    peak = 64 * one.machine.facts.operations_bf16_per_s
    assert best["utilization"] == pytest.approx(plan.operations / peak / best["seconds"])


def test_each_illegal_value_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        plan_cluster(job(), 64, {"tp": [2, 3, 8], "pp": [7], "ep": [8]}, Limits(1.0))
    assert [str(issue) for issue in caught.value.issues] == [
        "tp is 3 but must divide the 64 heads and the 64 GPUs. Maybe 2 or 4.",
        "ep is 8 but llama-3.1-70b has no experts. Maybe leave it out.",
        "pp is 7 but must divide the 64 GPUs. Maybe 4 or 8.",
    ]
