"""Metrics of each step, and files that are whole however a run ends."""

from __future__ import annotations

import json
import os
import sys
import types
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.utils

from instances.schedules import one_f_one_b
from optpipe.compile import compile_schedule
from optpipe.errors import InputError, MissingExtraError
from optpipe.schedule import schedule_text
from optpipe.train import (
    CheckpointConfig,
    ModelConfig,
    OutputConfig,
    RunFacts,
    StepReport,
    TrainingCallback,
    TrainingConfig,
    train,
)
from optpipe.train.launch import Launch
from optpipe.train.model import Model
from optpipe.train.output import Metrics, TensorBoard, Watch, build_callbacks, following
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
        assert Watch(model, 4, Events(leads=False), print).is_due(4) is measured


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


FACTS = RunFacts("a run", 100, 0, 2, {})


def interrupted_after_two_steps(output: OutputConfig, told: list[StepReport]) -> None:
    callbacks = build_callbacks(output, told.append, (), leads=True)
    with following(callbacks, FACTS):
        callbacks.step(step(0))
        callbacks.step(step(1))
        raise KeyboardInterrupt


def test_files_are_whole_however_a_run_ends(tmp_path: Path) -> None:
    output = OutputConfig(metrics=tmp_path / "m.jsonl", plot=tmp_path / "run.svg")
    told: list[StepReport] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_after_two_steps(output, told)
    assert len(told) == len((tmp_path / "m.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "run.svg").read_text().rstrip().endswith("</svg>")


def test_other_processes_leave_nothing(tmp_path: Path) -> None:
    callbacks = build_callbacks(OutputConfig(metrics=tmp_path / "m.jsonl"), None, [Following([])], leads=False)
    with following(callbacks, FACTS):
        callbacks.step(step(0))
    assert not list(tmp_path.iterdir())


class Following(TrainingCallback):
    """Notes what it is called with; fails in `fails`."""

    def __init__(self, calls: list[Any], fails: str = "") -> None:
        self.calls, self._fails = calls, fails

    def begin(self, run: RunFacts, /) -> None:
        self._note("begin", run.model, run.parameters, run.first_step, run.steps, run.options["seed"])

    def step(self, report: StepReport, /) -> None:
        self._note("step", report.step)

    def evaluation(self, step: int, loss: float, /) -> None:
        self._note("evaluation", step, loss)

    def checkpoint(self, step: int, folder: Path, /) -> None:
        self._note("checkpoint", step, folder.name)

    def end(self, error: BaseException | None, /) -> None:
        self._note("end", error)

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] == self._fails:
            raise ZeroDivisionError(self._fails)


def build_following() -> list[TrainingCallback]:
    return [Following(CALLS), TrainingCallback()]


def build_other() -> object:
    return object()


CALLS: list[Any] = []


def test_a_callback_follows_a_run(tmp_path: Path) -> None:
    """Evaluations are of the same batches: those of the steps after the last."""
    CALLS.clear()
    own: list[Any] = []
    config = TrainingConfig(
        one_f_one_b(2, 2),
        ModelConfig("tiny"),
        steps=4,
        checkpoints=CheckpointConfig(tmp_path, every_steps=3),
        output=OutputConfig(callback=f"{__name__}:build_following"),
        evaluate=2,
        evaluate_every=2,
    )
    result = train(config, callbacks=[Following(own)])
    assert own == CALLS
    losses = [call[2] for call in own if call[0] == "evaluation"]
    assert own == [
        ("begin", "tiny GPT, 2 layers, 4 x 32", result.parameters, 0, 4, 0),
        ("step", 0),
        ("step", 1),
        ("evaluation", 2, losses[0]),
        ("step", 2),
        ("checkpoint", 3, "step-0000000003"),
        ("step", 3),
        ("checkpoint", 4, "step-0000000004"),
        ("evaluation", 4, losses[1]),
        ("end", None),
    ]
    assert losses[1] == result.evaluation_loss
    assert losses[1] < losses[0]
    assert [(event.step, event.kind) for event in result.events] == [(2, "evaluated")]
    unevaluated = replace(config, evaluate=0, evaluate_every=None, checkpoints=CheckpointConfig())
    assert train(unevaluated).losses == result.losses


@pytest.mark.parametrize("fails", ["begin", "step", "end"])
def test_a_callback_that_fails_ends_the_run_and_all_others(fails: str) -> None:
    before: list[Any] = []
    after: list[Any] = []
    config = TrainingConfig(one_f_one_b(2, 2), ModelConfig("tiny"), steps=2)
    callbacks = [Following(before), Following([], fails), Following(after)]
    with pytest.raises(ZeroDivisionError, match=fails):
        train(config, callbacks=callbacks)
    assert before[-1][0] == "end"
    assert isinstance(before[-1][1], ZeroDivisionError)
    assert [call[0] for call in after[-1:]] == ([] if fails == "begin" else ["end"])


def test_what_is_no_callback_is_refused() -> None:
    output = OutputConfig(callback=f"{__name__}:build_other")
    with pytest.raises(InputError, match=r"^returns object, which has no method begin\. Maybe"):
        build_callbacks(output, None, (), leads=True)


class FakeWandB(types.ModuleType):
    """Stand-in for wandb: the calls of `WeightsAndBiases`, with the checks of steps that the service makes."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.exit_codes: list[int] = []

    def init(self, **options: Any) -> Any:
        self.begun = options
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        assert not self.logged or step >= self.logged[-1][0], "what goes back is dropped"
        json.dumps(values)
        self.logged.append((step, values))

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


def test_weights_and_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = TrainingConfig(one_f_one_b(2, 2), ModelConfig("tiny"), steps=4, evaluate=1, evaluate_every=2)
    config = replace(config, output=OutputConfig(wandb="pipelines"))
    losses = train(config).losses
    assert (fake.begun["project"], fake.begun["resume"]) == ("pipelines", "allow")
    assert fake.begun["config"]["model"]["name"] == "tiny"
    assert [values["loss"] for _, values in fake.logged if "loss" in values] == list(losses)
    assert [step for step, values in fake.logged if "evaluation loss" in values] == [1, 3]
    with pytest.raises(RuntimeError), following(build_callbacks(config.output, None, (), leads=True), FACTS):
        raise RuntimeError
    assert fake.exit_codes == [0, 1]


def test_without_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"needs wandb, which is not installed\. Maybe pip install"):
        build_callbacks(OutputConfig(wandb="pipelines"), None, (), leads=True)


def test_steps_are_profiled(tmp_path: Path) -> None:
    """Each action is a range of its thread, by the name that torch's schedules give it, which 'optpipe trace' reads."""
    schedule = one_f_one_b(2, 2)
    output = OutputConfig(profile_steps="1-2", profile_folder=tmp_path / "profile")
    config = TrainingConfig(schedule, ModelConfig("tiny"), steps=4, output=output)
    assert train(config).losses == train(replace(config, output=OutputConfig())).losses
    events = json.loads((tmp_path / "profile" / "rank-0.json").read_text())["traceEvents"]
    names = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    letters = {"F": "F", "B": "I", "W": "W", "BW": "B"}
    ops = [op for device in schedule.devices for op in device.compute.ops]
    assert {name: count for name, count in names.items() if name.startswith("PP:")} == {
        f"PP:{op.stage}{letters[op.kind]}{op.microbatch}": 2 for op in ops
    }
    for wrong in ("3-2", "one", "1-"):
        with pytest.raises(InputError, match=r"profile_steps is .* but must be a step or the first and last"):
            OutputConfig(profile_steps=wrong)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_there_as_soon_as_its_step_is_done(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m.jsonl")
    metrics.step(step(0, events=(OnlineEvent(0, "swapped", "a better one"),)))
    [first] = lines(tmp_path / "m.jsonl")
    assert (first["step"], first["loss"], first["tokens_per_second"]) == (0, 5.0, 200.0)
    assert first["events"] == [{"step": 0, "kind": "swapped", "text": "a better one", "seconds": 0.0}]
    metrics.end()


def write(path: Path, numbers: range) -> None:
    metrics = Metrics(path)
    for number in numbers:
        metrics.step(step(number))
    metrics.end()


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


def test_steps_are_written_to_a_pipe_of_which_nothing_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write(path, range(1))
    assert json.loads(os.read(reader, 10_000))["step"] == 0
    os.close(reader)


def test_a_full_disk_is_named() -> None:
    metrics = Metrics(Path("/dev/full"))
    for write_or_close in (lambda: metrics.step(step(0)), metrics.end):
        with pytest.raises(OSError, match="No space left") as caught:
            write_or_close()
        assert caught.value.filename == "/dev/full"


def test_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m.jsonl")
    event = OnlineEvent(0, "timed", "by a broken clock", float("nan"))
    metrics.step(step(0, loss=float("nan"), gradient_norm=float("inf"), skipped=True, events=(event,)))
    metrics.end()
    [line] = lines(tmp_path / "m.jsonl")
    assert line["events"] == [{"step": 0, "kind": "timed", "text": "by a broken clock", "seconds": None}]
    assert (line["loss"], line["gradient_norm"], line["skipped"]) == (None, None, True)


def test_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.delattr(torch.utils, "tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"needs tensorboard, which is not installed\. Maybe pip install"):
        TensorBoard(tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_resumed_run_hides_what_it_repeats(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for numbers in (range(5), range(3, 6)):
        scalars = TensorBoard(tmp_path)
        for number in numbers:
            scalars.step(step(number, bubble=0.25))
        scalars.evaluation(numbers.stop, 3.5)
        scalars.end()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [entry.step for entry in events.Scalars("loss")] == list(range(6))
    assert {entry.value for entry in events.Scalars("bubble")} == {0.25}
    assert [(entry.step, entry.value) for entry in events.Scalars("evaluation loss")] == [(6, 3.5)]
