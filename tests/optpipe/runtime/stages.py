"""Runs the ops of one stage, in any order and with any of them, as a program would."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from optpipe.kinds import RECOMPUTATIONS
from optpipe.runtime import MemoryMeter, Stage
from optpipe.runtime.activations import HostSlab
from optpipe.runtime.messages import Gradient, Tree, leaves, map_leaves, rebuild, tensors

F_B_W = ("F", "B", "W")
F_BW = ("F", "BW")
F_O_R_B_W = ("F", "O", "R", "B", "W")
RECOMPUTED = {
    "recomputed ahead": ("F", "C", "B", "W"),
    "recomputed inside": ("F", "CB", "W"),
    "recomputed inside, fused": ("F", "CBW"),
    "offloaded and recomputed": ("F", "O", "R", "C", "BW"),
}
WAYS = {"split": F_B_W, "fused": F_BW, "offloaded": F_O_R_B_W} | RECOMPUTED
"""Sequences of ops that a microbatch may go through on a stage."""


@dataclass
class Run:
    """Messages that a step of a stage made, by microbatch, and the weight gradients."""

    outputs: dict[int, Tree] = field(default_factory=dict)
    input_gradients: dict[int, Gradient] = field(default_factory=dict)
    weight_gradients: list[Tensor] = field(default_factory=list)


def play_between(stage: Stage, kind: str, i: int, slab: HostSlab) -> bool:
    """Run an O, R, C or W of microbatch i, which neither take nor make a message; False for other kinds."""
    match kind:
        case "O":
            stage.copy_out(i, slab)
            stage.free(i)
        case "R":
            stage.allocate(i)
            stage.copy_in(i)
        case "C":
            stage.recompute(i)
        case "W":
            stage.backward_weight(i)
        case _:
            return False
    return True


def run_step(
    stage: Stage,
    ops: Sequence[tuple[str, int]],
    messages: Mapping[int, Tree],
    target: Tree = None,
    mode: str = "full",
) -> Run:
    """One step; the gradient of every output is `weighing` of it. Microbatches that are recomputed are in `mode`."""
    found, slabs = Run(), {i: HostSlab() for i in messages}
    offloaded = {i for kind, i in ops if kind == "O"}
    recomputed = {i for kind, i in ops if kind in RECOMPUTATIONS}
    stage.begin_step()
    stage.zero_gradients()
    for kind, i in ops:
        if kind == "F":
            forward = stage.forward_of(mode if i in recomputed else None)
            found.outputs[i] = forward(i, map_leaves(Tensor.clone, messages[i]), target, i in offloaded)
        elif not play_between(stage, kind, i, slabs[i]):
            backward = backward_of(stage, kind)
            found.input_gradients[i] = backward(i, map_leaves(weighing, found.outputs[i]) if target is None else None)
    found.weight_gradients = gradients_of(stage.module)
    return found


def bytes_of_way(
    stage: Stage, meter: MemoryMeter, message: Tensor, kind: str, mode: str | None
) -> tuple[int, int, int]:
    """Bytes that stay after F of a microbatch, and the peaks of C and of the backward beyond these.

    `kind`: C (and BW), CBW, or BW.
    """
    stage.begin_step()
    stage.zero_gradients()
    with meter, meter.on(0):
        output = stage.forward_of(mode)(0, message.clone(), None, False, True)
        gradient = weighing(output)
        del output
        kept = meter.live_bytes[0]
        meter.restart_peak()
        if kind == "C":
            stage.recompute(0)
        ahead = meter.peak_bytes[0]
        meter.restart_peak()
        backward_of(stage, "CBW" if kind == "CBW" else "BW")(0, gradient)
        del gradient
        assert meter.live_bytes[0] == 0
    return kept, ahead - kept, meter.peak_bytes[0] - kept


def backward_of(stage: Stage, kind: str) -> Callable[[int, Gradient], Gradient]:
    """Any of the four backwards."""
    return {
        "B": stage.backward_input,
        "BW": stage.backward,
        "CB": stage.recompute_and_backward_input,
        "CBW": stage.recompute_and_backward,
    }[kind]


def run_one(stage: Stage, way: Sequence[str], message: Tree, target: Tree = None) -> Run:
    """One step of microbatch 0 alone."""
    return run_step(stage, [(kind, 0) for kind in way], {0: message}, target)


def plain_step(module: nn.Module, message: Tree) -> Run:
    """Run microbatch 0 by autograd alone."""
    for parameter in module.parameters():
        parameter.grad = None
    parts = [part.clone().requires_grad_(part.is_floating_point()) for part in leaves(message)]
    output = module(rebuild(message, parts))
    roots = [part for part in leaves(output) if part.requires_grad]
    torch.autograd.backward(roots, tensors([weighing(part) for part in roots]))
    gradients = rebuild(message, [part.grad for part in parts])
    return Run({0: map_leaves(Tensor.detach, output)}, {0: gradients}, gradients_of(module))


def weighing(output: Tensor) -> Tensor | None:
    """A gradient that weighs every entry differently; None for integers and booleans."""
    if not output.is_floating_point():
        return None
    return torch.arange(output.numel(), dtype=output.dtype).reshape(output.shape).sin()


def gradients_of(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]
