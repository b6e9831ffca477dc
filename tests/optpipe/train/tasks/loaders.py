"""Loaders of microbatches for stages of one's own, and the stages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

ROWS, ITEMS = 2, 14
"""Rows of a microbatch, and of the data: seven microbatches an epoch, which no step divides."""


def build() -> tuple[list[nn.Module], Tensor, Tensor, nn.Module]:
    stages = [nn.Sequential(nn.Linear(3, 8), nn.Tanh()), nn.Linear(8, 1)]
    return stages, torch.zeros(ROWS, 3), torch.zeros(ROWS, 1), nn.MSELoss()


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows told apart by their numbers, with noise that is drawn anew each time."""

    def __init__(self, replica: int) -> None:
        self._replica = replica

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, n: int) -> tuple[Tensor, Tensor]:
        x = torch.full((3,), n / ITEMS + self._replica)
        return x, x[:1].square()


class Drawing(Rows):
    def __getitem__(self, n: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(n)
        return x + 0.1 * torch.randn(3), y


def shuffled(replica: int, _replicas: int) -> DataLoader[Any]:
    return DataLoader(Drawing(replica), batch_size=ROWS, shuffle=True)


def stateful(replica: int, _replicas: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Rows(replica), batch_size=ROWS, shuffle=True)


def evaluated(replica: int, _replicas: int) -> DataLoader[Any]:
    return DataLoader(Rows(replica), batch_size=ROWS)


def uneven(replica: int, _replicas: int, **options: Any) -> DataLoader[Any]:
    """Thirteen rows: six microbatches and a half."""
    return DataLoader(Subset(Drawing(replica), range(13)), batch_size=ROWS, shuffle=True, **options)


def dropping(replica: int, replicas: int) -> DataLoader[Any]:
    return uneven(replica, replicas, drop_last=True)


def repeating(replica: int, replicas: int) -> DataLoader[Any]:
    """Fills the last microbatch."""

    def collate(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        rows = (rows * ROWS)[:ROWS]
        return tuple(map(torch.stack, zip(*rows, strict=True)))

    return uneven(replica, replicas, collate_fn=collate)


def listed(replica: int, replicas: int) -> list[Any]:
    return list(uneven(replica, replicas))


class Finite(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([Rows(0)[n] for n in range(13)])


def streaming(_replica: int, _replicas: int) -> DataLoader[Any]:
    return DataLoader(Finite(), batch_size=ROWS)


def of_a_list(replica: int, _replicas: int) -> DataLoader[Any]:
    """Batches that were made before."""
    return DataLoader(Rows(replica), batch_sampler=[[n, n + 1] for n in range(0, 12, 2)] + [[12]])


class Broken(Rows):
    def __getitem__(self, n: int) -> tuple[Tensor, Tensor]:
        if n == 5:
            raise OSError("the disk is gone")
        return super().__getitem__(n)


def broken(replica: int, _replicas: int) -> DataLoader[Any]:
    return DataLoader(Broken(replica), batch_size=ROWS)


def broken_elsewhere(replica: int, _replicas: int) -> DataLoader[Any]:
    return DataLoader(Broken(replica), batch_size=ROWS, num_workers=1)


def once(replica: int, _replicas: int) -> Iterator[Any]:
    return iter(DataLoader(Rows(replica), batch_size=ROWS))


def texts(_replica: int, _replicas: int) -> list[Any]:
    return [("a", "b")]


def wider(replica: int, _replicas: int) -> DataLoader[Any]:
    return DataLoader(Rows(replica), batch_size=2 * ROWS)


def wider_from_seven(step: int) -> tuple[list[Tensor], list[Tensor]]:
    """For the evaluation of a run of seven steps, twice the rows."""
    rows = ROWS if step < 7 else 2 * ROWS
    return [torch.zeros(rows, 3)] * 4, [torch.zeros(rows, 1)] * 4


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, replica: int) -> None:
        self._replica = replica

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for n in count():
            READ.append((self._replica, n))
            x = torch.full((3,), self._replica + n / 100)
            yield x, x[:1]


READ: list[tuple[int, int]] = []


def endless(replica: int, _replicas: int) -> DataLoader[Any]:
    return DataLoader(Endless(replica), batch_size=ROWS)


def empty(_replica: int, _replicas: int) -> list[Any]:
    return []


def numbers(_replica: int, _replicas: int) -> list[int]:
    return [1, 2]


def no_loader(_replica: int, _replicas: int) -> int:
    return 3


class Odd(list[Any]):
    """A loader with a state that cannot be written."""

    def state_dict(self) -> dict[str, Any]:
        return {"file": object()}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        pass


def odd(replica: int, replicas: int) -> Odd:
    return Odd(list(evaluated(replica, replicas)))
