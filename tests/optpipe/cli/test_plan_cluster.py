"""`optpipe plan MODEL --gpus N`: table, folder, document, why, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from optpipe.layers import LayerProfile
from optpipe.schedule import Schedule
from tests.optpipe.cli.conftest import Cli

JOB = ("llama-3.1-8b", "--gpus", 16, "--machine", "h100", "--sequence", 8192, "--global-batch", 32)


def test_a_plan_is_a_folder(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    run = cli("plan", *JOB, "--pp", 4, "--time-limit", 6, "-o", folder, "--plot", tmp_path / "plan.svg")
    assert (run.code, "take " in run.out, "legal strategies" in run.out) == (0, True, True)
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["best"]["pp"] == 4
    assert "no strategy takes less than" in (tmp_path / "plan.svg").read_text()
    for one in plan["solved"]:
        assert Schedule.load(folder / one["schedule_file"]).value_us == one["pipeline_us"]
    assert (folder / "schedule.json").exists()
    assert LayerProfile.load(folder / "layers.json").parallel.data * 4 <= 16
    run = cli("export", folder, "--to", "torchtitan", "-o", tmp_path / "new" / "run", "--json")
    assert run.document["files"] == ["launch.sh", "optpipe_plan.py", "schedule.json"]
    assert (tmp_path / "new/run/schedule.json").read_bytes() == (folder / "schedule.json").read_bytes()
    run = cli("export", folder / "plan.json", "--to", "megatron", "-o", tmp_path / "run")
    assert (run.code, f"wrote {tmp_path / 'run' / 'launch.sh'}" in run.out) == (0, True)
    large = ("llama-3.1-405b", "--gpus", 8, "--global-batch", 8, "--time-limit", 1)
    run = cli("plan", *large, "-o", folder, "--plot", tmp_path / "none.png")
    assert (run.code, "none.png is not drawn: nothing fits" in run.err) == (4, True)
    assert [path.name for path in folder.iterdir()] == ["plan.json"], "nothing of the earlier plan is left"
    run = cli("export", folder, "--to", "bridge", "-o", tmp_path / "run")
    assert (run.code, "best is null: no strategy of this plan fits. Maybe plan for more GPUs." in run.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("export", "plan", "--to", "torch-csv"),
            "--to is torch-csv, which takes a schedule, but plan is a plan. Maybe",
        ),
        (("export", "plan", "--to", "megatron", "--drop-offload"), "--drop-offload has no meaning with a plan"),
        (("export", "plan/schedule.json", "--to", "bridge"), "--to is bridge, which takes the folder of a plan, but"),
        (("export", "empty", "--to", "bridge"), "cannot be read: No such file or directory"),
        (("plan", *JOB), "--output is out, which cannot be made a folder: it is a file. Maybe name another one."),
    ],
)
def test_folders_that_are_none(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan/schedule.json").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "out").touch()
    run = cli(*arguments, "-o", "out")
    assert (run.code, message in run.err) == (2, True), run.err


@pytest.mark.parametrize("text", ['{"mine": "measured layers"}', "no JSON"])
def test_a_file_of_no_earlier_plan_is_kept(cli: Cli, tmp_path: Path, text: str) -> None:
    for name in ("plan.json", "layers.json"):
        (tmp_path / name).write_text(text)
    run = cli("plan", *JOB, "-o", tmp_path)
    assert (run.code, "plan.json is of no earlier plan. Maybe name another folder." in run.err) == (2, True)
    assert {path.read_text() for path in tmp_path.iterdir()} == {text}


def test_a_plan_that_is_missing_is_named_before_the_output(cli: Cli, tmp_path: Path) -> None:
    for trainer in ("megatron", "bridge"):
        run = cli("export", tmp_path / "nosuch", "--to", trainer, "-o", tmp_path)
        assert (run.code, "nosuch: cannot be read: No such file" in run.err) == (2, True), run.err


def test_sequences_are_no_longer_than_the_positions_by_default(cli: Cli) -> None:
    job = ("--gpus", 8, "--global-batch", 64, "--time-limit", 0.1, "--json")
    found = [cli("plan", model, *job).document["sequence"] for model in ("gpt2-xl", "llama-3.1-8b")]
    assert found == [1024, 4096]


def test_what_a_strategy_loses(cli: Cli) -> None:
    run = cli("plan", *JOB, "--time-limit", 0.5, "--why", "tp=8,pp=2")
    assert run.code == 0
    assert "bubble" in run.out
    assert "tp8 pp2" in run.out or "tp8 dp" in run.out
    assert "no legal strategy has tp 7" in cli("plan", *JOB, "--time-limit", 0.5, "--why", "tp=7").out
    asked = [cli("plan", *JOB, "--time-limit", 0.5, "--why", f"tp={tp}", "--json").document["why"] for tp in (7, 8)]
    assert asked[0] is None
    assert (asked[1]["tp"], asked[1]["end"], "bubble" in asked[1]["lost_s"]) == (8, "solved", True)


def test_experts_out_of_balance_take_time_and_nothing_leaves(cli: Cli) -> None:
    job = ("mixtral-8x7b", "--gpus", 16, "--machine", "h100", "--global-batch", 64, "--tp", 1, "--pp", 2, "--ep", 8)
    seconds = []
    for more in ((), ("--expert-imbalance", 1.25)):
        run = cli("plan", *job, "--offload", "no", "--time-limit", 4, "--json", *more)
        assert run.code == 0
        assert run.document["fixed"]["offload"] == ["no"]
        assert run.document["solved"] or more
        seconds.append(run.document["best"]["seconds"])
    assert 1.05 < seconds[1] / seconds[0] < 1.25


def test_the_rows_of_an_output_layer_on_all_devices(cli: Cli, tmp_path: Path) -> None:
    """They are a plan's if asked for. No trainer gets such a plan; its layers are planned again as measured ones."""
    job = ("gemma-2-9b", "--gpus", 8, "--global-batch", 32, "--pp", 8, "--sequence", 2048, "--microbatch-size", 1)
    run = cli("plan", *job, "--vocabulary", "spread", "--time-limit", 5, "-o", tmp_path / "plan")
    assert (run.code, "no trainer but optpipe train runs the passes" in run.out) == (0, True)
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert (plan["fixed"]["vocabulary"], plan["best"]["vocabulary"]) == (["spread"], "spread")
    assert Schedule.load(tmp_path / "plan" / "schedule.json").problem.pass_names == ("S", "T")
    for trainer in ("megatron", "torchtitan"):
        run = cli("export", tmp_path / "plan", "--to", trainer, "-o", tmp_path / "run")
        assert (run.code, "best.vocabulary is spread, but no trainer except" in run.err) == (2, True)
    layers = (tmp_path / "plan" / "layers.json", "--global-batch", 32, "--placements", "linear", "--time-limit", 2)
    run = cli("plan", *layers, "--devices", 8, "-o", tmp_path / "again.json", "--json")
    assert run.document["layouts"][0]["value_us"] == pytest.approx(plan["solved"][0]["pipeline_us"], rel=0.05)
    assert run.document["layouts"][0]["megatron_layout"] is None
    assert Schedule.load(tmp_path / "again.json").problem.pass_names == ("S", "T")
    run = cli("plan", *layers, "--devices", 4)
    assert (run.code, "spread.devices is 8, but the pipeline has 4. Maybe --devices 8." in run.err) == (2, True)


def test_what_a_long_output_layer_costs(cli: Cli) -> None:
    job = ("gemma-2-9b", "--gpus", 32, "--global-batch", 256, "--pp", 16, "--time-limit", 0.5)
    run = cli("plan", *job)
    assert "the output layer takes as long as 3.7 layers, and with pp=16 a cut evens out 2.8 at most" in run.out
    assert "with its rows on all devices (--vocabulary spread) a step takes" in run.out
    run = cli("plan", *job, "--why", "vocabulary=last")
    assert re.search(r"dp2 pp16 own head [0-9.]+ s: \+\d+\.\d %", " ".join(run.out.split())), run.out


def test_a_margin_of_memory_is_left(cli: Cli) -> None:
    strategy = ("--pp", 2, "--tp", 1, "--cp", 1, "--vpp", 2, "--time-limit", 0.1)
    job = ("llama-3.1-8b", "--gpus", 16, "--global-batch", 64, "--sequence", 8192, *strategy)
    tight, wide = cli("plan", *job).out, cli("plan", *job, "--memory-margin", "10%").out
    assert re.search(r"fullest rank takes 7\d\.\d GiB of 80.0 GiB, .* left; --memory-margin 10% leaves more", tight)
    [rest] = re.findall(r"fullest rank takes (.*) GiB of 72.0 GiB, .* left$", wide, re.MULTILINE)
    assert float(rest) <= 72


def test_nothing_fits(cli: Cli) -> None:
    job = ("llama-3.1-405b", "--gpus", 8, "--machine", "h100", "--global-batch", 8, "--time-limit", 1)
    run = cli("plan", *job)
    assert (run.code, "nothing fits" in run.out) == (4, True)
    least = min(cli("plan", *job, "--json").document["strategies"], key=lambda one: one["memory_bytes"])
    assert f"the least that is needed is {least['reason']}, with {least['name']}." in run.out


def test_all_activations_leave(cli: Cli) -> None:
    run = cli("plan", *JOB, "--pp", "4,8", "--offload", "yes", "--time-limit", 0.5, "--json")
    assert (run.code, run.document["fixed"]["offload"]) == (0, ["yes"])
    assert {one["offload"] for one in run.document["strategies"]} == {"yes"}
    lost = cli("plan", *JOB, "--pp", "4,8", "--offload", "yes", "--time-limit", 0.5, "--why", "pp=8").out
    assert any(line.startswith("offload ") for line in lost.splitlines())


def test_the_least_memory(cli: Cli) -> None:
    """No legal strategy, in any form of recomputation, holds less by `optpipe fits`' own closed form."""
    fixed = ("--pp", 2, "--microbatch-size", 1, "--overlap", "no")
    run = cli("plan", *JOB, *fixed, "--objective", "memory", "--json")
    plan = run.document
    assert (run.code, plan["objective"], plan["solved"]) == (0, "memory", [])
    ends = [one["end"] for one in plan["strategies"]]
    assert "beaten" not in ends
    sizes = [one["memory_bytes"] for one in plan["strategies"] if one["end"] == "solved"]
    assert sizes == sorted(sizes)
    best = plan["best"]
    assert {name: best[name] for name in ("tp", "cp", "dp", "vpp", "recompute")} == {
        name: plan["strategies"][0][name] for name in ("tp", "cp", "dp", "vpp", "recompute")
    }
    assert (best["recompute"], best["tp"]) == ("full", 8)
    fastest = cli("plan", *JOB, *fixed, "--objective", "time", "--time-limit", 1, "--json").document
    assert fastest["objective"] == "time"
    assert fastest["best"]["seconds"] < best["seconds"]
    assert max(sizes) > 1.2 * min(sizes)
    assert "the least of all strategies" in " ".join(cli("plan", *JOB, *fixed, "--objective", "memory").out.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tp", "two"), "--tp is 'two' but must be numbers. Maybe 2,4,8."),
        (("--sharding", "zero"), "--sharding has 'zero' but must be of none, optimizer, fsdp."),
        (
            ("--schedule", "foo"),
            "--schedule has 'foo' but must be of 1f1b, zb-h1, interleaved-1f1b, zb-v, v-half, v-min, dualpipe-v, "
            "vocab-2.",
        ),
        (("--vocabulary", "all"), "--vocabulary has 'all' but must be of last, own, spread."),
        (
            ("--overlap", "yes"),
            "is fixed: overlap is yes but ep is 1: no exchange of experts is to be hidden. Maybe overlap of no in",
        ),
        (("--devices", 4), "--devices has no meaning with --gpus"),
        (("--plot", "plan.bmp"), "pictures end in .png, .svg, .pdf, .html. Maybe name it plan.svg."),
        (("--objective", "device_span"), "--objective is 'device_span' but must be time or memory with --gpus."),
        (("--offload", "yes", "--pp", 1), "is fixed: offload is yes but pp is 1: the backward follows at once"),
        (("--expert-imbalance", 1.25), "--expert-imbalance has no meaning here: llama-3.1-8b has no experts. Maybe"),
        (("--why", "tp"), "--why has 'tp' but names are tp, cp"),
        (("--why", "tp=8", "--tp", 2), "--why asks for tp 8, but --tp allows 2 alone. Maybe leave one of them out."),
        (("--slice-by", "length"), "--slice-by has no meaning with --gpus"),
        (("--software", "megatron"), "--software is 'megatron' but must be of aleph-alpha-layouts, "),
    ],
)
def test_what_has_no_meaning_is_refused(cli: Cli, options: tuple[object, ...], message: str) -> None:
    run = cli("plan", *JOB, *options)
    assert (run.code, message in run.err) == (2, True)


def test_options_of_a_cluster_need_gpus(cli: Cli, tmp_path: Path) -> None:
    for option in ("--tp", "--machine", "--sequence", "--software"):
        run = cli("plan", tmp_path / "layers.json", "--devices", 4, "--global-batch", 8, option, 8)
        assert (run.code, f"{option} has no meaning without --gpus" in run.err) == (2, True)
    assert "Maybe --devices 4 for a layer profile, or --gpus 64" in cli("plan", "llama-3.1-8b").err
