"""What is measured of each step, and that files are whole however a run ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optpipe.compile import compile_schedule
from optpipe.schedule_text import schedule_text
from optpipe.train import ModelConfig, OutputConfig, StepReport, TrainingConfig, train
from optpipe.train.launch import Launch
from optpipe.train.model import Model
from optpipe.train.online.events import Events
from optpipe.train.output.leave import leaving
from optpipe.train.output.watch import Watch
from tests.optpipe.runtime.schedules import one_f_one_b
from tests.optpipe.train.output.reports import step
from tests.ranks import RunRanks

WORKER = Path(__file__).parents[2] / "cli" / "main_worker.py"


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
        assert Watch(model, 4, Events(leads=False)).due(4) is measured


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
    with leaving(output, "a run", told.append, leads=True) as report:
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
    with leaving(OutputConfig(metrics=tmp_path / "m.jsonl"), "a run", None, leads=False) as report:
        assert report is None
    assert not list(tmp_path.iterdir())
