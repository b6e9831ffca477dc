"""Stages that hand on more than one tensor: tuples and dicts, integers among them, on one device and across two."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from instances.schedules import one_f_one_b, v_wave
from optpipe.compile import compile_schedule
from optpipe.runtime import Mailbox, MemoryMeter, Pipeline, Stage
from optpipe.runtime.messages import Spec, Tree, message_spec
from optpipe.schedule import Schedule

M, WIDTH = 3, 6


class First(nn.Module):
    """Makes two activations, of which only the later stages use the second, and numbers of rows to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tree:
        hidden = self.layer(x)
        return {"hidden": hidden, "rest": (hidden.tanh(), torch.arange(2))}


class Middle(nn.Module):
    """Changes one activation and passes on the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, received: Tree) -> Tree:
        return {"hidden": self.layer(received["hidden"]), "rest": received["rest"]}


class Last(nn.Module):
    """Uses all of it."""

    def forward(self, received: Tree) -> Tensor:
        skipped, rows = received["rest"]
        result: Tensor = (received["hidden"] * skipped)[rows]
        return result


SCHEDULES = {
    "linear": one_f_one_b(4, M),
    "V": v_wave(2, M),
    "linear, offload": one_f_one_b(4, M, moved=[(s, i) for s in range(3) for i in range(M)]),
}


def specs(modules: list[nn.Module], x: Tree) -> list[Spec]:
    found = []
    for module in modules[:-1]:
        x = module(x)
        found.append(message_spec(x))
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_those_of_the_plain_step(name: str) -> None:
    schedule: Schedule = SCHEDULES[name]
    torch.manual_seed(0)
    modules = [First(), Middle(), Middle(), Last()]
    plain = nn.Sequential(*copy.deepcopy(modules))
    inputs, targets = torch.randn(2, M, 2, WIDTH)
    program, loss = compile_schedule(schedule), nn.functional.mse_loss
    stages = {
        s: Stage(module, first=s == 0, loss=loss if s == 3 else None, gradient_scale=1 / M)
        for s, module in enumerate(modules)
    }
    pipeline = Pipeline(program, stages, range(len(program.devices)), Mailbox(), specs(modules, inputs[0]))
    meter = MemoryMeter()
    losses = pipeline.run(list(inputs), list(targets), meter)
    plain_losses = torch.stack([loss(plain(x), y) for x, y in zip(inputs, targets, strict=True)])
    torch.autograd.backward(plain_losses.mean())
    torch.testing.assert_close(losses, plain_losses.detach().double())
    for module, reference in zip(modules, plain, strict=True):
        for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
    assert not any(meter.live_bytes.values())
