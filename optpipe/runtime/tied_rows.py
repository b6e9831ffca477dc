"""Rows of a vocabulary layer whose weight is also that of an embedding in an earlier stage (tied weights).

The embedding needs all rows on its own device. There the whole weight is, with a gradient, but without optimizer state:
each device updates its rows. So a step ends with two exchanges. The gradients of the embedding go to the devices of
their rows, which add them to their own; behind the update the rows come back. Were both updated from one gradient, the
state would be there twice, and a kernel that rounds by the place in a tensor would let them drift apart.

On the embedding's device rows and their gradients are views of the whole weight and of its gradient, and in one process
all are: then nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe.runtime.transport import peer_errors


def rows_within(whole: nn.Parameter, rows: range, own: nn.Parameter) -> None:
    """Make `own` a view of these rows of the whole weight, and its gradient one of that of the whole weight."""
    if whole.grad is None:
        whole.grad = torch.zeros_like(whole)
    own.data, own.grad = whole.detach()[rows.start : rows.stop], whole.grad[rows.start : rows.stop]


class TiedRows:
    """Exchanges between the device of an embedding and those of the rows, each in a process of its own over gloo.

    All processes construct it together; in the default group the rank of a process is its device. `home`: the
    embedding's device. `rows`: those of each device. `weight`: in the process of the embedding the whole weight, in
    others their rows.
    """

    def __init__(self, home: int, rows: Sequence[range], weight: nn.Parameter) -> None:
        self._rank, self._home, self._rows, self._weight = dist.get_rank(), home, rows, weight
        group = dist.new_group(backend="gloo", group_desc="optpipe tied rows")
        assert isinstance(group, dist.ProcessGroup), "every process is in it"
        self._group = group

    def add_gradients(self) -> None:
        """Add the embedding's gradient to that of the rows, at the end of a step."""
        gradient = self._weight.grad
        assert gradient is not None, "a step has begun, and gradients with it"
        with peer_errors("the gradients of an embedding that is tied to a vocabulary layer"):
            if self._rank == self._home:
                self._wait([self._group.send([part], d, 0) for d, part in self._others(gradient)])
            else:
                room = torch.empty_like(gradient)
                self._wait([self._group.recv([room], self._home, 0)])
                gradient += room

    @torch.no_grad()
    def gather_rows(self) -> None:
        """Bring the rows to the embedding's device, after they may have changed."""
        with peer_errors("the rows of an embedding that is tied to a vocabulary layer"):
            if self._rank == self._home:
                self._wait([self._group.recv([part], d, 0) for d, part in self._others(self._weight.detach())])
            else:
                self._wait([self._group.send([self._weight.detach()], self._home, 0)])

    def _others(self, whole: Tensor) -> list[tuple[int, Tensor]]:
        """Rows of each other device, with that device."""
        return [(d, whole[rows.start : rows.stop]) for d, rows in enumerate(self._rows) if d != self._home]

    @staticmethod
    def _wait(works: Sequence[dist.Work]) -> None:
        for work in works:
            work.wait()
