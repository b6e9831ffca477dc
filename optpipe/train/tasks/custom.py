"""A user's own stages as a task: modules, one microbatch and a loss from one callable, batches from another."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from optpipe.errors import InputError, Issue
from optpipe.models.cut import Unit, joined, parse_cut
from optpipe.models.loss import PerToken, is_counted
from optpipe.profile.subject import Data, Named, Subject, batch_of, load_subject
from optpipe.runtime.loss import Loss
from optpipe.runtime.messages import message_spec, spec_text
from optpipe.runtime.shared_parameters import shared_parameters
from optpipe.train.config import TrainingConfig
from optpipe.train.launch import leads
from optpipe.train.lengths import Sizes, tokens_of
from optpipe.train.tasks.base import Batch
from optpipe.train.tasks.loader import VARYING, LoadedBatches

LOG = logging.getLogger("optpipe.train")


class OwnStages:
    """Stages that the callable of `config.model.name` returns; `microbatches` are those of all replicas.

    The callable is called anew for each set of stages, with torch's generator seeded, so that all sets are equal.
    Raises InputError if it does not return `stages` stages, if its loss has parameters to train, or if
    `config.model.data` returns other batches than these stages take; TrainingError if stages share what cannot be kept
    one.
    """

    def __init__(self, config: TrainingConfig, stages: int, microbatches: int, loader: LoadedBatches | None) -> None:
        self.loader = loader
        self._model, self._seed, self._microbatches = config.model, config.seed, microbatches
        self._stages = stages
        first = self._load()
        blocks, cut = list(first.stages), config.model.cut
        self._sizes: tuple[int, ...] | None = None
        if cut is not None:
            units = [Unit((f"stages[{n}]",)) for n in range(len(blocks))]
            self._sizes = parse_cut(cut, units, stages, "model.cut")
        elif len(blocks) != stages:
            maybe = "--cut to join them" if len(blocks) > stages else "return as many stages"
            detail = (
                f"is {self._model.name}, which returns {len(blocks)} stage(s), but the schedule has {stages}. "
                f"Maybe profile and solve for this model, or {maybe}."
            )
            raise InputError([Issue(("model", "name"), "wrong_count", detail)])
        self._inputs, self._targets = first.inputs, first.targets
        self._loss: Loss = PerToken(first.loss) if is_counted(first.loss) else first.loss
        if self._model.varies and not is_counted(first.loss):
            detail = (
                f"is 'varying', but the loss of {self._model.name} has no count, so that tokens of short microbatches "
                "would weigh more than those of long ones. Maybe give it one: see 'Losses by tokens' in the guide."
            )
            raise InputError([Issue("model.lengths", "no_count", detail)])
        # No stage would own a parameter of the loss: no optimizer would have it, or only another process's.
        in_loss = first.loss.named_parameters() if isinstance(first.loss, nn.Module) else ()
        if trained := [name for name, parameter in in_loss if parameter.requires_grad]:
            detail = (
                f"is {self._model.name}, whose loss has parameters to train ({', '.join(trained[:4])}), which no stage "
                "has. Maybe compute what needs them in the last stage."
            )
            raise InputError([Issue("model.name", "loss_has_parameters", detail)])
        self._shapes = [{n: list(p.shape) for n, p in stage.named_parameters()} for stage in blocks]
        self._shared = [[list(place) for place in shared.places] for shared in shared_parameters(blocks)]
        self._unused: list[nn.Module] | None = self._joined(blocks)
        self._data: Data | None = loader or (Named("data", config.model.data) if config.model.data else None)
        if self._data is not None:
            self.batch(0)  # refuses batches that do not fit before a step is run
        elif leads():
            LOG.warning("no --data: every step trains on the one microbatch that %s returns", self._model.name)

    @property
    def architecture(self) -> None:
        """Not known."""
        return None

    @property
    def name(self) -> str:
        """Name of the callable."""
        return self._model.name

    @property
    def loss(self) -> Loss:
        """Loss that the callable returned."""
        return self._loss

    @property
    def tokens(self) -> int:
        """Tokens of the first input: its integers, N * T of floats of shape (N, T, C), otherwise its rows."""
        return tokens_of(self._inputs)

    @property
    def reference(self) -> Sizes:
        """The microbatch that the callable returned."""
        return Sizes.of(self._inputs)

    def build_stages(self, _own: Collection[int] | None = None) -> list[nn.Module]:
        """New modules, the same weights at each call."""
        unused, self._unused = self._unused, None
        return unused or self._joined(self._load().stages)

    def batch(self, step: int) -> Batch:
        """Batch of the step from the data callable; without one, the same microbatch every time."""
        inputs, targets = [self._inputs] * self._microbatches, [self._targets] * self._microbatches
        if self._data is not None:
            like = (self._inputs, self._targets)
            hint = VARYING if isinstance(self._loss, PerToken) else " Maybe pad them to one size."
            inputs, targets = batch_of(
                self._data, step, self._model.name, like, self._microbatches, varies=self._model.varies, hint=hint
            )
        if isinstance(self._loss, PerToken):
            targets = self._loss.with_tokens(targets, self.loader.tokens if self.loader else int)
        return inputs, targets

    def model_name(self, stage: int, name: str) -> str:
        """Name in a sequence of all blocks that the callable returns: the number of its block, and its name there."""
        if self._sizes is None:
            return f"{stage}.{name}"
        place, _, own = name.partition(".")
        return f"{sum(self._sizes[:stage]) + int(place)}.{own}"

    def identity(self) -> dict[str, Any]:
        """Names of model and data, the seed, the cut, the shapes of all parameters, and which of them blocks share."""
        identity = {
            "model": self._model.name,
            "data": self._model.data,
            **({"loader": self.loader.name} if self.loader else {}),
            **({"lengths": self._model.lengths} if self._model.varies else {}),
            "seed": self._seed,
            "microbatch": spec_text(message_spec(self._inputs)),
            "parameters": self._shapes,
            "cut": list(self._sizes or (1,) * self._stages),
        }
        return identity | ({"shared": self._shared} if self._shared else {})

    def _load(self) -> Subject:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            return load_subject(self._model.name)

    def _joined(self, blocks: Sequence[nn.Module]) -> list[nn.Module]:
        return list(blocks) if self._sizes is None else joined(blocks, self._sizes)
