"""What is measured of each step, and that files are whole however a run ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from instances.schedules import one_f_one_b
from optpipe.compile import compile_schedule
from optpipe.errors import MissingExtraError
from optpipe.schedule import schedule_text
from optpipe.train import ModelConfig, OutputConfig, StepReport, TrainingConfig, train
from optpipe.train.launch import Launch
from optpipe.train.model import Model
from optpipe.train.output import Metrics, Scalars, Watch, open_sinks
from optpipe.train.result import Events, OnlineEvent
from tests.optpipe.train.reports import step
from tests.ranks import RunRanks

WORKER = Path(__file__).parents[1] / "cli" / "main_worker.py"


def test_in_one_process_nobody_waits() -> None:
    reports: list[StepReport] = []
    result = train(TrainingConfig(one_f_one_b(2, 3), ModelConfig("tiny"), steps=2, data_parallel=1), reports.append)
    assert [(r.step, r.tokens, r.bubble) for r in reports] == [(k, 3 * 4 * 32, None) for k in range(2)]
    assert result.bubbles == ()
    assert all(r.tokens_per_second == pytest.approx(r.tokens / r.seconds) for r in reports)
    assert reports[0].peak_memory_bytes > 2**26, "torch alone takes more"


def test_a_run_without_a_step_has_measured_no_wait() -> None:
    """As one that resumes a checkpoint of its last step."""
    schedule = one_f_one_b(1, 2)
    model = Model(TrainingConfig(schedule, ModelConfig("tiny"), steps=4), compile_schedule(schedule), Launch(1))
    model.launch = Launch(1, distributed=True)
    for first, measured in ((0, True), (4, False)):
        model.step_number = first
        assert Watch(model, 4, Events(leads=False)).is_due(4) is measured


@pytest.mark.torchrun
def test_each_process_measures_its_wait(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Every step has its own, also where its outcome is known one step later."""
    (tmp_path / "s.json").write_text(schedule_text(one_f_one_b(2, 4)))
    options = f"--schedule {tmp_path}/s.json --model tiny --steps 4 --metrics {tmp_path}/m.jsonl --json"
    found = json.loads(run_ranks(WORKER, 2, "train", *options.split()))
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(0 < line["bubble"] < 1 for line in lines)
    assert len(found["bubbles"]) == 2
    assert found["bubbles"][0] == pytest.approx(sum(line["bubble"] for line in lines) / 4)


def interrupted_after_two_steps(output: OutputConfig, told: list[StepReport]) -> None:
    with open_sinks(output, "a run", told.append, leads=True) as report:
        assert report is not None
        report(step(0))
        report(step(1))
        raise KeyboardInterrupt


def test_files_are_whole_however_a_run_ends(tmp_path: Path) -> None:
    output = OutputConfig(metrics=tmp_path / "m.jsonl", plot=tmp_path / "run.svg")
    told: list[StepReport] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_after_two_steps(output, told)
    assert len(told) == len((tmp_path / "m.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "run.svg").read_text().rstrip().endswith("</svg>")


def test_other_processes_leave_nothing(tmp_path: Path) -> None:
    with open_sinks(OutputConfig(metrics=tmp_path / "m.jsonl"), "a run", None, leads=False) as report:
        assert report is None
    assert not list(tmp_path.iterdir())


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_there_as_soon_as_its_step_is_done(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m.jsonl")
    metrics(step(0, events=(OnlineEvent(0, "swapped", "a better one"),)))
    [first] = lines(tmp_path / "m.jsonl")
    assert (first["step"], first["loss"], first["tokens_per_second"]) == (0, 5.0, 200.0)
    assert first["events"] == [{"step": 0, "kind": "swapped", "text": "a better one", "seconds": 0.0}]
    metrics.close()


def write(path: Path, numbers: range) -> None:
    metrics = Metrics(path)
    for number in numbers:
        metrics(step(number))
    metrics.close()


def test_a_resumed_run_goes_on_before_what_was_lost(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, range(8))
    with path.open("a") as file:
        file.write('{"step": 8, "lo')  # the process was killed here
    write(path, range(5, 11))
    assert [line["step"] for line in lines(path)] == list(range(11))


def test_another_run_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("notes of mine\n")
    write(path, range(2))
    write(path, range(3))
    assert [line["step"] for line in lines(path)] == [0, 1, 2]


def test_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m.jsonl")
    event = OnlineEvent(0, "timed", "by a broken clock", float("nan"))
    metrics(step(0, loss=float("nan"), gradient_norm=float("inf"), skipped=True, events=(event,)))
    metrics.close()
    [line] = lines(tmp_path / "m.jsonl")
    assert line["events"] == [{"step": 0, "kind": "timed", "text": "by a broken clock", "seconds": None}]
    assert (line["loss"], line["gradient_norm"], line["skipped"]) == (None, None, True)


def test_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"needs tensorboard, which is not installed\. Maybe pip install"):
        Scalars(tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_resumed_run_hides_what_it_repeats(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for numbers in (range(5), range(3, 6)):
        scalars = Scalars(tmp_path)
        for number in numbers:
            scalars(step(number, bubble=0.25))
        scalars.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [entry.step for entry in events.Scalars("loss")] == list(range(6))
    assert {entry.value for entry in events.Scalars("bubble")} == {0.25}
