"""`optpipe profile` from the outside."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from optpipe.layers import LayerProfile
from optpipe.mode_names import parse_modes
from optpipe.partition import Batching, Partition, build_problem
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.verify import verify
from tests.optpipe.cli.conftest import Cli
from tests.optpipe.models import tiny_models
from tests.ranks import RunRanks
from tests.sample import some

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "examples" / "problems" / "gpt-320b-1000-gpus.toml"
QUICK: tuple[str, ...] = ("--model", "tiny", "--sequence", "8", "--microbatch-size", "1", "--rounds", "2")


def test_a_table_becomes_layers_that_can_be_planned(cli: Cli, tmp_path: Path) -> None:
    """1,000 GPUs, planned on whatever runs this test."""
    layers, schedule = tmp_path / "layers.json", tmp_path / "schedule.json"
    run = cli("profile", "--from-table", TABLE, "-o", layers)
    assert run.code == 0
    assert "k = 0.90" in run.out
    assert "Matrix products run at 400 TFLOP/s" in run.out
    profile = LayerProfile.load(layers)
    assert sum(layer.repeat for layer in profile.layers) == 102
    assert "400 TFLOP/s reached" in profile.source
    options = ("--global-batch", 50, "--microbatch-sizes", 1, "--placements", "linear", "--offload", "no")
    run = cli("plan", layers, "--devices", 25, *options, "--time-limit", "1", "-o", schedule, "--json")
    assert run.code == 0
    planned = Schedule.load(schedule)
    assert verify(planned).ok
    assert len(planned.devices) == 25
    assert all(device.peak_bytes_any_timing < 72e9 for device in planned.devices)


@pytest.fixture
def cut_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of a table are cut by the first cuts that are rated."""
    monkeypatch.setattr("optpipe.cli.profile.CUT_S", 0.3)


@pytest.mark.usefixtures("cut_quickly")
def test_a_table_with_stages_becomes_a_problem(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "problem.json"
    options = ("--stages", 20, "--placement", "interleaved-2", "--microbatches", 30)
    run = cli("profile", "--from-table", TABLE, *options, "-o", out, "--json")
    assert run.code == 0
    assert run.document["copy_to_compute_ratio"] == pytest.approx(0.903, abs=1e-3)
    assert any("shared" in sentence or "divided by 8" in sentence for sentence in run.document["assumptions"])
    problem = Problem.load(out)
    assert (problem.microbatches, [stage.device for stage in problem.stages]) == (30, [*range(10)] * 2)
    _, block, head = run.document["layers"]
    assert sum(stage.forward_us for stage in problem.stages) == pytest.approx(
        100 * block["forward_us"] + head["forward_us"]
    )
    moved = sum(stage.offload.bytes for stage in problem.stages if stage.offload)
    assert moved == 100 * block["offload_bytes"] > 0
    assert not any(stage.modes for stage in problem.stages)


@pytest.mark.usefixtures("cut_quickly")
def test_a_table_gives_modes_that_keep_the_inputs_of_layers(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "problem.json"
    options = ("--stages", 20, "--modes", "full,selective,selective-2+offload", "--json")
    run = cli("profile", "--from-table", TABLE, *options, "-o", out)
    assert run.code == 0
    _, block, _ = run.document["layers"]
    stage = Problem.load(out).stages[1]
    assert stage.offload is None, "it was not asked for"
    assert [mode.name for mode in stage.modes] == ["full", "selective", "selective-2+offload"]
    layers = round(stage.forward_us / block["forward_us"])
    message = block["recomputation"]["kept_bytes"]
    assert message == block["output_bytes"] < block["activation_bytes"] / 5
    assert [mode.kept_bytes for mode in stage.choices[1:]] == [
        *(message, layers * message, 2 * message + (layers - 2) * block["activation_bytes"])
    ]
    assert stage.choices[1].recompute_us == stage.choices[2].recompute_us == pytest.approx(stage.forward_us)


def test_a_model_becomes_a_problem_that_is_solved(cli: Cli, tmp_path: Path) -> None:
    out, schedule = tmp_path / "problem.json", tmp_path / "schedule.json"
    options = ("--layers", 3, "--devices", 2, "--microbatches", 4, "--memory", "4MiB")
    run = cli("profile", *QUICK, *options, "-o", out, "--json")
    assert run.code == 0
    problem = Problem.load(out)
    stages = run.document["stages"]
    for stage, found, device in zip(problem.stages, stages, problem.devices, strict=True):
        assert stage.forward_us == round(found["times"]["F"]["median_us"], 1)
        assert stage.activation_bytes == found["sizes"]["activation_bytes"]
        assert device.memory_bytes == 4 * 2**20 - found["parameter_bytes"]
    assert "round    1 of 4" in run.err
    assert cli("solve", out, "--method", "1f1b", "-o", schedule).code == 0
    assert verify(Schedule.load(schedule)).ok


def test_the_text_shows_every_stage_and_the_check(cli: Cli, tmp_path: Path) -> None:
    options = ("--stages", 2, "--microbatches", 2, "--check")
    run = cli("profile", *QUICK, *options, "-o", tmp_path / "problem.json")
    assert run.code == 0
    assert "tiny GPT, 2 layers, 1 x 8, float32" in run.out
    assert "mailbox copies within one process" in run.out
    peaks = re.findall(r"device (\d): peak (\S+ \S+), predicted (\S+ \S+)", run.out)
    assert [device for device, _, _ in peaks] == ["0", "1"]
    assert all(measured == predicted for _, measured, predicted in peaks)


def test_a_check_in_json_has_both_predictions(cli: Cli, tmp_path: Path) -> None:
    options = ("--devices", 2, "--placement", "v", "--microbatches", 2, "--check", "--json")
    check = cli("profile", *QUICK, *options, "-o", tmp_path / "problem.json").document["check"]
    assert check["measured_over_predicted"] == check["step"]["median_us"] / check["predicted_serial_us"]
    assert check["trace"]["basis"] == "re-timed"
    assert all(device["peak_bytes"] == device["planned_peak_bytes"] for device in check["trace"]["devices"])


def test_layers_of_a_model(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "layers.json"
    assert cli("profile", *QUICK, "--layers", 3, "--format", "layers", "-o", out).code == 0
    profile = LayerProfile.load(out)
    assert (len(profile.layers), profile.microbatch_size) == (3, 1)
    assert profile.copies is not None
    assert all(layer.output_bytes == 4 * 8 * 32 for layer in profile.layers[:-1])
    assert not any(layer.recomputation for layer in profile.layers)


def test_a_problem_of_slices_is_solved_and_checked(cli: Cli, tmp_path: Path) -> None:
    out, schedule = tmp_path / "problem.json", tmp_path / "schedule.json"
    options = ("--devices", 2, "--microbatches", 3, "--slices", 2, "--slice-by", "length", "--check")
    run = cli("profile", *QUICK, *options, "-o", out)
    assert run.code == 0
    assert "stage 0, slices of 4 4 tokens: F and BW take" in run.out
    assert "causal attention is" in run.out
    problem = Problem.load(out)
    assert problem.slice_count == 2
    assert [stage.slice_gradient_bytes for stage in problem.stages] == [2 * 4 * 4 * 32] * 2
    assert cli("solve", out, "--method", "seq1f1b", "-o", schedule).code == 0
    assert verify(Schedule.load(schedule)).ok


def test_measured_layers_are_planned_in_slices(cli: Cli, tmp_path: Path) -> None:
    out, schedule = tmp_path / "layers.json", tmp_path / "schedule.json"
    assert cli("profile", *QUICK, "--layers", 2, "--format", "layers", "--slices", "2,4", "-o", out).code == 0
    profile = LayerProfile.load(out)
    assert profile.sequence == 8
    assert [layer.attention and layer.attention.key_value_bytes for layer in profile.layers] == [2 * 4 * 8 * 32] * 2
    options = ("--devices", 2, "--global-batch", 2, "--microbatch-sizes", 1, "--placements", "linear", "--slices", "2")
    assert cli("plan", out, *options, "--time-limit", 1, "--offload", "no", "-o", schedule).code == 0
    planned = Schedule.load(schedule)
    assert verify(planned).ok
    assert planned.problem.slice_count == 2


def test_slices_of_a_decoder_of_transformers_are_measured(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "problem.json"
    options = ("--data", f"{tiny_models.__name__}:unmasked_batch", "--rounds", 1, "--devices", 2, "--slices", 2)
    by_length = ("--slice-by", "length")
    run = cli("profile", "--model", tiny_models.saved("llama"), *options, *by_length, "--check", "-o", out)
    assert run.code == 0
    kept_bytes = [stage.slice_gradient_bytes for stage in Problem.load(out).stages]
    of_layer = 2 * 4 * tiny_models.ROWS * tiny_models.TOKENS // 2 * 16  # keys and values, float32, half of the tokens
    assert kept_bytes == [tiny_models.LAYERS // 2 * of_layer] * 2
    run = cli("profile", "--model", tiny_models.saved("mistral"), *options, "-o", out)
    assert run.code == 2
    assert "is a configuration of mistral: models with full causal attention of" in run.err


@pytest.mark.parametrize(("name", "cut", "other"), some([("tiny", "3,1", "2,2"), ("llama", "1,4", "2,3")]))
def test_a_model_trains_as_it_was_cut_where_it_was_measured(
    cli: Cli, tmp_path: Path, name: str, cut: str, other: str
) -> None:
    """Unless it is asked for another cut; then peaks are those of another model."""
    model: tuple[str | int, ...] = ("--model", name, "--layers", 4)
    if name != "tiny":
        model = ("--model", tiny_models.saved(name), "--data", f"{tiny_models.__name__}:batch")
    problem, schedule = tmp_path / "problem.json", tmp_path / "schedule.json"
    measured = ("--devices", 2, "--microbatches", 4, "--rounds", 1)
    assert cli("profile", *model, "--cut", cut, *measured, "-o", problem).code == 0
    assert Problem.load(problem).name.endswith(f", cut {cut}")
    assert cli("solve", problem, "--method", "1f1b", "-o", schedule).code == 0
    train = ("train", "--schedule", schedule, *model, "--steps", 1, "--check", "--json")
    run = cli(*train)
    assert (run.code, run.document["check"]["failures"]) == (0, []), run.err
    assert "peaks are not held against the schedule's sizes" not in run.err
    run = cli(*train, "--cut", other)
    assert (run.code, "peaks are not held against the schedule's sizes" in run.err) == (0, True), run.err


def test_modes_of_stages_from_measured_layers_are_those_of_measured_stages(cli: Cli, tmp_path: Path) -> None:
    layers, whole = tmp_path / "layers.json", tmp_path / "problem.json"
    options = (*QUICK, "--layers", 4, "--modes")
    assert cli("profile", *options, "selective", "--format", "layers", "-o", layers).code == 0
    assert cli("profile", *options, "full,blocks,groups", "--devices", 2, "-o", whole).code == 0
    asked = parse_modes("full,blocks,groups", "modes")
    summed = build_problem(LayerProfile.load(layers), Partition((2, 2), (0, 1)), Batching(1, 4), modes=asked)
    assert summed is not None
    for by_layers, measured in zip(summed.stages, Problem.load(whole).stages, strict=True):
        assert [mode.name for mode in by_layers.modes] == ["full", "selective-1", "selective", "selective-groups-2"]
        assert by_layers.choice_numbers == measured.choice_numbers
        for one, other in zip(by_layers.modes, measured.modes, strict=True):
            assert one.kept_bytes == other.kept_bytes
            assert one.segment_bytes is not None
            assert other.segment_bytes is not None
            assert one.segment_bytes / 3 < other.segment_bytes <= one.segment_bytes, "a bound, but no loose one"


@pytest.mark.parametrize("name", some(["llama", "gpt2", "qwen3-moe"]))
def test_layers_predicted_for_a_machine_have_the_bytes_of_a_run(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = tiny_models.config(name)
    config.vocab_size = 256  # letters of the text that is read
    monkeypatch.setattr(config, "output_router_logits", False, raising=False)
    config.save_pretrained(tmp_path)
    options = ("--model", f"hf:{tmp_path}", "--sequence", 8, "--microbatch-size", 1, "--modes", "selective")
    profiles = []
    for how in (("--machine", "h100"), ("--format", "layers", "--rounds", 1, "--dtype", "bfloat16")):
        run = cli("profile", *options, *how, "-o", tmp_path / "layers.json", "--json")
        assert run.code == 0, run.err
        profiles.append(LayerProfile.load(tmp_path / "layers.json"))
    predicted, measured = profiles
    assert "predicted for h100, nothing measured" in predicted.source
    assert "of models that were not fitted are within" in predicted.source
    assert [layer.repeat for layer in predicted.layers] == [1, tiny_models.LAYERS - 1, 1]
    for own, run_layer in zip(predicted.layers, measured.layers, strict=True):
        recomputation = [one.recomputation and one.recomputation.kept_bytes for one in (own, run_layer)]
        assert recomputation[0] == recomputation[1]
        found, expected = (
            {key: value for key, value in one.to_data().items() if key.endswith("bytes")} for one in (own, run_layer)
        )
        assert found == expected


@pytest.mark.slow  # half a minute
def test_a_model_of_70b_is_predicted_without_memory(cli: Cli, tmp_path: Path) -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    sizes |= {"num_hidden_layers": 80, "vocab_size": 128256, "max_position_embeddings": 131072}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    out = tmp_path / "layers.json"
    options = ("--machine", "h100", "--sequence", 8192, "--microbatch-size", 1)
    assert cli("profile", "--model", f"hf:{tmp_path}", *options, "-o", out).code == 0
    profile = LayerProfile.load(out)
    frequencies_bytes = 2 * 64 * 4  # of rotary positions, as each layer has them to itself
    held_bytes = sum(layer.parameter_bytes for layer in profile.each_layer)
    assert held_bytes == 18 * 70_553_706_496 + 81 * frequencies_bytes
    layer, products = profile.layers[1], 2 * 8192 * (855_654_400 - 2 * 8192)
    assert layer.repeat == 79
    assert layer.forward_us > products / (989.4e6 * 0.71)


BAD = [
    (
        ("--from-table", TABLE, "--model", "small"),
        "--model has no meaning here: --from-table takes everything from its table",
    ),
    ((), "--model is missing. Maybe --model small"),
    (
        ("--model", "smal", "--devices", 2),
        "--model is 'smal' but must be one of tiny, small, medium, hf:FOLDER, or package",
    ),
    (("--model", "a:b", "--layers", 3), "--layers has no meaning here: --model is a:b, whose callable decides"),
    (("--model", "no_such_module:b"), "model no_such_module:b: cannot be imported"),
    (("--model", "tiny"), "--devices is missing. Maybe --devices 4"),
    (
        ("--model", "tiny", "--devices", 4, "--layers", 3),
        "--layers is 3, but there are 4 stages, and each needs one. Maybe",
    ),
    (
        ("--model", "tiny", "--devices", 2, "--modes", "offload,sparse"),
        "--modes has 'sparse', but must be offload, offload-bf16, offload-fp8, full",
    ),
    (
        ("--model", "tiny", "--devices", 2, "--modes", "selective-9"),
        "--modes has 'selective-9', which no stage of tiny",
    ),
    (("--model", "tiny", "--format", "layers", "--modes", "full"), "--modes is full, but of a layer only 'selective'"),
    (("--from-table", TABLE, "--modes", "full"), "--modes has no meaning here: --format is layers"),
    (("--from-table", TABLE, "--placement", "v"), "--placement has no meaning here: --format is layers, which 'optpi"),
    (("--from-table", TABLE, "--format", "layers", "--devices", 4), "--devices has no meaning here: --format is"),
    (("--from-run", "x", "--placement", "v"), "--placement has no meaning here: --from-run takes stages"),
    (("--model", "tiny", "--format", "layers", "--microbatches", 7), "--microbatches has no meaning here: --format"),
    (("--model", "tiny", "--devices", 2, "--sequence", 33), "--sequence is 33, but the tiny model takes at most 32"),
    (("--model", "tiny", "--stages", 3, "--placement", "v"), "--stages is 3, but placement v puts 2 on each device"),
    (("--model", "tiny", "--stages", 3, "--devices", 2), "--stages is 3, but placement linear puts 1 on each of 2 dev"),
    (("--model", "tiny", "--stages", 2, "--placement", "x"), "--placement 'x' is not a placement. Maybe one of linear"),
    (
        ("--model", "tiny", "--format", "layers"),
        "--layers is missing, but a layer profile needs the number of layers. Maybe",
    ),
    (("--model", "tiny", "--format", "layers", "--layers", 2, "--check"), "--check needs a problem to schedule"),
    (("--from-table", TABLE, "--slices", "4"), "--slices has no meaning here: --from-table takes everything"),
    (("--model", "tiny", "--devices", 2, "--slice-by", "length"), "--slice-by has no meaning here: --slices is not"),
    (
        ("--model", "tiny", "--devices", 2, "--slices", "1"),
        "--slices holds '1', but a sequence is cut into 2 slices or",
    ),
    (("--model", "tiny", "--devices", 2, "--slices", "2,4"), "--slices holds 2 numbers, but a problem has one number"),
    (("--model", "tiny", "--devices", 2, "--slices", "33"), "--slices holds 33, but a sequence of tiny GPT"),
    (
        ("--model", "tiny", "--format", "layers", "--layers", 2, "--slices", "2", "--slice-by", "length"),
        "--slice-by has no meaning here: --format is layers",
    ),
    (("--from-table", TABLE, "--stages", 200), "--placement gives 200 stages on 200 devices, into which 102 layers"),
    (("--from-table", TABLE, "--stages", 2), "the parameters of a device's stages at most 67.1 GiB"),
    (("--from-table", TABLE, "--format", "problem"), "--devices is missing"),
    (("--from-table", TABLE, "--machine", "h100"), "--machine has no meaning here: --from-table takes everything"),
    (
        ("--model", "tiny", "--layers", 2, "--machine", "h100", "--devices", 2),
        "--devices has no meaning here: --machine predicts layers, which 'optpipe plan' cuts",
    ),
    (
        ("--model", "tiny", "--layers", 2, "--machine", "h100", "--rounds", 2),
        "--rounds has no meaning here: --machine computes nothing",
    ),
    (("--model", "tiny", "--layers", 2, "--machine", "h10"), "--machine is 'h10', which is no known machine and no"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options(cli: Cli, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    out = tmp_path / "out.json"
    run = cli("profile", *options, "-o", out)
    assert run.code == 2
    assert message in run.err
    assert not out.exists()


def test_ctrl_c_leaves_no_file(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("optpipe.profile.measured.measure_op_times", interrupted)
    out = tmp_path / "problem.json"
    run = cli("profile", *QUICK, "--devices", 2, "-o", out)
    assert run.code == 130
    assert "Traceback" not in run.err
    assert list(tmp_path.glob("*.json")) == []


@pytest.mark.torchrun
def test_two_processes_measure_a_stage_each(run_ranks: RunRanks, tmp_path: Path) -> None:
    out = tmp_path / "problem.json"
    options = ("--layers", "3", "--slices", "2", "-o", str(out))
    run_ranks(Path(__file__).parent / "main_worker.py", 2, "profile", *QUICK, *options)
    problem = Problem.load(out)
    assert [stage.device for stage in problem.stages] == [0, 1]
    assert "transfers: gloo between processes" in problem.source
    assert problem.transfer_us[0] > 0  # type: ignore[index, operator]
    assert problem.stages[0].activation_bytes > problem.stages[1].activation_bytes > 0, "two layers of three, and one"
    assert problem.slices is not None
    cut = problem.slices.factors.bytes or [1, 1]
    kept = [stage.slice_gradient_bytes * cut[0] for stage in problem.stages]
    assert kept == pytest.approx([2 * 2 * 4 * 32 * 4 * cut[0], 2 * 4 * 32 * 4 * cut[0]], abs=1), "of the first slice"


def test_a_check_whose_peaks_differ_ends_with_exit_code_1(cli: Cli, tmp_path: Path) -> None:
    options = ("--devices", 2, "--microbatches", 4, "--rounds", 2, "--check")
    run = cli("profile", "--model", "tests.optpipe.train.odd_stages:growing", *options, "-o", tmp_path / "problem.json")
    assert run.code == 1
    assert re.search(
        r"error: memory is not as predicted: device 1 held [\d,]+ bytes at its peak, but [\d,]+ are", run.err
    )
    assert "device 1: peak" in run.out


def test_data_shows_the_spread_and_a_margin_leaves_room(cli: Cli, tmp_path: Path) -> None:
    out, stages = tmp_path / "problem.json", "tests.optpipe.train.odd_stages"
    options = ("--devices", 2, "--rounds", 1, "--memory", "100KB", "--check", "-o", out)
    data = ("--model", f"{stages}:experts", "--data", f"{stages}:many")
    run = cli("profile", *data, *options)
    assert run.code == 0
    assert "stage 1: sizes depend on the data, over 2 microbatches: activation" in run.out
    whole = Problem.load(out)
    assert cli("profile", *data, *options, "--memory-margin", "10%").code == 0
    for a, b in zip(whole.devices, Problem.load(out).devices, strict=True):
        assert (a.memory_bytes or 0) - (b.memory_bytes or 0) == 10_000


def test_a_margin_of_nothing_is_refused(cli: Cli, tmp_path: Path) -> None:
    run = cli("profile", *QUICK, "--devices", 2, "--memory-margin", "10%", "-o", tmp_path / "problem.json")
    assert run.code == 2
    assert "--memory-margin has no meaning here: --memory is not given" in run.err
