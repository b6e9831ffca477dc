"""Layer profiles: what they refuse, and what a layout of one costs."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from optpipe.errors import InputError
from optpipe.layers import LayerProfile
from optpipe.partition import (
    Batching,
    Partition,
    build_problem,
    check_layer_modes,
    name_with_cut,
    parameter_bytes,
)
from optpipe.problem import Problem
from tests.layer_profiles import BLOCK, profile

COPIES = {"offload_bytes_per_us": 40, "reload_bytes_per_us": 20}
EXAMPLES = Path(__file__).parents[2] / "examples" / "problems"


def test_round_trip() -> None:
    path = EXAMPLES / "real8.layers.json"
    loaded = LayerProfile.load(path)
    assert LayerProfile.from_json(loaded.to_json()) == loaded
    assert len(loaded.each_layer) == 32


def test_the_rows_of_a_head_on_all_devices() -> None:
    """A head of 60 us a pass, 4 of them fixed, on four devices, behind a message of 20 bytes; seven blocks of 10 us."""
    link = {"latency_us": 3, "bytes_per_us": 10}
    given = profile(8, head=6, link=link).replaced(layers=[*profile(8, head=6).layers[:-1]])
    head = profile(8, head=6).layers[-1].replaced(fixed_us=4, activation_bytes=420, parameter_bytes=1001)
    spread = given.replaced(layers=[*given.layers, head]).with_spread_head(4)
    assert spread.spread is not None
    assert spread.spread.to_data() == {
        "devices": 4,
        "logits_us": 2 * (4 + 56 / 4),
        "weights_us": 4 + 56 / 4,
        "fixed_us": 4,
        "broadcast_us": 2 * 3 + 20 / 10,
        "reduce_us": 3 * 2 * 3 + 20 / 10,
        "kept_bytes": 2 * 20 + 400 // 4,
        "parameter_bytes": 251,
    }
    assert [(one.forward_us, one.backward_us) for one in spread.each_layer] == [pytest.approx((10.9, 21.4))] * 7
    assert LayerProfile.from_json(spread.to_json()) == spread
    layout = Partition((2, 2, 2, 1), (0, 1, 2, 3))
    assert parameter_bytes(spread, layout) == [2251, 2251, 2251, 1251]
    assert name_with_cut(spread, layout) == name_with_cut(given.replaced(name="", spread=None), layout) == ""
    assert name_with_cut(spread.replaced(name="toy"), layout) == "toy, cut 2,2,2,2", "the head's module is in the last"
    double = build_problem(spread, layout, Batching(2, 4))
    assert double is not None
    logits, weights = double.spread or ()
    assert (logits.us, weights.us) == ([4 + 2 * (36 - 4)] * 4, [4 + 2 * (18 - 4)] * 4)
    assert (logits.kept_bytes, weights.frees, weights.kept_bytes) == ([280] * 4, "S", None)
    with pytest.raises(InputError, match="is one layer, whose rows alone make no stages"):
        profile(2).replaced(layers=[head]).with_spread_head(4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offload_bytes": 101}, "layers[0] has offload_bytes 101 but activation_bytes is 100"),
        ({"forward_us": -1}, "layers[0].forward_us is -1 but must be at least 0"),
        (
            {"recomputation": {"kept_bytes": 101}},
            "layers[0] has recomputation.kept_bytes 101 but activation_bytes is 100",
        ),
        (
            {"recomputation": {"kept_bytes": 10, "offload_bytes": 11}},
            "layers[0].recomputation has offload_bytes 11 but kept_bytes is 10",
        ),
        (
            {"attention": {"forward_us": 11, "backward_input_us": 0}},
            "layers[0] has attention.forward_us 11, but forward_us is 10, of which 0 are fixed_us",
        ),
        (
            {"fixed_us": 6, "attention": {"forward_us": 0, "backward_input_us": 5}},
            "layers[0] has attention.backward_input_us 5, but backward_input_us is 10, of which 6 are fixed_us",
        ),
        (
            {"attention": {"forward_us": 0, "backward_input_us": 0, "key_value_bytes": 101}},
            "layers[0] has attention.key_value_bytes 101 but activation_bytes is 100",
        ),
        ({"repeat": 3000}, "layers hold 3000 with repeats, but at most 2000"),
        ({"forward_ms": 1}, "layers[0].forward_ms is not a field. Maybe you meant forward_us"),
    ],
)
def test_refuses(change: dict[str, int], message: str) -> None:
    with pytest.raises(InputError) as caught:
        LayerProfile.from_data({"format": "optpipe.layers/1", "layers": [BLOCK | change]})
    assert message in str(caught.value)


def test_a_problem_in_place_of_a_profile_is_named() -> None:
    with pytest.raises(InputError, match=r"is a problem but a layer profile is needed. Maybe run 'optpipe solve'"):
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


RECOMPUTED = {"recomputation": {"kept_bytes": 20, "offload_bytes": 20}}


def recomputed() -> LayerProfile:
    """An embedding, four blocks that can be recomputed, and a head; parameters aside."""
    embedding, head = (BLOCK | {"name": name, "offload_bytes": 0} for name in ("embedding", "head"))
    layers = [embedding, BLOCK | RECOMPUTED | {"repeat": 4}, head]
    return LayerProfile.from_data({"format": "optpipe.layers/1", "layers": layers, "copies": COPIES})


def test_modes_of_a_stage_follow_from_its_layers() -> None:
    """A block keeps its input, 20 of 100 bytes; embedding and head keep all. W needs 50 of each layer."""
    layout = Partition((3, 3), (0, 1))
    asked = ("full", "selective", "blocks", "selective+offload", "full")
    problem = build_problem(recomputed(), layout, Batching(2, 4), offload=True, modes=asked)
    assert problem is not None
    first, second = problem.stages
    assert [mode.name for mode in first.modes] == ["full", "selective", "selective-1", "selective+offload"]
    modes = {mode.name: mode for mode in first.choices}
    assert [modes[name].kept_bytes for name in ("full", "selective-1", "selective")] == [0, 440, 280]
    assert [modes[name].recompute_us for name in ("full", "selective-1", "selective")] == [60, 20, 40]
    # at the last block: its 160 bytes beyond its input; at the first: 160 - 40 behind it + 100 for the last block's W
    assert modes["selective"].segment_bytes == 220
    assert modes["selective"].forward_workspace_bytes == 160
    assert modes["full"].segment_bytes == 600
    leaves = modes["selective+offload"].offload
    assert leaves is not None
    assert (leaves.bytes, leaves.offload_us, leaves.reload_us) == (80, 2, 4)
    assert second.choices[second.choice_numbers["full"]].kept_bytes == 40, "what the stage before sends"


def test_a_stage_without_blocks_has_no_selective_mode() -> None:
    problem = build_problem(recomputed(), Partition((5, 1), (0, 1)), Batching(1, 4), modes=("selective", "selective-4"))
    assert problem is not None
    assert [[mode.name for mode in stage.modes] for stage in problem.stages] == [["selective", "selective-4"], []]


def test_memory_of_a_recomputed_stage_bounds_that_of_its_layers() -> None:
    """CB, played layer by layer, takes no more than its segment; nor does F take more than its workspace."""
    rng = Random(0)
    for _ in range(200):
        layers = []
        for _ in range(rng.randint(1, 5)):
            held = rng.randint(1, 9)
            again = {"recomputation": {"kept_bytes": rng.randint(0, held)}} if rng.random() < 0.7 else {}
            sizes = {
                "output_bytes": 2,
                "activation_bytes": held,
                "backward_weight_bytes": rng.randint(0, held),
                "offload_bytes": 0,
            }
            layers.append(BLOCK | sizes | again)
        given = LayerProfile.from_data({"format": "optpipe.layers/1", "layers": layers})
        problem = build_problem(given, Partition((len(layers),), (0,)), Batching(1, 1), modes=("selective", "groups"))
        assert problem is not None
        for mode in problem.stages[0].modes:
            each, group = given.each_layer, int(mode.name.removeprefix("selective-groups-").replace("selective", "1"))
            blocks, kept, began = 0, [], []
            for n, layer in enumerate(each):
                begins = layer.recomputation is None or blocks % group == 0
                blocks += layer.recomputation is not None
                began.append(n if begins else began[-1])
                stays = layer.recomputation.kept_bytes if layer.recomputation else layer.activation_bytes
                kept.append(stays if begins else max(0, stays - each[n - 1].output_bytes))
            forward = [sum(kept[:n]) + layer.activation_bytes for n, layer in enumerate(each)]
            alive = [sum(kept[:k]) + sum(of.activation_bytes for of in each[k : n + 1]) for n, k in enumerate(began)]
            behind = [sum(layer.backward_weight_bytes for layer in each[n + 1 :]) for n in range(len(each))]
            backward = [of_layer + weights for of_layer, weights in zip(alive, behind, strict=True)]
            choice = problem.stages[0].choices[problem.stages[0].choice_numbers[mode.name]]
            assert choice.segment_bytes is not None
            assert choice.kept_bytes + choice.forward_workspace_bytes == max(sum(kept), *forward)
            assert choice.kept_bytes + choice.segment_bytes == max(sum(kept), *backward)


@pytest.mark.parametrize(
    ("layers", "mode", "message"),
    [
        (recomputed(), "selective:mlp", "--modes has 'selective:mlp', but parts of layers have no costs"),
        (
            recomputed(),
            "offload-bf16",
            "--modes has 'offload-bf16', but how layers leave in low precision is not known",
        ),
        (profile(4), "blocks", "--modes has 'blocks', but no layer says what it keeps"),
        (profile(4), "full+offload", "--modes has 'full+offload', but the profile has no rate of copies"),
        (recomputed(), "selective-99", "--modes has 'selective-99', but "),
        (recomputed(), "selective-groups-99", " of the profile can be recomputed. Maybe blocks."),
    ],
)
def test_modes_that_do_not_follow_from_layers_are_refused(layers: LayerProfile, mode: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        check_layer_modes(layers, [mode], "--modes")
    assert message in str(caught.value)
