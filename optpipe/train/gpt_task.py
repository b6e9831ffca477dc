"""The small GPT over the standard library's sources as a task."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import nn

from optpipe.runtime.stage import Loss
from optpipe.train.config import TrainingConfig
from optpipe.train.gpt import build_stages, byte_loss, gpt_name
from optpipe.train.task import Batch
from optpipe.train.text import Batches, standard_library_text


class GPTTask:
    """A GPT of `stages` stages, with batches of `microbatches` microbatches, those of all replicas."""

    def __init__(self, config: TrainingConfig, stages: int, microbatches: int) -> None:
        model = config.model
        self._model, self._seed, self._stages = model, config.seed, stages
        self.shape = model.shape(stages)
        text = standard_library_text()
        self._batches = Batches(
            text,
            microbatches=microbatches,
            size=model.microbatch_size,
            sequence=self.shape.sequence,
            seed=config.seed,
        )
        self._data = {"text_bytes": len(text), "text_sum": int(text.sum())}

    @property
    def name(self) -> str:
        """Sizes of the model and of a microbatch."""
        return gpt_name(self._model.name, self.shape.layers, self._model.microbatch_size, self.shape.sequence)

    @property
    def loss(self) -> Loss:
        """In nats a byte."""
        return byte_loss

    @property
    def tokens(self) -> int:
        """Bytes of text."""
        return self._model.microbatch_size * self.shape.sequence

    def build_stages(self) -> list[nn.Module]:
        """As drawn from the seed."""
        model = self._model
        return build_stages(self.shape, self._stages, self._seed, model.torch_dtype, tied=model.tied)

    def batch(self, step: int) -> Batch:
        """Random pieces of the text."""
        return self._batches.batch(step)

    def identity(self) -> dict[str, Any]:
        """All sizes, the precision, and which text it is."""
        model = self._model
        chosen = {"microbatch_size": model.microbatch_size, "dtype": model.dtype, "tied": model.tied}
        return {"model": model.name, "seed": self._seed} | chosen | asdict(self.shape) | self._data
