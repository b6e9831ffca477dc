"""`optpipe plan` from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optpipe.layers import LayerProfile
from optpipe.schedule import Schedule
from optpipe.verify import verify
from tests.layer_profiles import ATTENDING, BLOCK, profile
from tests.optpipe.cli.conftest import Cli
from tests.optpipe.models import tiny_models


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    path = tmp_path / "layers.json"
    path.write_text(profile(8, head=3, name="toy").to_json())
    return path


def test_the_best_layout_is_written_and_told(cli: Cli, layers: Path, tmp_path: Path) -> None:
    out = tmp_path / "best.json"
    options = ("--devices", "2", "--global-batch", "4", "--microbatch-sizes", "1", "--placements", "linear,v")
    run = cli("plan", layers, *options, "--time-limit", "2", "-o", out, "--json")
    assert run.code == 0
    first, *others = run.document["layouts"]
    schedule = Schedule.load(out)
    assert verify(schedule).ok
    assert schedule.value_us == first["value_us"]
    assert [stage.device for stage in schedule.problem.stages] == first["devices_of_stages"]
    assert all(other["value_us"] is None or other["value_us"] >= first["value_us"] for other in others)


def test_the_table_says_which_is_best(cli: Cli, layers: Path) -> None:
    options = ("--devices", "2", "--global-batch", "4", "--microbatch-sizes", "1", "--placements", "linear")
    run = cli("plan", layers, *options, "--time-limit", "2")
    assert run.code == 0
    header, best = run.out.splitlines()[:2]
    assert "sequences / s" in header
    assert best.startswith("linear")
    assert best.rstrip().endswith("best")
    assert "layers of each stage: 5 3" in run.out
    assert "rated 1 of 1 layouts" in run.out
    assert "no cut of them has a shorter step" in run.out


def test_what_a_layout_loses(cli: Cli, layers: Path) -> None:
    """The head takes three blocks' time: the even cut 4, 4 has 6 of 10 on one device, the cut 5, 3 half."""
    options = ("--devices", "2", "--global-batch", "4", "--microbatch-sizes", "1", "--placements", "linear,v")
    limits = ("--time-limit", "2", "--offload", "no")
    run = cli("plan", layers, *options, *limits, "--json", "--why", "cut=6,2")
    layouts = run.document["layouts"]
    assert layouts[0]["end"] == "solved"
    assert sum(layouts[0]["time_by_kind_us"].values()) == pytest.approx(layouts[0]["value_us"])
    named = next(one for one in layouts if one["cut"] == "asked")
    assert (named["layers_of_stages"], named["end"]) == ([6, 2], "beaten")
    assert named["why_not"] == f"at least {100 * (named['bound_us'] / layouts[0]['value_us'] - 1):+.1f} %"
    text = cli("plan", layers, *options, *limits, "--why", "placement=linear,cut=4,4").out
    header, imbalance, *_ = text.splitlines()
    assert "linear, asked cut, microbatch 1" in header
    assert imbalance.split()[:3] == ["imbalance", "120.0", "µs"]
    assert "beaten: no schedule of this cut takes less than 760.0 µs" in text
    assert "is the best: " in cli("plan", layers, *options, *limits, "--why", "microbatch_size=1").out
    asked = ("--microbatch-sizes", "1,2", "--memory", "4500B", "--why", "placement=linear,microbatch_size=2")
    text = cli("plan", layers, *options, *limits, *asked).out
    assert (
        "does not fit, device 0 needs 4.69 KiB of 4.39 KiB, 300 B too few: parameters 3.91 KiB, one microbatch 800 B"
        in text
    )


def test_places_of_the_output_layer(cli: Cli, tmp_path: Path) -> None:
    """Seven blocks and a head of twelve on four devices: no cut takes less than the head, 8 x 360 us."""
    layers, out = tmp_path / "layers.json", tmp_path / "best.json"
    layers.write_text(profile(8, head=12, name="toy").to_json())
    options = ("--devices", 4, "--global-batch", 8, "--microbatch-sizes", 1, "--placements", "linear,v")
    by_default = cli("plan", layers, *options, "--time-limit", 2, "--json").document["layouts"]
    assert {one["vocabulary"] for one in by_default} == {"last", "own"}
    assert by_default[0]["vocabulary"] == "own"
    assert by_default[0]["value_us"] >= 8 * 360
    every = ("--vocabulary", "last,own,spread", "--time-limit", 1, "-o", out)
    best, *others = cli("plan", layers, *options, *every, "--json").document["layouts"]
    assert (best["vocabulary"], best["megatron_layout"], sum(best["layers_of_stages"])) == ("spread", None, 8)
    assert {one["vocabulary"] for one in others} >= {"last", "own"}
    schedule = Schedule.load(out)
    assert (schedule.problem.pass_names, verify(schedule).ok) == (("S", "T"), True)
    assert best["bound_us"] <= best["value_us"] == schedule.value_us < 0.6 * by_default[0]["value_us"]
    text = cli("plan", layers, *options, *every).out
    assert "output layer" in text.splitlines()[0]
    assert "the rows of the last layer are on all devices, which no trainer but optpipe train runs" in text
    losses = cli("plan", layers, *options, *every, "--why", "vocabulary=own").out
    assert "imbalance" in losses.splitlines()[1]
    own = cli("plan", layers, *options, "--vocabulary", "own", "--time-limit", 1, "--json").document["layouts"]
    assert {one["layers_of_stages"][-1] for one in own} == {1}
    run = cli("plan", layers, *options, "--vocabulary", "all")
    assert (run.code, "--vocabulary has 'all' but must be of last, own, spread." in run.err) == (2, True)
    layers.write_text(profile(8, head=12).with_spread_head(4).to_json())
    run = cli("plan", layers, *options, "--vocabulary", "spread")
    assert (run.code, "--vocabulary has no meaning here: the profile has its head" in run.err) == (2, True)


def test_a_measured_model_trains_with_its_output_layer_on_all_devices(cli: Cli, tmp_path: Path) -> None:
    """As it is cut, with the memory that is planned."""
    layers, out = tmp_path / "layers.json", tmp_path / "schedule.json"
    model = ("--model", tiny_models.saved("llama"), "--data", f"{tiny_models.__name__}:batch")
    assert cli("profile", *model, "--format", "layers", "--rounds", 1, "-o", layers).code == 0
    options = ("--devices", 2, "--global-batch", 8, "--microbatch-sizes", 2, "--placements", "linear")
    run = cli("plan", layers, *options, "--vocabulary", "spread", "--time-limit", 3, "-o", out, "--json")
    sizes = run.document["layouts"][0]["layers_of_stages"]
    assert sum(sizes) == len(LayerProfile.load(layers).each_layer)
    cut = ",".join(str(size) for size in sizes)
    run = cli("train", "--schedule", out, *model, "--cut", cut, "--steps", 1, "--check", "--json")
    assert run.code == 0, run.err
    assert run.document["check"]["max_gradient_error"] < 1e-5


def test_rows_of_an_output_layer_in_a_layer_of_others_are_not_spread(cli: Cli, tmp_path: Path) -> None:
    """The last layer of this model is a block with the output layer: without it the block would not be planned."""
    layers = tmp_path / "layers.json"
    model = ("--model", "tiny", "--layers", 4, "--format", "layers", "--rounds", 1)
    assert cli("profile", *model, "-o", layers).code == 0
    run = cli("plan", layers, "--devices", 2, "--global-batch", 8, "--vocabulary", "spread")
    assert (run.code, "output_layer_alone is false: the last layer holds more" in run.err) == (2, True), run.err


def test_nothing_is_best_before_all_are_rated(cli: Cli, layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layout always has a rating; without time for the others the table does not rank them."""
    monkeypatch.setattr("solver.layout.candidates.LAST_SHARE", 0.0)
    options = ("--devices", "2", "--global-batch", "4", "--microbatch-sizes", "1", "--time-limit", "0.01")
    run = cli("plan", layers, *options, "--placements", "linear,interleaved-2,v")
    assert run.code == 0
    assert run.out.splitlines()[1].rstrip().endswith("best of those rated")
    assert "  best\n" not in run.out
    assert run.out.count("there was no time to look at it") >= 2
    assert "rated 1 of 3 layouts" in run.out
    [first, *others] = cli("plan", layers, *options, "--placements", "linear,v", "--json").document["layouts"]
    assert first["every_cut_bound_us"] <= first["value_us"]
    assert {one["value_us"] for one in others if one["placement"] == "v"} == {None}
    why = cli("plan", layers, *options, "--placements", "linear,v", "--why", "placement=linear").out
    assert "with placement linear is the best of those rated: " in why


def test_what_is_named_twice_is_tried_once(cli: Cli, layers: Path) -> None:
    options = ("--devices", "2", "--global-batch", "4", "--time-limit", "0.5", "--offload", "no", "--json")
    run = cli("plan", layers, *options, "--placements", "linear,linear", "--microbatch-sizes", "1,1")
    cuts = [tuple(one["layers_of_stages"]) for one in run.document["layouts"]]
    assert len(cuts) == len({*cuts})


def test_modes_that_a_refusal_names_are_taken(cli: Cli, layers: Path) -> None:
    options = ("--devices", "2", "--global-batch", "4", "--time-limit", "0.5", "--modes")
    refused = cli("plan", layers, *options, "kept")
    assert refused.code == 2
    _, _, named = refused.err.strip().rstrip(".").rpartition("Maybe --modes ")
    assert cli("plan", layers, *options, named).code == 0


def test_a_profile_of_layers_and_a_model_are_told_apart(cli: Cli, layers: Path) -> None:
    run = cli("plan", "llama-3.1-8b", "--devices", "4", "--global-batch", "8")
    assert "--devices is of a layer profile, but llama-3.1-8b is the name of a model. Maybe --gpus 4" in run.err
    assert run.code == 2
    run = cli("plan", layers, "--gpus", "8", "--global-batch", "8")
    assert "is a layer profile but" in run.err
    assert "Maybe run 'optpipe plan' on it, with --devices." in run.err


def test_layers_that_take_no_time_have_no_throughput(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    times = dict.fromkeys(("forward_us", "backward_input_us", "backward_weight_us"), 0)
    path.write_text(json.dumps({"format": "optpipe.layers/1", "layers": [BLOCK | times | {"repeat": 2}]}))
    options = ("--devices", "2", "--global-batch", "2", "--placements", "linear", "--offload", "no")
    [layout] = cli("plan", path, *options, "--time-limit", "2", "--json").document["layouts"]
    assert (layout["value_us"], layout["sequences_per_s"]) == (0, None)
    assert "0 µs" in cli("plan", path, *options, "--time-limit", "2").out


def test_layouts_recompute_where_modes_are_given(cli: Cli, tmp_path: Path) -> None:
    """Too little memory for a stage's four layers of 100 bytes at once, unless they are recomputed."""
    path, out = tmp_path / "layers.json", tmp_path / "best.json"
    layers = [BLOCK | {"repeat": 8, "recomputation": {"kept_bytes": 20}, "parameter_bytes": 0}]
    path.write_text(json.dumps({"format": "optpipe.layers/1", "layers": layers, "memory_bytes": 390}))
    options = ("--devices", "2", "--global-batch", "2", "--microbatch-sizes", "1", "--placements", "linear")
    assert cli("plan", path, *options, "--time-limit", "2").code == 4
    run = cli("plan", path, *options, "--time-limit", "2", "--modes", "full,blocks", "-o", out, "--json")
    assert run.code == 0
    schedule = Schedule.load(out)
    assert verify(schedule).ok
    numbers = range(1, run.document["layouts"][0]["layers_of_stages"][1])
    names = ["full", *(f"selective-{number}" for number in numbers), "selective"]
    assert [mode.name for mode in schedule.problem.stages[1].modes] == names
    assert run.document["layouts"][0]["recomputed"] == sum(device.recomputed for device in schedule.devices) > 0
    assert "recomputed" in cli("plan", path, *options, "--time-limit", "1", "--modes", "selective").out


def test_the_global_batch_is_that_of_all_replicas(cli: Cli, layers: Path) -> None:
    """Two replicas of two devices of the pipeline with three tensor-parallel GPUs each: 12 GPUs."""
    layers.write_text(json.dumps(json.loads(layers.read_text()) | {"parallel": {"tensor": 3, "data": 2}}))
    options = ("--devices", "2", "--placements", "linear", "--offload", "no", "--time-limit", "2")
    run = cli("plan", layers, *options, "--global-batch", "8", "--microbatch-sizes", "1", "--json").document
    assert (run["gpus"], run["global_batch"]) == (12, 8)
    best = run["layouts"][0]
    assert best["microbatches"] == 4, "of a replica"
    assert best["sequences_per_s"] == pytest.approx(8e6 / best["value_us"])
    text = cli("plan", layers, *options, "--global-batch", "8", "--microbatch-sizes", "1").out
    assert (
        "2 devices of the pipeline x 3 (parallel.tensor) x 2 (parallel.data) = 12 GPUs; a replica runs 4 of 8" in text
    )
    odd = cli("plan", layers, *options, "--global-batch", "7")
    assert odd.code == 2
    assert "--global-batch is 7, which the profile's 2 replicas (parallel.data) do not divide. Maybe 8." in odd.err
    size = cli("plan", layers, *options, "--global-batch", "8", "--microbatch-sizes", "8")
    assert "holds '8', which does not divide --global-batch 8 over parallel.data 2, 4." in size.err


def test_a_layout_of_megatron_is_costed_and_compared(cli: Cli, tmp_path: Path) -> None:
    """The uneven cut 5, 1 takes 5 layers a microbatch where the even one takes 3."""
    path, out = tmp_path / "layers.json", tmp_path / "best.json"
    rows = [BLOCK | {"name": "embedding"}, BLOCK | {"name": "layer", "repeat": 4}, BLOCK | {"name": "head"}]
    path.write_text(json.dumps({"format": "optpipe.layers/1", "name": "toy", "layers": rows}))
    options = ("--devices", "2", "--global-batch", "4", "--microbatch-sizes", "1", "--placements", "linear")
    command = ("plan", path, *options, "--time-limit", "2", "--layout", "Ettt*2|L", "-o", out)
    layouts = cli(*command, "--json").document["layouts"]
    given = next(layout for layout in layouts if layout["cut"] == "given")
    assert (given["layers_of_stages"], given["megatron_layout"]) == ([5, 1], "Et*4|L")
    assert layouts[0]["megatron_layout"] == "Ett|ttL"
    assert given["value_us"] > layouts[0]["value_us"]
    slower = given["value_us"] / layouts[0]["value_us"] - 1
    text = cli(*command).out
    assert f"{100 * slower:+.1f} % against the best; at least" in text
    assert "for Megatron-LM: --pipeline-model-parallel-layout 'Ett|ttL'" in text
    for layout, message in (
        ("Ett|t|tL", "--layout has 3 stages, which 2 devices do not divide. Maybe --devices 1."),
        ("Et|L", "--layout has 3 layers (1 E, 1 t, 0 m, 1 L), but the profile has 6."),
        ("zigzag", "--layout is 'zigzag', in which 'a g i z' has no meaning"),
    ):
        run = cli("plan", path, *options, "--layout", layout)
        assert run.code == 2
        assert message in run.err
    run = cli("plan", "Et|(tt|)*30L", *options)
    assert (
        "Et|(tt|)*30L: is no file but a layout string of Megatron-LM. Maybe give a layer profile, and this" in run.err
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--modes", "offload"), "--modes has 'offload', which --offload decides here."),
        (("--offload", "no", "--modes", "full+offload"), "--modes has 'full+offload', but --offload is no."),
        (("--modes", "selective"), "--modes has 'selective', but no layer says what it keeps if it is recomputed"),
        (("--microbatch-sizes", "9" * 5000), "does not divide --global-batch 8."),
        (("--microbatch-sizes", "3"), "--microbatch-sizes holds '3', which does not divide --global-batch 8."),
        (("--placements", "zigzag"), "--placements is wrong: 'zigzag' is not a placement. Maybe one of linear"),
        (
            ("--why", "tp=2"),
            "--why has 'tp=2' but names are placement, cut, microbatch_size, slices, offload, vocabulary. Maybe",
        ),
        (("--why", "placement=w"), "--why has placement 'w', which is not searched. Maybe placement of linear,"),
        (("--why", "cut=4,3"), "--why has cut '4,3', but a cut is even, searched, or the layers of each stage: 8 in"),
        (("--why", "cut=1,1,1,1,2,2"), "has cut 1,1,1,1,2,2 of 6 stages, which no placement has: linear,"),
        (("--objective", "time"), "--objective is 'time' but must be makespan or device_span."),
        (
            ("--offload", "yes"),
            "--offload is yes, but the profile lacks offload_bytes of its layers or the rate of copies.",
        ),
    ],
)
def test_bad_options(cli: Cli, layers: Path, options: tuple[str, ...], message: str) -> None:
    run = cli("plan", layers, "--devices", "2", "--global-batch", "8", *options)
    assert run.code == 2
    assert message in run.err


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """Sequences of 64 tokens whose attention takes half of F and B, with room for one of two stages' whole ones."""
    path = tmp_path / "long.json"
    more = {"sequence": 64, "name": "long", "memory_bytes": 4000 + 550}
    path.write_text(profile(8, head=1, **more, layers=[ATTENDING | {"repeat": 8}]).to_json())
    return path


def test_slices_are_chosen_where_they_fit_better(cli: Cli, long: Path, tmp_path: Path) -> None:
    out = tmp_path / "best.json"
    options = ("--devices", "2", "--global-batch", "3", "--placements", "linear", "-o", out)
    run = cli("plan", long, *options, "--slices", "1,4", "--time-limit", "2", "--json")
    assert run.code == 0
    first = run.document["layouts"][0]
    assert (first["slices"], len(first["slice_lengths"]), sum(first["slice_lengths"])) == (4, 4, 64)
    assert first["slice_lengths"] == sorted(first["slice_lengths"], reverse=True)
    assert {one["slices"] for one in run.document["layouts"]} == {1, 4}
    schedule = Schedule.load(out)
    assert verify(schedule).ok
    assert schedule.problem.slice_count == 4
    shown = cli("plan", long, *options, "--slices", "4", "--slice-by", "length", "--time-limit", "1").out
    assert "tokens of each slice: 16 16 16 16" in shown
    assert shown.splitlines()[0].split()[:4] == ["placement", "cut", "microbatch", "slices"]


def test_lengths_of_microbatches(cli: Cli, long: Path, tmp_path: Path) -> None:
    """Which order is chosen, and what the imbalance costs beside other orders and equal microbatches."""
    lengths, out = tmp_path / "lengths.txt", tmp_path / "best.json"
    lengths.write_text("64\n16\n32 32\n8\n")
    options = (
        "--devices",
        "2",
        "--lengths",
        lengths,
        "--placements",
        "linear",
        "--memory",
        "6KB",
    )
    run = cli("plan", long, *options, "--time-limit", "2", "-o", out, "--json")
    assert run.code == 0
    schedule, found = Schedule.load(out), run.document["lengths"]
    assert verify(schedule).ok
    assert found["microbatch_order"] == list(schedule.microbatch_order or ())
    assert sorted(found["microbatch_order"]) == [0, 1, 2, 3]
    assert [entry["bytes"] for entry in found["microbatch_factors"]] == [1, 0.25, 1, 0.125]
    given = found["published"][0]
    assert (given["name"], given["microbatch_order"]) == ("given", [0, 1, 2, 3])
    assert schedule.value_us <= min(one["value_us"] for one in found["published"])
    same, level = found["equal"]
    assert same["bubble"] <= given["bubble"]
    assert level["value_us"] < same["value_us"]  # long documents have more attention
    shown = cli("plan", long, *options, "--time-limit", "1").out
    assert "this plan" in shown
    assert "microbatches in the order " in shown
    assert "equal lengths, the same tokens" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--global-batch", "4", "--placements", "w"), "--placements is wrong: 'w' is not a placement. Maybe one of"),
        ((), "--global-batch is missing. Maybe --global-batch 64, or --lengths with a file."),
        (("--global-batch", "4", "--slices", "0"), "--slices holds '0', but a sequence of 64 tokens has from 1 to"),
        (("--global-batch", "4", "--slices", "65"), "--slices holds '65', but a sequence of 64 tokens has from 1 to"),
        (("--global-batch", "4", "--slice-by", "length"), "--slice-by has no meaning here: --slices is not given."),
        (("--lengths", "LENGTHS", "--global-batch", "4"), "--global-batch has no meaning here: --lengths gives the"),
        (("--lengths", "LENGTHS", "--slices", "2"), "--slices has no meaning here: --lengths gives the microbatches"),
    ],
)
def test_bad_slices_and_lengths(cli: Cli, long: Path, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    (tmp_path / "lengths.json").write_text("[64, 32]")
    named = [str(tmp_path / "lengths.json") if option == "LENGTHS" else option for option in options]
    run = cli("plan", long, "--devices", "2", *named)
    assert run.code == 2
    assert message in run.err


def test_slices_need_the_costs_of_attention(cli: Cli, layers: Path, tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text("[64, 32]")
    run = cli("plan", layers, "--devices", "2", "--global-batch", "4", "--slices", "1,2")
    assert run.code == 2
    assert "--slices needs to know how costs grow with the length of a sequence, but the profile has no seq" in run.err
    run = cli("plan", layers, "--devices", "2", "--lengths", tmp_path / "lengths.json")
    assert run.code == 2
    assert "--lengths needs to know how costs grow" in run.err


def test_nothing_fits(cli: Cli, layers: Path) -> None:
    run = cli("plan", layers, "--devices", "2", "--global-batch", "4", "--memory", "1KB", "--time-limit", "2")
    assert run.code == 4
    assert (
        "linear, even cut, microbatch 1: on device 0 parameters alone take 3.91 KiB of 1,000 B, 2.93 KiB too few"
        in run.err
    )


def test_a_margin_needs_a_memory(cli: Cli, layers: Path) -> None:
    run = cli("plan", layers, "--devices", "2", "--global-batch", "4", "--memory-margin", "10%", "--time-limit", "2")
    assert run.code == 2
    assert "--memory-margin has no meaning here: neither --memory nor the profile gives a device's memory." in run.err
    memory = ("--memory", "1KB", "--memory-margin", "50%")
    run = cli("plan", layers, "--devices", "2", "--global-batch", "4", *memory, "--time-limit", "2")
    assert run.code == 4
    assert "on device 0 parameters alone take 3.91 KiB of 500 B, 3.42 KiB too few" in run.err
