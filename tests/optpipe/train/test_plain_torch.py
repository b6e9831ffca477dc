"""Stages that plain autograd trains are trained alike, or refused by the reason that is theirs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from instances.schedules import one_f_one_b
from optpipe.errors import OptPipeError
from optpipe.profile.subject import load_subject
from optpipe.schedule import Schedule
from optpipe.train import ModelConfig, OptimizerConfig, TrainingConfig, train
from tests.optpipe.train import plain_torch
from tests.optpipe.train.cases import schedules

MODULE = plain_torch.__name__
STEPS = 3
SCHEDULES = {"fused": one_f_one_b(2, 4, fused=True), "split": schedules(2)["linear"]}


def trained(name: str, schedule: Schedule, evaluate: int = 0) -> list[float]:
    optimizer = OptimizerConfig(name="sgd", learning_rate=0.1, beta1=0.0, weight_decay=0.0, clip_norm=None)
    model = ModelConfig(f"{MODULE}:{name}")
    return list(train(TrainingConfig(schedule, model, optimizer, steps=STEPS, evaluate=evaluate)).losses)


def expected(name: str, microbatches: int) -> list[float]:
    """Losses of plain steps, one microbatch after the other."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        subject = load_subject(f"{MODULE}:{name}")
    module = nn.Sequential(*subject.stages)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        values = [subject.loss(module(subject.inputs), subject.targets) / microbatches for _ in range(microbatches)]
        torch.autograd.backward(values)
        losses.append(sum(float(value.detach()) for value in values))
        optimizer.step()
    return losses


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("name", [*plain_torch.STAGES, "lazy", "traced"])
def test_training_equals_plain_steps(name: str, kind: str) -> None:
    schedule = SCHEDULES[kind]
    losses = trained(name, schedule)
    assert losses == pytest.approx(expected(name, schedule.problem.microbatches), rel=1e-10)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sparse", r"a stage returned a tensor of layout torch.sparse_coo, but only dense ones .*Maybe"),
        ("mixed_keys", r"has keys of int and str, but they must be all str or all int\. Maybe use texts"),
        ("detached_loss", r"the loss has no gradient, though the output of the last stage has one\. Maybe"),
        (
            "loss_by_rows",
            r"the loss returns a tensor of shape \[4, 8\], but must return one number.*Maybe take the mean",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_by_its_own_reason(name: str, reason: str) -> None:
    with pytest.raises(OptPipeError, match=reason):
        trained(name, SCHEDULES["split"])


def test_other_messages_in_evaluation_are_refused_where_it_is_asked_for() -> None:
    name, reason = "in_evaluation_less", r"stages\[0\].* returns .* in training but .* in evaluation.*Maybe"
    with pytest.raises(OptPipeError, match=reason):
        trained(name, SCHEDULES["split"], evaluate=1)
