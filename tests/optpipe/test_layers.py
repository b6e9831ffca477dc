"""Layer profiles: what they refuse, and what a layout of one costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from optpipe.errors import InputError
from optpipe.layers import LayerProfile
from optpipe.partition import Batching, Partition, build_problem, parameter_bytes
from optpipe.problem import Problem
from tests.layer_profiles import BLOCK, profile

COPIES = {"offload_bytes_per_us": 40, "reload_bytes_per_us": 20}
EXAMPLES = Path(__file__).parents[2] / "examples" / "problems"


def test_round_trip() -> None:
    path = EXAMPLES / "real8.layers.json"
    loaded = LayerProfile.load(path)
    assert LayerProfile.from_json(loaded.to_json()) == loaded
    assert len(loaded.each_layer) == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offload_bytes": 101}, "layers[0] has offload_bytes 101 but activation_bytes is 100"),
        ({"forward_us": -1}, "layers[0].forward_us is -1 but must be at least 0"),
        ({"repeat": 3000}, "layers hold 3000 with repeats, but at most 2000"),
        ({"forward_ms": 1}, "layers[0].forward_ms is not a field. Maybe you meant forward_us"),
    ],
)
def test_refuses(change: dict[str, int], message: str) -> None:
    with pytest.raises(InputError) as caught:
        LayerProfile.from_data({"format": "optpipe.layers/1", "layers": [BLOCK | change]})
    assert message in str(caught.value)


def test_a_problem_in_place_of_a_profile_is_named() -> None:
    with pytest.raises(InputError, match=r"already cut into stages. Maybe use 'optpipe solve'"):
        LayerProfile.load(EXAMPLES / "offload-p4-m8.json")


def test_a_stage_sums_up_its_layers() -> None:
    given = profile(5, head=2, link={"latency_us": 3, "bytes_per_us": 4}, copies=COPIES)
    problem = build_problem(given, Partition((2, 3), (0, 1)), Batching(2, 8), offload=True)
    assert problem is not None
    assert problem.to_data() == Problem.from_data(problem.to_data()).to_data()
    first, last = problem.stages
    assert (first.forward_us, last.forward_us) == (2 * 2 * 10, 2 * (10 + 10 + 20))
    assert (first.activation_bytes, first.backward_weight_bytes) == (2 * 2 * 100, 2 * 2 * 50)
    assert first.offload is not None
    assert (first.offload.bytes, first.offload.offload_us, first.offload.reload_us) == (320, 8.0, 16.0)
    assert problem.forward_delay_us == [3 + 2 * 20 / 4]
    assert problem.microbatches == 8


def test_fixed_time_does_not_grow_with_the_microbatch() -> None:
    given = LayerProfile.from_data({"format": "optpipe.layers/1", "layers": [BLOCK | {"fixed_us": 4}]})
    problem = build_problem(given, Partition((1,), (0,)), Batching(3, 1))
    assert problem is not None
    assert problem.stages[0].forward_us == 4 + 3 * 6


def test_parameters_come_off_the_budget_or_overfill_it() -> None:
    layout = Partition((1, 2, 2), (0, 1, 0))
    assert parameter_bytes(profile(5), layout) == [3000, 2000]
    fits = build_problem(profile(5, memory_bytes=3500), layout, Batching(1, 2))
    assert fits is not None
    assert [device.memory_bytes for device in fits.devices] == [500, 1500]
    assert build_problem(profile(5, memory_bytes=2999), layout, Batching(1, 2)) is None
