"""Packing: documents of different lengths in sequences of one length, without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from optpipe.models.loss import IGNORED


class PackedTokens(IterableDataset[dict[str, Tensor]]):
    """Sequences of `sequence` tokens, filled with one document after the other; what does not fit begins the next.

    `documents[n]` are the token ids of a document, as a list, a tensor, or an entry of a data set; of `replicas` each
    takes every so many-th, from `replica` on. Yields a model of transformers' `input_ids`, `position_ids`, which begin
    with 0 in each document, so that none attends to another, and `labels`, in which no document predicts the next; each
    of shape (sequence,). Tokens that fill no sequence at the end are left out. It has a state, which torchdata's
    `StatefulDataLoader` keeps.
    """

    def __init__(self, documents: Sequence[Any], sequence: int, replica: int = 0, replicas: int = 1) -> None:
        self._documents, self._sequence = documents, sequence
        self._replica, self._replicas = replica, replicas
        self._next, self._offset = replica, 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            ids: list[Tensor] = []
            positions: list[Tensor] = []
            labels: list[Tensor] = []
            space = self._sequence
            while space:
                if self._next >= len(self._documents):
                    self._next, self._offset = self._replica, 0
                    return
                document = torch.as_tensor(self._documents[self._next])[self._offset :]
                part = document[:space]
                ids.append(part)
                positions.append(torch.arange(len(part)))
                labels.append(part.clone())
                labels[-1][:1] = IGNORED  # nothing before it in its sequence is of the same document
                space -= len(part)
                if len(part) < len(document):
                    self._offset += len(part)
                else:
                    self._next, self._offset = self._next + self._replicas, 0
            yield {
                "input_ids": torch.cat(ids).long(),
                "position_ids": torch.cat(positions),
                "labels": torch.cat(labels).long(),
            }

    def state_dict(self) -> dict[str, int]:
        """Position between two sequences."""
        return {"next": self._next, "offset": self._offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at a position."""
        self._next, self._offset = state["next"], state["offset"]
