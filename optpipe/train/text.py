"""Text that is on every machine: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from optpipe.errors import TrainingError

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

    `microbatches` of `size` sequences of `sequence` bytes; the target of each byte is the next one.
    """

    def __init__(self, text: Tensor, *, microbatches: int, size: int, sequence: int, seed: int) -> None:
        self._text, self._microbatches, self._size, self._seed = text, microbatches, size, seed
        self._offsets = torch.arange(sequence + 1)

    def batch(self, step: int) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs and targets of a step, by microbatch: each of shape (size, sequence), dtype int64."""
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + step) % 2**63)
        last = len(self._text) - len(self._offsets)
        starts = torch.randint(last + 1, (self._microbatches, self._size, 1), generator=generator)
        pieces = self._text[starts + self._offsets].long()
        inputs, targets = pieces[..., :-1].contiguous(), pieces[..., 1:].contiguous()
        return [x.clone() for x in inputs], [y.clone() for y in targets]
