"""Evaluation: forwards alone, with the losses of the plain model, and nothing left of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from instances.schedules import one_f_one_b, v_wave
from optpipe.compile import compile_schedule
from optpipe.errors import TrainingError
from optpipe.runtime import Mailbox, MemoryMeter, Pipeline, Stage
from tests.optpipe.runtime.chains import M, batch, chain, gradients, specs, stages_of

SCHEDULES = {"linear": one_f_one_b(4, M), "V": v_wave(2, M)}


def pipeline(modules: list[nn.Module], name: str = "linear") -> Pipeline:
    program = compile_schedule(SCHEDULES[name])
    return Pipeline(program, stages_of(modules), range(len(program.devices)), Mailbox(), specs(4))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("microbatches", [1, 2 * M])
def test_losses_are_those_of_the_plain_model_for_any_number_of_microbatches(name: str, microbatches: int) -> None:
    modules = chain(4)
    inputs, targets = (2 * part for part in batch(4))
    found = pipeline(modules, name).evaluate(inputs[:microbatches], targets[:microbatches])
    with torch.no_grad():
        plain = [nn.functional.mse_loss(nn.Sequential(*modules)(x), y) for x, y in zip(inputs, targets, strict=True)]
    torch.testing.assert_close(found, torch.stack(plain[:microbatches]).double())


def test_no_gradient_is_touched_and_no_byte_stays() -> None:
    modules, (inputs, targets), meter = chain(4), batch(4), MemoryMeter()
    pipe = pipeline(modules)
    pipe.run(inputs, targets)
    before = gradients(modules)
    pipe.evaluate(inputs, targets, meter)
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(modules), strict=True))
    assert max(meter.peak_bytes.values()) > 0
    assert not any(meter.live_bytes.values())


def test_layers_evaluate_and_go_back_to_the_mode_that_they_were_in() -> None:
    torch.manual_seed(0)
    dropout, frozen = nn.Dropout(0.5), nn.BatchNorm1d(6).eval()
    stage = Stage(nn.Sequential(frozen, dropout), first=True, loss=nn.functional.mse_loss)
    program = compile_schedule(one_f_one_b(1, 2))
    pipe = Pipeline(program, {0: stage}, [0], Mailbox(), [])
    x = torch.randn(4, 6)
    assert torch.equal(*pipe.evaluate([x, x], [x, x]))
    assert pipe.evaluate([x, x], [x, x]).max() < 1e-6, "without dropout the untrained norm is the identity"
    assert (dropout.training, frozen.training) == (True, False)


def test_a_failure_leaves_nothing_and_restores_the_mode() -> None:
    modules, (inputs, targets), meter = chain(4), batch(4), MemoryMeter()
    pipe = pipeline(modules)
    modules[2][-1].calls_left = 2  # type: ignore[index]
    with pytest.raises(TrainingError, match=r"device 2 failed at F2\.1"):
        pipe.evaluate(inputs, targets, meter)
    assert not any(meter.live_bytes.values())
    assert modules[0].training
    assert len(pipe.evaluate(inputs, targets)) == M


def test_microbatches_of_another_shape_are_refused() -> None:
    inputs, targets = batch(4)
    with pytest.raises(TrainingError, match=r"between stages 0 and 1 is float32\[1, 10\] but must be float32\[2, 10\]"):
        pipeline(chain(4)).evaluate([x[:1] for x in inputs], [y[:1] for y in targets])
