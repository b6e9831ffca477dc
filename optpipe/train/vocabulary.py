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
from optpipe.runtime.vocabulary import IGNORED, Labels, VocabularyShard, pass_bytes, rows_of
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
        ("model.tied", model.tied, model.tied, "train with weights of its own for the head"),
        ("evaluate", config.evaluate, bool(config.evaluate), "evaluate with a schedule without spread passes"),
        ("evaluate_every", config.evaluate_every, config.evaluate_every is not None, "leave it out"),
        ("checkpoints.folder", config.checkpoints.folder, config.checkpoints.folder is not None, "leave it out"),
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

    `name`: of its weight, as the undivided last stage calls it. `weight`: (vocabulary, width). `holders`: for each
    device the stage that holds its rows.
    """

    passes: VocabularyPasses
    labels: Labels
    name: str
    weight: Tensor
    holders: Sequence[int]

    def rows(self, device: int) -> range:
        """Rows of a device."""
        return rows_of(len(self.weight), device, len(self.holders))

    def rows_in(self, stage: int) -> range:
        """Rows that a stage holds."""
        return self.rows(self.holders.index(stage))

    def shards(self, modules: Mapping[int, nn.Module], gradient_scale: float) -> dict[int, VocabularyShard]:
        """Rows of the devices whose stages are given, by device; each becomes a parameter of its stage."""
        shards = {}
        for device, stage in enumerate(self.holders):
            if stage not in modules:
                continue
            own = self.rows(device)
            rows = ByHand(self.weight.detach()[own.start : own.stop].clone())
            modules[stage].register_parameter(ROWS, rows)
            shards[device] = VocabularyShard(
                rows,
                own.start,
                len(self.weight),
                self.labels,
                gradient_scale=gradient_scale,
                barriers=self.passes.barriers,
            )
        return shards

    def with_sizes(self, problem: Problem, activation: Spec) -> Problem:
        """The problem with the memory that its passes take; `activation` is what the last stage gives to the layer."""
        width, dtype, count = self.weight.shape[1], self.weight.dtype, len(self.holders)
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


def divided_layer(program: Program, modules: Sequence[nn.Module], task: Task) -> DividedLayer:
    """Take the layer that the last stage names from it, for the passes of a program; the stage then ends before it.

    A module within the last stage names its layer by `vocabulary_layer`: an nn.Linear without bias, whose output is
    that of the stage. Raises TrainingError where there is none, or the layer or its loss is another.
    """
    assert program.vocabulary is not None, "the program has the passes of one"
    labels, last, count = labels_of(task.loss), len(modules) - 1, len(program.devices)
    named = [(path, m) for path, m in modules[last].named_modules() if getattr(m, "vocabulary_layer", None)]
    if len(named) != 1:
        raise TrainingError(
            f"{len(named)} modules in the last stage of {task.name} have vocabulary_layer, but the schedule divides "
            "one such layer over all devices. Maybe set it to the name of the nn.Linear that makes the logits, or "
            "solve without spread passes."
        )
    [(path, holder)] = named
    layer = getattr(holder, holder.vocabulary_layer)
    where = f"{path}.{holder.vocabulary_layer}".lstrip(".")
    shared = [n for n, module in enumerate(modules[:-1]) for p in module.parameters() if p is layer.weight]
    for wrong, text in (
        (
            not isinstance(layer, nn.Linear),
            f"is {type(layer).__name__}, but must be nn.Linear. Maybe name another layer",
        ),
        (getattr(layer, "bias", None) is not None, "has a bias, which the passes do not add. Maybe use bias=False"),
        (not layer.weight.requires_grad, "is frozen, but its gradient is made. Maybe solve without spread passes"),
        (bool(shared), f"shares its weight with stages[{[*shared, 0][0]}], which has all rows. Maybe do not tie them"),
        (len(layer.weight) < count, f"has {len(layer.weight)} rows for {count} devices. Maybe use fewer devices"),
    ):
        if wrong:
            raise TrainingError(f"stages[{last}].{where} of {task.name} {text}.")
    without = [d for d in range(count) if d not in program.placement]
    if without:
        raise TrainingError(
            f"device {without[0]} has no stage to hold its rows of the vocabulary layer. Maybe place one on each."
        )
    setattr(holder, holder.vocabulary_layer, nn.Identity())
    holders = [program.placement.index(d) for d in range(count)]
    return DividedLayer(program.vocabulary, labels, f"{where}.weight", layer.weight, holders)
