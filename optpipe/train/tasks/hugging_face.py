"""A model of transformers as a task: stages cut by its layers, batches of text or from a callable of the user's."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from optpipe.cluster.model import Model as Architecture
from optpipe.cluster.model import read_model
from optpipe.errors import InputError, Issue
from optpipe.models.hugging_face import PART, PREFIX, SLICED, HuggingFace
from optpipe.models.loss import LabelLoss, PerToken
from optpipe.profile.subject import DATA_RETURNS, Data, Named, batch_of
from optpipe.runtime.loss import Loss
from optpipe.runtime.messages import Tree, leaves, message_spec, spec_text
from optpipe.train.config import ModelConfig, TrainingConfig
from optpipe.train.launch import Launch, leads, own_rank
from optpipe.train.lengths import DrawnLengths, Sizes
from optpipe.train.tasks.base import Batch
from optpipe.train.tasks.gpt import VOCABULARY, Batches, standard_library_text
from optpipe.train.tasks.loader import VARYING, LoadedBatches

LOG = logging.getLogger("optpipe.train")

LONGEST = 512
"""Tokens of a sequence where neither the user nor the configuration says fewer."""


def folder_name(model: str) -> str:
    """Last part of the path in the name of a model."""
    return model.rstrip("/").rpartition("/")[2].removeprefix(PREFIX)


class HuggingFaceTask:
    """The model of `config.model.name`, in `stages` stages; `microbatches` are those of all replicas.

    Without a data callable it reads the text of the standard library, a byte a token. Raises InputError where model,
    cut or data do not fit.
    """

    def __init__(
        self, config: TrainingConfig, stages: int, microbatches: int, loader: LoadedBatches | None, launch: Launch
    ) -> None:
        model, self.loader, self._launch = config.model, loader, launch
        self._seed = config.seed
        self.model = HuggingFace(
            model.name, stages, model.cut, dtype=model.torch_dtype, seed=config.seed, cut_field="model.cut"
        )
        if not self.model.weights and leads():
            LOG.info("%s has no weights: they are drawn from the seed", model.name)
        self._labels = self.model.loss
        self._slices = config.schedule.problem.slice_count if config.schedule else 1
        if self._slices > 1 and not self.model.takes_slices:
            detail = (
                f"is a configuration of {self.model.config.model_type}, but the schedule has slices of sequences, "
                f"which models with full causal attention of {', '.join(SLICED)} take. Maybe solve without slices."
            )
            raise InputError([Issue("model.name", "no_slices", detail)])
        # The label of a slice's last position is in the next slice: labels are shifted before they are cut.
        self._loss = PerToken(self.model.loss if self._slices == 1 else LabelLoss(shift=False))
        self.batches = HuggingFaceBatches(self.model, model, microbatches, config.seed, loader)
        self._first = self.batches.batch(0)
        self._compared = False

    @property
    def name(self) -> str:
        """Class and folder of the model, and the size of a microbatch."""
        return self.batches.name

    @property
    def architecture(self) -> Architecture | None:
        """Architecture of a causal language model of text alone; None for others."""
        config = self.model.config.to_dict()
        if not self._labels.shift or "text_config" in config:
            return None
        try:
            return read_model(config)
        except InputError:  # a family that `optpipe plan` does not read
            return None

    @property
    def loss(self) -> Loss:
        """Mean over the tokens of the batch."""
        return self._loss

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch; the items of a model that reads no tokens."""
        first: Tensor = leaves(self._first[0][0])[0]
        return first.shape[0] if first.is_floating_point() else first.numel()

    @property
    def reference(self) -> Sizes:
        """The longest sequences of text, or the first microbatch of other data."""
        return self.batches.reference

    def build_stages(self, own: Collection[int] | None = None) -> list[nn.Module]:
        """Stages with weights of the folder, or drawn.

        The first call, of all processes together, compares what they compute with the uncut model, on every microbatch
        of the first batch. Raises InputError where anything differs.
        """
        launch, pairs = self._launch, list(zip(*self._first, strict=True))
        count = len(pairs) // launch.replicas
        batch = [] if self._compared else pairs[launch.replica * count : (launch.replica + 1) * count]
        self._compared = True
        if own is None or launch.pipeline_processes == 1:  # alike in all processes, whichever stages each needs
            return self.model.build_stages(None, batch, launch.hardware)
        if batch:
            self._compare(batch)
        return self.model.build_stages(own)

    def _compare(self, batch: Sequence[tuple[Tree, Tree]]) -> None:
        """Compare in the first process of each replica; all raise the InputError of one."""
        launch, refused = self._launch, None
        if launch.rank % launch.devices == 0:
            try:
                self.model.compare(batch, launch.hardware, _room_bytes(launch.hardware))
            except InputError as error:
                refused = [(issue.code, issue.detail) for issue in error.issues]
        if found := next((issues for issues in launch.gather(refused) if issues), None):
            raise InputError([Issue("", code, detail) for code, detail in found], f"model {self.model.name}")

    def batch(self, step: int) -> Batch:
        """Inputs, and labels with the number of tokens of the batch."""
        inputs, labels = self._first if step == 0 and self.loader is None else self.batches.batch(step)
        if self._slices > 1:
            labels = [label if label is None else self._labels.shifted(label) for label in labels]
        return inputs, self._loss.with_tokens(labels, self.loader.tokens if self.loader else int)

    def model_name(self, _stage: int, name: str) -> str:
        """Name that transformers gives it."""
        return name.removeprefix(PART)

    def identity(self) -> dict[str, Any]:
        """The configuration, the cut, and which data they are."""
        return self.model.identity() | self.batches.identity() | {"seed": self._seed, "cut": list(self.model.sizes)}


def _room_bytes(hardware: torch.device) -> int:
    """Memory for the parameters of a model that is there for a comparison: half of what is free, for each process."""
    if hardware.type == "cuda":
        return int(torch.cuda.mem_get_info(hardware)[0] // 2)
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return free_bytes // 2 // own_rank().processes


class HuggingFaceBatches:
    """Batches for a model of transformers, those of all replicas: inputs, and labels as transformers takes them."""

    def __init__(
        self,
        model: HuggingFace,
        config: ModelConfig,
        microbatches: int | None,
        seed: int,
        loader: LoadedBatches | None = None,
    ) -> None:
        self._data: Data | None = loader or (Named("data", config.data) if config.data else None)
        self._microbatches = microbatches
        self._text: Batches | None = None
        self._like: tuple[Tree, Tree] | None = None
        self._varies = config.varies
        self._identity: dict[str, Any] = {"data": config.data}
        if config.varies:
            self._identity["lengths"] = config.lengths
        if loader is not None:
            self._identity["loader"] = loader.name
        name = f"{model.kind.__name__} of {folder_name(model.name)}"
        if self._data is not None:
            self._like = self._first_of_data(self._data)
            self.name = f"{name}, {spec_text(message_spec(self._like[0]))}"
            self._identity["microbatch"] = spec_text(message_spec(self._like[0]))
            self.reference = Sizes.of(self._like[0])
            return
        if model.vocabulary is None or model.vocabulary < VOCABULARY or not model.causal:
            what = f"a vocabulary of {model.vocabulary}" if model.causal else "no tokens to predict"
            detail = f"is missing, and {model.name} has {what}, so it does not learn from bytes. Maybe give your own."
            raise InputError([Issue("model.data", "missing", detail)])
        sequence = config.sequence or min(model.longest or LONGEST, LONGEST)
        if model.longest is not None and sequence > model.longest:
            detail = f"is {sequence} but must be at most {model.longest}, which is the longest of {model.name}."
            raise InputError([Issue("model.sequence", "out_of_range", detail)])
        text = standard_library_text()
        lengths = DrawnLengths(config, sequence) if config.varies else None
        self._text = Batches(
            text,
            microbatches=microbatches or 1,
            size=config.microbatch_size,
            sequence=sequence,
            seed=seed,
            lengths=lengths,
        )
        self.name = f"{name}, {config.microbatch_size} x {sequence}"
        self.reference = Sizes(config.microbatch_size * sequence, config.microbatch_size)
        self._identity |= {"text_bytes": len(text), "text_sum": int(text.sum()), "sequence": sequence}
        self._identity["microbatch_size"] = config.microbatch_size
        self._identity |= lengths.identity() if lengths else {}

    def batch(self, step: int) -> Batch:
        """Inputs and labels of a step."""
        if self._text is not None:
            inputs, _ = self._text.batch(step)
            return list(inputs), [x.clone() for x in inputs]
        assert self._data is not None, "there is text or data"
        assert self._like is not None, "the first batch was read"
        first = "the first microbatch of step 0"
        return batch_of(self._data, step, first, self._like, self._microbatches, varies=self._varies, hint=VARYING)

    def identity(self) -> dict[str, Any]:
        """JSON values that tell these batches from others."""
        return self._identity

    def _first_of_data(self, data: Data) -> tuple[Tree, Tree]:
        returned = data(0)
        if (
            not isinstance(returned, tuple)
            or len(returned) != 2
            or not all(isinstance(p, list | tuple) for p in returned)
        ):
            data.refuse("wrong_return", f"returns {type(returned).__name__}, but must return {DATA_RETURNS}.")
        if not returned[0] or not returned[1]:
            data.refuse("wrong_count", "returns no microbatch for step 0.")
        target = returned[1][0]
        if not isinstance(target, Tensor) or target.dtype != torch.int64:
            data.refuse("wrong_target", "returns targets that are no tensors of int64, as labels of transformers are.")
        return returned[0][0], target
