"""Slices of a sequence, and microbatches of unequal lengths: where they are cut, and what each costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.errors import InputError
from optpipe.layers import LayerProfile
from optpipe.partition import Batching, Partition, build_problem
from optpipe.problem import Problem
from optpipe.sequences import (
    attention_shares,
    evened,
    load_lengths,
    microbatch_factors,
    slice_lengths,
    slice_times_us,
)
from optpipe.simulate import simulate
from solver.published.seq1f1b import seq1f1b
from tests.layer_profiles import ATTENDING, BLOCK


def attending(**more: object) -> LayerProfile:
    """Four blocks of which half of the time is attention, for sequences of 16 tokens."""
    layers = [ATTENDING | {"repeat": 4}]
    return LayerProfile.from_data({"format": "optpipe.layers/1", "sequence": 16, "layers": layers} | more)


@pytest.mark.parametrize(
    ("sequence", "count", "share", "lengths"),
    [
        (16, 4, 0.0, (4, 4, 4, 4)),
        (16, 2, 1.0, (11, 5)),  # 16 / sqrt 2
        (4096, 4, 1.0, (2048, 848, 656, 544)),
        (1, 1, 0.5, (1,)),
        (3, 3, 1.0, (1, 1, 1)),
    ],
)
def test_slices_of_equal_compute(sequence: int, count: int, share: float, lengths: tuple[int, ...]) -> None:
    assert slice_lengths(sequence, count, "compute", share) == lengths


@given(st.integers(1, 10_000), st.integers(1, 40), st.floats(0, 1), st.sampled_from([None, 1, 64]))
def test_slices_make_up_the_sequence(sequence: int, count: int, share: float, multiple: int | None) -> None:
    count = min(count, sequence)
    equal = slice_lengths(sequence, count, multiple=multiple)
    balanced = slice_lengths(sequence, count, "compute", share, multiple)
    for lengths in (equal, balanced):
        assert (len(lengths), sum(lengths), min(lengths) >= 1) == (count, sequence, True)
    assert sum(attention_shares(balanced)) == pytest.approx(1.0)
    if multiple == 1:
        assert max(equal) - min(equal) <= 1
        times = slice_times_us(1.0, 0.0, share, balanced)
        assert max(times) - min(times) <= 4 / sequence  # a token at either end


def test_more_slices_than_tokens() -> None:
    with pytest.raises(ValueError, match=r"a sequence of 4 tokens has no 5 slices\. Maybe from 1 to 4\."):
        slice_lengths(4, 5)


def test_equal_slices_of_causal_attention() -> None:
    """The figures of a small case: attention half of F, four slices of 15, 21, 27 and 33."""
    assert slice_times_us(96, 0, 48, slice_lengths(16, 4)) == [15, 21, 27, 33]
    assert slice_times_us(100, 4, 48, slice_lengths(16, 4)) == [19, 25, 31, 37]  # each slice pays what is fixed


def sliced(profile: LayerProfile, lengths: tuple[int, ...], **more: object) -> Problem:
    problem = build_problem(profile, Partition((2, 2), (0, 1)), Batching(1, 3), slices=lengths, **more)  # type: ignore[arg-type]
    assert problem is not None
    return problem


def test_a_problem_of_slices_does_the_work_of_whole_sequences() -> None:
    profile = attending()
    whole = build_problem(profile, Partition((2, 2), (0, 1)), Batching(1, 3))
    assert whole is not None
    for lengths in ((4, 4, 4, 4), (7, 5, 4), (16,)):
        problem = sliced(profile, lengths)
        assert problem.work_us == pytest.approx(whole.work_us, rel=1e-5)
        held = [problem.stage_of(0, unit).activation_bytes for unit in range(len(lengths))]
        assert sum(held) == pytest.approx(whole.stages[0].activation_bytes, abs=len(lengths) + 1)
    assert sliced(profile, (16,)).to_data() == whole.to_data()
    problem = sliced(profile, (4, 4, 4, 4))
    assert [problem.stage_of(0, unit).forward_us for unit in range(4)] == pytest.approx(
        [15 / 48 * 10, 21 / 48 * 10, 27 / 48 * 10, 33 / 48 * 10], rel=1e-5
    )
    assert problem.stage_of(0, 3).backward_weight_us == 2 * 10 / 4
    simulate(problem, seq1f1b(problem))


def test_slices_of_a_stage_differ_from_another_s() -> None:
    """The last stage has a head without attention: its slices have other factors."""
    layers = [ATTENDING | {"repeat": 3}, BLOCK]
    problem = sliced(attending(layers=layers), (8, 8))
    first, last = problem.stages
    assert first.slice_factors is not None
    assert last.slice_factors is not None
    assert first.slice_factors.forward == [0.75, 1.25]
    assert last.slice_factors.forward == [0.875, 1.125]
    assert (first.slice_factors.backward_weight, first.slice_factors.bytes) == (None, None)
    assert problem.slices is not None
    assert problem.slices.factors.forward is None
    cut = sliced(attending(layers=layers), (12, 4)).slices
    assert cut is not None
    assert cut.factors.bytes == [1.5, 0.5]  # by which a sequence is cut where a schedule runs


def test_messages_of_slices_have_their_lengths() -> None:
    problem = sliced(attending(link={"latency_us": 3, "bytes_per_us": 4}), (12, 4))
    assert problem.unit_delays_us["forward"][0, :2] == pytest.approx([3 + 15 / 4, 3 + 5 / 4], rel=1e-5)
    assert problem.unit_delays_us["backward"][0, :2] == pytest.approx([3 + 15 / 4, 3 + 5 / 4], rel=1e-5)


def test_keys_and_values_of_slices_stay() -> None:
    """40 of the 200 bytes of a stage are keys and values: no mode throws them away, and they do not leave."""
    copies = {"offload_bytes_per_us": 40, "reload_bytes_per_us": 20}
    layers = [ATTENDING | {"repeat": 4, "recomputation": {"kept_bytes": 20, "offload_bytes": 20}, "offload_bytes": 100}]
    profile = attending(copies=copies, layers=layers)
    problem = sliced(profile, (8, 8), offload=True, modes=["full", "full+offload"])
    stage = problem.stages[1]
    assert (stage.activation_bytes, stage.slice_gradient_bytes) == (100, 20)
    assert stage.offload is not None
    assert (stage.offload.bytes, stage.offload.offload_us) == (80, 2.0)
    full, leaving = stage.modes
    assert (full.kept_bytes, full.recompute_us) == (30, 10.0)  # its input of 10 bytes, and 20
    assert leaving.offload is not None
    assert leaving.offload.bytes == 10
    assert problem.stage_of(1, 1).modes[0].recompute_us == 12.5  # as F of the second slice


def test_factors_of_microbatches() -> None:
    """A third of the time is attention: two documents of half the length take half of that and all of the rest."""
    factors = microbatch_factors(attending(), [[16], [32], [8, 8], [8]])
    share = 20 / 60  # attention in B and F, none in W
    assert [entry["time"] for entry in factors] == pytest.approx(
        [1, 2 * (1 - share) + 4 * share, 1 - share / 2, (1 - share) / 2 + share / 4], abs=1e-6
    )
    assert [entry["bytes"] for entry in factors] == [entry["transfer"] for entry in factors] == [1, 2, 1, 0.5]


def test_a_microbatch_too_large_for_a_factor_is_named() -> None:
    """With 62,500 times the tokens, two thirds of the time grow with them, a third with their square."""
    with pytest.raises(
        InputError, match=r"^--lengths\[1\] has 1,000,000 tokens, 1,302,125,000 times the work .* Maybe a"
    ):
        microbatch_factors(attending(), [[16], [1_000_000]])


def test_evened_lengths() -> None:
    assert evened([[10], [20], [60]]) == [[30]] * 3
    assert evened([[10, 10], [20, 20, 20], [20]]) == [[17, 17]] * 3


@pytest.mark.parametrize(
    "text",
    [
        "[16, [8, 8], 4]",
        "16\n8 8\n\n4\n",
        "16\n8,8\n4",
        "[16,\n [8, 8],\n 4]",
        "\ufeff16\n8 8\n4\n",
        "\ufeff[16, [8, 8], 4]",
    ],
)
def test_lengths_are_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "lengths").write_text(text, encoding="utf-8")
    assert [list(entry) for entry in load_lengths(tmp_path / "lengths")] == [[16], [8, 8], [4]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 0, 2]", "[1] is 0 but must be a whole number of tokens from 1 to 1,000,000,000, or a list of such."),
        ("1\n\n2\nx\n", "line 4 is 'x' but must be a whole number of tokens"),
        ("1\n4 0\n", "line 2 is 0 but must be"),
        ("[1, []]", "[1] is empty but must be"),
        ("[1.5]", "[0] is 1.5 but must be"),
        ("[true]", "[0] is true but must be"),
        ('{"lengths": [1]}', "but must be a list of 1 to 1,000,000 lengths, one for each microbatch."),
        ("[]", "has 0 but must be a list of 1 to"),
        (json.dumps([[2 * 10**9]]), "[0] is 2000000000 but must be"),
    ],
)
def test_bad_lengths(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(InputError) as caught:
        load_lengths(tmp_path / "lengths")
    assert message in str(caught.value)


def test_lengths_in_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("16\n8\n", encoding="utf-16")
    with pytest.raises(InputError, match=r"is not UTF-8: .* Maybe it is UTF-16"):
        load_lengths(tmp_path / "lengths")


def test_a_profile_that_does_not_know_attention() -> None:
    for profile, field in (
        (attending(layers=[BLOCK]), r"layers\[\]\.attention"),
        (attending(sequence=None), "sequence"),
    ):
        with pytest.raises(InputError, match=f"the profile has no {field}"):
            microbatch_factors(profile, [[1]])
