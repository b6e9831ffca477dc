"""A small GPT trained on the text of Python's standard library.

Shapes: N sequences in a microbatch, T bytes in a sequence, C width, V entries in the vocabulary.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optpipe.errors import TrainingError
from optpipe.models.cut import Unit, evenly, parse_cut
from optpipe.models.loss import LabelLoss, PerToken
from optpipe.runtime.loss import Loss
from optpipe.runtime.slices import slice_context
from optpipe.train.config import SIZES, GPTShape, GPTSize, TrainingConfig
from optpipe.train.lengths import DrawnLengths, Sizes, step_generator
from optpipe.train.tasks.base import Batch

__all__ = ["SIZES", "VOCABULARY", "GPTShape", "GPTSize", "build_stages", "byte_loss"]

VOCABULARY = 256
"""The model reads bytes."""


def build_stages(
    shape: GPTShape, stages: int | Sequence[int], seed: int, dtype: torch.dtype, *, tied: bool = False
) -> list[nn.Module]:
    """The model as `stages` modules, to be applied one after the other: bytes (N, T) -> logits (N, T, V).

    `stages`: how many, with layers spread evenly (`evenly`), or the layers of each. Weights depend on shape and seed
    alone, not on the stages. With `tied` the head's weight is the embedding's.
    """
    sizes = evenly(shape.layers, stages) if isinstance(stages, int) else stages
    embedding, head = _Embedding(shape), _Head(shape)
    parts: list[list[nn.Module]] = [[_Block(shape) for _ in range(count)] for count in sizes]
    parts[0].insert(0, embedding)
    parts[-1].append(head)
    modules = [nn.Sequential(*part).to(dtype) for part in parts]
    _initialise(modules, seed)
    if tied:
        head.head.weight = embedding.byte.weight
    return list(modules)


def byte_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy in nats: logits (N, T, V), target (N, T)."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def _initialise(modules: list[nn.Sequential], seed: int) -> None:
    """Normal weights of deviation 0.02 (GPT-2), drawn layer by layer; biases and norms as torch sets them: 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    for module in modules:
        for layer in module.modules():
            if isinstance(layer, nn.Linear | nn.Embedding):
                drawn = torch.empty(layer.weight.shape, dtype=torch.float64).normal_(0, 0.02, generator=generator)
                layer.weight.data.copy_(drawn)
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                layer.bias.data.zero_()


class _Embedding(nn.Module):
    """Bytes (N, T) -> activations (N, T, C)."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Embedding(shape.sequence, shape.width)
        self.positions: Tensor
        self.register_buffer("positions", torch.arange(shape.sequence), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        context = slice_context()
        begin = context.offset if context else 0
        embedded: Tensor = self.byte(text) + self.position(self.positions[begin : begin + text.shape[1]])
        return embedded


class _Block(nn.Module):
    """Attention and a two-layer perceptron, each on the normed activations (N, T, C) and added to them."""

    takes_slices = True

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_perceptron = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.projection(self._attention(self.query_key_value(self.norm_attention(x))))
        widened = nn.functional.gelu(self.widen(self.norm_perceptron(x)))
        result: Tensor = x + self.narrow(widened)
        return result

    def _attention(self, qkv: Tensor) -> Tensor:
        """Causal attention on queries, keys and values side by side: (N, T, 3C) -> (N, T, C)."""
        q, k, v = qkv.view(*qkv.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        context, mask = slice_context(), None
        if context is not None:  # the rest of a slice's queries, keys and values side by side is not kept
            q, (k, v) = q.contiguous(), context.extend(self, k, v)
            mask = context.causal_mask(q) if context.index else None
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return mixed.transpose(1, 2).flatten(2)


class _Head(nn.Module):
    """Activations (N, T, C) -> logits (N, T, V)."""

    vocabulary_layer = "head"

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        return logits


def gpt_sizes(shape: GPTShape, stages: int, cut: str | None, field: str) -> tuple[int, ...]:
    """Layers of each stage: those of a cut (`parse_cut`), else spread evenly. Raises InputError that names `field`."""
    if cut is None:
        return evenly(shape.layers, stages)
    return parse_cut(cut, [Unit((f"layers.{n}",)) for n in range(shape.layers)], stages, field)


def gpt_name(size: str, layers: int, microbatch_size: int, sequence: int) -> str:
    """A GPT of a named size with what its costs depend on, such as "tiny GPT, 2 layers, 4 x 32"."""
    return f"{gpt_prefix(size, layers)}, {microbatch_size} x {sequence}"


def gpt_prefix(size: str, layers: int) -> str:
    """The part of that name that all microbatches have."""
    return f"{size} GPT, {layers} layers"


MAX_TEXT_BYTES = 4 * 2**20


def standard_library_text() -> Tensor:
    """The standard library's top-level modules in the order of their names, at most 4 MiB: bytes, dtype uint8.

    The same on every machine with the same release of Python.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= MAX_TEXT_BYTES:
            break
    if not text:
        raise TrainingError(f"{folder} holds no Python sources to train on. Maybe this Python is installed zipped.")
    return torch.frombuffer(text[:MAX_TEXT_BYTES], dtype=torch.uint8)


class Batches:
    """Random pieces of a text, the same for the same seed and step.

    `microbatches` of `size` sequences of `sequence` bytes; the target of each byte is the next one. With `lengths` the
    sequences of each microbatch are of a length of their own.
    """

    def __init__(
        self,
        text: Tensor,
        *,
        microbatches: int,
        size: int,
        sequence: int,
        seed: int,
        lengths: DrawnLengths | None = None,
    ) -> None:
        self._text, self._microbatches, self._size, self._seed = text, microbatches, size, seed
        self._lengths = lengths
        self._offsets = torch.arange(sequence + 1)

    def batch(self, step: int) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs and targets of a step, by microbatch: each of shape (size, sequence), dtype int64."""
        generator = step_generator(self._seed, step)
        last = len(self._text) - len(self._offsets)
        starts = torch.randint(last + 1, (self._microbatches, self._size, 1), generator=generator)
        pieces = self._text[starts + self._offsets].long()
        if self._lengths is not None:
            lengths = self._lengths.draw(step, self._microbatches, generator)
            parts = [piece[:, : length + 1] for piece, length in zip(pieces, lengths, strict=True)]
            return [part[:, :-1].contiguous() for part in parts], [part[:, 1:].contiguous() for part in parts]
        inputs, targets = pieces[..., :-1].contiguous(), pieces[..., 1:].contiguous()
        return [x.clone() for x in inputs], [y.clone() for y in targets]


class GPTTask:
    """A GPT of `stages` stages, with batches of `microbatches` microbatches, those of all replicas."""

    loader = None

    def __init__(self, config: TrainingConfig, stages: int, microbatches: int) -> None:
        model = config.model
        self._model, self._seed = model, config.seed
        self.shape = model.shape(stages)
        self._sizes = gpt_sizes(self.shape, stages, model.cut, "model.cut")
        text = standard_library_text()
        self._lengths = DrawnLengths(model, self.shape.sequence) if model.varies else None
        self._batches = Batches(
            text,
            microbatches=microbatches,
            size=model.microbatch_size,
            sequence=self.shape.sequence,
            seed=config.seed,
            lengths=self._lengths,
        )
        self._loss = PerToken(LabelLoss(shift=False)) if model.varies else None
        self._data = {"text_bytes": len(text), "text_sum": int(text.sum())}

    @property
    def architecture(self) -> None:
        """Not known."""
        return None

    @property
    def name(self) -> str:
        """Sizes of the model and of a microbatch."""
        return gpt_name(self._model.name, self.shape.layers, self._model.microbatch_size, self.shape.sequence)

    @property
    def loss(self) -> Loss:
        """Cross entropy in nats a byte, of all bytes of the batch where microbatches differ."""
        return self._loss or byte_loss

    @property
    def tokens(self) -> int:
        """Bytes of text."""
        return self._model.microbatch_size * self.shape.sequence

    @property
    def reference(self) -> Sizes:
        """The longest sequences."""
        return Sizes(self.tokens, self._model.microbatch_size)

    def build_stages(self, _own: Collection[int] | None = None) -> list[nn.Module]:
        """Stages with the weights drawn from the seed."""
        model = self._model
        return build_stages(self.shape, self._sizes, self._seed, model.torch_dtype, tied=model.tied)

    def batch(self, step: int) -> Batch:
        """Random pieces of the text."""
        inputs, targets = self._batches.batch(step)
        return (inputs, self._loss.with_tokens(targets)) if self._loss else (inputs, targets)

    def model_name(self, stage: int, name: str) -> str:
        """Names of layers by their numbers in the model, `embedding` and `head`."""
        place, _, own = name.partition(".")
        layer = int(place) - (stage == 0)
        if layer < 0:
            return f"embedding.{own}"
        return f"head.{own}" if layer == self._sizes[stage] else f"layers.{sum(self._sizes[:stage]) + layer}.{own}"

    def identity(self) -> dict[str, Any]:
        """All sizes, the cut, the precision, and which text it is."""
        model = self._model
        chosen: dict[str, Any] = {"microbatch_size": model.microbatch_size, "dtype": model.dtype, "tied": model.tied}
        chosen |= {"lengths": model.lengths} | self._lengths.identity() if self._lengths else {}
        return (
            {"model": model.name, "seed": self._seed, "cut": [*self._sizes]} | chosen | asdict(self.shape) | self._data
        )
