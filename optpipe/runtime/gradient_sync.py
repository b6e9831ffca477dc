"""Gradient sums over replicas of the pipeline, and over the stages that share a parameter.

Hooks of data-parallel wrappers do not see the weight gradients that W computes later, so the sum over replicas starts
at the program's REDUCE: after a stage's last W, while its device works on other stages and the pipeline cools down. The
sum of a shared parameter needs all stages that have it, so it starts at the end of the step, in the same order in all
processes. Gradients that are summed over the same processes are views of one buffer: one operation without copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe.runtime.shared_parameters import SharedParameter
from optpipe.runtime.stage import Stage
from optpipe.runtime.weight_gradients import gradient_dtype

Group = dist.ProcessGroup | None
"""Processes over which a gradient is summed; None: only this one."""


class GradientReduction(Protocol):
    """Completes the gradients that the backwards of one process have accumulated."""

    @property
    def reducers(self) -> Mapping[int, Callable[[], None]]:
        """For each stage, what its REDUCE starts."""

    def finish(self) -> None:
        """Wait until all gradients are complete, at the end of a step."""

    def clear(self) -> None:
        """Forget what was started: after an error."""


class GradientSync:
    """Sums in which this process takes part.

    `replicas` is the group of the processes with the same stages (None: one pipeline). `shared` comes from
    `with_groups`, and `hold_once` has been applied to the stages of this process.

    `paused`: nothing is summed, because a further run of the schedule adds to the same gradients.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        replicas: dist.ProcessGroup | None = None,
        shared: Sequence[tuple[SharedParameter, Group]] = (),
    ) -> None:
        self.paused = False
        self._running: list[dist.Work] = []
        self._aliases: list[tuple[nn.Parameter, list[nn.Parameter]]] = []
        self._buffers: list[tuple[Tensor, dist.ProcessGroup]] = []
        held = {id(p) for own, _ in self._share(stages, shared) for p in own}
        self._sums: dict[int, list[Tensor]] = {
            number: shared_buffers(p for p in stage.module.parameters() if p.requires_grad and id(p) not in held)
            if replicas is not None
            else []
            for number, stage in stages.items()
        }
        self._replicas = replicas

    @property
    def reducers(self) -> Mapping[int, Callable[[], None]]:
        """For each stage, what its REDUCE starts."""
        return {number: self._reducer(buffers) for number, buffers in self._sums.items()}

    def finish(self) -> None:
        """Wait until every sum is in the gradients, at the end of a step that has computed all of them."""
        if self.paused:
            return
        self._wait()
        for first, aliases in self._aliases:
            for alias in aliases:
                _gradient(first).add_(_gradient(alias))
        for buffer, group in self._buffers:
            self._start(buffer, group)
        self._wait()
        for first, aliases in self._aliases:
            for alias in aliases:
                _gradient(alias).copy_(_gradient(first))

    def clear(self) -> None:
        """Forget what was started: after an error."""
        self._running.clear()

    def _share(
        self, stages: Mapping[int, Stage], shared: Sequence[tuple[SharedParameter, Group]]
    ) -> list[tuple[list[nn.Parameter], Group]]:
        """Trained shared parameters of this process: the parameter and its aliases, with the group to sum over."""
        found: list[tuple[list[nn.Parameter], Group]] = []
        for parameter, group in shared:
            places = parameter.places_in(stages) if parameter.trained else []
            own = list({id(p): p for p in (stages[s].module.get_parameter(name) for s, name in places)}.values())
            if own:
                found.append((own, group))
        self._aliases = [(own[0], own[1:]) for own, _ in found if len(own) > 1]
        for alias in [alias for _, aliases in self._aliases for alias in aliases]:
            alias.grad = torch.zeros_like(alias, dtype=gradient_dtype(alias))
        for group in {id(group): group for _, group in found}.values():
            buffers = shared_buffers(own[0] for own, its_group in found if its_group is group)
            self._buffers += [(buffer, group) for buffer in buffers if group is not None]
        return found

    def _reducer(self, buffers: Sequence[Tensor]) -> Callable[[], None]:
        def start() -> None:
            for buffer in () if self.paused else buffers:
                assert self._replicas is not None, "buffers are there to be summed over replicas"
                self._start(buffer, self._replicas)

        return start

    def _start(self, buffer: Tensor, group: dist.ProcessGroup) -> None:
        work = dist.all_reduce(buffer, group=group, async_op=True)
        assert work is not None, "this process is in the group"
        self._running.append(work)

    def _wait(self) -> None:
        while self._running:
            self._running.pop().wait()


def shared_buffers(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Allocate one flat buffer of zeros per dtype and device, and make the gradients views of it."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((gradient_dtype(parameter), parameter.device), []).append(parameter)
    buffers = []
    for (dtype, device), members in kinds.items():
        buffer = torch.zeros(sum(p.numel() for p in members), dtype=dtype, device=device)
        parts = torch.split(buffer, [p.numel() for p in members])
        for parameter, part in zip(members, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        buffers.append(buffer)
    return buffers


def with_groups(
    shared: Sequence[SharedParameter], ranks_of: Callable[[int], Sequence[int]]
) -> list[tuple[SharedParameter, Group]]:
    """Create the group of the processes that hold each shared parameter. Collective over all ranks.

    `ranks_of(s)`: the ranks that hold stage s, one per replica.
    """
    groups: dict[tuple[int, ...], Group] = {}
    found: list[tuple[SharedParameter, Group]] = []
    for parameter in shared:
        members = tuple(sorted({rank for s, _ in parameter.places for rank in ranks_of(s)}))
        if members not in groups:
            group = dist.new_group(list(members)) if len(members) > 1 else None
            groups[members] = group if isinstance(group, dist.ProcessGroup) else None
        found.append((parameter, groups[members]))
    return found


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "it was allocated with the sums"
    return parameter.grad
