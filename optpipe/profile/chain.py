"""A subject's stages on their hardware, checked to fit one another, with samples of what crosses between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optpipe.profile.callables import check_tensors, refuse
from optpipe.profile.subject import Subject
from optpipe.runtime.evaluation import evaluating
from optpipe.runtime.messages import MessageSpec, Spec, Tree, map_leaves, spec_of, spec_text
from optpipe.runtime.stage import Stage
from optpipe.runtime.weight_gradients import compiler_failure

GRADIENT_SCALE = 1e-3
"""Of sampled gradients: far from numbers so small that a CPU computes with them slowly."""


@dataclass(frozen=True)
class Chain:
    """The stages that this process profiles, by number, out of `count`; `messages[b]` crosses from stage b to b + 1."""

    stages: Mapping[int, Stage]
    count: int
    inputs: Tree
    targets: Tree
    messages: list[Spec]

    def before(self, stage: int) -> Spec | None:
        """What a stage receives from the one before it; None for the first, which gets the batch."""
        return self.messages[stage - 1] if stage else None

    def after(self, stage: int) -> Spec | None:
        """What a stage hands on; None for the last, which has the loss."""
        return self.messages[stage] if stage < len(self.messages) else None

    def received(self, stage: int, device: torch.device) -> Tree:
        """A microbatch as a stage receives it: the batch, or random numbers (zeros for integers) of its message."""
        before = self.before(stage)
        return self.inputs if before is None else map_leaves(lambda spec: _random(spec, device), before)

    def gradient(self, stage: int, device: torch.device) -> Any:
        """A gradient of a stage's output, random; None for the last stage, and for integers."""
        after = self.after(stage)
        return None if after is None else map_leaves(lambda spec: _random_gradient(spec, device), after)


def chain_of(
    subject: Subject,
    device: torch.device,
    microbatches: int,
    mine: Collection[int],
    autocast: torch.dtype | None = None,
) -> Chain:
    """Put the stages in `mine` on `device`, and learn from all of them what crosses the boundaries.

    Every stage runs forward once, one of another process only for that. `microbatches` scales the loss's gradient;
    `autocast` is that of `Stage`. Raises InputError where a stage does not take what the one before returns.
    """
    inputs, targets = (map_leaves(lambda x: x.to(device), tree) for tree in (subject.inputs, subject.targets))
    message, messages = inputs, []
    with torch.autocast(device.type, autocast) if autocast else nullcontext():
        for s, module in enumerate(subject.stages):
            module.to(device)
            message = _output(subject, s, module, message)
            messages.append(spec_of(message))
            if s not in mine:
                module.to("cpu")
        _check_loss(subject, message, targets)
    last = len(subject.stages) - 1
    stages = {
        s: Stage(
            module,
            first=s == 0,
            loss=subject.loss if s == last else None,
            gradient_scale=1 / microbatches,
            autocast=autocast,
            seed=0,
        )
        for s, module in enumerate(subject.stages)
        if s in mine
    }
    for s, stage in stages.items():
        stage.join(s, ())
    return Chain(stages, len(subject.stages), inputs, targets, messages[:-1])


def _output(subject: Subject, s: int, module: nn.Module, received: Tree) -> Tree:
    try:
        with torch.no_grad(), evaluating([module]):
            output = module(received)
    except Exception as error:
        what = f"what stages[{s - 1}] returns" if s else "the inputs"
        kind, text = type(module).__name__, str(error).strip().splitlines() or [""]
        if failure := compiler_failure(error):
            detail = f"stages[{s}]: torch.compile fails: {failure}. Maybe train without torch.compile."
            refuse(subject.name, "compiler_failed", detail)
        refuse(
            subject.name,
            "stage_does_not_fit",
            f"stages[{s}] ({kind}) fails on {what}, {spec_text(spec_of(received))}: {type(error).__name__}: {text[0]}. "
            "Maybe a stage is missing, or the sizes of two differ.",
        )
    check_tensors(subject.name, f"the output of stages[{s}]", output)
    return output


def _check_loss(subject: Subject, output: Tree, targets: Tree) -> None:
    with torch.no_grad():
        try:
            loss = subject.loss(output, targets)
        except Exception as error:
            shown = f"{spec_text(spec_of(output))} and {spec_text(spec_of(targets))}"
            refuse(subject.name, "loss_does_not_fit", f"loss fails on {shown}: {type(error).__name__}: {error}.")
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        found = spec_text(spec_of(loss)) if isinstance(loss, Tensor) else type(loss).__name__
        refuse(subject.name, "loss_no_scalar", f"loss returns {found}, but must return one number, as a tensor.")


def _random(spec: MessageSpec, device: torch.device) -> Tensor:
    empty = spec.empty(device)
    return empty.normal_() if spec.has_gradient else empty.zero_()


def _random_gradient(spec: MessageSpec, device: torch.device) -> Tensor | None:
    return spec.empty(device).normal_(0, GRADIENT_SCALE) if spec.has_gradient else None
