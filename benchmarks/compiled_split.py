"""Split backwards inside compiled graphs: a weight gradient that is deferred by a custom operator.

python -m benchmarks.compiled_split: processor time of F, B and W of blocks of a GPT, run eagerly with split layers as
the runtime has them, compiled with fused backwards, and compiled with `DeferredLinear` in the place of `nn.Linear`.

In the compiled graph of a backward the operator `optpipe_benchmark::defer` takes a layer's input and the gradient of
its output, and W multiplies them later. The compiler takes both for dead after the operator and may write other tensors
into their memory, so the operator has to copy them: `--no-copies` shows what becomes of the gradients without.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import thread_time
from typing import Any

import torch
from torch import Tensor, nn

from optpipe.runtime.stage import Stage

WIDTH, ROWS, BLOCKS, ROUNDS = 256, 512, 2, 7
DEFERRED: list[tuple[int, Tensor, Tensor]] = []
COPIES = True


@torch.library.custom_op("optpipe_benchmark::defer", mutates_args=())
def defer(x: Tensor, gradient: Tensor, slot: int) -> Tensor:
    """Keep what the weight gradient of layer `slot` needs; the result is the gradient of the layer's token."""
    DEFERRED.append((slot, x.clone(), gradient.clone()) if COPIES else (slot, x, gradient))
    return x.new_empty(0)


@defer.register_fake
def _(x: Tensor, gradient: Tensor, slot: int) -> Tensor:  # noqa: ARG001
    return x.new_empty(0)


class _Deferred(torch.autograd.Function):
    """y = x W^T + b, whose backward leaves the gradients of W and b to `weight_gradients`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, _token: Tensor, slot: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.slot = slot
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, None, None, defer(x, gradient, ctx.slot), None


class DeferredLinear(nn.Module):
    """`nn.Linear` with a token: an empty tensor, whose gradient keeps `defer` in the graph."""

    def __init__(self, linear: nn.Linear, slot: int) -> None:
        super().__init__()
        self.linear, self.slot = linear, slot
        self.token = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        y: Tensor = _Deferred.apply(x, self.linear.weight, self.linear.bias, self.token, self.slot)  # type: ignore[no-untyped-call]
        return y


class Block(nn.Module):
    """Norm, two layers and an activation, added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.widen, self.narrow = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        y: Tensor = x + self.narrow(nn.functional.gelu(self.widen(self.norm(x))))
        return y


def model() -> nn.Sequential:
    """The blocks, equal at each call."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def deferred(module: nn.Module) -> list[nn.Linear]:
    """Replace the layers of a model; returns them by slot."""
    layers: list[nn.Linear] = []
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, nn.Linear):
                setattr(part, name, DeferredLinear(child, len(layers)))
                layers.append(child)
    return layers


def weight_gradients(layers: list[nn.Linear]) -> None:
    """W: add the gradients that were deferred."""
    while DEFERRED:
        slot, x, gradient = DEFERRED.pop()
        for parameter, found in (
            (layers[slot].weight, gradient.flatten(0, -2).T @ x.flatten(0, -2)),
            (layers[slot].bias, gradient.flatten(0, -2).sum(0)),
        ):
            parameter.grad = found if parameter.grad is None else parameter.grad + found


def timed(ops: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median milliseconds of processor time of each op, run in their order, after two rounds that compile."""
    took: dict[str, list[float]] = {name: [] for name in ops}
    for n in range(ROUNDS + 2):
        for name, op in ops.items():
            begin = thread_time()
            op()
            if n > 1:
                took[name].append(1e3 * (thread_time() - begin))
    return {name: median(times) for name, times in took.items()}


def by_autograd(module: Callable[[Tensor], Tensor], x: Tensor, layers: list[nn.Linear] | None) -> dict[str, float]:
    """Times of a module whose backward is one call, and of W where layers are deferred."""
    state: dict[str, Tensor] = {}
    gradient = torch.ones_like(x)

    def forward() -> None:
        state["y"] = module(x.detach().requires_grad_())

    ops: dict[str, Callable[[], Any]] = {"F": forward}
    ops["BW" if layers is None else "B"] = lambda: torch.autograd.backward(state.pop("y"), gradient)
    if layers is not None:
        ops["W"] = lambda: weight_gradients(layers)
    return timed(ops)


def eagerly_split(x: Tensor) -> dict[str, float]:
    """Times of the runtime's stage."""
    stage, gradient = Stage(model()), torch.ones_like(x)
    stage.zero_gradients()
    return timed(
        {
            "F": lambda: stage.forward(0, x, None, offloads=False),
            "B": lambda: stage.backward_input(0, gradient),
            "W": lambda: stage.backward_weight(0),
        }
    )


def gradient_error(x: Tensor) -> float:
    """Largest error of a weight gradient of the compiled split module, relative to the largest entry."""
    plain, split = model(), model()
    layers = deferred(split)
    torch.autograd.backward(plain(x).square().sum())
    torch.autograd.backward(torch.compile(split)(x.detach().requires_grad_()).square().sum())
    weight_gradients(layers)
    theirs = [part for part in plain.modules() if isinstance(part, nn.Linear)]
    errors = []
    for ours, other in zip(layers, theirs, strict=True):
        assert ours.weight.grad is not None, "it was deferred and computed"
        assert other.weight.grad is not None, "autograd has computed it"
        errors.append(float((ours.weight.grad - other.weight.grad).abs().max() / other.weight.grad.abs().max()))
    return max(errors)


def main() -> None:
    """Print times and errors."""
    global COPIES
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-copies", action="store_true", help="keep what the compiler believes to be dead")
    COPIES = not parser.parse_args().no_copies
    torch.set_num_threads(1)
    x = torch.randn(1, ROWS, WIDTH)
    split = model()
    layers = deferred(split)
    rows = {
        "eager, split": eagerly_split(x),
        "eager, fused": by_autograd(model(), x, None),
        "compiled, fused": by_autograd(torch.compile(model()), x, None),
        "compiled, split by a custom operator": by_autograd(torch.compile(split), x, layers),
    }
    for name, times in rows.items():
        text = ", ".join(f"{op} {took:.2f} ms" for op, took in times.items())
        print(f"{name}: {text}, all {sum(times.values()):.2f} ms")
    print(f"largest error of a weight gradient, compiled and split: {gradient_error(x):.1e}")


if __name__ == "__main__":
    main()
