"""Slices of sequences that are measured: problems and layers that hold what was measured, and peaks as predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import ceil
from typing import Any

import pytest
import torch

from optpipe.errors import InputError
from optpipe.layers import LayerProfile
from optpipe.partition import Batching, Partition, build_problem
from optpipe.problem import Problem
from optpipe.profile.check import check_prediction
from optpipe.profile.measured import Measured, StageFigures, measure
from optpipe.profile.ops import Spread
from optpipe.profile.slices import Slicing, fit_length_costs
from optpipe.profile.subject import Chain, Subject, build_chain
from optpipe.runtime.probe import StageSizes
from optpipe.sequences import slice_lengths, slice_times_us
from optpipe.train.tasks.gpt import GPTShape, build_stages, byte_loss
from solver.solve import solve
from tests.optpipe.profile.subjects import CPU, measured, perceptron
from tests.sample import some

WIDTH, SEQUENCE, SIZE = 16, 24, 2
KEYS_AND_VALUES = 2 * 4 * SIZE * WIDTH
"""Bytes of a layer and a token of the microbatch."""


def gpt(layers: int = 3) -> Subject:
    """Two stages, of two layers and of one."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(256, (SIZE, SEQUENCE + 1), generator=generator)
    stages = build_stages(GPTShape(WIDTH, 2, SEQUENCE, layers), 2, 0, torch.float32)
    return Subject("a GPT", stages, text[:, :-1].contiguous(), text[:, 1:].contiguous(), byte_loss)


def sliced(slices: Sequence[int] = (4,), **options: Any) -> tuple[Measured, Chain]:
    chain = build_chain(gpt(), CPU, 4, [0, 1])
    return measure(gpt_of(chain), chain, [0, 1], CPU, 1, slices=slices, **options), chain


def gpt_of(chain: Chain) -> Subject:
    return replace(gpt(), stages=[stage.module for stage in chain.stages.values()])


@pytest.fixture(scope="module")
def whole_and_cut() -> tuple[Measured, Chain]:
    return sliced(modes=["offload", "full", "selective"])


def test_a_problem_has_the_times_and_gradients_of_its_slices(whole_and_cut: tuple[Measured, Chain]) -> None:
    found, _ = whole_and_cut
    problem = found.problem(4)
    assert problem.slices is not None
    assert problem.slice_count == 4
    for stage, figures, layers in zip(problem.stages, found.stages, (2, 1), strict=True):
        [slicing] = figures.slicings
        assert slicing.lengths == (6, 6, 6, 6)
        assert stage.slice_gradient_bytes == layers * KEYS_AND_VALUES * 6
        assert stage.slice_factors is not None
        for name, kind in (("forward", "F"), ("backward_input", "B"), ("backward_weight", "W")):
            factors = getattr(stage.slice_factors, name)
            found_us = [factor * getattr(stage, f"{name}_us") for factor in factors]
            assert found_us == pytest.approx([one[kind].median_us for one in slicing.times], abs=0.2)
        recomputed = stage.slice_factors.recompute
        assert recomputed is not None
        assert sum(recomputed) == pytest.approx(4)
        assert {mode.name for mode in stage.modes} == {"full", "selective"}
        assert all(mode.recompute_us and mode.recompute_us > 0 for mode in stage.modes)
    assert Problem.from_json(problem.to_json()) == problem
    assert "with sequences of 24 tokens in slices: 4 (6 6 6 6)" in problem.source


@pytest.mark.parametrize("method", some(["seq1f1b", "gpipe"]))
def test_peaks_of_a_sliced_step_are_at_most_those_predicted(whole_and_cut: tuple[Measured, Chain], method: str) -> None:
    found, chain = whole_and_cut
    check = check_prediction(found, chain.in_slices(found.slice_lengths), solve(found.problem(4), method), CPU)
    assert check.failures == []
    for device in check.trace.devices:
        assert device.peak_bytes > 0.8 * device.planned_peak_bytes
    assert {share.kind for share in check.shares} >= {"F", "BW"}


def test_figures_of_slices_go_from_process_to_process(whole_and_cut: tuple[Measured, Chain]) -> None:
    for figures in whole_and_cut[0].stages:
        assert StageFigures.from_data(asdict(figures)) == figures


def test_layers_have_keys_and_values_of_whole_sequences() -> None:
    found, _ = sliced((2, 3))
    profile = found.layers()
    assert profile.sequence == SEQUENCE
    for layer, layers in zip(profile.layers, (2, 1), strict=True):
        assert layer.attention is not None
        assert layer.attention.key_value_bytes == layers * KEYS_AND_VALUES * SEQUENCE
    assert LayerProfile.from_json(profile.to_json()) == profile
    assert [len(one.lengths) for one in found.stages[0].slicings] == [2, 3]


WHOLE_US = {"F": 100.0, "B": 150.0, "W": 80.0}
ATTENTION_US = {"F": 40.0, "B": 90.0, "W": 0.0}
SLICE_US = {"F": 7.0, "B": 3.0, "W": 0.5}


def times_us(kind: str, lengths: Sequence[int]) -> list[float]:
    """Times of slices that follow the formula, of a stage of known parts."""
    return [time_us + SLICE_US[kind] for time_us in slice_times_us(WHOLE_US[kind], 0, ATTENTION_US[kind], lengths)]


def times_of(lengths: Sequence[int]) -> list[dict[str, Spread]]:
    columns = {kind: times_us(kind, lengths) for kind in "FBW"}
    return [{kind: Spread(*[of_kind[q]] * 3, 1) for kind, of_kind in columns.items()} for q in range(len(lengths))]


@pytest.mark.parametrize("cuts", [[(12, 12)], [(6, 6, 6, 6)], [(12, 8, 4), (4, 20)]])
@pytest.mark.parametrize("kind", ["F", "B", "W"])
def test_parts_of_times_are_found_from_slices(cuts: list[tuple[int, ...]], kind: str) -> None:
    costs = fit_length_costs(WHOLE_US[kind], [(lengths, times_us(kind, lengths)) for lengths in cuts])
    assert costs == pytest.approx((ATTENTION_US[kind], SLICE_US[kind]), rel=1e-4, abs=1e-3)


def test_parts_of_times_are_never_negative_and_at_most_the_time() -> None:
    """Slices that take less than their share, the later the less, as caches may have it; and more than all."""
    assert fit_length_costs(100.0, [((1, 1), [40.0, 30.0])]) == (0.0, 0.0)
    assert fit_length_costs(100.0, [((1, 1), [10.0, 200.0])]).attention_us <= 100.0


def figures(lengths: tuple[int, ...]) -> StageFigures:
    """A stage whose slices follow the formula."""
    sizes = StageSizes(2400, 1200, 0, {"F": 5, "B": 6, "W": 7, "BW": 8})
    of_slice = replace(sizes, activation_bytes=600, backward_weight_bytes=300, gradients_taken_bytes=300)
    times = {kind: Spread(time_us, time_us, time_us, 1) for kind, time_us in WHOLE_US.items()}
    times |= {kind: Spread(1.0, 1.0, 1.0, 1) for kind in ("BW", "O", "R")}
    return StageFigures(times, sizes, 1000, slicings=(Slicing(lengths, times_of(lengths), [of_slice] * len(lengths)),))


def test_a_plan_of_measured_layers_has_the_slices_that_were_measured() -> None:
    """Fitted to four slices of equal length; cut into others, and of two layers in one stage."""
    found, _ = measured(perceptron((3, 3, 3)), [0, 1], rounds=1)
    profile = replace(found, stages=[figures((6, 6, 6, 6))] * 2).layers()
    for lengths in ((6, 6, 6, 6), (12, 12), (11, 8, 5)):
        problem = build_problem(profile, Partition((2,), (0,)), Batching(profile.microbatch_size, 4), slices=lengths)
        assert problem is not None
        [stage] = problem.stages
        assert problem.slices is not None
        for name, kind in (("forward", "F"), ("backward_input", "B"), ("backward_weight", "W")):
            factors = getattr(problem.slices.factors, name) or [1.0] * len(lengths)
            found_us = [factor * getattr(stage, f"{name}_us") for factor in factors]
            assert found_us == pytest.approx([2 * time_us for time_us in times_us(kind, lengths)], abs=0.4)
        # 300 bytes of gradients of three slices: 400 of keys and values of the sequence, in each layer.
        assert stage.slice_gradient_bytes == ceil(800 / len(lengths))


def test_slices_of_equal_compute_are_cut_by_the_measured_share(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "optpipe.profile.measured"

    def whole(chain: Chain, *_: object) -> Mapping[int, Mapping[str, Spread]]:
        return dict.fromkeys(chain.stages, figures((12, 12)).times)

    def of_slices(slices: Sequence[Chain], *_: object) -> Mapping[int, Sequence[Mapping[str, Spread]]]:
        lengths = [chain.inputs.shape[1] for chain in slices]
        extra = {kind: Spread(1.0, 1.0, 1.0, 1) for kind in ("BW", "O", "R")}
        return {s: [one | extra for one in times_of(lengths)] for s in slices[0].stages}

    monkeypatch.setattr(f"{module}.measure_op_times", whole)
    monkeypatch.setattr(f"{module}.measure_slice_times", of_slices)
    found, _ = sliced((3,), slice_by="compute")
    expected = slice_lengths(SEQUENCE, 3, "compute", 130 / 330)
    assert expected[0] > expected[1] > expected[2]
    assert found.slice_lengths == expected
    problem = found.problem(4)
    assert problem.slices is not None
    assert problem.slices.factors.bytes == pytest.approx([3 * length / SEQUENCE for length in expected], abs=1e-6)


def test_stages_that_do_not_take_slices_are_refused_by_name() -> None:
    subject = perceptron()
    with pytest.raises(InputError, match=r"--slices is given, but stages\[0\] of perceptron \(Sequential\) does not"):
        measure(subject, build_chain(subject, CPU, 4, [0, 1]), [0, 1], CPU, 1, slices=(2,))


def test_more_slices_than_tokens_are_refused() -> None:
    with pytest.raises(InputError, match=r"--slices holds 25, but a sequence of a GPT has 24 tokens"):
        sliced((25,))
