"""Cuts: pinned steps of known models, bounds that every schedule keeps, and brute force over all cuts."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from math import inf
from typing import Any

import numpy as np
import pytest

from instances.drawn_models import drawn_model, every_cut
from optpipe.layers import LayerProfile
from optpipe.partition import Batching, Partition, build_problem
from optpipe.placement import placement
from optpipe.problem import Problem
from solver.layout import cuts
from solver.layout.cut_bounds import CutBounds
from solver.layout.cuts import Build, CutSearch, FoundCuts, Sizes, even_cut, even_sizes
from solver.layout.quick_rating import QuickRating
from solver.limits import Cancel, Limits
from tests.layer_profiles import profile
from tests.sample import RARELY, some

LINEAR, V = placement("linear", 4, 1), placement("v", 3, 2)


def build(given: LayerProfile, places: tuple[int, ...], microbatches: int, sizes: Sizes) -> Problem | None:
    return build_problem(given, Partition(sizes, places), Batching(given.microbatch_size, microbatches))


def found(given: LayerProfile, places: tuple[int, ...], microbatches: int, alone: bool | None = None) -> FoundCuts:
    bounds = CutBounds(given, places, 1.0, microbatches, alone=alone)
    return searched(bounds, partial(build, given, places, microbatches), Limits(inf))


def searched(bounds: CutBounds, build: Build, limits: Limits) -> FoundCuts:
    search = CutSearch(bounds, build, limits, alike=True)
    search.begin()
    search.extend(limits)
    return search.found


def layers(*times: float, **more: Any) -> LayerProfile:
    """Layers whose F, B and W each take these times."""
    each = [
        dict.fromkeys(("forward_us", "backward_input_us", "backward_weight_us"), time)
        | {"activation_bytes": 1000, "backward_weight_bytes": 500}
        for time in times
    ]
    return LayerProfile.from_data({"format": "optpipe.layers/1", "layers": each} | more)


@pytest.mark.parametrize(("count", "stages", "sizes"), [(7, 3, (3, 2, 2)), (6, 3, (2, 2, 2)), (4, 4, (1, 1, 1, 1))])
def test_even(count: int, stages: int, sizes: Sizes) -> None:
    assert even_sizes(count, stages) == sizes


def test_the_cut_of_the_shortest_step_is_not_that_of_the_least_busiest_device() -> None:
    """The layers of torch's own test of its partitioner: 520 is the bound of each cut whose busiest device has 60."""
    given = layers(8, 11, 2, 1, 18, 5, 4, 11)
    best = found(given, LINEAR, 8)
    assert next(iter(best.rated.values())).value_us == 504
    assert best.least_us == 504
    busiest = CutBounds(given, LINEAR, 1.0, 8).of(np.array([[0, 1, 3, 5, 8]]))
    assert busiest.max() == 520


def test_the_last_device_begins_last_and_has_less() -> None:
    """Llama-2-7B as Galvatron measured it for four sequences: nine layers first, seven and the head last."""
    given = layers(0, *[16497] * 32, 12441)
    best = found(given, LINEAR, 16)
    assert next(iter(best.rated)) == (10, 8, 8, 8)
    assert best.least_us == 7126704 == next(iter(best.rated.values())).value_us


def test_the_warm_up_has_room_behind_a_large_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding of 1.8 layers: with three layers beside it there is room for one microbatch, 19.6 s a step."""
    layer = {"forward_us": 11000, "backward_input_us": 11500, "backward_weight_us": 10500, "repeat": 24}
    layer |= {"activation_bytes": 202 * 10**6, "backward_weight_bytes": 190117647, "parameter_bytes": 7270 * 10**6}
    ends = {"activation_bytes": 16384, "backward_weight_bytes": 16384, "parameter_bytes": 13100 * 10**6}
    embedding = ends | {"forward_us": 0, "backward_input_us": 0, "backward_weight_us": 0}
    head = ends | {"forward_us": 19800, "backward_input_us": 19800, "backward_weight_us": 19800}
    head |= {"activation_bytes": 537559040, "backward_weight_bytes": 537559040}
    monkeypatch.setattr(cuts, "MOST_RATED", 20)
    data = {"format": "optpipe.layers/1", "memory_bytes": 36 * 10**9, "layers": [embedding, layer, head]}
    best = found(LayerProfile.from_data(data), placement("linear", 8, 1), 32)
    assert next(iter(best.rated.values())).value_us <= 4_408_500


def test_many_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi K2: 61 layers on 16 devices; with the head on two layers 816,200 is the bound of two layers a stage."""
    layer = {"forward_us": 1000, "backward_input_us": 1100, "backward_weight_us": 900, "repeat": 61}
    more = {"activation_bytes": 1000, "backward_weight_bytes": 500}
    nothing = dict.fromkeys(("forward_us", "backward_input_us", "backward_weight_us"), 0)
    head = dict.fromkeys(nothing, 2100)
    data = {"format": "optpipe.layers/1", "layers": [nothing | more, layer | more, head | more]}
    given, places = LayerProfile.from_data(data), placement("interleaved", 16, 2)
    monkeypatch.setattr(cuts, "MOST_RATED", 12)
    best = found(given, places, 64)
    assert min(one.value_us for one in best.rated.values()) <= 816_200


def test_parameters_and_activations_fit() -> None:
    best = found(profile(12, head=10, memory_bytes=6 * 1100), placement("linear", 3, 1), 4)
    assert best.rated
    assert all(max(sizes) <= 5 for sizes in best.rated)
    assert not found(profile(12, memory_bytes=3 * 1100), placement("linear", 3, 1), 4).rated


def test_too_few_layers() -> None:
    assert found(profile(3), LINEAR, 4) == FoundCuts({}, inf)
    assert found(profile(4), LINEAR, 4, alone=False) == FoundCuts({}, inf), "each stage has one, the last as well"
    assert list(found(profile(4), LINEAR, 4, alone=True).rated) == [(1, 1, 1, 1)]


@pytest.mark.parametrize(
    ("head", "alone", "sizes"),
    [(5, None, (5, 5, 5, 1)), (5, True, (5, 5, 5, 1)), (2, True, (5, 5, 5, 1)), (1, None, (4, 4, 4, 4))],
)
def test_a_long_last_layer_has_a_stage_of_its_own(head: int, alone: bool | None, sizes: Sizes) -> None:
    """15 layers and a head on four devices: a head of five layers is as long as each other stage."""
    rated = found(profile(16, head=head), LINEAR, 16, alone).rated
    assert next(iter(rated)) == sizes
    assert even_cut(CutBounds(profile(16), LINEAR, 1.0, 16, alone=alone))[-1] == (1 if alone else 4)
    if alone is None:
        assert all(cut[-1] > 1 for cut in found(profile(16, head=head), LINEAR, 16, alone=False).rated)


def test_a_cancelled_search_rates_nothing() -> None:
    given, limits = profile(12), Limits(inf)
    limits.cancel.request()
    bounds = CutBounds(given, LINEAR, 1.0, 4)
    assert not searched(bounds, partial(build, given, LINEAR, 4), limits).rated


@pytest.mark.parametrize("seed", some(range(100), RARELY))
def test_no_cut_is_better_by_a_hundredth(seed: int) -> None:
    """Brute force: every cut rated as the search rates its best ones; no value is below a bound."""
    given, places, microbatches = drawn_model(seed)
    alone = (None, None, True, False)[seed % 4]
    bounds = CutBounds(given, places, 1.0, microbatches, alone=alone)
    least_us, least_bound_us = inf, inf
    for sizes in every_cut(len(given.each_layer), len(places)):
        problem = build(given, places, microbatches, sizes)
        bound_us = float(bounds.of(np.array([(0, *accumulate(sizes))])).max())
        if problem is None or (alone is not None and (sizes[-1] == 1) != alone):
            assert bound_us == inf
            continue
        one = QuickRating.of(problem, Cancel())
        if one.value_us <= least_us * 1.05:
            one.improve(Limits(inf))
        assert one.value_us >= bound_us * (1 - 1e-9)
        least_us, least_bound_us = min(least_us, one.value_us), min(least_bound_us, bound_us)
    tables = bounds.least()
    if tables is not None:
        assert tables[0] <= least_bound_us * (1 + 1e-9)
    best = found(given, places, microbatches, alone)
    value_us = min((one.value_us for one in best.rated.values()), default=inf)
    assert bounds.floor_us() * (1 - 1e-9) <= best.least_us <= least_us * (1 + 1e-9)
    assert value_us <= least_us * 1.01
