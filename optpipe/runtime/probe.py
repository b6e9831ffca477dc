"""Probes of stages: the messages they exchange and the bytes they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from optpipe.errors import TrainingError
from optpipe.problem import Problem
from optpipe.runtime.activations import HostSlab
from optpipe.runtime.messages import MessageSpec, Spec, Tree, map_leaves, message_spec
from optpipe.runtime.recorder import MemoryMeter
from optpipe.runtime.stage import Stage, evaluating


@dataclass(frozen=True)
class StageSizes:
    """Bytes of one microbatch on one stage, as the contract's fields of a stage define them.

    `offload_bytes` may leave to the host. Workspaces are what an op needs beside what is held before it (F: after
    it), the message that it uses and the one that it makes included.
    """

    activation_bytes: int
    backward_weight_bytes: int
    offload_bytes: int
    workspace_bytes: dict[str, int]


@dataclass(frozen=True)
class SizeRange:
    """Sizes of several microbatches on one stage, each figure by itself: the largest, and the smallest.

    They differ where a stage's sizes depend on the data, as those of experts do that get as many rows as are sent to
    them. Plans count the largest.
    """

    largest: StageSizes
    smallest: StageSizes
    samples: int


Sample = tuple[Tree, Tree]
"""A microbatch as a stage sees it: what it receives, and the target, which only the last stage looks at."""

ALIKE = 3
"""So many microbatches of equal sizes are taken to speak for all: sizes that depend on the data differ sooner."""


def size_range(seen: Sequence[StageSizes]) -> SizeRange:
    """The range of the sizes of microbatches."""
    return SizeRange(_extreme(max, seen), _extreme(min, seen), len(seen))


def until_alike(found: Iterable[StageSizes]) -> list[StageSizes]:
    """The sizes of one microbatch after the other, up to the last or to the first `ALIKE`, if these are all equal."""
    seen: list[StageSizes] = []
    for sizes in found:
        seen.append(sizes)
        if len(seen) == ALIKE and all(other == sizes for other in seen):
            break
    return seen


def measure_samples(stage: Stage, samples: Sequence[Sample], before: Spec | None, after: Spec | None) -> SizeRange:
    """Measure a stage with what it really receives, microbatch by microbatch (`measure_stage`, `until_alike`)."""
    return size_range(until_alike(measure_stage(stage, sample, before, after, zeros=False) for sample in samples))


def _extreme(choose: Callable[[Iterable[int]], int], seen: Sequence[StageSizes]) -> StageSizes:
    return StageSizes(
        choose(sizes.activation_bytes for sizes in seen),
        choose(sizes.backward_weight_bytes for sizes in seen),
        choose(sizes.offload_bytes for sizes in seen),
        {kind: choose(sizes.workspace_bytes[kind] for sizes in seen) for kind in seen[0].workspace_bytes},
    )


def measure_stage(
    stage: Stage, batch: Sample, before: Spec | None, after: Spec | None, *, zeros: bool = True
) -> StageSizes:
    """Run one microbatch through a stage twice, once with B and W, O and R, once with BW.

    `batch` is what the stage receives, and the target; with `zeros` all but the first stage receive zeros of the shape
    of their message instead. `before` and `after` are the messages at the stage's boundaries, None at the ends. Adds
    to gradients: set them to zero afterwards. Leaves buffers and random numbers as they were.
    A compiled stage has no B and W, and no workspace of theirs.
    """
    with unchanged_stage(stage):
        stage.begin_step()
        stage.zero_gradients()
        return _measured(stage, _Probe(stage, batch, before, after, zeros))


def _measured(stage: Stage, probe: _Probe) -> StageSizes:
    with probe.meter, probe.meter.on(0):
        activation, work_f = probe.forward(fused=True)
        offload = probe.offload_and_reload()
        kept, work_bw = probe.backward(fused=True)
        workspace = {"F": work_f, "BW": work_bw}
        if stage.splits:
            split_activation, split_work_f = probe.forward(fused=False)
            # the larger where a layer's split keeps more or less than autograd: F may come before either
            activation, workspace["F"] = max(activation, split_activation), max(work_f, split_work_f)
            kept, workspace["B"] = probe.backward(fused=False)
            workspace["W"] = probe.backward_weight()
    return StageSizes(activation, kept, offload, workspace)


@contextmanager
def unchanged_stage(stage: Stage) -> Iterator[None]:
    """Put back what a forward changes: running statistics, and the count of steps."""
    buffers = [(buffer, buffer.clone()) for buffer in stage.module.buffers()]
    step = stage.random.step if stage.random else 0
    try:
        yield
    finally:
        for buffer, value in buffers:
            buffer.copy_(value)
        if stage.random:
            stage.random.step = step


class _Probe:
    """Runs the ops of microbatch 0; each answers with bytes held after it, or its workspace, or both."""

    def __init__(self, stage: Stage, batch: Sample, before: Spec | None, after: Spec | None, zeros: bool) -> None:
        self.stage, self.batch, self.before, self.after, self.zeros = stage, batch, before, after, zeros
        self.meter = MemoryMeter()

    @property
    def _live(self) -> int:
        return self.meter.live_bytes[0]

    @property
    def _peak(self) -> int:
        return self.meter.peak_bytes[0]

    def forward(self, *, fused: bool) -> tuple[int, int]:
        self.meter.restart_peak()
        received = self._received()
        self.stage.forward(0, received, self.batch[1] if self.after is None else None, offloads=True, fused=fused)
        del received
        return self._live, self._peak - self._live

    def _received(self) -> Tree:
        """The batch, which is the caller's, or a message, which is the stage's and counts."""
        if self.before is None:
            return self.batch[0]
        if self.zeros:
            return map_leaves(self._zeros, self.before)
        return map_leaves(lambda leaf: leaf.to(self.stage.device, copy=True), self.batch[0])

    def offload_and_reload(self) -> int:
        held = self._live
        with self.meter.on(None):
            self.stage.copy_out(0, HostSlab())
        self.stage.free(0)
        moved = held - self._live
        self.stage.allocate(0)
        self.stage.copy_in(0)
        return moved

    def backward(self, *, fused: bool) -> tuple[int, int]:
        held = self._live
        self.meter.restart_peak()
        gradient = None if self.after is None else map_leaves(self._zero_gradient, self.after)
        (self.stage.backward if fused else self.stage.backward_input)(0, gradient)
        del gradient
        return self._live, self._peak - held

    def backward_weight(self) -> int:
        held = self._live
        self.meter.restart_peak()
        self.stage.backward_weight(0)
        return self._peak - held

    def _zeros(self, spec: MessageSpec) -> Tensor:
        return spec.empty(self.stage.device).zero_()

    def _zero_gradient(self, spec: MessageSpec) -> Tensor | None:
        return self._zeros(spec) if spec.has_gradient else None


def with_measured_sizes(problem: Problem, sizes: list[StageSizes]) -> Problem:
    """The same problem with measured sizes; times, placement and budgets stay. A stage that never offloads stays so."""
    stages = []
    for stage, size in zip(problem.stages, sizes, strict=True):
        measured = asdict(size)
        moved = measured.pop("offload_bytes")
        offload = stage.offload.to_data() | {"bytes": moved} if stage.offload else None
        stages.append(stage.to_data() | measured | {"offload": offload})
    return Problem.from_data(problem.to_data() | {"stages": stages})


Gather = Callable[[Any], list[Any]]
"""Given a JSON value by each process, returns those of all processes, in every process."""


def learn_messages(
    stages: Mapping[int, Stage], count: int, microbatch: Tree, target: Tree, gather: Gather = lambda value: [value]
) -> list[Spec]:
    """The spec of the message at each boundary of a model of `count` stages, of which this process has `stages`.

    Runs each stage forward once, the first on a microbatch of the size that all will have, the others on zeros.
    Called by all processes together, those without the first stage too. Raises TrainingError where a stage returns
    what cannot be a message.
    """
    specs: list[Spec] = []
    received = microbatch
    for s in range(count - 1):
        mine = _to_data(_output(stages[s], received, target)) if s in stages else None
        [found] = [data for data in gather(mine) if data is not None]
        specs.append(_from_data(found))
        received = map_leaves(_zeros_on(stages[s + 1].device), specs[-1]) if s + 1 in stages else None
    return specs


def _output(stage: Stage, received: Tree, target: Tree) -> Spec:
    with evaluating([stage.module]):
        return message_spec(stage.evaluate(0, received, target))


def _zeros_on(device: torch.device) -> Callable[[MessageSpec], Tensor]:
    return lambda spec: spec.empty(device).zero_()


def _to_data(spec: Spec) -> Any:
    """A spec as JSON, in which a named tuple would lose its names."""
    if hasattr(spec, "_fields"):
        raise TrainingError(
            f"a stage returned the named tuple {type(spec).__name__}, whose names other processes do not know. "
            "Maybe return a dict, or a plain tuple."
        )
    if isinstance(spec, tuple | list):
        return {type(spec).__name__: [_to_data(part) for part in spec]}
    if isinstance(spec, dict):
        return {"dict": {key: _to_data(part) for key, part in spec.items()}}
    return {"tensor": [str(spec.dtype).removeprefix("torch."), list(spec.shape)]}


def _from_data(data: Any) -> Spec:
    [(kind, value)] = data.items()
    if kind == "tensor":
        dtype, shape = value
        return MessageSpec(tuple(shape), getattr(torch, dtype))
    if kind == "dict":
        return {key: _from_data(part) for key, part in value.items()}
    parts = [_from_data(part) for part in value]
    return parts if kind == "list" else tuple(parts)
