"""Updates that do not wait equal those that do, bit for bit: losses, norms, weights, optimizers and buffers."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import nn

from optpipe.compile import compile_schedule
from optpipe.errors import RunFailedError
from optpipe.train.check import reference_step
from optpipe.train.launch import Launch
from optpipe.train.model import Model
from optpipe.train.rollback import MOST_ROLLBACKS
from optpipe.train.tasks.gpt import byte_loss
from tests.optpipe.runtime.schedules import random_placement, random_schedule
from tests.optpipe.train.update_cases import (
    STEPS,
    WITHOUT_LOSS,
    config_of,
    digests_of,
    facts,
    noisy_model,
    run,
    same_bits,
    schedules,
    state_of,
    synchronous,
)
from tests.sample import some

SCHEDULES = schedules()


@pytest.mark.parametrize("name", some(list(SCHEDULES)))
def test_steps_some_clipped_some_skipped_equal_the_synchronous_ones(name: str) -> None:
    schedule = SCHEDULES[name]
    model = noisy_model(config_of(schedule), Launch(len(schedule.devices)), optimistic=True)
    outcomes, (expected, digests) = run(model), synchronous(name)
    assert facts(outcomes) == facts(expected)
    assert digests_of(model) == digests
    assert sum(outcome.rolled_back for outcome in outcomes) > STEPS / 6


def test_the_steps_hold_all_cases() -> None:
    outcomes, _ = synchronous("1F1B")
    assert [outcome.step for outcome in outcomes] == list(range(STEPS))
    assert [outcome.step for outcome in outcomes if outcome.skipped] == list(WITHOUT_LOSS)
    clipped = sum(outcome.clipped for outcome in outcomes)
    assert STEPS / 10 < clipped < STEPS * 0.9  # by the text, which is Python's own library
    assert not any(outcome.rolled_back for outcome in outcomes)


@pytest.mark.parametrize("seed", some(range(20)))
def test_random_schedules_equal_the_synchronous_ones(seed: int) -> None:
    schedule = random_schedule(random_placement(Random(seed), microbatches=3), seed)
    found = []
    for optimistic in (False, True):
        config = config_of(schedule, steps=8, clip_norm=4.0, name="sgd" if seed % 2 else "adamw")
        launch = Launch(len(schedule.devices))
        model = noisy_model(config, launch, optimistic=optimistic, without_loss=[3])
        found.append((facts(run(model)), state_of(model)))
    assert found[0][0] == found[1][0]
    assert same_bits(found[0][1], found[1][1])


def test_clipping_is_that_of_torch_on_the_whole_model() -> None:
    config = config_of(SCHEDULES["V"], steps=30, warm_up_steps=0, decay="none")
    model = Model(config, compile_schedule(SCHEDULES["V"]), Launch(2), optimistic=True)
    modules = model.task.build_stages()
    whole = nn.Sequential(*modules)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=config.optimizer.learning_rate)
    plain = []
    for step in range(30):
        loss = reference_step(modules, byte_loss, *model.task.batch(step))
        plain.append((loss, float(nn.utils.clip_grad_norm_(whole.parameters(), 2.2))))
        optimizer.step()
    outcomes = run(model)
    assert [(o.loss, o.gradient_norm) for o in outcomes] == [pytest.approx(pair, rel=1e-8) for pair in plain]
    assert 3 < sum(o.clipped for o in outcomes) < 27


@pytest.mark.parametrize("optimistic", [False, True])
def test_a_loss_that_is_no_number_stops_and_touches_no_weight(optimistic: bool) -> None:
    model = noisy_model(
        config_of(SCHEDULES["1F1B"], on_not_finite="stop"), Launch(4), optimistic=optimistic, without_loss=[2]
    )
    for step in range(2):
        model.step(model.task.batch(step))
    model.settle()
    before = {name: tensor for name, tensor in state_of(model).items() if not name.endswith(("mean", "calls"))}
    with pytest.raises(RunFailedError, match=r"the loss is nan at step 2 with learning_rate 0\.01\. Maybe lower it"):
        model.step(model.task.batch(2)) + model.settle()
    assert same_bits({name: state_of(model)[name] for name in before}, before)


def test_a_first_loss_that_is_no_number_is_no_matter_of_the_learning_rate() -> None:
    config = config_of(SCHEDULES["1F1B"], on_not_finite="stop")
    model = noisy_model(config, Launch(4), optimistic=False, without_loss=[0])
    with pytest.raises(RunFailedError, match=r"the loss is nan at step 0, before any update\. Maybe a number of the"):
        model.step(model.task.batch(0)) + model.settle()


def test_it_waits_while_most_steps_are_wrong_and_then_no_longer() -> None:
    """As many processes decide it: by outcomes, which all have."""
    wrong = range(MOST_ROLLBACKS + 4)
    model = noisy_model(
        config_of(SCHEDULES["1F1B"], steps=40, clip_norm=None), Launch(4), optimistic=True, without_loss=wrong
    )
    outcomes = run(model)
    assert [o.step for o in outcomes if o.skipped] == list(wrong)
    rolled_back = [o.step for o in outcomes if o.rolled_back]
    assert rolled_back[: MOST_ROLLBACKS + 1] == list(range(MOST_ROLLBACKS + 1))
    assert len(rolled_back) < len(wrong)


def test_the_copies_take_what_is_said_and_only_where_an_update_may_be_undone() -> None:
    def copies_bytes(**optimizer: object) -> tuple[int, int]:
        config = config_of(SCHEDULES["1F1B"], steps=3, **optimizer)
        model = Model(config, compile_schedule(SCHEDULES["1F1B"]), Launch(4), optimistic=True)
        run(model)
        parameters = [p for stage in model.stages.values() for p in stage.module.parameters()]
        return model._updates.snapshot.size_bytes, sum(p.nbytes for p in parameters)

    adamw, parameters_bytes = copies_bytes()
    assert adamw == pytest.approx(3 * parameters_bytes, rel=0.01)
    assert copies_bytes(name="sgd")[0] == pytest.approx(2 * parameters_bytes, rel=0.01)
    assert copies_bytes(clip_norm=None, on_not_finite="stop")[0] == 0
