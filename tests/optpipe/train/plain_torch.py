"""Two stages for each feature of torch that a user's stage may have, all of which plain autograd trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

WIDTH = 8
Compute = Callable[["Using", Tensor], Any]


class Using(nn.Module):
    """A stage that computes a function of itself and its input, with two layers and matrices of its own."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.compute = compute
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4)
        self.complex = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128) / 4)

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


class Last(nn.Module):
    """The last stage, which takes the first tensor of what it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Tensor:
        while not isinstance(x, Tensor):
            x = x[0]
        y: Tensor = self.layer(x)
        return y


def hooked(stage: Using, x: Tensor) -> Tensor:
    y: Tensor = stage.one(x)
    y.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    y.retain_grad()
    return y


def penalised(stage: Using, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = stage.one(x).tanh() @ stage.experts[0]
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + gradient


def functional_gradient(stage: Using, x: Tensor) -> Tensor:
    def value(parameters: dict[str, Tensor]) -> Tensor:
        y: Tensor = torch.func.functional_call(stage.one, parameters, (x,))
        return y.tanh().sum()

    y: Tensor = stage.other(x)
    return y + torch.func.grad(value)(dict(stage.one.named_parameters()))["bias"]


def forward_mode(stage: Using, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        y = forward_ad.unpack_dual(stage.one(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    return y + stage.other(x)


def frozen_for_a_call(stage: Using, x: Tensor) -> Tensor:
    stage.one.weight.requires_grad_(False)
    y: Tensor = stage.one(x)
    stage.one.weight.requires_grad_(True)
    return y + stage.other(x)


def in_evaluation_less(stage: Using, x: Tensor) -> Any:
    y = stage.one(x)
    return (y, y.mean()) if stage.training else y


STAGES: dict[str, Compute] = {
    "functional_call": lambda s, x: torch.func.functional_call(s.one, {"weight": s.one.weight * 2}, (x,)),
    "functional_call_of_a_parameter": lambda s, x: torch.func.functional_call(
        s.one, {"weight": s.other.weight}, (s.other(x),)
    ),
    "vmap": lambda s, x: torch.func.vmap(s.one)(x) + torch.func.vmap(lambda row: row @ s.experts[0])(x),
    "jacobian": lambda s, x: torch.func.vmap(torch.func.jacrev(lambda row: s.one(row).tanh()))(x).sum(-1),
    "functional_gradient": functional_gradient,
    "forward_mode": forward_mode,
    "hooked": hooked,
    "penalised": penalised,
    "frozen_for_a_call": frozen_for_a_call,
    "in_evaluation_less": in_evaluation_less,
    "integer_keys": lambda s, x: {0: s.one(x), 1: x},
    "broadcast": lambda s, x: torch.matmul(s.one(x).unsqueeze(0), s.experts).sum(0),
    "complex_numbers": lambda s, x: (x.to(s.complex.dtype) @ s.complex).abs() + s.one(x),
}


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()[None]  # one entry, as autograd takes it


def _build(first: nn.Module) -> tuple[list[nn.Module], Tensor, Tensor, Any]:
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    return [first.double(), Last().double()], x, x.sin(), loss


def _builder(name: str) -> Callable[[], Any]:
    return lambda: _build(Using(STAGES[name]))


for _name in STAGES:
    globals()[_name] = _builder(_name)


def lazy() -> Any:
    return _build(nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d()))


def traced() -> Any:
    return _build(nn.Sequential(torch.jit.trace(nn.Linear(WIDTH, WIDTH), torch.zeros(4, WIDTH))))  # type: ignore[no-untyped-call]


def sparse() -> Any:
    return _build(Using(lambda stage, x: (stage.one(x), x.to_sparse())))


def mixed_keys() -> Any:
    return _build(Using(lambda stage, x: {0: stage.one(x), "x": x}))


def detached_loss() -> Any:
    stages, x, target, _ = _build(Using(lambda stage, x: stage.one(x)))
    return stages, x, target, lambda output, wanted: loss(output, wanted).detach()


def loss_by_rows() -> Any:
    stages, x, target, _ = _build(Using(lambda stage, x: stage.one(x)))
    return stages, x, target, nn.MSELoss(reduction="none")
