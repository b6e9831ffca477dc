"""Strategies of a job: all legal ones end, bounds hold, and what is fixed stays fixed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from optpipe.cluster.costs import INDEX
from optpipe.cluster.machine import named_machines
from optpipe.cluster.model import load_model
from optpipe.cluster.software import MEGATRON, software_of
from optpipe.cluster.strategy import Strategy
from solver.layout.asked import cheapest_change
from solver.layout.fitting import Job, ranks_of
from solver.layout.strategies import Rated, Rater, families, rate_all, variants
from tests.heavy_head import heavy_job
from tests.sample import some

JOBS = {
    "llama-3.1-8b": (16, 8192, 64),
    "llama-3.1-70b": (64, 8192, 128),
    "mixtral-8x7b": (32, 4096, 128),
}


def job(name: str) -> tuple[Job, int]:
    gpus, sequence, batch = JOBS[name]
    return Job(load_model(name), named_machines()["h100"], sequence, batch, MEGATRON), gpus


def useful_s(rater: Rater, strategy: Strategy) -> float:
    """Seconds of the model's products, attention and experts in a step, divided evenly among all GPUs."""
    mean = rater.job.costs(replace(strategy, recompute="none")).devices().sum(1).mean(0)
    kinds = mean * rater.job.slowdowns(strategy) * strategy.microbatches(rater.job.global_batch)
    return float(sum(kinds[INDEX[kind]] for kind in ("products", "attention", "experts")))


@cache
def rated(name: str) -> list[Rated]:
    one, gpus = job(name)
    return [rating for group in rate_all(one, gpus, {}) for rating in group]


@pytest.mark.parametrize("name", JOBS)
def test_every_legal_strategy_has_one_end(name: str) -> None:
    one, gpus = job(name)
    legal = [variant for family in families(one, gpus, {}) for variant in variants(one, family, {})]
    ends = rated(name)
    assert len(ends) == len(legal) == len(set(legal))
    best = min(rating.seconds for rating in ends)
    for rating in ends:
        match rating.end:
            case "solved":
                assert rating.bound_s <= rating.seconds * (1 + 1e-9)
                assert rating.memory_bytes <= one.machine.facts.memory_bytes
            case "beaten":
                assert rating.bound_s > best
            case "does_not_fit":
                assert rating.memory_bytes > one.machine.facts.memory_bytes


@pytest.mark.parametrize("name", JOBS)
def test_no_beaten_strategy_is_faster(name: str) -> None:
    """A sample of them, rated all the same."""
    one, _ = job(name)
    best, rater = min(rating.seconds for rating in rated(name)), Rater(one, {})
    for rating in some([rating for rating in rated(name) if rating.end == "beaten"]):
        assert rater.rate(rating.strategy, rating.bound_s).seconds >= best


@pytest.mark.parametrize("name", JOBS)
def test_what_is_lost_adds_up(name: str) -> None:
    """A step is the model's products, attention and experts, and what is lost by kind."""
    one, _ = job(name)
    rater = Rater(one, {})
    for rating in sorted(rated(name), key=lambda rating: rating.seconds)[:20]:
        lost = rater.lost_s(rating)
        assert lost["bubble"] >= -1e-9
        left_s = rating.seconds - sum(lost.values())
        assert left_s == pytest.approx(useful_s(rater, rating.strategy), rel=1e-6)


def test_messages_that_a_searched_schedule_hides_are_not_lost() -> None:
    one, _ = job("llama-3.1-8b")
    rater = Rater(one, {})
    published = next(
        rating for rating in rated("llama-3.1-8b") if rating.end == "solved" and rater.lost_s(rating)["pipeline"] > 0
    )
    before = rater.lost_s(published)
    searched = replace(published, seconds=published.seconds - before["bubble"] - before["pipeline"] / 2)
    lost = rater.lost_s(searched)
    assert (lost["bubble"], lost["pipeline"]) == (pytest.approx(0), pytest.approx(before["pipeline"] / 2))
    assert searched.seconds - sum(lost.values()) == pytest.approx(useful_s(rater, searched.strategy), rel=1e-6)


def test_a_schedule_has_as_many_stages_as_it_takes() -> None:
    one, gpus = job("llama-3.1-8b")
    fixed: Mapping[str, Collection[object]] = {"schedule": ["1f1b", "zb-v"], "pp": [4]}
    found = {
        (rating.strategy.schedule, rating.strategy.virtual) for group in rate_all(one, gpus, fixed) for rating in group
    }
    assert found == {("1f1b", 1), ("zb-v", 2)}


@pytest.mark.parametrize(
    ("software", "schedules"), [("", {"1f1b", "interleaved-1f1b"}), ("torchtitan", {"dualpipe-v"})]
)
def test_exchanges_hide_in_the_schedules_of_the_trainer(software: str, schedules: set[str]) -> None:
    one = Job(load_model("mixtral-8x7b"), named_machines()["h100"], 4096, 256, software_of(software), software)
    fixed: Mapping[str, Collection[object]] = {"overlap": ["yes"], "pp": [1, 2], "ep": [8], "sharding": ["optimizer"]}
    found = [rating for group in rate_all(one, 32, fixed) for rating in group]
    assert {rating.strategy.schedule for rating in found} == schedules
    rater = Rater(one, fixed)
    for rating in found:
        apart = replace(rating.strategy, overlap="no")
        assert rating.strategy.virtual > 1 or rating.strategy.pipeline == 1
        if rating.end == "solved":
            assert rating.seconds < one.seconds(apart)
            assert 0 < rater.hidden_s(rating) == pytest.approx(one.seconds(apart) - rating.seconds, rel=0.1)


@pytest.mark.parametrize(
    "fixed", [{"tp": [8]}, {"pp": [4], "vpp": [1, 5]}, {"dp": [2]}, {"microbatch_size": [2], "sharding": ["fsdp"]}]
)
def test_what_is_fixed_stays(fixed: Mapping[str, Collection[object]]) -> None:
    one, gpus = job("llama-3.1-70b")
    found = [rating.strategy for group in rate_all(one, gpus, fixed) for rating in group]
    assert found
    fields = {"tp": "tensor", "pp": "pipeline", "vpp": "virtual", "dp": "data"}
    for name, values in fixed.items():
        assert {getattr(strategy, fields.get(name, name)) for strategy in found} <= set(values)


def test_the_cheapest_change_fits() -> None:
    one, _ = job("llama-3.1-70b")
    for rating in [rating for rating in rated("llama-3.1-70b") if rating.end == "does_not_fit"][::60]:
        change = cheapest_change(one, rating.strategy)
        ranks = [] if change is None else ranks_of(one, change[1], change[1].schedule)
        assert all(rank.total <= one.machine.facts.memory_bytes for rank in ranks)


def test_an_output_layer_that_no_cut_evens_out() -> None:
    """A cut of 42 layers on 16 devices evens out 2.8 of them; on all devices each has a sixteenth of its rows."""
    gemma = Job(load_model("gemma-2-9b"), named_machines()["h100"], 4096, 256, MEGATRON)
    rater, one = Rater(gemma, {}), Strategy(data=2, pipeline=16, schedule="1f1b")
    layer = rater.output_layer(one)
    assert layer is not None
    # 256,000 products with a token, and in a layer three by 14,336 and in attention some 16,000: 4.3 times as many.
    assert 3 < layer.layers < 5
    assert layer.most_layers == 42 / 15
    assert layer.rated["spread"].seconds < layer.rated["own"].seconds < layer.rated["last"].seconds
    devices = gemma.costs(replace(one, vocabulary="spread")).devices().sum(1) @ gemma.slowdowns(one)
    assert devices.max() / devices.min() < 1.5, "three or two layers, and a sixteenth of the rows"
    assert rater.output_layer(replace(one, pipeline=1, data=32)) is None


def test_no_trainer_is_asked_for_passes_that_it_does_not_run() -> None:
    """By default the output layer is in the last stage, alone where it is long. Passes have to be asked for."""
    one, fixed = heavy_job(), {"pp": [1, 4, 8], "tp": [1], "cp": [1], "microbatch_size": [1]}

    def places(job: Job, **more: Collection[object]) -> set[tuple[str, str]]:
        found = [rating.strategy for group in rate_all(job, 8, fixed | more) for rating in group]
        assert all(strategy.vocabulary == "last" for strategy in found if strategy.pipeline == 1)
        return {(strategy.vocabulary, strategy.schedule) for strategy in found}

    orders = ("1f1b", "interleaved-1f1b")
    by_default = {*product(["last", "own"], orders)}
    assert places(one) == by_default
    assert places(one, vocabulary=["last", "own", "spread"]) == by_default | {("spread", "vocab-2")}
    assert places(one, schedule=["vocab-2"]) == {("spread", "vocab-2")}
    assert places(one, vocabulary=["own"]) == {*product(["own"], orders)}
    assert places(heavy_job(4096), vpp=[1]) == {("last", "1f1b")}, "alone it would be a short stage"
    assert places(heavy_job(4096), vocabulary=["last", "own"]) == by_default
