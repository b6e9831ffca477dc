"""A subject's stages on their hardware, checked to fit one another, with samples of what crosses between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optpipe.profile.callables import check_tensors, refuse
from optpipe.profile.subject import Subject
from optpipe.runtime.evaluation import evaluating
from optpipe.runtime.messages import MessageSpec, Spec, Tree, map_leaves, spec_of, spec_text
from optpipe.runtime.shared_parameters import with_own_modules
from optpipe.runtime.stage import Stage
from optpipe.runtime.stage_sizes import Sample
from optpipe.runtime.weight_gradients import compiler_failure

GRADIENT_SCALE = 1e-3
"""Of sampled gradients: far from numbers so small that a CPU computes with them slowly."""


@dataclass(frozen=True)
class Chain:
    """The stages that this process profiles, by number, out of `count`; `messages[b]` crosses from stage b to b + 1.

    `batch`: the microbatches, with their targets. `samples[s]`: the same as stage s gets them, the first stage from
    the batch, the others on the CPU as the stages before really compute them.
    """

    stages: Mapping[int, Stage]
    count: int
    batch: Sequence[Sample]
    samples: Mapping[int, Sequence[Sample]]
    messages: list[Spec]

    @property
    def inputs(self) -> Tree:
        """The first microbatch."""
        return self.batch[0][0]

    @property
    def targets(self) -> Tree:
        """The target of the first microbatch."""
        return self.batch[0][1]

    def before(self, stage: int) -> Spec | None:
        """What a stage receives from the one before it; None for the first, which gets the batch."""
        return self.messages[stage - 1] if stage else None

    def after(self, stage: int) -> Spec | None:
        """What a stage hands on; None for the last, which has the loss."""
        return self.messages[stage] if stage < len(self.messages) else None

    def received(self, stage: int, device: torch.device, sample: int = 0) -> Tree:
        """A microbatch as a stage receives it: the batch, or a new copy of what the stage before sends."""
        found = self.samples[stage][sample][0]
        return map_leaves(lambda leaf: leaf.to(device, copy=True), found) if stage else found

    def target(self, stage: int, sample: int = 0) -> Tree | None:
        """What the last stage's loss compares with; None for the others."""
        return self.batch[sample][1] if self.after(stage) is None else None

    def gradient(self, stage: int, device: torch.device) -> Any:
        """A gradient of a stage's output, random; None for the last stage, and for integers."""
        after = self.after(stage)
        return None if after is None else map_leaves(lambda spec: random_gradient(spec, device), after)


def chain_of(
    subject: Subject,
    device: torch.device,
    microbatches: int,
    mine: Collection[int],
    autocast: torch.dtype | None = None,
) -> Chain:
    """Put the stages in `mine` on `device`, and learn from all of them what crosses the boundaries.

    Every stage runs forward on each microbatch of the subject, one of another process only for that.
    `microbatches` scales the loss's gradient; `autocast` is that of `Stage`. Raises InputError where a stage does not
    take what the one before returns, or returns another shape for another microbatch.
    """
    batch = [
        (map_leaves(lambda x: x.to(device), inputs), map_leaves(lambda x: x.to(device), targets))
        for inputs, targets in ((subject.inputs, subject.targets), *subject.more)
    ]
    trees, messages, samples = [inputs for inputs, _ in batch], [], {0: batch}
    modules = with_own_modules(subject.stages)
    with torch.autocast(device.type, autocast) if autocast else nullcontext():
        for s, module in enumerate(modules):
            module.to(device)
            trees = [_output(subject, s, module, received) for received in trees]
            messages.append(_spec_of_all(subject, s, trees))
            if s + 1 in mine:
                sent = [map_leaves(lambda leaf: leaf.to("cpu"), tree) for tree in trees]
                samples[s + 1] = [(tree, targets) for tree, (_, targets) in zip(sent, batch, strict=True)]
            if s not in mine:
                module.to("cpu")
        for output, (_, targets) in zip(trees, batch, strict=True):
            _check_loss(subject, output, targets)
    last = len(subject.stages) - 1
    stages = {
        s: Stage(
            module.to(device),  # again: a stage of another process may have taken along what they share
            first=s == 0,
            loss=subject.loss if s == last else None,
            gradient_scale=1 / microbatches,
            autocast=autocast,
            seed=0,
        )
        for s, module in enumerate(modules)
        if s in mine
    }
    for s, stage in stages.items():
        stage.join(s, ())
    return Chain(stages, len(subject.stages), batch, samples, messages[:-1])


def _spec_of_all(subject: Subject, s: int, outputs: Sequence[Tree]) -> Spec:
    """The spec of what a stage returns, which a runtime relies on to be that of every microbatch."""
    first, *others = map(spec_of, outputs)
    for other in others:
        if other != first:
            detail = f"stages[{s}] returns {spec_text(first)} for one microbatch but {spec_text(other)} for another."
            refuse(subject.name, "message_varies", detail)
    return first


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


def random_gradient(spec: MessageSpec, device: torch.device) -> Tensor | None:
    """A gradient of a message, far from 0; None for integers."""
    return spec.empty(device).normal_(0, GRADIENT_SCALE) if spec.has_gradient else None
