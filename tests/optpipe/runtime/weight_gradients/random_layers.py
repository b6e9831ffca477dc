"""Layers at random: every product with a weight, in every dtype, with shapes that broadcast, are empty or strided."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = {
    torch.float64: 1e-11,
    torch.complex128: 1e-11,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.bfloat16: 3e-2,
}
"""Dtypes, and what gradients may differ by, relative to the largest."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
Use = Callable[[Tensor, Tensor, Tensor], Tensor]


class Using(nn.Module):
    """A layer that computes a function of its input, a weight and a bias."""

    def __init__(self, use: Use, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.use, self.weight, self.bias = use, nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.weight, self.bias)


class RandomLayers:
    """A layer and its input, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._numbers = torch.Generator().manual_seed(seed)
        self.dtype = self._random.choice([*DTYPES])
        self.rows, self.inputs, self.outputs = (self._random.choice([0, 1, 1, 2, 3, 4]) for _ in range(3))
        self.experts = self._random.choice([1, 2, 3])

    def layer(self) -> tuple[nn.Module, Tensor]:
        """A layer of any kind, and an input."""
        kinds = (self._linear, self._embedding, self._convolution, self._matmul, self._of_entries, self._of_all)
        made, x = self._random.choice(kinds)()
        return made, x if x.dtype == torch.int64 else self._strided(x)

    def _drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, generator=self._numbers)

    def _strided(self, x: Tensor) -> Tensor:
        layouts: list[Callable[[Tensor], Tensor]] = [lambda t: t, lambda t: torch.stack([t, t], -1)[..., 0]]
        if x.dim() > 1 and len(x):
            layouts += [lambda t: t.mT.contiguous().mT, lambda t: t[:1].expand(t.shape)]
        return self._random.choice(layouts)(x)

    def _leading(self) -> list[int]:
        return [self._random.choice([0, 1, 2, 3]) for _ in range(self._random.randrange(3))]

    def _linear(self) -> tuple[nn.Module, Tensor]:
        x, linear = self._drawn(*self._leading(), self.inputs), nn.functional.linear
        if self._random.random() < 0.5:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says of an empty weight that it cannot be drawn
                return nn.Linear(self.inputs, self.outputs, self._random.random() < 0.7, dtype=self.dtype), x
        return Using(linear, self._drawn(self.outputs, self.inputs), self._drawn(self.outputs)), x

    def _embedding(self) -> tuple[nn.Module, Tensor]:
        self.dtype = self.dtype.to_real()  # torch itself has no gradient of a complex embedding
        entries, width = self._random.choice([1, 3, 5]), max(self.outputs, 1)
        padding = self._random.choice([None, 0, entries - 1])
        index = torch.randint(0, entries, self._leading(), generator=self._numbers)
        if self._random.random() < 0.5:
            return nn.Embedding(entries, width, padding_idx=padding, dtype=self.dtype), index
        looked_up: Use = lambda x, weight, bias: nn.functional.embedding(x, weight, padding) * bias  # noqa: E731
        return Using(looked_up, self._drawn(entries, width), self._drawn(width)), index

    def _convolution(self) -> tuple[nn.Module, Tensor]:
        draw = self._random.choice
        kind, groups = draw(CONVOLUTIONS), draw([1, 2])
        channels, dims = groups * draw([1, 2]), int(kind.__name__[-2])
        sizes: dict[str, Any] = {"stride": draw([1, 2]), "padding": draw([0, 1]), "dilation": draw([1, 2])}
        layer = kind(channels, groups * draw([1, 2]), draw([1, 2, 3]), groups=groups, dtype=self.dtype, **sizes)
        return layer, self._drawn(*[2] * draw([0, 1]), channels, *[6] * dims)

    def _matmul(self) -> tuple[nn.Module, Tensor]:
        """A product of any two shapes that broadcast, with the weight on either side, transposed or not."""
        of_weight, of_x = (
            [self._random.choice([1, self.experts]) for _ in range(self._random.choice([0, 0, 1, 1, 2]))] for _ in "wx"
        )
        left, transposed = self._random.random() < 0.5, self._random.random() < 0.4
        shape = [self.outputs, self.rows] if left else [self.inputs, self.outputs]
        weight = self._drawn(*of_weight, *(reversed(shape) if transposed else shape))

        def use(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            weight = weight.mT if transposed else weight
            return (weight @ x if left else torch.matmul(x, weight)) + bias

        return Using(use, weight, self._drawn(1)), self._drawn(*of_x, self.rows, self.inputs)

    def _of_entries(self) -> tuple[nn.Module, Tensor]:
        """Products with entries of a weight, as they are, changed in a copy, or changed in place."""
        kinds = self._random.choice([torch.int64, torch.int32])
        index = torch.randint(-self.experts, self.experts, (self.rows,), generator=self._numbers).to(kinds)
        one = self._random.choice([0, -1, torch.tensor(-1)])
        uses: list[Use] = [
            lambda x, weight, bias: x.unsqueeze(-2) @ weight[index] + bias,
            lambda x, weight, bias: x.unsqueeze(-2) @ weight[index].mul_(2) + bias,
            lambda x, weight, bias: torch.matmul(x.unsqueeze(-2), 2 * weight[index]) + bias,
            lambda x, weight, bias: nn.functional.linear(x, weight[one].T, bias),
            lambda x, weight, bias: (x.unsqueeze(-2) * weight[index].mT @ weight[index]).sum() + bias,
        ]
        weight = self._drawn(self.experts, self.inputs, self.outputs)
        return Using(self._random.choice(uses), weight, self._drawn(self.outputs)), self._drawn(self.rows, self.inputs)

    def _of_all(self) -> tuple[nn.Module, Tensor]:
        """Functions of a bias, an input and a weight of two or three dimensions."""
        n, k, m, draw = self.rows, self.inputs, self.outputs, self._random.choice
        if draw([True, False]):
            rows = draw([(m,), (1,), (), (n, m), (n, 1), (1, m)])
            of_rows: list[Use] = [
                lambda x, weight, bias: torch.addmm(bias, x, weight),
                lambda x, weight, bias: torch.addmm(bias, x, weight, beta=2, alpha=3),
                lambda x, weight, bias: bias.addmm(x, weight),
                lambda x, weight, bias: torch.tensordot(x, weight, 1) * bias,
            ]
            return Using(draw(of_rows), self._drawn(k, m), self._drawn(*rows)), self._drawn(n, k)
        equation = draw(["enk,ekm->enm", "enk,ekm->nm", "enk,ekm->nem", "enk,ekm->n"])
        of_each: list[Use] = [
            lambda x, weight, bias: torch.baddbmm(bias, x, weight),
            lambda x, weight, bias: torch.addbmm(bias[0], x, weight),
            lambda x, weight, bias: torch.einsum(equation, x, weight) + bias.sum(),
            lambda x, weight, bias: (x.unsqueeze(-1) * weight.unsqueeze(1)).sum(2) + bias,
        ]
        e = self.experts
        return Using(draw(of_each), self._drawn(e, k, m), self._drawn(draw([1, e]), n, m)), self._drawn(e, n, k)
