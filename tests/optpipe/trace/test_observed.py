"""Profiles of other trainers become traces: torch's own classes under torch.profiler, and ranges that are counted."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from optpipe.cli.app import command_line
from optpipe.errors import InputError
from optpipe.simulate import simulate
from optpipe.trace import Trace
from optpipe.trace.compare import compare
from optpipe.trace.observed import load_profiles
from optpipe.verify import verify
from tests.optpipe.trace.megatron_profiles import megatron_orders, megatron_problem, write_profiles
from tests.ranks import RunRanks

WORKER = Path(__file__).parent / "profiled_worker.py"


@pytest.mark.torchrun
def test_a_profile_of_torchs_classes(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(WORKER, 2, str(tmp_path))
    for name, placement in (("gpipe", [0, 1]), ("interleaved", [0, 1, 0, 1])):
        trace = load_profiles([tmp_path / f"{name}{rank}.json" for rank in range(2)])
        assert [stage.device for stage in trace.schedule.problem.stages] == placement
        assert trace.schedule.problem.microbatches == 4
        assert trace.step == 1, "the last of two"
        assert verify(trace.schedule).ok, verify(trace.schedule).violations
        order = [str(op) for op in trace.schedule.orders.devices[1].compute]
        if name == "gpipe":
            assert order == [f"{kind}1.{i}" for kind in ("F", "BW") for i in range(4)]
        for device in compare(trace).devices:
            assert 0 <= device.bubble < 1
    files = [str(tmp_path / f"gpipe{rank}.json") for rank in range(2)]
    written = tmp_path / "trace.json"
    shown = CliRunner().invoke(command_line(), ["trace", *files, "-o", str(written)])
    assert shown.exit_code == 0, shown.output
    assert "idle planned" in shown.output
    assert Trace.load(written).schedule.method == "observed"


def profile(path: Path, *ranges: tuple[str, float, float], cat: str = "user_annotation") -> Path:
    events = [{"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur} for name, ts, dur in ranges]
    more = [{"ph": "X", "cat": cat, "name": "PP:0F0 not one", "ts": 0, "dur": 1}, {"ph": "M", "name": "process_name"}]
    path.write_text(json.dumps({"traceEvents": events + more}))
    return path


@pytest.fixture
def gpipe(tmp_path: Path) -> list[Path]:
    """Two ranks and microbatches by GPipe: F takes 10, BW 20; the second rank waits within its first range."""
    marks = ("forward_step", "forward_step", "backward_step", "backward_step")
    first = zip(marks, (0, 10, 50, 70), (10, 10, 20, 20), strict=True)
    second = zip(marks, (0, 20, 30, 50), (20, 10, 20, 20), strict=True)
    return [profile(tmp_path / "0.json", *first), profile(tmp_path / "1.json", *second)]


def test_a_better_order_of_what_was_observed(gpipe: list[Path]) -> None:
    trace = load_profiles(gpipe)
    assert trace.step_us == 90
    assert [stage.forward_us for stage in trace.schedule.problem.stages] == [10, 10], "without the wait"
    assert [device.bubble for device in compare(trace).devices] == pytest.approx([1 - 60 / 90] * 2)
    assert [device.memory_bytes for device in trace.schedule.problem.devices] == [2, 2], "two in flight"
    shown = CliRunner().invoke(command_line(), ["trace", *map(str, gpipe), "--better", "2", "--json"])
    assert shown.exit_code == 0, shown.output
    better = json.loads(shown.stdout)["better"]
    assert better["in_use_us"] == 90
    assert better["value_us"] == better["bound_us"] == 70, "W apart from B fills every bubble but the first"
    assert better["saved"] == pytest.approx(1 - 70 / 90)


def test_profiles_that_are_none(gpipe: list[Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no ranges of a pipeline"):
        load_profiles([profile(tmp_path / "none.json"), gpipe[1]])
    with pytest.raises(InputError, match="lack F or backward of stage 0"):
        load_profiles([profile(tmp_path / "x.json", ("PP:1F0", 0, 1), ("PP:1B0", 1, 1))])
    packed = gzip.compress(b'{"traceEvents": []}')
    event = b'[{"ph": "X", "name": "PP:0F0", "dur": 1, "ts": 1' + b"0" * 400 + b"}]"
    damaged = {"a.json": b'{"traceEvents": [', "b.json.gz": packed[:-9], "c.json.gz": packed[:12] + bytes(9)}
    damaged |= {"d.json": b"[" * 100_000, "e.json": event, "f.json.gz": b"[]"}
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match="is no Chrome trace"):
            load_profiles([tmp_path / name])


def test_the_gpus_ranges_count_where_there_are_any(tmp_path: Path) -> None:
    path = profile(tmp_path / "gpu.json", ("PP:0F0", 100, 7), ("PP:0B0", 110, 9), cat="gpu_user_annotation")
    data = json.loads(path.read_text())
    data["traceEvents"] += [{"ph": "X", "cat": "user_annotation", "name": "PP:0F0", "ts": 1, "dur": 1}]
    path.write_text(json.dumps(data))
    assert load_profiles([path]).step_us == 19


@pytest.mark.parametrize("gpu", [True, False], ids=["gpu", "cpu"])
@pytest.mark.parametrize(("p", "chunks", "m"), [(3, 1, 5), (2, 2, 4), (4, 2, 8), (2, 3, 6)])
def test_a_profile_of_megatron(p: int, chunks: int, m: int, gpu: bool, tmp_path: Path) -> None:
    """Ops have no numbers, and frames contain others of the same name. Of a GPU the kernels count, not their launch.

    The last rank of 1F1B without chunks runs no forward ahead, so that it alone does not say where a step ends.
    """
    problem, orders = megatron_problem(p, chunks, m), megatron_orders(p, chunks, m)
    trace, simulation = load_profiles(write_profiles(tmp_path, problem, orders, gpu=gpu)), simulate(problem, orders)
    found = trace.schedule
    assert trace.step == 1
    assert [stage.device for stage in found.problem.stages] == [s % p for s in range(p * chunks)]
    assert found.problem.microbatches == m
    assert [list(device.compute.ops) for device in found.devices] == [list(of.compute) for of in orders.devices]
    assert [stage.forward_us for stage in found.problem.stages] == [stage.forward_us for stage in problem.stages]
    assert trace.step_us == pytest.approx(simulation.value_us, abs=0.01)
    assert found.value_us == pytest.approx(simulation.value_us)
    assert verify(found).ok


def test_the_profiler_names_frames_so(tmp_path: Path) -> None:
    """A real profile with stacks of functions that are called and placed as Megatron's are."""
    folder = tmp_path / "megatron" / "core" / "pipeline_parallel"
    folder.mkdir(parents=True)
    calls = "def forward_step(step, x):\n    return step(x)\n\ndef backward_step(y):\n    y.sum().backward()\n"
    (folder / "schedules.py").write_text(calls)
    spec = spec_from_file_location("schedules", folder / "schedules.py")
    assert spec is not None
    assert spec.loader is not None
    schedules = module_from_spec(spec)
    spec.loader.exec_module(schedules)
    layer = torch.nn.Linear(8, 8)

    def forward_step(x: torch.Tensor) -> torch.Tensor:
        return layer(x)  # type: ignore[no-any-return]

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as taken:
        for _ in range(2):
            for y in [schedules.forward_step(forward_step, torch.ones(2, 8)) for _ in range(3)]:
                schedules.backward_step(y)
    taken.export_chrome_trace(str(tmp_path / "rank-0.json"))
    trace = load_profiles([tmp_path / "rank-0.json"])
    assert trace.step == 1
    assert [str(op) for op in trace.schedule.devices[0].compute.ops] == [
        f"{k}0.{i}" for k in ("F", "BW") for i in range(3)
    ]


def test_megatrons_groups_may_be_larger_than_the_pipeline(tmp_path: Path) -> None:
    """By a flag of its own; the profile alone does not tell such groups from more chunks."""
    problem, orders = megatron_problem(2, 2, 5), megatron_orders(2, 2, 5, group=3)
    paths = write_profiles(tmp_path, problem, orders)
    with pytest.raises(InputError, match=r"--chunks is missing: rank-1.json.gz begins a step of 10 forwards with 4"):
        load_profiles(paths)
    trace = load_profiles(paths, chunks=2)
    assert [list(of.compute.ops) for of in trace.schedule.devices] == [list(of.compute) for of in orders.devices]
    shown = CliRunner().invoke(command_line(), ["trace", *map(str, paths), "--chunks", "2", "--better", "1", "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["better"]["saved"] >= 0
    for wrong in ("4", "5"):
        with pytest.raises(InputError, match=f"--chunks is {wrong}, but rank-1.json.gz begins"):
            load_profiles(paths, chunks=int(wrong))


def selected(paths: list[Path], ranks: str, change: Callable[[dict[str, Any]], None] = lambda data: None) -> list[Path]:
    """The profiles of some ranks in some order, after a change of what they contain."""
    for path in set(paths):
        data = json.loads(gzip.decompress(path.read_bytes()))
        change(data)
        path.write_bytes(gzip.compress(json.dumps(data).encode()))
    return [paths[int(rank)] for rank in ranks]


def anonymous(data: dict[str, Any]) -> None:
    del data["distributedInfo"]


def grouped(data: dict[str, Any]) -> None:
    """As Megatron-LM names its groups."""
    groups = [("default_pg", [0, 1, 2, 3]), ("PIPELINE_MODEL_PARALLEL_GROUP", [0, 1, 2, 3])]
    data["distributedInfo"]["pg_config"] = [{"pg_desc": name, "ranks": ranks} for name, ranks in groups]


@pytest.mark.parametrize("change", [anonymous, grouped, lambda data: None], ids=["anonymous", "grouped", "ranked"])
@pytest.mark.parametrize("ranks", ["01", "12", "02", "013", "012", "00", "0", "3210", "10", "0213", "0122"])
def test_ranks_that_are_missing_doubled_or_in_another_order(
    ranks: str, change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    """1F1B: even without any rank stated, the forwards that run ahead do not fit."""
    paths = write_profiles(tmp_path, megatron_problem(4, 1, 8), megatron_orders(4, 1, 8))
    with pytest.raises(InputError, match="Maybe") as caught:
        load_profiles(selected(paths, ranks, change))
    assert "rank-" in f"{caught.value.source} {caught.value}", "a file is named"


@pytest.mark.parametrize(
    ("ranks", "missing"), [("23", "0, 1"), ("13", "0, 2"), ("123", "0"), ("3", "0, 1, 2"), ("0", "1, 2, 3")]
)
def test_the_rest_of_a_pipeline_is_named(ranks: str, missing: str, tmp_path: Path) -> None:
    """By their order the last ranks alone could be a whole pipeline; the groups of processes say that they are none."""
    paths = write_profiles(tmp_path, megatron_problem(4, 1, 8), megatron_orders(4, 1, 8))
    with pytest.raises(
        InputError, match=f"of a pipeline of ranks 0, 1, 2, 3, .* Maybe add the profile of rank {missing}"
    ):
        load_profiles(selected(paths, ranks, grouped))


def test_more_ranks_of_a_job_are_said_where_nothing_names_the_pipeline(tmp_path: Path) -> None:
    """Two pipelines of two ranks could be a job of four; without any rank stated there are the files' names."""
    paths = write_profiles(tmp_path, megatron_problem(4, 1, 8), megatron_orders(4, 1, 8))
    trace = load_profiles(paths[2:])
    assert trace.source.endswith("(of ranks 2, 3; if the pipeline has ranks 0, 1, 2, 3, some are missing)")
    assert "missing" not in load_profiles(paths).source
    named = load_profiles(selected(paths, "123", anonymous)).source
    assert named.endswith("(by their names of ranks 1, 2, 3; if a pipeline has those before, some are missing)")
    assert "missing" not in load_profiles(paths).source


@pytest.mark.parametrize(
    ("ranks", "processes", "divided"),
    [("123", 4, False), ("23", 4, True), ("23", 5, False), ("23", 6, True), ("3", 4, True), ("123", 6, False)],
)
def test_ranks_that_are_no_pipeline_of_any_mesh(ranks: str, processes: int, divided: bool, tmp_path: Path) -> None:
    """By their order they are a whole pipeline; three of four ranks are none, since no mesh has one rank over."""
    paths = write_profiles(tmp_path, megatron_problem(4, 1, 8), megatron_orders(4, 1, 8))
    chosen = selected(paths, ranks, lambda data: data["distributedInfo"].update(world_size=processes))
    if divided:
        assert "some are missing" in load_profiles(chosen).source
        return
    with pytest.raises(InputError, match=f"is of a job of {processes} ranks, .* Maybe a rank is missing") as caught:
        load_profiles(chosen)
    assert caught.value.source == str(chosen[0])


def with_messages(data: dict[str, Any], rank: int, group: str) -> None:
    """The messages of a rank of four, as torch 2.5 and later write them beside the kernels of NCCL."""
    for peer in {rank - 1, rank + 1} & {*range(4)}:
        for name, field in (("send", "Dst Rank"), ("recv", "Src Rank")):
            more = {"Collective name": name, "Process Group Description": group, field: peer}
            event = {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "ts": 1.0, "dur": 1.0}
            data["traceEvents"].append(event | {"args": more})


@pytest.mark.parametrize("stated", [True, False], ids=["ranked", "anonymous"])
@pytest.mark.parametrize("ranks", ["23", "13", "3", "123", "0123"])
def test_messages_name_the_ranks_that_are_missing(ranks: str, stated: bool, tmp_path: Path) -> None:
    """Those of another group, such as a ring of the context, say nothing of the pipeline."""
    paths = write_profiles(tmp_path, megatron_problem(4, 1, 8), megatron_orders(4, 1, 8))
    for rank, path in enumerate(paths):
        data = json.loads(gzip.decompress(path.read_bytes()))
        with_messages(data, rank, "PIPELINE_MODEL_PARALLEL_GROUP")
        data["traceEvents"][-1]["args"] |= {"Dst Rank": 77, "Process Group Description": "CONTEXT_PARALLEL_GROUP"}
        data["distributedInfo"]["world_size"] = 12  # pipelines of 1, 2, 3 and 4 ranks divide it
        if not stated:
            del data["distributedInfo"]
        path.write_bytes(gzip.compress(json.dumps(data).encode()))
    chosen = [paths[int(rank)] for rank in ranks]
    if ranks == "0123":
        assert load_profiles(chosen).step == 1
        return
    with pytest.raises(InputError, match="has messages to or from rank") as caught:
        load_profiles(chosen)
    missing = {"23": "1", "13": "0, 2", "3": "2", "123": "0"}[ranks]
    fix = f"Maybe add the profile of rank {missing}." if stated else "Maybe one is missing."
    assert str(caught.value).endswith(fix)


def test_gpipe_in_another_order(gpipe: list[Path]) -> None:
    with pytest.raises(
        InputError, match=r"has 2 of 2 BW of stage 0 end before those of stage 1, which they need, in 0"
    ):
        load_profiles(gpipe[::-1])


@pytest.mark.parametrize(
    ("ranks", "said"),
    [("1", "receives messages for its first forward"), ("0", "receives messages after its last forward")],
)
def test_messages_say_that_a_rank_is_missing(ranks: str, said: str, gpipe: list[Path]) -> None:
    """Rank 0 waits for gradients, rank 1 for activations: on its own each lacks a neighbour."""
    for path, times in zip(gpipe, ((45, 69), (1, 15)), strict=True):
        data = json.loads(path.read_text())
        data["traceEvents"] += [{"ph": "X", "cat": "cpu_op", "name": "c10d::recv_", "ts": t, "dur": 1} for t in times]
        path.write_text(json.dumps(data))
    assert load_profiles(gpipe).step_us == 90
    with pytest.raises(InputError, match=said):
        load_profiles([gpipe[int(rank)] for rank in ranks])


def test_profiles_of_two_trainers(gpipe: list[Path], tmp_path: Path) -> None:
    path = profile(tmp_path / "torch.json", ("PP:0F0", 0, 7), ("PP:0B0", 10, 9))
    with pytest.raises(InputError, match=r"^has ranges with numbers \(PP:0F0\), others have none"):
        load_profiles([gpipe[0], path])


def test_one_file_of_all_ranks(gpipe: list[Path]) -> None:
    """As tools merge them: all ops would be one device's, at the same times."""
    merged: list[dict[str, Any]] = []
    for rank, path in enumerate(gpipe):
        merged += [event | {"pid": rank} for event in json.loads(path.read_text())["traceEvents"]]
    gpipe[0].write_text(json.dumps({"traceEvents": merged}))
    with pytest.raises(InputError, match=r"has ranges of 2 processes. Maybe give a file for each rank."):
        load_profiles(gpipe[:1])


@pytest.mark.parametrize(("ts", "dur"), [(1e300, 1.0), (float("nan"), 1.0), (0.0, -5.0), (0.0, float("inf"))])
def test_times_that_are_none(ts: float, dur: float, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"PP:0F0 begins at .* us and takes .* us") as caught:
        load_profiles([profile(tmp_path / "rank0.json", ("PP:0F0", ts, dur))])
    assert caught.value.source.endswith("rank0.json")


def test_chunks_are_for_ranges_without_numbers(tmp_path: Path) -> None:
    path = profile(tmp_path / "torch.json", ("PP:0F0", 0, 7), ("PP:0B0", 10, 9))
    with pytest.raises(InputError, match="is for ranges of Megatron-LM"):
        load_profiles([path], chunks=2)
