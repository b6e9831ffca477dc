"""A run that is recorded is planned without its model, and takes the memory that the plan says."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from optpipe.cli.app import command_line
from optpipe.compile import compile_schedule
from optpipe.compile.memory import planned_peaks_bytes
from optpipe.errors import InputError
from optpipe.pipelining import recording_schedule
from optpipe.problem import Problem
from optpipe.profile.from_run import join_records
from optpipe.trace.document import Trace
from optpipe.trace.record import load_records
from optpipe.verify import verify
from solver.build import build_schedule
from tests.ranks import RunRanks

WORKER = Path(__file__).parent / "recorder_worker.py"
MODES = ["full", "full+offload"]
CASES: list[dict[str, Any]] = [
    {"name": "kept", "placement": [0, 1, 1, 0], "reshard": False, "reduce_every": None, "modes": MODES},
    {"name": "resharded", "placement": [0, 1], "reshard": True, "reduce_every": None, "modes": MODES},
    {"name": "often", "placement": [0, 1, 0, 1], "reshard": False, "reduce_every": 2, "modes": MODES},
    {"name": "plain", "placement": [0, 1], "reshard": None, "reduce_every": None, "modes": ["offload-bf16"]},
]
NAMES = [case["name"] for case in CASES]

Run = tuple[Path, list[list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def run(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The folder of the records, and for each case what each rank found."""
    folder = tmp_path_factory.mktemp("records")
    run_ranks(WORKER, 4, str(folder), json.dumps(CASES))
    found = [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(4)]
    return folder, [list(ranks) for ranks in zip(*found, strict=True)]


@pytest.mark.torchrun
@pytest.mark.parametrize("case", range(len(CASES)), ids=NAMES)
def test_the_planned_peak_is_the_measured_one(run: Run, case: int) -> None:
    """On another schedule than the recorded one, to which all ranks changed between two steps."""
    for rank in run[1][case]:
        assert rank["offloads"] > 0, "the plan moves activations"
        lossy = CASES[case]["modes"] == ["offload-bf16"]
        assert set(rank["kinds"]) >= ({"B", "BW"} if lossy else {"C", "CB", "CBW"})
        assert rank["modes"] == sorted(CASES[case]["modes"])
        assert (rank["gradient_bytes"] > 0) == (CASES[case]["reshard"] is not None)
        assert rank["error"] < (2.0**-8 if lossy else 1e-5)
        assert rank["measured_bytes"] == pytest.approx(rank["planned_bytes"], rel=0.02), run[1][case]


@pytest.mark.torchrun
def test_every_kind_of_op_has_its_time(run: Run) -> None:
    recorded = join_records(load_records(run[0] / "kept"))
    for costs in recorded.stages:
        assert {"F", "B", "W", "BW", "O", "R", "GATHER", "REDUCE"} <= costs.times_us.keys()
        assert costs.replica.gathered_bytes == costs.replica.gradient_bytes == 2 * 8416 * 4, "two whole blocks"
        assert not costs.estimated
    crossed = [forward is not None and backward is not None for forward, backward in recorded.transfers_us]
    assert crossed == [True, False, True], "stages 1 and 2 share a device"


@pytest.mark.torchrun
def test_the_command_writes_a_problem(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    options = ["--from-run", str(run[0] / "kept"), "-o", str(path), "--memory", "16MiB", "--microbatches", "9"]
    shown = CliRunner().invoke(command_line(), ["profile", *options, "--json"])
    assert shown.exit_code == 0, shown.output
    problem = Problem.load(path)
    assert problem.microbatches == 9
    assert [stage.device for stage in problem.stages] == [0, 1, 1, 0]
    assert all(stage.offload is not None for stage in problem.stages)
    held = 2 * (4 * 8416 * 4 + 2 * 2 * 8416 * 4)  # two stages: own halves four times, whole parameters and gradients
    for device in problem.devices:
        assert device.memory_bytes is not None
        assert 16 * 2**20 - held - 4 * 8416 * 4 <= device.memory_bytes < 16 * 2**20 - held, "and buffers of collectives"
    assert [mode.name for mode in problem.stages[1].modes] == MODES
    assert [mode.name for mode in problem.stages[0].modes] == ["full"], "its input is the batch: nothing is kept"
    for stage in problem.stages:
        assert all(mode.recompute_us > 0 and mode.segment_bytes for mode in stage.modes)
    table = CliRunner().invoke(command_line(), ["profile", *options, "--modes", "full"])
    assert "gather" in table.output
    assert "stage 1, full: keeps 64.0 KiB of" in table.output
    limited = Problem.load(path).stages[1]
    assert limited.offload is None
    assert [mode.name for mode in limited.modes] == ["full"]
    unknown = CliRunner().invoke(command_line(), ["profile", *options, "--modes", "selective"]).exception
    assert "'selective', but the modes of the recorded run are offload, full, full+offload" in str(unknown)
    too_small = CliRunner().invoke(command_line(), ["profile", *options[:4], "--memory", "100KB"]).exception
    assert isinstance(too_small, InputError)
    assert "Maybe shard more" in str(too_small)


@pytest.mark.torchrun
def test_a_recorded_run_is_compared_with_its_plan_and_says_what_collectives_take(run: Run, tmp_path: Path) -> None:
    written = tmp_path / "trace.json"
    shown = CliRunner().invoke(command_line(), ["trace", str(run[0] / "kept"), "--json", "-o", str(written)])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.output)
    recorded = join_records(load_records(run[0] / "kept"))
    assert found["basis"] == "measured", "each rank is a process"
    assert 0.5 < found["work_ratio"] < 2, "planned are the medians of the step, since no times were"
    assert {kind["planned_us"] > 1 for kind in found["kinds"] if kind["kind"] in ("F", "B", "W")} == {True}
    for d, device in enumerate(found["devices"]):
        once = [costs.times_us["GATHER"] for s, costs in enumerate(recorded.stages) if recorded.placement[s] == d]
        assert device["collectives_us"] > 0.1 * sum(once)
        assert 0 < device["bubble"] < 1
        assert device["peak_bytes"] > 0
    assert Trace.load(written).schedule.method == "recording"
    table = CliRunner().invoke(command_line(), ["trace", str(written)])
    assert "in gathers of parameters and reductions of gradients" in " ".join(table.output.split())


@pytest.mark.torchrun
def test_a_run_that_recomputes_everything_shows_whole_activations(run: Run) -> None:
    """Records of the microbatches in the mode `full` alone, as if no other had run."""
    records = load_records(run[0] / "kept")
    alone = []
    for record in records:
        full = {(stage.stage, i) for stage in record.stages for i in stage.modes["full"]}

        def only(columns: Any, full: set[tuple[int, int]] = full) -> Any:
            keys = zip(columns.stage, columns.microbatch, columns.kind, strict=True)
            at = [k for k, (s, i, kind) in enumerate(keys) if (s, i) in full or kind in ("GATHER", "REDUCE")]
            names = type(columns).model_fields
            return columns.model_copy(update={name: [getattr(columns, name)[k] for k in at] for name in names})

        stages = [one.model_copy(update={"modes": {"full": one.modes["full"]}}) for one in record.stages]
        rows = {"steps": [only(step) for step in record.steps], "memory": only(record.memory)}
        alone.append(record.model_copy(update=rows | {"stages": stages}))
    for one, all_ in zip(join_records(alone).stages, join_records(records).stages, strict=True):
        assert one.activation_bytes == pytest.approx(all_.activation_bytes, rel=0.02)
        assert one.times_us["F"] > 0
        assert one.modes["full"]["kept_bytes"] == all_.modes["full"]["kept_bytes"]


@pytest.mark.torchrun
def test_memory_decides_how_often_gradients_are_reduced(run: Run) -> None:
    recorded = join_records(load_records(run[0] / "kept"))
    problem = recorded.problem(6)
    one_at_a_time = recording_schedule(recorded.placement, 6, offload=False)
    schedule = build_schedule(problem, one_at_a_time.orders, 0.0, "by hand", 0.0)

    def peak(every: int | None) -> int:
        program = compile_schedule(schedule, reduce_gradients=True, gather_parameters=True, reduce_every=every)
        peaks = planned_peaks_bytes(program, problem, recorded.message_bytes, recorded.replicas)
        for costs, device in zip(recorded.stages, recorded.placement, strict=True):
            peaks[device] += costs.parameter_bytes
        return max(peaks)

    once, often = peak(None), peak(1)
    assert often < once, "gradients of one stage at a time"
    assert recorded.reduce_every(schedule, once) is None
    assert recorded.reduce_every(schedule, once - 1) is not None
    every = recorded.reduce_every(schedule, often)
    assert every is not None
    assert peak(every) <= often < peak(every + 1 if every < 5 else None)
    with pytest.raises(InputError, match=r"1 B too few for this schedule however often gradients are reduced"):
        recorded.reduce_every(schedule, min(peak(k) for k in range(1, 6)) - 1)


@pytest.mark.torchrun
def test_reducing_after_every_microbatch_leaves_more_memory(run: Run, tmp_path: Path) -> None:
    options = ["--from-run", str(run[0] / "kept"), "--memory", "16MiB"]
    found = []
    for k, more in enumerate(([], ["--reduce-every", "1"], ["--reduce-every", "2"])):
        path = tmp_path / f"{k}.json"
        assert CliRunner().invoke(command_line(), ["profile", *options, *more, "-o", str(path)]).exit_code == 0
        found.append([device.memory_bytes for device in Problem.load(path).devices])
    assert found[2] == found[0], "several stages of a device may hold gradients at once"
    assert found[1] == [budget + 2 * 8416 * 4 for budget in found[0] if budget is not None]
    alone = ["profile", "--model", "tiny", "--devices", "2", "-o", str(tmp_path / "x.json"), "--reduce-every", "1"]
    assert "--reduce-every has no meaning here" in str(CliRunner().invoke(command_line(), alone).exception)


@pytest.mark.torchrun
def test_a_run_of_torchs_schedule_has_times_and_sizes(run: Run) -> None:
    recorded = join_records(load_records(run[0] / "torch"))
    assert all({"F", "BW"} <= costs.times_us.keys() for costs in recorded.stages)
    for costs in recorded.stages:
        assert costs.activation_bytes > 10 * 512 * 32 * 4 / 2
        assert "half of BW" in "".join(costs.estimated)
    problem = recorded.problem()
    assert problem.microbatches == 7
    assert all(stage.offload is None for stage in problem.stages), "nothing was moved, so nothing is known of it"
    assert all(stage.backward_input_us == stage.backward_weight_us > 0 for stage in problem.stages)
    plain = CliRunner().invoke(command_line(), ["trace", str(run[0] / "torch")]).exception
    assert isinstance(plain, InputError)
    assert "has no planned schedule: torch's own ran" in str(plain)


@pytest.mark.torchrun
def test_records_that_do_not_belong_together(run: Run, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no records \(rank0\.json and so on\)\. Maybe the run ended"):
        load_records(tmp_path)
    with pytest.raises(InputError, match=r"Maybe the folder is misspelt"):
        load_records(tmp_path / "none")
    shutil.copy(run[0] / "plain" / "rank0.json", tmp_path)
    with pytest.raises(InputError, match=r"has no record of devices \[1\]"):
        load_records(tmp_path)
    shutil.copy(run[0] / "often" / "rank3.json", tmp_path)
    with pytest.raises(InputError, match=r"placement.*is \[0, 1, 0, 1\] but \[0, 1\] in rank0\.json"):
        load_records(tmp_path)


@pytest.mark.parametrize(("placement", "microbatches"), [([0, 1], 6), ([0, 1, 1, 0], 5), ([1, 0, 0], 1)])
def test_a_schedule_to_record_by_has_every_way_of_a_backward(placement: list[int], microbatches: int) -> None:
    schedule = recording_schedule(placement, microbatches)
    assert verify(schedule).ok, verify(schedule).violations
    kinds = Counter(op.kind for op in schedule.orders.ops() if op.stage == 0)
    assert kinds["B"] == kinds["W"] == (microbatches + 1) // 3
    assert kinds["O"] == kinds["R"] == microbatches // 3
    assert not any(op.kind == "O" for op in recording_schedule(placement, microbatches, offload=False).orders.ops())


@pytest.mark.parametrize("placement", [[0, 1], [0, 1, 1, 0]])
def test_a_schedule_to_record_by_has_every_mode_that_is_asked_for(placement: list[int]) -> None:
    schedule = recording_schedule(placement, 7, modes=MODES)
    assert verify(schedule).ok, verify(schedule).violations
    for s, stage in enumerate(schedule.problem.stages):
        assert schedule.modes is not None
        names = [stage.choices[mode].name for mode in schedule.modes[s]]
        assert Counter(names) == {"kept": 2, "offload": 1, "full": 3, "full+offload": 1}
    lossy = recording_schedule(placement, 4, modes=["offload-fp8"])
    assert verify(lossy).ok, verify(lossy).violations
    assert lossy.mode_names == ["offload-fp8"]
    with pytest.raises(InputError, match=r"microbatches is 6, but 7 options are to be recorded\. Maybe name fewer"):
        recording_schedule(placement, 6, modes=MODES)


@pytest.mark.slow  # the command line is started two and three times
@pytest.mark.torchrun
@pytest.mark.parametrize("seconds", [0, 1])
def test_a_run_plans_itself(run_ranks: RunRanks, tmp_path: Path, seconds: int) -> None:
    """Recorded, then by a published schedule, then by what the search has found; gradients stay."""
    run_ranks(Path(__file__).parent / "online_worker.py", 2, str(tmp_path), str(seconds))
    first, second = (json.loads((tmp_path / f"online{rank}.json").read_text()) for rank in range(2))
    assert first["methods"] == second["methods"], first["log"]
    assert first["methods"][:2] == ["recording", "ada-offload"], first["log"]
    assert len(first["methods"]) == (3 if seconds else 2), first["log"]
    assert max(first["error"], second["error"]) < 1e-6
    assert first["modes"] == second["modes"] == MODES, "the problem has what was recorded"
