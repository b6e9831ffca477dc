"""Microbatches of different sizes: the gradients and losses of the uncut model, and peaks as planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from instances.schedules import one_f_one_b
from optpipe.compile import compile_schedule
from optpipe.compile.memory import planned_peaks_bytes
from optpipe.errors import InputError, RunFailedError, TrainingError
from optpipe.problem import Problem
from optpipe.runtime.messages import size_bytes
from optpipe.runtime.probe import measure_stage, with_measured_sizes
from optpipe.schedule import Schedule
from optpipe.train import ModelConfig, OutputConfig, TrainingConfig, train
from optpipe.train.check import planned_peaks
from optpipe.train.launch import Launch
from optpipe.train.model import Model
from optpipe.train.result import StepReport
from optpipe.train.tasks import build_task
from tests.optpipe.train.cases import MAX_ERROR, M, assert_plain_step, decaying, everything, schedules
from tests.ranks import RunRanks
from tests.sample import some
from tests.unequal_schedules import with_factors

FACTORS: list[Mapping[str, float]] = [
    {"time": 2, "bytes": 1.5},
    {"time": 0.5, "bytes": 0.5, "transfer": 0.5},
    {},
    {"time": 1.5, "bytes": 2},
]
ORDER = [2, 0, 3, 1]
SCHEDULES = {name: with_factors(schedule, FACTORS, ORDER) for name, schedule in schedules(2).items()}
STAGES = "tests.optpipe.train.unequal_stages"
MODELS = {
    "gpt": ModelConfig("tiny", dtype="float64", lengths="varying"),
    "data": ModelConfig(f"{STAGES}:build", data=f"{STAGES}:data", lengths="varying"),
    "loader": ModelConfig(f"{STAGES}:build", loader=f"{STAGES}:loader", lengths="varying"),
}
TWO = ["linear, offload; gpt", "linear, offload; data", "linear, offload; loader", *some(("V; gpt", "recomputed; gpt"))]


def config_of(case: str) -> TrainingConfig:
    """Two checked steps in several processes."""
    name, model = case.split("; ")
    in_more = {
        "three devices": with_factors(one_f_one_b(3, M, moved=everything(3)), FACTORS, ORDER),
        "replicas": schedules(2)["linear"],
    }
    replicas = 2 if name == "replicas" else 1
    return TrainingConfig((SCHEDULES | in_more)[name], MODELS[model], steps=2, check=True, data_parallel=replicas)


@pytest.fixture(scope="module")
def two_ranks(run_ranks: RunRanks) -> dict[str, Any]:
    return run_ranks.train(__name__, 2, TWO)[0]


@pytest.mark.torchrun
@pytest.mark.parametrize("case", TWO)
def test_two_ranks_do_what_one_process_does(two_ranks: dict[str, Any], case: str) -> None:
    """All sizes are known without telling one another: gradients, and peaks of the GPT, as planned, loss by loss."""
    found = two_ranks[case]
    assert found["processes"] == 2
    if case.endswith("gpt"):
        assert_plain_step(found["check"])
    assert found["check"]["failures"] == []
    assert found["losses"] == list(train(replace(config_of(case), check=False)).losses)


@pytest.mark.torchrun
@pytest.mark.parametrize(("case", "processes"), [("three devices; gpt", 3), ("replicas; gpt", 4)])
def test_more_ranks_equal_the_plain_step(run_ranks: RunRanks, case: str, processes: int) -> None:
    """Two replicas of two devices: one batch, cut into parts of different lengths; gradients are those of all of it."""
    found = run_ranks.train(__name__, processes, [case])[0][case]
    assert found["processes"] == processes
    assert_plain_step(found["check"])


def varying(schedule: Schedule, dtype: Any = "float64", **settings: Any) -> TrainingConfig:
    return TrainingConfig(schedule, ModelConfig("tiny", dtype=dtype, lengths="varying"), **settings)


@pytest.mark.parametrize("name", some(list(SCHEDULES)))
def test_a_chosen_order_of_equal_shapes_equals_the_plain_step(name: str) -> None:
    assert SCHEDULES[name].microbatch_order == ORDER
    assert_plain_step(
        train(TrainingConfig(SCHEDULES[name], ModelConfig("tiny", dtype="float64"), steps=1, check=True)).check
    )


@pytest.mark.parametrize(("name", "dtype"), some([*product(SCHEDULES, MAX_ERROR)]))
def test_microbatches_of_different_lengths_equal_the_plain_step_in_the_planned_memory(name: str, dtype: str) -> None:
    assert_plain_step(train(varying(SCHEDULES[name], dtype, steps=1, check=True)).check, dtype)


def test_schedules_of_equal_microbatches_take_different_lengths_too() -> None:
    assert_plain_step(train(varying(schedules(2)["V, offload"], steps=1, check=True, accumulate=2)).check)


def test_lengths_differ_within_a_step_and_between_steps() -> None:
    task = build_task(varying(SCHEDULES["linear"]), 2, M)
    lengths = [[len(x[0]) for x in task.batch(step)[0]] for step in range(8)]
    assert lengths == [[len(x[0]) for x in task.batch(step)[0]] for step in range(8)]
    assert len(set(map(tuple, lengths))) == 8
    assert min(map(min, lengths)) >= 5
    assert max(map(max, lengths)) <= 32


def test_losses_are_those_of_training_the_uncut_model_by_tokens() -> None:
    """Cross entropy over all bytes of a batch, with nothing of ours: each byte weighs the same."""
    config = varying(SCHEDULES["recomputed"], steps=4, evaluate=1)
    task = build_task(config, 2, M)
    model = nn.Sequential(*task.build_stages())
    optimizer = torch.optim.AdamW(decaying(model.parameters()), lr=config.optimizer.learning_rate)
    plain = []
    for step in range(5):
        inputs, targets = task.batch(step)
        logits = [model(x).flatten(0, 1) for x in inputs]
        loss = nn.functional.cross_entropy(torch.cat(logits), torch.cat([target.flatten() for target, _ in targets]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        plain.append(loss.item())
    reports: list[StepReport] = []
    result = train(config, reports.append)
    assert [*result.losses, result.evaluation_loss] == pytest.approx(plain, rel=1e-12)
    assert [r.tokens for r in reports] == [sum(x.numel() for x in task.batch(step)[0]) for step in range(4)]


def test_the_order_in_which_microbatches_run_depends_on_their_sizes_but_not_what_is_drawn_for_them() -> None:
    schedule = schedules(2)["linear"]
    config = varying(schedule, steps=6)
    model = Model(config, compile_schedule(schedule), Launch(2))
    batches = [model.task.batch(step) for step in range(6)]
    orders = [model.order_of(inputs) for inputs, _ in batches]
    assert len({tuple(order or ()) for order in orders}) > 1
    model.run(*batches[0])
    assert all(stage.random is None or stage.random.numbers == orders[0] for stage in model.stages.values())


@pytest.mark.parametrize("source", ["data", "loader"])
def test_stages_of_ones_own_take_microbatches_of_different_lengths(source: str) -> None:
    model = ModelConfig(f"{STAGES}:build", lengths="varying", **{source: f"{STAGES}:{source}"})
    assert_plain_step(train(TrainingConfig(SCHEDULES["linear, offload"], model, steps=1, check=True)).check, "float32")


def test_a_loss_that_counts_no_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="tokens of short microbatches would weigh more"):
        train(TrainingConfig(SCHEDULES["linear"], ModelConfig(f"{STAGES}:uncounted", lengths="varying"), steps=1))


def test_other_sizes_are_refused_unless_they_may_vary() -> None:
    model = ModelConfig(f"{STAGES}:build", data=f"{STAGES}:data")
    with pytest.raises(InputError, match="Maybe --lengths varying"):
        train(TrainingConfig(SCHEDULES["linear"], model, steps=1))


def test_messages_that_no_size_explains_are_refused() -> None:
    model = ModelConfig(f"{STAGES}:odd", lengths="varying", data=f"{STAGES}:data")
    with pytest.raises((TrainingError, RunFailedError), match="message between stages 0 and 1"):
        train(TrainingConfig(SCHEDULES["linear"], model, steps=1))


def test_a_trace_of_varying_lengths_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"output\.trace"):
        varying(SCHEDULES["linear"], output=OutputConfig(trace=tmp_path / "trace.json"))


def test_sizes_in_proportion_to_tokens_predict_the_peaks_of_different_lengths() -> None:
    """A problem with the sizes of the longest microbatch and factors of bytes, against every length measured."""
    schedule = schedules(2)["linear, offload"]
    model = Model(varying(schedule), compile_schedule(schedule), Launch(2))
    batch = model.task.batch(0)
    measured = planned_peaks(model, batch)
    inputs, targets = batch
    longest = max(range(M), key=lambda i: inputs[i].numel())
    received = [inputs[longest], model.stages[0].module(inputs[longest]).detach()]
    sizes = [
        measure_stage(stage, (received[s], targets[longest]), *model.messages_at(s, inputs[longest]), zeros=False)
        for s, stage in model.stages.items()
    ]
    order = model.order_of(inputs) or range(M)
    bytes_ = [inputs[i].numel() / inputs[longest].numel() for i in order]
    data = with_measured_sizes(schedule.problem, sizes).to_data()
    problem = Problem.from_data(data | {"microbatch_factors": [{"bytes": factor} for factor in bytes_]})
    assert model.shapes is not None
    messages = [[size_bytes(spec) for spec in model.shapes.of(inputs[i])] for i in order]
    planned = planned_peaks_bytes(model.program, problem, [*zip(*messages, strict=True)])
    assert planned == pytest.approx(measured, rel=0.02)
