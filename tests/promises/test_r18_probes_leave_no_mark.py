"""R18: whatever runs a user's modules outside of a training step leaves them, and all generators, as they were."""

from __future__ import annotations

import inspect
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from instances.schedules import one_f_one_b
from optpipe.profile.check import check_prediction
from optpipe.profile.measured import measure
from optpipe.profile.ops import measure_op_sizes
from optpipe.profile.subject import Subject, build_chain
from optpipe.profile.undeferred import measure_undeferred
from optpipe.runtime import Stage, learn_messages
from optpipe.runtime.messages import MessageSpec
from optpipe.runtime.probe import measure_stage
from optpipe.train import CheckpointConfig, ModelConfig, OutputConfig, TrainingConfig, train
from solver.solve import solve

CPU, ROWS, WIDTH, STEPS, M = torch.device("cpu"), 4, 6, 4, 4

GLOBAL = torch.Generator().manual_seed(5)


def noise_of_a_global(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=GLOBAL)


@dataclass
class Statistics:
    """An object of the user's own."""

    calls: int = 0
    seen: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Slotted(Statistics):
    """One with slots beside attributes."""

    drawn: int = 0


def counting() -> Callable[..., None]:
    """A hook that counts its calls in a variable of the function around it."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    return count


class Marked(nn.Module):
    """Counts its calls wherever a module may keep a number, and draws from every kind of generator."""

    counts: Tensor
    replaced: Tensor
    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.unsplit = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.register_buffer("counts", torch.zeros((), dtype=torch.int64))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.calls, self.rows, self.names = 0, [0], {"calls": 0}
        self.tensor, self.array, self.numbers = torch.zeros(2), np.zeros(2), array("l", [0])
        self.statistics, self.unregistered = Slotted(), (nn.BatchNorm1d(WIDTH),)
        self.cache: Tensor | None = None
        self.hook = self.layer.register_forward_hook(counting())
        self.own, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(2)
        self.python, self.nested = random.Random(3), SimpleNamespace(old=np.random.RandomState(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.arange(WIDTH) / WIDTH
        self.counts += 1
        self.replaced = self.replaced + 1
        self.hidden[0] += 1
        self.calls += 1
        self.rows.append(len(x))
        self.names["calls"] += 1
        self.tensor[0] += 1
        self.array[0] += 1
        self.numbers[0] += 1
        self.statistics.calls += 1
        self.statistics.drawn += 1
        self.statistics.seen.append(len(x))
        drawn = random.random() + np.random.rand() + float(self.numpy.random()) + self.python.random()
        drawn += self.nested.old.rand() + float(torch.rand((), generator=self.own)) + float(torch.rand(()))
        with torch.no_grad():
            self.unregistered[0](x)
        x = self.unsplit(x, self.norm(self.layer(x))) + self.cache + drawn + noise_of_a_global(x)
        return torch.tanh(x)


def marks(modules: list[nn.Module]) -> list[Any]:
    """All that a call changes, as values that can be compared."""
    found: list[Any] = [random.getstate(), str(np.random.get_state()), torch.get_rng_state(), GLOBAL.get_state()]
    for module in modules:
        assert isinstance(module, Marked)
        found += [buffer.clone() for buffer in module.buffers()] + [module.hidden.clone(), module.tensor.clone()]
        found += [buffer.clone() for buffer in module.unregistered[0].buffers()]
        found += [module.calls, list(module.rows), dict(module.names), module.array.tolist(), module.cache]
        [count] = module.layer._forward_hooks.values()
        found += [list(module.numbers), inspect.getclosurevars(count).nonlocals]
        found += [module.statistics.calls, module.statistics.drawn, list(module.statistics.seen), sorted(vars(module))]
        found += [module.own.get_state(), str(module.numpy.bit_generator.state), module.python.getstate()]
        found += [str(module.nested.old.get_state()), [part.training for part in module.modules()]]
        gradients = [parameter.grad for parameter in module.parameters()]
        found += [gradient if gradient is None else gradient.clone() for gradient in gradients]
    return [value.tolist() if isinstance(value, Tensor) else value for value in found]


def stages_of(modules: list[nn.Module]) -> dict[int, Stage]:
    last = len(modules) - 1
    return {
        s: Stage(module, first=s == 0, loss=nn.functional.mse_loss if s == last else None, own_random_numbers=s != 1)
        for s, module in enumerate(modules)
    }


X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
SPEC = MessageSpec((ROWS, WIDTH), torch.float32)


def learning(modules: list[nn.Module]) -> None:
    learn_messages(stages_of(modules), len(modules), X, X)


def measuring_a_stage(modules: list[nn.Module]) -> None:
    stage = stages_of(modules)[1]
    measure_stage(stage, (X, X), SPEC, SPEC, modes={"full": {"CB", "CBW"}, "selective": {"CBW"}})


def timing_kinds_of_layers(modules: list[nn.Module]) -> None:
    measure_undeferred(1, stages_of(modules)[1], X, None, X.clone())


def profiling(modules: list[nn.Module]) -> None:
    subject = Subject("marked", modules, X, X, nn.functional.mse_loss)
    chain = build_chain(subject, CPU, M, range(len(modules)))
    measure_op_sizes(chain, CPU)
    found = measure(subject, chain, [0, 1, 2], CPU, 1, modes=("offload", "full"))
    check_prediction(found, [chain], solve(found.problem(M), "1f1b"), CPU)


@pytest.mark.parametrize("probe", [learning, measuring_a_stage, timing_kinds_of_layers, profiling])
def test_a_probe_leaves_no_mark(probe: Callable[[list[nn.Module]], None]) -> None:
    modules: list[nn.Module] = [Marked() for _ in range(3)]
    modules[1](X).sum().backward()  # one of them has gradients
    before = marks(modules)
    probe(modules)
    assert marks(modules) == before


def test_a_probe_that_fails_leaves_no_mark_either() -> None:
    modules: list[nn.Module] = [Marked(), nn.Sequential(Marked(), nn.Linear(WIDTH + 1, WIDTH)), Marked()]
    own = [modules[0], modules[1][0], modules[2]]  # type: ignore[index]
    before = marks(own)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        learning(modules)
    assert marks(own) == before


class Counted(nn.Module):
    """Numbers that are in the checkpoint say how often it was called, and what it drew shows in the loss."""

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.calls = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), 0
        self.register_buffer("counts", torch.zeros((), dtype=torch.int64))
        self.own = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.counts += self.calls
        return self.norm(self.layer(x)) + 0.1 * self.calls + torch.rand(x.shape, generator=self.own)


def build() -> tuple[list[nn.Module], Tensor, Tensor, Any]:
    return [Counted(), Counted()], X, X.sin(), nn.functional.mse_loss


def run(folder: Path, **options: Any) -> tuple[list[float], list[dict[str, list[float]]]]:
    checkpoints = CheckpointConfig(folder=folder)
    model = ModelConfig(f"{__name__}:build")
    result = train(TrainingConfig(one_f_one_b(2, M), model, checkpoints=checkpoints, steps=STEPS, **options))
    assert result.check is None or not result.check.failures
    files = sorted(max(folder.glob("step-*")).glob("stage-*.safetensors"))
    return list(result.losses), [{n: t.tolist() for n, t in load_file(file).items()} for file in files]


def test_a_training_counts_each_microbatch_once_whatever_else_runs(tmp_path: Path) -> None:
    """With and without a check, evaluations and a recorded step: the same losses, weights, buffers and counters."""
    plain, state = run(tmp_path / "plain")
    with_more = run(tmp_path / "more", check=True, evaluate=1, evaluate_every=1, output=OutputConfig(trace_step=2))
    assert with_more == (plain, state)
    calls = STEPS * M
    assert [stage[f"{s}.counts"] for s, stage in enumerate(state)] == [calls * (calls + 1) // 2] * 2
    assert [stage[f"{s}.norm.num_batches_tracked"] for s, stage in enumerate(state)] == [calls] * 2
