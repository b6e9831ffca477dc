"""`optpipe machines`, `fits` and `calibrate`: tables, documents, exit codes and what is refused."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from optpipe.cluster import machine as machine_module
from optpipe.cluster.layers import strategy_layers, strategy_partition
from optpipe.cluster.machine import Machine, named_machines
from optpipe.cluster.memory import MemoryModel
from optpipe.cluster.model import load_model
from optpipe.cluster.software import MEGATRON
from optpipe.cluster.strategy import Strategy, Vocabulary
from optpipe.partition import Batching, build_problem, name_with_cut
from optpipe.schedule import Schedule, schedule_text
from solver.build import build_schedule
from solver.layout.fitting import Job
from solver.methods import METHODS, published_orders
from tests.optpipe.cli.conftest import Cli

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "published"
LLAMA = ("llama-3.1-70b", "--gpus", 64, "--machine", "h100", "--sequence", 8192, "--global-batch", 128)


def test_every_named_machine_is_listed(cli: Cli) -> None:
    run = cli("machines")
    assert [line.split()[0] for line in run.out.splitlines()[1:-1]] == list(named_machines())
    [machine] = cli("machines", "h200", "--json").document["machines"]
    assert machine["facts"]["memory_bytes"] == 141 * 2**30
    assert "no source seen" not in cli("machines", "h200").out
    assert cli("machines", "h201").err.endswith("Maybe 'h200'.\n")


def test_a_job_that_fits(cli: Cli) -> None:
    run = cli("fits", *LLAMA, "--tp", 4, "--cp", 2, "--pp", 4, "--vpp", 5, "--json")
    document = run.document
    assert (run.code, document["fits"], document["change"]) == (0, True, None)
    assert [rank["device"] for rank in document["ranks"]] == [0, 1, 2, 3]
    for rank in document["ranks"]:
        kinds = ("weights", "gradients", "optimizer", "activations", "fragments", "context")
        assert sum(rank[f"{kind}_bytes"] for kind in kinds) == pytest.approx(rank["total_bytes"], abs=6)
        assert rank["left_bytes"] == document["memory_bytes"] - rank["total_bytes"]
    assert document["ranks"][0]["activations_bytes"] > document["ranks"][3]["activations_bytes"]


def test_a_job_that_does_not_fit_is_told_the_cheapest_change(cli: Cli) -> None:
    run = cli("fits", *LLAMA, "--tp", 4, "--pp", 2, "--json")
    assert (run.code, run.document["fits"]) == (1, False)
    option, value = run.document["change"]["option"].split()
    changed = ["--tp", 4, "--pp", 2]
    changed[changed.index(option) + 1 if option in changed else slice(2, 2)] = value if option in changed else ()  # type: ignore[call-overload]
    again = cli("fits", *LLAMA, *changed, *([] if option in changed else [option, value]))
    assert (again.code, "fits:" in again.out) == (0, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tp", 4, "--dp", 2), "dp makes dp x tp x cp x pp = 8 GPUs but there are 64. Maybe dp 16."),
        (("--tp", 3), "tp is 3 but must divide the 64 heads and the 64 GPUs. Maybe 2 or 4."),
        (
            ("--pp", 4, "--vpp", 2, "--schedule", "1f1b"),
            "schedule is 1f1b, which runs with vpp 1, but vpp is 2.",
        ),
        (("--pp", 4, "--schedule", "zb-v"), "but vpp is 1. Maybe vpp 2, or schedule 1f1b or zb-h1."),
        (("--pp", 4, "--schedule", "none.json"), "none.json: cannot be read: No such file or directory. Maybe"),
        (("--pp", 4, "--vpp", 2, "--vocabulary", "spread"), "which runs with vpp 1, but vpp is 2. Maybe vpp 1."),
        (
            ("--pp", 4, "--vocabulary", "spread", "--schedule", "1f1b"),
            "schedule is 1f1b, which has the output layer's rows in one stage, but vocabulary is spread. Maybe",
        ),
        (
            ("--pp", 4, "--schedule", "vocab-2"),
            "on all devices, but vocabulary is last. Maybe schedule 1f1b, or vocabulary spread.",
        ),
        (("--vocabulary", "spread"), "vocabulary is spread but pp is 1: one device has all layers. Maybe last."),
        (("--pp", 4, "--vocabulary", "all"), "--vocabulary has 'all' but must be of last, own, spread."),
        (("--pp", 4, "--schedule", "nope"), "method is 'nope'; the methods are"),
        (("--pp", 4, "--schedule", "gis-h"), "schedule cannot run: "),
    ],
)
def test_what_no_trainer_can_start_is_refused(cli: Cli, options: tuple[object, ...], message: str) -> None:
    """Exit code 1 says that a job does not fit, and nothing else."""
    run = cli("fits", *LLAMA, *options)
    assert (run.code, message in run.err) == (2, True), run.err


@pytest.mark.parametrize("place", ["last", "own", "spread"])
def test_the_output_layer_is_held_where_it_is(cli: Cli, place: Vocabulary) -> None:
    """The bytes of a plan's memory model; passes on all devices run in their own published schedule."""
    job = ("gemma-2-9b", "--gpus", 8, "--machine", "h100", "--sequence", 4096, "--global-batch", 64, "--pp", 8)
    found = cli("fits", *job, "--vocabulary", place, "--json").document["ranks"]
    strategy = Strategy(pipeline=8, vocabulary=place, schedule="vocab-2" if place == "spread" else "1f1b")
    ranks = MemoryModel(load_model("gemma-2-9b"), strategy, 4096, 64).devices()
    for kind in ("weights", "gradients", "optimizer"):
        assert [one[f"{kind}_bytes"] for one in found] == [round(getattr(held, kind)) for held in ranks]
    present = [held.activations + held.logits + held.transient for held in ranks[:-1]]
    assert [one["activations_bytes"] for one in found[:-1]] == pytest.approx(present, rel=0.01)
    if place == "spread":
        assert len({one["weights_bytes"] for one in found[3:]}) == 1, "as many layers and rows on each of these"


def test_a_schedule_from_a_file_is_held_as_it_is(cli: Cli, tmp_path: Path) -> None:
    """GPipe holds every microbatch."""
    job = (*LLAMA, "--tp", 8, "--pp", 8)
    cli("solve", *_problem(cli, tmp_path), "-o", tmp_path / "gpipe.json", "--method", "gpipe")
    held = [
        cli("fits", *job, "--schedule", schedule, "--json").document["ranks"][7]["activations_bytes"]
        for schedule in ("gpipe", tmp_path / "gpipe.json", "1f1b")
    ]
    assert held[0] == held[1] > 8 * held[2]


def _schedule_file(
    folder: Path, method: str, offload: bool = False, modes: tuple[str, ...] = ()
) -> tuple[Path, Schedule]:
    """A schedule of an uneven cut, as a plan writes it."""
    job = Job(load_model("llama-3.1-8b"), named_machines()["h100"], 12288, 64, MEGATRON)
    strategy = Strategy(pipeline=4, data=2, stage_layers=(6, 9, 9, 8))
    layers = strategy_layers(job.model, job.machine, strategy, job.sequence)
    layout = strategy_partition(job.model, strategy)
    name = name_with_cut(layers, layout)
    problem = build_problem(layers, layout, Batching(1, 32), offload=offload, modes=modes, name=name)
    assert problem is not None
    schedule = build_schedule(problem, published_orders(METHODS[method], problem), 0.0, method, 0.0)
    (folder / "schedule.json").write_text(schedule_text(schedule))
    return folder / "schedule.json", schedule


FILE_JOB = ("llama-3.1-8b", "--gpus", 8, "--machine", "h100", "--sequence", 12288, "--global-batch", 64)


@pytest.mark.parametrize(
    ("method", "offload"), [("1f1b", False), ("ada-offload", True)], ids=["cut", "cut and offload"]
)
def test_a_plans_schedule_is_judged_with_its_cut_and_copies(
    cli: Cli, tmp_path: Path, method: str, offload: bool
) -> None:
    file, schedule = _schedule_file(tmp_path, method, offload)
    assert any(device.offload for device in schedule.devices) == offload
    run = cli("fits", *FILE_JOB, "--pp", 4, "--schedule", file, "--json")
    assert (run.code, run.document["cut"]) == (0, [7, 9, 9, 9])
    held = [rank["activations_bytes"] for rank in run.document["ranks"]]
    assert held == [device.peak_bytes_any_timing for device in schedule.devices]
    assert f"cut 7,9,9,9, {file} says it" in cli("fits", *FILE_JOB, "--pp", 4, "--schedule", file).out.replace("\n", "")


def test_the_modes_of_a_file_say_what_is_recomputed(cli: Cli, tmp_path: Path) -> None:
    file, schedule = _schedule_file(tmp_path, "1f1b-recompute", modes=("selective",))
    for recompute in ("none", "full"):
        run = cli("fits", *FILE_JOB, "--pp", 4, "--schedule", file, "--recompute", recompute, "--json")
        held = [rank["activations_bytes"] for rank in run.document["ranks"]]
        assert held == [device.peak_bytes_any_timing for device in schedule.devices]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--pp", 2), "schedule has 4 devices, but pp is 2. Maybe --pp 4."),
        (("--pp", 4, "--vpp", 2), "schedule has 1 stages on each device, but vpp is 2. Maybe --vpp 1."),
        (("--pp", 4, "--microbatch-size", 2), "schedule runs 32 microbatches, but a step has 16. Maybe another"),
        (
            ("--pp", 4, "--vocabulary", "spread"),
            "rows in one stage, but vocabulary is spread. Maybe --vocabulary last.",
        ),
    ],
)
def test_a_schedule_of_another_job_is_refused(
    cli: Cli, tmp_path: Path, options: tuple[object, ...], message: str
) -> None:
    file, _ = _schedule_file(tmp_path, "ada-offload", offload=True)
    run = cli("fits", *FILE_JOB, *options, "--schedule", file)
    assert (run.code, message in run.err) == (2, True), run.err


def test_offloads_of_a_file_need_a_rate_of_copies(cli: Cli, tmp_path: Path) -> None:
    file, _ = _schedule_file(tmp_path, "ada-offload", offload=True)
    facts = (Path(machine_module.__file__).parent / "machines" / "h100.toml").read_text().splitlines()
    machine = tmp_path / "machine.toml"
    machine.write_text("\n".join(line for line in facts if "host_bytes" not in line))
    job = [machine if word == "h100" else word for word in FILE_JOB]
    run = cli("fits", *job, "--pp", 4, "--schedule", file)
    assert (run.code, "offload is yes but host_bytes_per_s of" in run.err) == (2, True), run.err


@pytest.mark.parametrize("fixed", [{}, {"--dp": "4"}], ids=["replicas left over", "replicas given"])
@pytest.mark.parametrize(("sequence", "schedule"), [(16384, {}), (4096, {"--schedule": "gpipe"})])
def test_the_cheapest_change_fits_as_the_command_that_it_makes(
    cli: Cli, sequence: int, schedule: dict[str, str], fixed: dict[str, str]
) -> None:
    job = ("llama-3.1-8b", "--gpus", 8, "--machine", "h100", "--sequence", sequence, "--global-batch", 64)
    options = {"--pp": "2"} | schedule | fixed
    run = cli("fits", *job, *chain.from_iterable(options.items()), "--json")
    assert run.code == 1
    words = run.document["change"]["option"].split()
    options |= dict(zip(words[::2], words[1::2], strict=True))
    assert cli("fits", *job, *chain.from_iterable(options.items())).code == 0


def test_what_is_proposed_exists(cli: Cli) -> None:
    """No pipeline is longer than the GPUs."""
    job = ("llama-3.1-405b", "--gpus", 8, "--machine", "h100", "--sequence", 4096, "--global-batch", 64)
    run = cli("fits", *job, "--pp", 8, "--recompute", "full")
    assert (run.code, run.out.splitlines()[-1]) == (1, "no single change of it fits. Maybe more GPUs.")


def _problem(cli: Cli, folder: Path) -> tuple[Path]:
    from instances import uniform

    path = folder / "problem.json"
    path.write_text(uniform(8, 128).to_json())
    return (path,)


def test_calibration_writes_a_machine_and_checks_it(cli: Cli, tmp_path: Path) -> None:
    rows, models, ours = PUBLISHED / "steps.csv", PUBLISHED / "models.json", tmp_path / "ours.toml"
    run = cli("calibrate", rows, "--machine", "b200", "--models", models, "-o", ours)
    assert (run.code, f"wrote {ours}" in run.out) == (0, True)
    assert Machine.load(ours).facts == named_machines()["b200"].facts
    document = cli("calibrate", rows, "--machine", ours, "--models", models, "--check", "--json").document
    errors = sorted(abs(row["error"]) for row in document["rows"] if row["error"] is not None)
    assert document["median_error"] == pytest.approx(errors[len(errors) // 2], abs=0.002)
    assert document["median_error"] < 0.03
    assert document["median_memory_error"] < 0.03
    assert {"id", "predicted_s", "measured_s", "error", "predicted_peak_gib", "measured_peak_gib", "fits"} <= set(
        document["rows"][0]
    )
    reasons = {one["reason"] for one in document["skipped"]}
    assert {"does not name its machine", "was measured on h100", "sequence is not stated"} <= reasons


def test_a_check_lists_what_cannot_be_predicted(cli: Cli, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(
        "id,model,machine,gpus,sequence,global_batch\na,llama-3.1-8b,b200,8,8192,64\nb,none,h100,8,8192,64\n"
    )
    document = cli("calibrate", rows, "--machine", "h100", "--check", "--json").document
    assert document["rows"] == []
    assert document["skipped"] == [
        {"id": "a", "reason": "was measured on b200"},
        {"id": "b", "reason": "model 'none' is not known"},
    ]
    assert document["median_error"] is document["p90_error"] is document["median_memory_error"] is None
    assert cli("calibrate", rows, "--machine", "h100", "--check").code == 0
    assert cli("calibrate", rows, "--machine", "h100").code == 2


def test_what_cannot_be_calibrated(cli: Cli, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("model,gpus,sequence,global_batch,seconds_per_step\nllama-3.1-8b,8,8192,64,3\n")
    run = cli("calibrate", rows, "--machine", "h100")
    assert (run.code, "has 1 rows of h100 with a time" in run.err) == (2, True)
    checked = cli("calibrate", rows, "--machine", "h100", "--check", "--json")
    assert (checked.code, len(checked.document["rows"])) == (0, 1)
    assert cli("calibrate", rows, "--machine", "h100", "--check", "-o", tmp_path / "x.toml").code == 2
    assert cli("calibrate", tmp_path / "none.csv", "--machine", "h100").code == 2
