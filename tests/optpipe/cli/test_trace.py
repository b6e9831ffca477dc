"""A step is recorded by `train --trace`, compared by `trace`, drawn, and exported; what cannot be is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from instances.schedules import one_f_one_b
from optpipe.schedule import schedule_text
from optpipe.trace import Trace
from optpipe.trace.compare import Span, planned_spans
from optpipe.units import idle_text, time_text, time_unit
from tests.optpipe.cli.conftest import Cli, Run
from tests.optpipe.plot.schedules import pair
from tests.optpipe.trace.traces import trace_data, trace_of
from tests.ranks import RunRanks

WORKER = Path(__file__).parent / "main_worker.py"


@pytest.fixture
def schedule_file(tmp_path: Path) -> Path:
    """A schedule to train."""
    path = tmp_path / "schedule.json"
    path.write_text(schedule_text(one_f_one_b(2, 4, moved=[(0, 1), (0, 2)])))
    return path


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """A step that ran as planned, a device a process."""
    path = tmp_path / "trace.json"
    path.write_text(trace_of(pair()).to_json())
    return path


def test_train_records_a_step_after_warm_up(cli: Cli, schedule_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    run = cli("train", "--schedule", schedule_file, "--model", "tiny", "--steps", "5", "--trace", out)
    assert run.code == 0
    trace = Trace.load(out)
    assert trace.step == 3
    assert "re-timed: the devices ran in one process, in turns" in run.out
    assert f"wrote {out}; see 'optpipe trace {out}'" in run.out
    again = cli("trace", out)
    assert again.code == 0
    assert all(text in again.out for text in ("idle planned", "largest differences", "F of stage 1"))
    assert "transfers" not in again.out  # in one process no message is waited for


def test_train_as_one_json_document(cli: Cli, schedule_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    options = ("--model", "tiny", "--steps", "2", "--trace", out, "--trace-step", "0", "--json")
    document = cli("train", "--schedule", schedule_file, *options).document
    assert Trace.load(out).step == 0
    assert document["trace"] == cli("trace", out, "--json").document
    assert document["trace"]["basis"] == "re-timed"
    assert len(document["losses"]) == 2


def test_train_without_trace_has_none(cli: Cli, schedule_file: Path) -> None:
    run = cli("train", "--schedule", schedule_file, "--model", "tiny", "--steps", "1", "--json")
    assert "trace" not in run.document


def test_comparison_as_text_and_json(cli: Cli, trace_file: Path) -> None:
    text = cli("trace", trace_file).out
    clocks = time_text(Trace.load(trace_file).clock_error_us)
    assert f"measured: each device ran in its own process; clocks agree to within {clocks}, so" in text
    step = time_text(pair().value_us)
    assert f"step: planned {step}, measured {step}, ratio 1.000" in text
    idle = idle_text(pair().idle_us(1), time_unit(pair().value_us))
    assert text.count(idle) == 2  # planned and measured
    document = cli("trace", trace_file, "--json").document
    assert document["step_us"] == document["planned_step_us"] == pair().value_us
    assert len(document["devices"]) == 2
    assert len(document["differences"]) == 10
    assert document["differences"][0].keys() == {
        "op",
        "device",
        "planned_us",
        "measured_us",
        "difference_us",
        "on_path",
    }


def test_picture(cli: Cli, trace_file: Path, tmp_path: Path) -> None:
    run = cli("trace", trace_file, "--plot", tmp_path / "step.svg")
    assert f"wrote {tmp_path / 'step.svg'}" in run.out
    assert "decides the end (measured)" in (tmp_path / "step.svg").read_text()


def test_export_to_chrome_trace(cli: Cli, trace_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "events.json"
    assert cli("export", trace_file, "--to", "chrome-trace", "-o", out).code == 0
    names = [event["name"] for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {"F0.0", "BW1.3", "O0.1", "SEND_F0.0"} <= set(names)


def _refused(run: Run) -> str:
    assert run.code == 2
    return run.err


def test_bad_input_is_named(
    cli: Cli, trace_file: Path, schedule_file: Path, problem_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    csv = _refused(cli("export", trace_file, "--to", "torch-csv", "-o", out))
    assert (
        f"{trace_file}: is a measured step but a schedule is needed. Maybe use 'optpipe trace', or give the sch" in csv
    )
    problem = _refused(cli("export", problem_file, "--to", "chrome-trace", "-o", out))
    assert "is a problem but a measured step or a schedule is needed. Maybe run 'optpipe solve'" in problem
    model = _refused(cli("export", trace_file, "--to", "lp", "-o", out))
    assert f"{trace_file}: is a measured step but a problem or a schedule is needed. Maybe use 'optpipe trace'" in model
    assert "is a schedule but a measured step is needed. Maybe use 'optpipe verify'" in _refused(
        cli("trace", schedule_file)
    )
    assert "has the suffix '.gif'" in _refused(cli("trace", trace_file, "--plot", tmp_path / "step.gif"))
    assert not out.exists()
    train = ("train", "--schedule", schedule_file, "--model", "tiny", "--steps", "2")
    assert "--trace-step is 1, but --trace is missing. Maybe --trace trace.json." in _refused(
        cli(*train, "--trace-step", "1")
    )
    assert "--trace-step is 2 but must be from 0 to 1" in _refused(cli(*train, "--trace", out, "--trace-step", "2"))
    nowhere = schedule_file / "trace.json"
    assert "cannot be written" in _refused(cli(*train, "--trace", nowhere))


@pytest.mark.torchrun
def test_ranks_gather_one_trace_on_one_clock(run_ranks: RunRanks, schedule_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    options = ("--schedule", str(schedule_file), "--model", "tiny", "--steps", "2", "--trace", str(out))
    run_ranks(WORKER, 2, "train", *options)
    trace = Trace.load(out)
    assert [device.process for device in trace.devices] == [0, 1]
    assert trace.devices_ran_at_once
    assert trace.clock_error_us == 0.0  # two processes of one host
    found = list(trace.messages())
    assert len(found) == 8
    assert all(send.start_us < user.start_us for send, user in found)
    assert all(device.memory.bytes[-1] == 0 for device in trace.devices)
    assert [device.peak_bytes for device in trace.devices] == [d.planned_peak_bytes for d in trace.devices]


def test_a_plan_that_does_not_fit_is_of_another_model_or_met_a_busy_machine(cli: Cli, tmp_path: Path) -> None:
    schedule, path = pair(), tmp_path / "trace.json"
    slow = {op: Span(100 * span.start_us, 100 * span.end_us) for op, span in planned_spans(schedule).items()}
    data = trace_data(schedule, slow)
    name = schedule.problem.name
    for source, note in (
        ("small GPT; torch 2", f"the plan is of {name or 'a problem without a name'!r}, but the step ran 'small GPT'."),
        (f"{name}; torch 2", "compute took 100 times as long as planned. Maybe other programs kept the machine busy"),
    ):
        path.write_text(json.dumps(data | {"source": source}))
        assert f"note: {note}" in cli("trace", path).out
