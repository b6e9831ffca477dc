"""Probes of stages: the messages they exchange and the bytes they hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from optpipe.costs import BACKWARD_OF
from optpipe.errors import TrainingError
from optpipe.mode_names import IN_LOW_PRECISION, without_offload
from optpipe.problem import Problem
from optpipe.runtime.activations import HostSlab
from optpipe.runtime.messages import MessageSpec, Spec, Tree, map_leaves, message_spec
from optpipe.runtime.recorder import MemoryMeter
from optpipe.runtime.shapes import MessageShapes
from optpipe.runtime.stage import Stage, evaluating


@dataclass(frozen=True)
class StageSizes:
    """Bytes of one microbatch on one stage, as the fields of a problem's stage define them.

    `offload_bytes` can be offloaded. The workspace of an op is its peak beyond the memory held before it (F: after it),
    including the messages that it uses and makes. `recomputed`: those that differ in modes that recompute, by name.
    """

    activation_bytes: int
    backward_weight_bytes: int
    offload_bytes: int
    workspace_bytes: dict[str, int]
    recomputed: Mapping[str, RecomputedSizes] = field(default_factory=dict)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict`."""
        recomputed = {mode: RecomputedSizes(**sizes) for mode, sizes in data.get("recomputed", {}).items()}
        return cls(**{**data, "recomputed": recomputed})


@dataclass(frozen=True)
class RecomputedSizes:
    """Bytes of one microbatch that is recomputed, as the fields of a mode define them.

    `offload_bytes` of what is kept can be offloaded.
    """

    kept_bytes: int
    offload_bytes: int
    forward_workspace_bytes: int
    workspace_bytes: int
    segment_bytes: int


@dataclass(frozen=True)
class SizeRange:
    """Largest and smallest sizes over several microbatches on one stage, each figure separately.

    They differ if a stage's sizes depend on the data, as with a mixture of experts. Plans use the largest.
    """

    largest: StageSizes
    smallest: StageSizes
    samples: int


Modes = Mapping[str, Collection[str]]
"""Names of modes that recompute, with the backwards (CB, CBW) that recompute inside themselves."""

Sample = tuple[Tree, Tree]
"""Input of a stage for one microbatch, and the target, which only the last stage uses."""

ALIKE = 3
"""After this many microbatches of equal sizes, sizes are taken to be independent of the data."""


def size_range(seen: Sequence[StageSizes]) -> SizeRange:
    """Range of the sizes of microbatches."""
    return SizeRange(_extreme(max, seen), _extreme(min, seen), len(seen))


def until_alike(measured: Iterable[StageSizes]) -> list[StageSizes]:
    """Take sizes of successive microbatches; stop after the first `ALIKE` if these are equal."""
    seen: list[StageSizes] = []
    for sizes in measured:
        seen.append(sizes)
        if len(seen) == ALIKE and all(other == sizes for other in seen):
            break
    return seen


def measure_samples(
    stage: Stage, samples: Sequence[Sample], before: Spec | None, after: Spec | None, *, modes: Modes | None = None
) -> SizeRange:
    """Measure a stage with its actual input, microbatch by microbatch (`measure_stage`, `until_alike`)."""
    return size_range(
        until_alike(measure_stage(stage, sample, before, after, zeros=False, modes=modes) for sample in samples)
    )


def _extreme(choose: Callable[[Iterable[int]], int], seen: Sequence[StageSizes]) -> StageSizes:
    def extreme_again(mode: str) -> RecomputedSizes:
        again = [sizes.recomputed[mode] for sizes in seen]
        return RecomputedSizes(*(choose(getattr(sizes, name) for sizes in again) for name in names))

    names = [field.name for field in fields(RecomputedSizes)]
    return StageSizes(
        choose(sizes.activation_bytes for sizes in seen),
        choose(sizes.backward_weight_bytes for sizes in seen),
        choose(sizes.offload_bytes for sizes in seen),
        {kind: choose(sizes.workspace_bytes[kind] for sizes in seen) for kind in seen[0].workspace_bytes},
        {mode: extreme_again(mode) for mode in seen[0].recomputed},
    )


def measure_stage(
    stage: Stage,
    batch: Sample,
    before: Spec | None,
    after: Spec | None,
    *,
    zeros: bool = True,
    modes: Modes | None = None,
) -> StageSizes:
    """Run one microbatch through a stage twice, once with O, R and BW, once with B and W.

    In each of `modes` also with O, R, C and BW, and with the backwards named there.

    `batch` is the stage's input and target; with `zeros` all but the first stage receive zeros of the shape of their
    message instead. `before` and `after` are the messages at the stage's boundaries, None at the ends of the model.
    Adds to gradients: zero them afterwards. Restores buffers and random numbers. A compiled stage has no B and W, and
    no workspace of theirs.
    """
    with unchanged_stage(stage):
        stage.begin_step()
        stage.zero_gradients()
        probe = _Probe(stage, batch, before, after, zeros)
        sizes = _measured(stage, probe)
        return replace(
            sizes,
            recomputed={mode: _measured_again(probe, sizes, mode, inside) for mode, inside in (modes or {}).items()},
        )


def _measured(stage: Stage, probe: _Probe) -> StageSizes:
    with probe.meter, probe.meter.on(0):
        activation, work_f = probe.forward(fused=True)
        offload = probe.offload_and_reload()
        kept, work_bw = probe.backward("BW")
        workspace = {"F": work_f, "BW": work_bw}
        if stage.splits:
            split_activation, split_work_f = probe.forward(fused=False)
            # the larger where a layer's split keeps more or less than autograd: F may come before either
            activation, workspace["F"] = max(activation, split_activation), max(work_f, split_work_f)
            kept, workspace["B"] = probe.backward("B")
            workspace["W"] = probe.backward_weight()
    return StageSizes(activation, kept, offload, workspace)


def _measured_again(probe: _Probe, sizes: StageSizes, mode: str, inside: Collection[str]) -> RecomputedSizes:
    """Sizes of a microbatch that is recomputed in a mode, beside those of one that is kept."""
    with probe.meter, probe.meter.on(0):
        kept, work = probe.forward(fused=True, mode=mode)
        offload = probe.offload_and_reload()
        recomputation = probe.recompute()
        probe.backward("BW")
        peaks: dict[str, int] = {}
        for kind in sorted(inside):
            probe.forward(fused=kind == "CBW", mode=mode)
            _, peaks[kind] = probe.backward(kind)
            if kind == "CB":
                probe.backward_weight()
    segments = [peak - sizes.workspace_bytes[BACKWARD_OF[kind]] for kind, peak in peaks.items()]
    return RecomputedSizes(
        kept_bytes=kept,
        offload_bytes=offload,
        forward_workspace_bytes=max(work - sizes.workspace_bytes["F"], 0),
        workspace_bytes=max(recomputation - (sizes.activation_bytes - kept), 0),
        segment_bytes=max([*segments, 0]),
    )


@contextmanager
def unchanged_stage(stage: Stage) -> Iterator[None]:
    """Restore the running statistics and the step count, which a forward changes."""
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
    """Ops of microbatch 0; each returns the bytes held after it, its workspace, or both."""

    def __init__(self, stage: Stage, batch: Sample, before: Spec | None, after: Spec | None, zeros: bool) -> None:
        self.stage, self.batch, self.before, self.after, self.zeros = stage, batch, before, after, zeros
        self.meter = MemoryMeter()

    @property
    def _live(self) -> int:
        return self.meter.live_bytes[0]

    @property
    def _peak(self) -> int:
        return self.meter.peak_bytes[0]

    def forward(self, *, fused: bool, mode: str | None = None) -> tuple[int, int]:
        self.meter.restart_peak()
        received = self._received()
        forward = self.stage.forward_of(mode)
        forward(0, received, self.batch[1] if self.after is None else None, offloads=True, fused=fused)
        del received
        return self._live, self._peak - self._live

    def _received(self) -> Tree:
        """The batch, which the caller owns, or a message, which counts as the stage's memory."""
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

    def recompute(self) -> int:
        held = self._live
        self.meter.restart_peak()
        self.stage.recompute(0)
        return self._peak - held

    def backward(self, kind: str) -> tuple[int, int]:
        held = self._live
        self.meter.restart_peak()
        gradient = None if self.after is None else map_leaves(self._zero_gradient, self.after)
        backward = {
            "B": self.stage.backward_input,
            "BW": self.stage.backward,
            "CB": self.stage.recompute_and_backward_input,
            "CBW": self.stage.recompute_and_backward,
        }[kind]
        backward(0, gradient)
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
    """Replace the sizes of a problem by measured ones; a stage without offload stays without.

    Modes that recompute get the sizes measured for what they recompute, copies in low precision those of an offload;
    others are left out. Raises TrainingError where what they keep is no less than the whole activation.
    """
    stages = []
    for s, (stage, size) in enumerate(zip(problem.stages, sizes, strict=True)):
        measured = asdict(size)
        moved, recomputed = measured.pop("offload_bytes"), measured.pop("recomputed")
        offload = stage.offload.to_data() | {"bytes": moved} if stage.offload else None
        data = stage.to_data() | measured | {"offload": offload, "modes": []}
        for mode in stage.modes:
            if mode.name in IN_LOW_PRECISION and mode.offload:
                data["modes"].append({"name": mode.name, "offload": mode.offload.to_data() | {"bytes": moved}})
            again = recomputed.get(without_offload(mode.name))
            if again is None or mode.recompute_us is None:
                continue
            if again["kept_bytes"] >= size.activation_bytes:
                raise TrainingError(
                    f"stages[{s}] keeps {again['kept_bytes']:,} bytes of a microbatch in the mode {mode.name!r}, but "
                    f"all that it has is {size.activation_bytes:,} bytes. Maybe leave this mode out of the stage."
                )
            own = mode.to_data() | {name: value for name, value in again.items() if name != "offload_bytes"}
            copies = mode.offload.to_data() | {"bytes": again["offload_bytes"]} if mode.offload else None
            data["modes"].append(own | {"offload": copies})
        stages.append(data)
    return Problem.from_data(problem.to_data() | {"stages": stages})


Gather = Callable[[Any], list[Any]]
"""Collective function that returns the JSON values of all processes in every process."""


def learn_messages(
    stages: Mapping[int, Stage], count: int, microbatch: Tree, target: Tree, gather: Gather = lambda value: [value]
) -> list[Spec]:
    """Determine the spec of the message at each boundary of a model of `count` stages; this process has `stages`.

    Runs each stage forward once, the first on `microbatch`, which has the shape of all microbatches, the others on
    zeros. Collective: all processes call it. Raises TrainingError if a stage's output cannot be a message.
    """
    specs: list[Spec] = []
    received = microbatch
    for s in range(count - 1):
        own = None
        if s in stages:
            with evaluating([stages[s].module]):
                own = _to_data(message_spec(stages[s].evaluate(0, received, target)))
        [spec] = [data for data in gather(own) if data is not None]
        specs.append(_from_data(spec))
        received = None
        if s + 1 in stages:
            empty = map_leaves(partial(MessageSpec.empty, device=stages[s + 1].device), specs[-1])
            received = map_leaves(Tensor.zero_, empty)
    return specs


def learn_shapes(
    stages: Mapping[int, Stage], count: int, microbatches: Sequence[Tree], gather: Gather = lambda value: [value]
) -> MessageShapes:
    """Learn messages as functions of the sizes of a microbatch's input, from these inputs (`learn_messages`).

    Collective: all processes call it, with as many inputs. Raises TrainingError where there is no such function.
    """
    samples = []
    for microbatch in microbatches:
        own = gather(_to_data(message_spec(microbatch)))[0]  # replicas have inputs of their own, but learn the first's
        samples.append((_from_data(own), learn_messages(stages, count, microbatch, None, gather)))
    return MessageShapes(samples)


def _to_data(spec: Spec) -> Any:
    """Convert a spec to JSON. Raises TrainingError for a named tuple, whose names JSON would lose."""
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
