"""A vocabulary layer whose rows lie on all devices of a run: the layer of the task's last stage, cut into rows.

Each device's rows are a parameter of its first stage, so that optimizer, gradients and norms treat them as its others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from optpipe.compile import Program
from optpipe.errors import TrainingError
from optpipe.models.loss import LabelLoss, PerToken
from optpipe.problem import Problem
from optpipe.runtime.loss import Loss
from optpipe.runtime.messages import MessageSpec, Spec, spec_text
from optpipe.runtime.shared_parameters import Place
from optpipe.runtime.tied_rows import TiedRows, rows_within
from optpipe.runtime.vocabulary import IGNORED, Labels, VocabularyShard, named_layers, pass_bytes, rows_of
from optpipe.runtime.weight_gradients import ByHand
from optpipe.spread import VocabularyPasses
from optpipe.train.config import TrainingConfig
from optpipe.train.tasks.base import Task
from optpipe.train.tasks.gpt import byte_loss

ROWS = "vocabulary_rows"
"""Name of the parameter with a device's rows, in its first stage."""


def refuse_settings(config: TrainingConfig, hardware: torch.device) -> None:
    """Raise TrainingError for a setting that does not go with a vocabulary layer on all devices."""
    model = config.model
    refused: Sequence[tuple[str, object, bool, str]] = (
        ("device", hardware.type, hardware.type != "cpu", "use --device cpu"),
        ("model.dtype", model.dtype, model.dtype == "bfloat16", "train in float32 or float64"),
        ("model.autocast", model.autocast, model.autocast is not None, "leave it out"),
        ("model.lengths", model.lengths, model.varies, "train on sequences of one length"),
        ("model.loader", model.loader, model.loader is not None, "give batches by --data"),
        ("online.mode", config.online.mode, config.online.on, "leave --online and --solve out"),
        ("output.trace", config.output.trace, config.output.trace is not None, "leave it out"),
    )
    for field, value, wrong, fix in refused:
        if wrong:
            raise TrainingError(
                f"{field} is {value}, but the schedule has the passes of a vocabulary layer on all devices, with which "
                f"that does not run. Maybe {fix}."
            )


def labels_of(loss: Loss) -> Labels:
    """How to read labels from the target of a cross entropy. Raises TrainingError for any other loss."""
    if loss is byte_loss:
        return lambda target: (target.flatten(), (target != IGNORED).sum())
    counted = loss.loss if isinstance(loss, PerToken) else None
    if isinstance(counted, LabelLoss):
        return lambda target: (counted.shifted(target[0]).flatten(), target[1])
    name = getattr(loss, "__name__", type(counted or loss).__name__)
    raise TrainingError(
        f"the loss is {name}, but that of a vocabulary layer on all devices is the cross entropy of the GPT, or an "
        "optpipe.models.loss.LabelLoss. Maybe solve without spread passes."
    )


@dataclass(frozen=True)
class DividedLayer:
    """The layer of the last stage, divided over the devices (`divided_layer`).

    `head`: where the undivided model has its weight, which is `spec`, (vocabulary, width). `tied`: the place in an
    earlier stage that has the same weight. `holders`: for each device the stage that holds its rows.
    """

    passes: VocabularyPasses
    labels: Labels
    head: Place
    spec: MessageSpec
    holders: Sequence[int]
    tied: Place | None = None

    @property
    def place(self) -> Place:
        """Place at which the undivided model has the weight first."""
        return self.tied or self.head

    def rows(self, device: int) -> range:
        """Rows of a device."""
        return rows_of(self.spec.shape[0], device, len(self.holders))

    def rows_in(self, stage: int) -> range:
        """Rows that a stage holds."""
        return self.rows(self.holders.index(stage))

    def shards(
        self, weight: Tensor, modules: Mapping[int, nn.Module], gradient_scale: float
    ) -> dict[int, VocabularyShard]:
        """Rows of the devices whose stages are given, by device; each becomes a parameter of its stage.

        `weight`: that of the undivided layer.
        """
        shards, whole = {}, self.whole(modules)
        for device, stage in enumerate(self.holders):
            if stage not in modules:
                continue
            own = self.rows(device)
            rows = ByHand(weight.detach()[own.start : own.stop].clone())
            if whole is not None:
                rows_within(whole, own, rows)
            modules[stage].register_parameter(ROWS, rows)
            shards[device] = VocabularyShard(
                rows,
                own.start,
                self.spec.shape[0],
                self.labels,
                gradient_scale=gradient_scale,
                barriers=self.passes.barriers,
            )
        return shards

    def whole(self, modules: Mapping[int, nn.Module]) -> nn.Parameter | None:
        """The whole weight, where one of the stages given has it."""
        if self.tied is None or self.tied[0] not in modules:
            return None
        return modules[self.tied[0]].get_parameter(self.tied[1])

    def tied_rows(self, modules: Mapping[int, nn.Module], placement: Sequence[int]) -> TiedRows | None:
        """Exchanges of this process, which has one device, with the one that has the whole weight, if any has.

        Collective over all processes.
        """
        if self.tied is None:
            return None
        [held] = [modules[stage] for stage in self.holders if stage in modules]
        weight = self.whole(modules)
        ranges = [self.rows(device) for device in range(len(self.holders))]
        return TiedRows(placement[self.tied[0]], ranges, held.get_parameter(ROWS) if weight is None else weight)

    def with_sizes(self, problem: Problem, activation: Spec) -> Problem:
        """The problem with the memory that its passes take; `activation` is what the last stage gives to the layer."""
        width, dtype, count = self.spec.shape[1], self.spec.dtype, len(self.holders)
        tokens = prod(activation.shape[:-1])
        sizes = [pass_bytes((len(self.rows(d)), width), dtype, tokens, count) for d in range(count)]
        workspace = [own for _, own in sizes]
        making = [own + activation.size_bytes for own in workspace]  # with the addend of the activation's gradient
        first, second = (making, workspace) if self.passes.barriers == 1 else (workspace, making)
        changes: dict[str, dict[str, Any]] = {
            self.passes.logits: {"kept_bytes": [kept for kept, _ in sizes], "workspace_bytes": first},
            self.passes.weights: {"frees": self.passes.logits, "kept_bytes": None, "workspace_bytes": second},
        }
        passes = [one.replaced(**changes[one.name]) for one in problem.spread or ()]
        return problem.replaced(spread=passes)


def check_activation(spec: Spec, width: int) -> None:
    """Raise TrainingError unless what the last stage gives to a vocabulary layer is a tensor (..., width)."""
    if not isinstance(spec, MessageSpec) or len(spec.shape) < 2 or spec.shape[-1] != width:
        raise TrainingError(
            f"the last stage gives {spec_text(spec)} to its vocabulary layer, which takes one tensor (..., {width}). "
            "Maybe something follows the layer that vocabulary_layer names."
        )


def divided_layer(program: Program, modules: Sequence[nn.Module], task: Task) -> tuple[DividedLayer, Tensor]:
    """Take the layer that the last stage names from it, for the passes of a program; the stage then ends before it.

    Returns also its weight, of which nothing is kept otherwise.

    A module within the last stage names its layer by `vocabulary_layer`: an nn.Linear without bias, whose output is
    that of the stage. Raises TrainingError where there is none, or the layer or its loss is another.
    """
    assert program.vocabulary is not None, "the program has the passes of one"
    labels, last, count = labels_of(task.loss), len(modules) - 1, len(program.devices)
    named = named_layers(modules[last])
    if len(named) != 1:
        raise TrainingError(
            f"{len(named)} modules in the last stage of {task.name} have vocabulary_layer, but the schedule divides "
            "one such layer over all devices. Maybe set it to the name of the nn.Linear that makes the logits, or "
            "solve without spread passes."
        )
    [(path, holder, name)] = named
    layer = getattr(holder, name)
    where = f"{path}.{name}".lstrip(".")
    if not isinstance(layer, nn.Linear):
        raise TrainingError(
            f"stages[{last}].{where} of {task.name} is {type(layer).__name__}, but must be nn.Linear. Maybe name "
            "another layer."
        )
    weight = layer.weight
    tied = [(n, name) for n, m in enumerate(modules[:-1]) for name, p in m.named_parameters() if p is weight]
    uses = len(tied) + sum(p is weight for _, p in modules[last].named_parameters(remove_duplicate=False))
    for wrong, text in (
        (layer.bias is not None, "has a bias, which the passes do not add. Maybe use bias=False"),
        (not weight.requires_grad, "is frozen, but its gradient is made. Maybe solve without spread passes"),
        (
            uses - len(tied) > 1 or len(tied) > 1,
            f"has its weight in {uses} places, but outside the layer one place in an earlier stage may have it. Maybe "
            "solve without spread passes",
        ),
        (len(weight) < count, f"has {len(weight)} rows for {count} devices. Maybe use fewer devices"),
    ):
        if wrong:
            raise TrainingError(f"stages[{last}].{where} of {task.name} {text}.")
    without = [d for d in range(count) if d not in program.placement]
    if without:
        raise TrainingError(
            f"device {without[0]} has no stage to hold its rows of the vocabulary layer. Maybe place one on each."
        )
    setattr(holder, name, nn.Identity())
    holders = [program.placement.index(d) for d in range(count)]
    spec, head = MessageSpec(tuple(weight.shape), weight.dtype), (last, f"{where}.weight")
    return DividedLayer(program.vocabulary, labels, head, spec, holders, *tied), weight
