"""Peaks above plan or budget are failures of a check: for experts, whose sizes depend on the data, above all."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from optpipe.errors import InputError
from optpipe.problem import Problem
from optpipe.profile.subject import load_subject, with_samples
from optpipe.schedule import Schedule, schedule_text
from optpipe.train import CheckResult, ModelConfig, OnlineConfig, OutputConfig, TrainingConfig, train
from solver.solve import solve
from tests.optpipe.profile.subjects import measured
from tests.ranks import RunRanks

STAGES = "tests.optpipe.train.odd_stages"
MAIN = Path(__file__).parents[1] / "cli" / "main_worker.py"
EXPERTS, MANY = f"{STAGES}:experts", f"{STAGES}:many"


def problem(data: str | None = None, memory_bytes: int | None = None) -> Problem:
    """The experts' costs, measured with the microbatch of the model, or with those of `data`."""
    subject = load_subject(EXPERTS)
    return measured(with_samples(subject, data) if data else subject, [0, 1])[0].problem(2, memory_bytes)


def scheduled(found: Problem) -> Schedule:
    return solve(found, "1f1b")


def checked(schedule: Schedule, margin: float = 0.0) -> CheckResult:
    online = OnlineConfig(memory_margin=margin)
    config = TrainingConfig(schedule, ModelConfig(EXPERTS, data=MANY), online=online, steps=1, check=True)
    found = train(config).check
    assert found is not None
    return found


def test_a_peak_above_the_plan_of_the_schedule_fails() -> None:
    found = checked(scheduled(problem()))
    [failure] = found.failures
    device = found.devices[1]
    assert device.schedule_peak_bytes is not None
    assert device.peak_bytes > device.schedule_peak_bytes
    assert failure.startswith(
        f"device 1 held {device.peak_bytes:,} bytes at its peak, but {device.schedule_peak_bytes:,} are planned"
    )
    assert device.peak_bytes <= device.planned_peak_bytes, "the check itself measures every microbatch of the step"


def test_measured_with_all_its_data_the_same_model_passes() -> None:
    found = checked(scheduled(problem(MANY)))
    assert found.failures == ()
    assert [device.peak_bytes for device in found.devices] <= [device.schedule_peak_bytes for device in found.devices]


def test_a_margin_says_how_far_above_is_right() -> None:
    assert checked(scheduled(problem()), margin=0.9).failures == ()


def test_a_peak_above_the_budget_fails_and_names_it() -> None:
    """By the smaller sizes the budget is kept."""
    memory_bytes = 60_000
    schedule = scheduled(problem(memory_bytes=memory_bytes))
    found = checked(schedule)
    [failure] = found.failures
    assert found.devices[1].budget_bytes is not None
    assert f"its budget is {found.devices[1].budget_bytes:,} with its messages" in failure


def test_the_sizes_of_another_model_s_schedule_are_no_plan_for_this_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    found = checked(scheduled(Problem.from_data(problem().to_data() | {"name": "another"})))
    assert found.failures == ()
    assert found.devices[1].schedule_peak_bytes is None
    said = f"budgets: its problem is named 'another', but a profile of this model is named '{EXPERTS}'. Maybe solve"
    assert said in caplog.text
    caplog.clear()
    checked(scheduled(problem(MANY)))
    assert "budgets" not in caplog.text


def test_a_margin_leaves_so_much_of_the_memory_free() -> None:
    found, _ = measured(load_subject(EXPERTS), [0, 1])
    whole, less = found.problem(2, 100_000), found.problem(2, 100_000, 0.1)
    for a, b in zip(whole.devices, less.devices, strict=True):
        assert a.memory_bytes is not None
        assert b.memory_bytes == a.memory_bytes - 10_000
    assert found.layers(100_000, 0.1).memory_bytes == 90_000
    with pytest.raises(InputError, match=r"of which a margin of 90% is kept free"):
        found.problem(2, 10_000, 0.9)


def test_a_step_that_exceeds_the_plan_is_said_in_log_and_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All goes as planned in the second step; in the tenth more rows go to the wide expert."""
    metrics = tmp_path / "metrics.jsonl"
    model = ModelConfig(EXPERTS, data=f"{STAGES}:more_and_more")
    config = TrainingConfig(scheduled(problem()), model, output=OutputConfig(metrics=metrics), steps=12)
    result = train(config)
    said = re.compile(r"in step 9 device 1 held [\d,]+ bytes at its peak, but [\d,]+ are planned: [\d,]+ too many")
    [event] = result.events
    assert event.kind == "memory"
    assert said.match(event.text)
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [[e["text"] for e in step["events"]] for step in steps] == [[]] * 9 + [[event.text]] + [[]] * 2
    [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert event.text in warning.getMessage()


@pytest.mark.torchrun
def test_it_is_said_by_the_leading_process_of_many(run_ranks: RunRanks, tmp_path: Path) -> None:
    """The second process has the device with too much."""
    path = tmp_path / "schedule.json"
    path.write_text(schedule_text(scheduled(problem())))
    options = f"--model {EXPERTS} --data {STAGES}:more_and_more --steps 14 --json"
    found = json.loads(run_ranks(MAIN, 2, "train", "--schedule", str(path), *options.split()))
    [event] = found["events"]
    assert event["text"].startswith("in step 9 device 1 held ")


def test_steps_with_another_model_s_schedule_are_not_metered(caplog: pytest.LogCaptureFixture) -> None:
    renamed = Problem.from_data(problem().to_data() | {"name": "another"})
    model = ModelConfig(EXPERTS, data=f"{STAGES}:more_and_more")
    assert train(TrainingConfig(scheduled(renamed), model, steps=10)).events == ()
    checked_first = train(TrainingConfig(scheduled(renamed), model, steps=10, check=True))
    assert [event.kind for event in checked_first.events] == ["memory"], "held against what the check has measured"
