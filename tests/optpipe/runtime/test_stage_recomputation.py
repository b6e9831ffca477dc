"""A stage whose activations are made anew: what must not happen twice, and what cannot be run twice."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from optpipe.errors import TrainingError
from optpipe.runtime import MemoryMeter, Stage
from tests.optpipe.runtime.stages import F_B_W, F_BW, RECOMPUTED, Run, run_step

M = 3
MESSAGES = {i: torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i in range(M)}


def normed() -> nn.Module:
    """Layers with running statistics, dropout, and a norm in evaluation mode, which reads its statistics."""
    torch.manual_seed(0)
    frozen = nn.BatchNorm1d(6).eval()
    frozen.running_mean = torch.ones(6)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None), nn.Dropout(0.5), nn.Linear(6, 6), frozen)


def together(way: tuple[str, ...]) -> list[tuple[str, int]]:
    """All F, then all that follows, one kind after the other."""
    return [(kind, i) for kind in way for i in range(M)]


def values(run: Run) -> list[Tensor]:
    return [*run.outputs.values(), *run.input_gradients.values(), *run.weight_gradients]


@pytest.mark.parametrize("way", RECOMPUTED)
def test_gradients_and_running_statistics_are_those_of_a_step_that_keeps(way: str) -> None:
    """Bit for bit; statistics with an average over all batches seen, which a second look would move."""
    kept, recomputed = normed(), normed()
    plain = F_BW if RECOMPUTED[way][-1] in ("BW", "CBW") else F_B_W
    first = run_step(Stage(kept, seed=7), together(plain), MESSAGES)
    second = run_step(Stage(recomputed, seed=7), together(RECOMPUTED[way]), MESSAGES)
    for one, other in zip(values(first), values(second), strict=True):
        assert torch.equal(one, other)
    buffers = dict(recomputed.named_buffers())
    assert int(buffers["1.num_batches_tracked"]) == M
    for name, buffer in kept.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_a_microbatch_is_recomputed_with_its_own_random_numbers_whatever_ran_in_between() -> None:
    kept = run_step(Stage(normed(), seed=7), together(F_BW), MESSAGES)
    ops = [("F", 0), ("F", 1), ("C", 0), ("F", 2), ("BW", 0), ("CBW", 1), ("C", 2), ("BW", 2)]
    found = run_step(Stage(normed(), seed=7), ops, MESSAGES)
    assert all(torch.equal(one, other) for one, other in zip(values(kept), values(found), strict=True))


def test_between_f_and_c_only_the_input_is_held() -> None:
    stage, meter = Stage(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.5))), MemoryMeter()
    stage.begin_step()
    with meter, meter.on(0):
        received = MESSAGES[0].clone()
        before = meter.live_bytes[0]
        output = stage.forward_keeping_input(0, received, None, False)
        del output, received
        assert meter.live_bytes[0] == before == 4 * 6 * 4
        stage.recompute(0)
        assert meter.live_bytes[0] > before
        stage.clear()
    assert meter.live_bytes[0] == 0


class Counting(nn.Module):
    """Multiplies by how often it was called, as its buffer says, from the call of a number on."""

    def __init__(self, *, replaces: bool, first: int = 0) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones(()))
        self.replaces, self.left = replaces, first

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left >= 0:
            return x
        if self.replaces:
            self.calls = self.calls + 1
        else:
            self.calls += 1
        return x * float(self.calls)


class Bypassing(nn.Module):
    """Running statistics that no version counter tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.variance, training=True)


@pytest.mark.parametrize(
    "module",
    [Counting(replaces=False), Counting(replaces=True), Bypassing()],
    ids=["in place", "replaced", "behind autograd"],
)
def test_a_recomputation_finds_the_buffers_of_its_f_and_leaves_them(module: nn.Module) -> None:
    runs, layers = [], []
    for ops in (together(F_BW), [("F", 0), ("F", 1), ("C", 0), ("F", 2), ("BW", 0), ("CBW", 1), ("C", 2), ("BW", 2)]):
        torch.manual_seed(0)
        layers.append(nn.Sequential(nn.Linear(6, 6), copy.deepcopy(module)))
        runs.append(run_step(Stage(layers[-1]), ops, MESSAGES))
    assert all(torch.equal(one, other) for one, other in zip(*map(values, runs), strict=True))
    for one, other in zip(*(layer.buffers() for layer in layers), strict=True):
        assert torch.equal(one, other)


OF_A_GLOBAL, HIDDEN = torch.Generator(), {"generator": torch.Generator()}


class Noisy(nn.Linear):
    """Multiplies by numbers that are no draws of torch's default generator; counts its calls."""

    def __init__(self, draw: Callable[[Noisy], float]) -> None:
        super().__init__(6, 6)
        self.draw, self.calls = draw, 0
        self.own, self.numpy, self.python = [torch.Generator()], np.random.default_rng(1), random.Random(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(super().forward(x) * (1 + self.draw(self)))


DRAWS: dict[str, Callable[[Noisy], float]] = {
    "numpy": lambda _: np.random.rand(),
    "python": lambda _: random.random(),
    "its own of torch": lambda layer: float(torch.rand((), generator=layer.own[0])),
    "its own of numpy": lambda layer: float(layer.numpy.random()),
    "its own of python": lambda layer: layer.python.random(),
    "a global": lambda _: float(torch.rand((), generator=OF_A_GLOBAL)),
}


def noisy_run(draw: Callable[[Noisy], float], ops: list[tuple[str, int]], mode: str) -> tuple[Run, list[float], int]:
    """A step, what would be drawn after it, and how often the layer was called."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    OF_A_GLOBAL.manual_seed(0)
    layer = Noisy(draw)
    run = run_step(Stage(nn.Sequential(layer), own_random_numbers=False), ops, MESSAGES, mode=mode)
    return run, [draw(layer) for draw in DRAWS.values()], layer.calls


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_recomputation_draws_from_every_generator_as_its_f_did(draw: Callable[[Noisy], float], mode: str) -> None:
    kept, *after_kept = noisy_run(draw, together(F_BW), mode)
    ops = [("F", 0), ("F", 1), ("C", 0), ("F", 2), ("BW", 0), ("CBW", 1), ("C", 2), ("BW", 2)]
    again, *after_again = noisy_run(draw, ops, mode)
    assert all(torch.equal(one, other) for one, other in zip(values(kept), values(again), strict=True))
    assert after_again == after_kept
    assert after_kept[1] == M


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize(
    "draw",
    [lambda _: float(torch.rand((), generator=HIDDEN["generator"])), lambda layer: 0.1 * layer.calls],
    ids=["a generator that is not found", "its number of calls"],
)
def test_a_recomputation_whose_output_is_another_is_refused(draw: Callable[[Noisy], float], mode: str) -> None:
    with pytest.raises(TrainingError, match=r"tensor 0 of the output is \S+ when \w+ is run again, .* wrong\. Maybe"):
        noisy_run(draw, [("F", 0), ("F", 1), ("CBW", 0), ("CBW", 1)], mode)


class Differentiating(nn.Module):
    """Asks for a gradient in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            [slope] = torch.autograd.grad((x**3).sum(), x)
        return slope


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.ReLU(inplace=True), "changes its input in place"),
        (Counting(replaces=False, first=2), r"changes the buffer 1\.calls now"),
        (Counting(replaces=True, first=2), r"changes the buffer 1\.calls now"),
        (Differentiating(), "differentiates within its forward"),
    ],
    ids=["in place", "counts later", "counts anew later", "differentiates"],
)
def test_what_cannot_be_run_twice_is_refused(module: nn.Module, reason: str) -> None:
    parts = [module, nn.Linear(6, 6)] if isinstance(module, nn.ReLU) else [nn.Linear(6, 6), module]
    stage = Stage(nn.Sequential(*copy.deepcopy(parts)))
    run_step(stage, [("F", 0), ("BW", 0)], MESSAGES)
    with pytest.raises(TrainingError, match=reason):
        run_step(stage, [("F", 0), ("F", 1), ("CBW", 0), ("CBW", 1)], MESSAGES)
