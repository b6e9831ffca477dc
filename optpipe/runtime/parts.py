"""Parts of a module, by which a forward and a backward of different microbatches run as a block.

A module says of which parts it consists by a method `block_parts`, which returns a list of `Part`: run one after the
other they are its forward. A part that exchanges data with other devices begins its exchange and leaves the wait for it
to the next part. In a block a pass runs up to its next exchange, then the other one runs: so it computes while the
exchange of the first takes place. Of a layer of experts that is combine | attention and dispatch | experts and
dispatch | experts and combine | attention, and so on, from the end of the backward's and the begin of the forward's
module (the order of `overlap_moe_expert_parallel_comm` in Megatron-LM).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from optpipe.errors import TrainingError
from optpipe.runtime.messages import Tree

Result = TypeVar("Result")
InParts = Generator[None, None, Result]
"""A pass that stops behind each of its exchanges, and returns what the whole pass does."""


@dataclass(frozen=True)
class Part:
    """Part of a module: `run` takes what the part before it returned, the first one what the module takes.

    `exchanges`: it begins an exchange with other devices, for which the part behind it waits.
    """

    run: Callable[..., Tree]
    exchanges: bool = False


def block_parts(module: nn.Module) -> Sequence[Part]:
    """The parts that a module gives, none if it gives none. Raises TrainingError for anything else."""
    give = getattr(module, "block_parts", None)
    if give is None:
        return ()
    parts = list(give())
    if not all(isinstance(part, Part) for part in parts):
        wrong = next(type(part).__name__ for part in parts if not isinstance(part, Part))
        detail = f"block_parts of {type(module).__name__} has a {wrong}, but is a list of Part. Maybe Part(self.layer)."
        raise TrainingError(detail)
    return parts


def run_whole(one: InParts[Result]) -> Result:
    """Run a pass to its end, and return its result."""
    while True:
        try:
            next(one)
        except StopIteration as end:
            result: Result = end.value
            return result


def run_as_block(backward: InParts[None], forward: InParts[None]) -> None:
    """Run both passes to their ends; behind each exchange the other one continues."""
    passes = deque([backward, forward])
    while passes:
        try:
            next(passes[0])
            passes.rotate(-1)
        except StopIteration:
            passes.popleft()
