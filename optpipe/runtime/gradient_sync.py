"""Sums gradients over replicas of the pipeline, and over the two stages that share tied weights.

Hooks of data-parallel wrappers do not see weight gradients that W computes later, so summing begins where the program
says REDUCE: after a stage's last W, while its device still works on others and the pipeline cools down. All
gradients of a stage that are summed over the same processes lie in one buffer, of which each `.grad` is a view: one
operation, nothing copied together or apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe.errors import TrainingError
from optpipe.runtime.stage import Stage


@dataclass(frozen=True)
class TiedWeights:
    """Parameters of two stages that are one: equal at the start, they get the sum of both gradients.

    Each side is a stage and the parameter's name in its module, such as the embedding and the output head.
    """

    first: tuple[int, str]
    last: tuple[int, str]

    def __str__(self) -> str:
        return f"stages[{self.first[0]}].{self.first[1]} and stages[{self.last[0]}].{self.last[1]}"


class GradientSync:
    """The sums that this process takes part in.

    `replicas` holds for each stage of this process the group of the processes that have the same one (None: there is
    one pipeline). `ties` are made by `tie_groups`: with each, the group of all processes that hold either side
    (None: both sides of the only pipeline are in this process).
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        replicas: dist.ProcessGroup | None = None,
        ties: Sequence[tuple[TiedWeights, dist.ProcessGroup | None]] = (),
    ) -> None:
        self._sums: dict[int, list[Callable[[], None]]] = {number: [] for number in stages}
        self._running: list[dist.Work] = []
        self._due: list[tuple[list[Tensor], dist.ProcessGroup | None]] = []
        tied = {id(parameter) for tie, _ in ties for parameter in _sides(stages, tie)}
        for number, stage in stages.items():
            own = [p for p in stage.module.parameters() if p.requires_grad and id(p) not in tied]
            if replicas is not None:
                self._sums[number] += [self._over(buffer, replicas) for buffer in shared_buffers(own)]
        for tie, group in ties:
            self._add_tie(stages, tie, group)

    @property
    def reducers(self) -> Mapping[int, Callable[[], None]]:
        """For each stage, what its REDUCE starts."""
        return {number: self._reducer(sums) for number, sums in self._sums.items()}

    def finish(self) -> None:
        """Return when every sum that was started is in the gradients.

        Two sides of a tie in one process are summed here: their stages may run on two streams of one GPU.
        """
        while self._running:
            self._running.pop().wait()
        while self._due:
            buffers, group = self._due.pop()
            total = buffers[0] + buffers[1]
            if group is not None:
                dist.all_reduce(total, group=group)
            for buffer in buffers:
                buffer.copy_(total)

    def clear(self) -> None:
        """Forget what was started: after an error."""
        self._running.clear()
        self._due.clear()

    @staticmethod
    def _reducer(sums: Sequence[Callable[[], None]]) -> Callable[[], None]:
        def start() -> None:
            for begin in sums:
                begin()

        return start

    def _over(self, buffer: Tensor, group: dist.ProcessGroup) -> Callable[[], None]:
        def start() -> None:
            work = dist.all_reduce(buffer, group=group, async_op=True)
            assert work is not None, "this process is in the group"
            self._running.append(work)

        return start

    def _add_tie(self, stages: Mapping[int, Stage], tie: TiedWeights, group: dist.ProcessGroup | None) -> None:
        sides = _sides(stages, tie)
        _check_equal(tie, sides)
        buffers = [buffer for side in sides for buffer in shared_buffers([side])]
        if len(sides) == 1:
            assert group is not None, "the other side is in another process"
            number = tie.first[0] if tie.first[0] in stages else tie.last[0]
            self._sums[number].append(self._over(buffers[0], group))
        elif sides:
            self._sums[tie.last[0]].append(lambda: self._due.append((buffers, group)))


def shared_buffers(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """One flat buffer of zeros for each dtype and device, of which the gradients become views."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    buffers = []
    for (dtype, device), members in kinds.items():
        buffer = torch.zeros(sum(p.numel() for p in members), dtype=dtype, device=device)
        parts = torch.split(buffer, [p.numel() for p in members])
        for parameter, part in zip(members, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        buffers.append(buffer)
    return buffers


def tie_groups(
    ties: Sequence[TiedWeights], ranks_of: Callable[[int], Sequence[int]]
) -> list[tuple[TiedWeights, dist.ProcessGroup | None]]:
    """A group for each tie, made by all ranks in one order. `ranks_of(s)`: the ranks that hold stage s, one a replica.

    Raises TrainingError where a tie joins a stage with itself.
    """
    groups: list[tuple[TiedWeights, dist.ProcessGroup | None]] = []
    for tie in ties:
        if tie.first == tie.last:
            raise TrainingError(f"{tie} are the same. Maybe one of the two stages is meant otherwise.")
        members = sorted({*ranks_of(tie.first[0]), *ranks_of(tie.last[0])})
        group = dist.new_group(members) if len(members) > 1 else None
        groups.append((tie, group if isinstance(group, dist.ProcessGroup) else None))
    return groups


def _sides(stages: Mapping[int, Stage], tie: TiedWeights) -> list[nn.Parameter]:
    """The sides of a tie that are in this process."""
    found = []
    for number, name in (tie.first, tie.last):
        if number in stages:
            parameters = dict(stages[number].module.named_parameters(remove_duplicate=False))
            if name not in parameters:
                known = ", ".join(list(parameters)[:8])
                raise TrainingError(f"{tie} are tied, but stage {number} has no {name!r}. Maybe one of {known}.")
            found.append(parameters[name])
    return found


def _check_equal(tie: TiedWeights, sides: Sequence[nn.Parameter]) -> None:
    """The sides in one process must be equal parameters; across processes only their shapes meet, in the sum."""
    if len({side.shape for side in sides}) > 1:
        raise TrainingError(
            f"{tie} are tied, but their shapes are {' and '.join(str(tuple(side.shape)) for side in sides)}. "
            "Maybe one of the two is transposed."
        )
    if any(not torch.equal(sides[0].detach(), side.detach()) for side in sides):
        raise TrainingError(f"{tie} are tied, but their values differ. Maybe copy one to the other before training.")
