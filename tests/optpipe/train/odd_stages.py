"""Stages with what a plain GPT has not: random numbers, running statistics, frozen, unused and dead parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, ROWS = 8, 16

Built = tuple[list[nn.Module], Tensor, Tensor, nn.Module]


class Unused(nn.Linear):
    """Has a parameter that its forward leaves alone."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(WIDTH))


class Breaking(nn.Module):
    """Fails in the third microbatch that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)  # which splits, so that nothing is measured before the run
        self.trained_on = 0

    def forward(self, x: Tensor) -> Tensor:
        self.trained_on += self.training
        if self.trained_on == 3:
            raise ValueError("the layer broke")
        broken: Tensor = self.layer(x)
        return broken


class Counting(nn.Linear):
    """Multiplies by how often any has run, so that the same batch gives something else each time."""

    calls = 0

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        Counting.calls += 1
        return Counting.calls * super().forward(x)


class Growing(nn.Linear):
    """Takes more memory from its thirteenth call on."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x.exp().log() if self.calls > 12 else x)


class Hoarding(nn.Linear):
    """Keeps what it has computed."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(super().forward(x))
        return self.kept[-1]


class Averaging(nn.Linear):
    """Puts another tensor in the place of its buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.training:
            self.mean = self.mean.lerp(y.detach().mean(0), 0.1)
        return y


class Drifting(nn.Linear):
    """Returns a little more with each call of any of its kind, until it begins anew."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Drifting.calls += 1
        return (1 + 0.01 * (Drifting.calls % 37)) * super().forward(x)


def drifting() -> Built:
    """The last stage changes by itself."""
    return _built([nn.Linear(WIDTH, WIDTH), Drifting(WIDTH, WIDTH)])


class Summing(nn.Module):
    """The gradients of its two matrices are one, which autograd makes once."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,kij->bj", x, torch.stack([self.one, self.other]))


def summing() -> Built:
    """Both stages have such matrices."""
    return _built([Summing(), Summing()])


class ComplexLinear(nn.Linear):
    """Takes and returns real numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.complex64)).abs()


def complex_numbers() -> Built:
    """In single precision, which no tensor of the stages has in its own name."""
    return _built([ComplexLinear(8, 8, dtype=torch.complex64) for _ in range(2)])


def normed() -> Built:
    """A norm behind each layer, of which the bias does nothing."""
    return _built([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(2)])


def counting() -> Built:
    """The last stage has a gradient that no plain step has."""
    return _built([nn.Linear(WIDTH, WIDTH), Counting()])


def growing() -> Built:
    """The last stage takes more than was measured."""
    return _built([nn.Linear(WIDTH, WIDTH), Growing()])


def hoarding() -> Built:
    """The last stage leaves memory alive."""
    return _built([nn.Linear(WIDTH, WIDTH), Hoarding()])


def averaging() -> Built:
    """Both stages replace a buffer in each forward."""
    return _built([Averaging(), Averaging()])


def dropout() -> Built:
    """Both stages draw, and so does the loss."""
    return _built([_block(nn.Dropout(0.3)), _block(nn.Dropout(0.3))], _Noisy())


def batch_norm() -> Built:
    """Both stages keep running statistics."""
    return _built([_block(nn.BatchNorm1d(WIDTH)), _block(nn.BatchNorm1d(WIDTH))])


def unused() -> Built:
    """Each stage has a parameter without a gradient."""
    return _built([Unused(), Unused()])


def breaking() -> Built:
    """The last stage fails in the second step of two microbatches."""
    return _built([nn.Linear(WIDTH, WIDTH), Breaking()])


class BreakingUndeferred(nn.Linear):
    """Fails whenever it is trained, and does not split."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise ValueError("the layer broke")
        return super().forward(x)


def breaking_undeferred() -> Built:
    """The last stage fails before the run, where it is measured."""
    return _built([nn.Linear(WIDTH, WIDTH), BreakingUndeferred(WIDTH, WIDTH)])


def misfits() -> Built:
    """The second of three stages does not take what the first returns."""
    return _built([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH + 1, WIDTH), nn.Linear(WIDTH, WIDTH)])


def frozen() -> Built:
    """All of the first stage, and half of the last."""
    first, last = nn.Linear(WIDTH, WIDTH), _block(nn.Linear(WIDTH, WIDTH))
    for module in (first, last[0]):
        module.requires_grad_(False)
    return _built([first, last])


def all_frozen() -> Built:
    """Nothing to train."""
    return _built([nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(2)])


def solved() -> Built:
    """A loss of exactly 0, and no gradient but 0."""
    stages: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    for parameter in [p for stage in stages for p in stage.parameters()]:
        nn.init.zeros_(parameter)
    return stages, torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH), nn.MSELoss()


def without_a_number(step: int) -> tuple[list[Tensor], list[Tensor]]:
    """Two microbatches a step; those of step 1 have no finite loss."""
    inputs = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    if step == 1:
        inputs[1, 0, 0] = torch.nan
    return list(inputs), list(inputs.sin())


class _Noisy(nn.MSELoss):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output, target + torch.randn_like(target))


def _block(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def _built(stages: list[nn.Module], loss: nn.Module | None = None) -> Built:
    return stages, torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), loss or nn.MSELoss()


class Experts(nn.Module):
    """Rows whose first entry is positive go to a wide expert, the others to a narrow one."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.narrow = nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        output = torch.zeros_like(x)
        output[chosen] = self.wide(x[chosen])
        output[~chosen] = self.narrow(x[~chosen])
        return output


def experts() -> Built:
    """The last stage's memory depends on the data, whose sign the first keeps; two rows are positive."""
    keeps = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        keeps.weight.copy_(torch.eye(WIDTH))
        keeps.bias.zero_()
    inputs, targets = _with_positive_rows(2)
    return [keeps, Experts()], inputs, targets, nn.MSELoss()


def more_and_more(step: int) -> tuple[list[Tensor], list[Tensor]]:
    """Two microbatches a step; from the third on, more and more rows go to the wide expert."""
    samples = [_with_positive_rows(min(2 + 2 * (step // 2), ROWS)) for _ in range(2)]
    return [inputs for inputs, _ in samples], [targets for _, targets in samples]


def many(_step: int) -> tuple[list[Tensor], list[Tensor]]:
    """Two microbatches, in the second of which all rows go to the wide expert."""
    samples = [_with_positive_rows(rows) for rows in (2, ROWS)]
    return [inputs for inputs, _ in samples], [targets for _, targets in samples]


def _with_positive_rows(rows: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rows))
    inputs[:, 0] = torch.where(torch.arange(ROWS) < rows, 5.0, -5.0)
    return inputs, inputs.sin()
