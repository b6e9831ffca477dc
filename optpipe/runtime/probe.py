"""Probes of stages: the messages they exchange and the bytes they hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from optpipe.errors import RunFailedError, TrainingError
from optpipe.kinds import PLAIN_BACKWARD
from optpipe.mode_names import IN_LOW_PRECISION, without_offload
from optpipe.problem import Problem
from optpipe.runtime.activations import HostSlab
from optpipe.runtime.messages import MessageSpec, Spec, Tree, bad_keys, map_leaves, message_spec, output_spec
from optpipe.runtime.module_state import unchanged as unchanged_state
from optpipe.runtime.recorder import MemoryMeter
from optpipe.runtime.shapes import MessageShapes
from optpipe.runtime.stage import Stage, evaluating
from optpipe.runtime.transport import is_peer_error
from optpipe.stage import UnitStage


@dataclass(frozen=True)
class StageSizes:
    """Bytes of one microbatch on one stage, as the fields of a problem's stage define them.

    `offload_bytes` can be offloaded. The workspace of an op is its peak beyond the memory held before it (F: after it),
    including the messages that it uses and makes. `recomputed`: those that differ in modes that recompute, by name. Of
    slices, the gradients of keys and values that the backward takes at its start or frees at its end (`UnitStage`).
    """

    activation_bytes: int
    backward_weight_bytes: int
    offload_bytes: int
    workspace_bytes: dict[str, int]
    recomputed: Mapping[str, RecomputedSizes] = field(default_factory=dict)
    gradients_taken_bytes: int = 0
    gradients_freed_bytes: int = 0

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
    Leaves no mark (`unchanged`). A compiled stage has no B and W, and no workspace of theirs.
    """
    with unchanged([stage]):
        stage.begin_step()
        stage.zero_gradients()
        [sizes] = _measured_in_modes(stage, [_Probe(stage, batch, before, after, zeros)], modes)
        return sizes


def measure_slices(
    stage: Stage,
    samples: Sequence[Sample],
    messages: Sequence[tuple[Spec | None, Spec | None]],
    *,
    modes: Modes | None = None,
) -> list[StageSizes]:
    """Sizes of each slice of one microbatch on a stage, as `measure_stage` has them of a whole one.

    `samples` and `messages` are those of the slices in their order.
    """
    with unchanged([stage]):
        stage.begin_step()
        stage.zero_gradients()
        meter = MemoryMeter()
        probes = [
            _Probe(stage, sample, *around, zeros=False, unit=unit, meter=meter)
            for unit, (sample, around) in enumerate(zip(samples, messages, strict=True))
        ]
        return _measured_in_modes(stage, probes, modes)


def _measured_in_modes(stage: Stage, probes: Sequence[_Probe], modes: Modes | None) -> list[StageSizes]:
    """Sizes of the slices of a microbatch, which are run forward in their order and backward from the last."""
    for probe in probes:  # modules make caches in their first forward, which are no activations
        probe.forward(fused=True)
    stage.clear()
    sizes = _measured(stage, probes)
    again = {mode: _measured_again(probes, sizes, mode, inside) for mode, inside in (modes or {}).items()}
    return [
        replace(own, recomputed={mode: of_slices[unit] for mode, of_slices in again.items()})
        for unit, own in enumerate(sizes)
    ]


def _measured(stage: Stage, probes: Sequence[_Probe]) -> list[StageSizes]:
    meter = probes[0].meter
    with meter, meter.on(0):
        fused = [probe.forward(fused=True) for probe in probes]
        offloads = [probe.offload_and_reload() for probe in probes]
        backwards = [probe.backward("BW") for probe in reversed(probes)][::-1]
        if not stage.splits:
            return [
                StageSizes(f.held, f.held + b.held, moved, {"F": f.work, "BW": b.work}, {}, b.taken, b.freed)
                for f, moved, b in zip(fused, offloads, backwards, strict=True)
            ]
        split = [probe.forward(fused=False) for probe in probes]
        halves = [(probe.backward("B"), probe.backward_weight()) for probe in reversed(probes)][::-1]
    sizes = []
    for f, moved, bw, s, (b, work_w) in zip(fused, offloads, backwards, split, halves, strict=True):
        # F: the larger where a layer's split keeps more or less than autograd, since it may come before either
        workspace = {"F": max(f.work, s.work), "BW": bw.work, "B": b.work, "W": work_w}
        sizes.append(StageSizes(max(f.held, s.held), s.held + b.held, moved, workspace, {}, b.taken, b.freed))
    return sizes


def _measured_again(
    probes: Sequence[_Probe], sizes: Sequence[StageSizes], mode: str, inside: Collection[str]
) -> list[RecomputedSizes]:
    """Sizes of slices that are recomputed in a mode, compared with those of slices that are kept."""
    meter = probes[0].meter
    with meter, meter.on(0):
        forwards = [probe.forward(fused=True, mode=mode) for probe in probes]
        offloads = [probe.offload_and_reload() for probe in probes]
        recomputations: list[int] = []
        for probe in reversed(probes):
            recomputations.insert(0, probe.recompute())
            probe.backward("BW")
        peaks: dict[str, list[int]] = {}
        for kind in sorted(inside):
            for probe in probes:
                probe.forward(fused=kind == "CBW", mode=mode)
            peaks[kind] = []
            for probe in reversed(probes):
                peaks[kind].insert(0, probe.backward(kind).work)
                if kind == "CB":
                    probe.backward_weight()
    return [
        RecomputedSizes(
            kept_bytes=forwards[n].held,
            offload_bytes=offloads[n],
            forward_workspace_bytes=max(forwards[n].work - own.workspace_bytes["F"], 0),
            workspace_bytes=max(recomputations[n] - (own.activation_bytes - forwards[n].held), 0),
            segment_bytes=max([*(peaks[k][n] - own.workspace_bytes[PLAIN_BACKWARD[k]] for k in peaks), 0]),
        )
        for n, own in enumerate(sizes)
    ]


@contextmanager
def unchanged(stages: Iterable[Stage], *, gradients: bool = True) -> Iterator[None]:
    """Context after which stages, their losses and all generators are as before: see `optpipe.runtime.module_state`.

    With `gradients` theirs too: within the context there are none at first.
    """
    stages = list(stages)
    steps = [(stage.random, stage.random.step) for stage in stages if stage.random]
    parameters = [parameter for stage in stages for parameter in stage.module.parameters()] if gradients else []
    before = [(parameter, parameter.grad) for parameter in parameters]
    with ExitStack() as contexts:
        for device in {stage.device for stage in stages}:
            of_device = [root for stage in stages if stage.device == device for root in stage.roots]
            contexts.enter_context(unchanged_state(of_device, device))
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient
            for random, step in steps:
                random.step = step


class _Found(NamedTuple):
    """Change of the memory held by an op, its workspace, and the gradients of keys and values that it took or freed."""

    held: int
    work: int
    taken: int = 0
    freed: int = 0


class _Probe:
    """Ops of one unit: of a whole microbatch, or of a slice of it, whose probes share a meter."""

    def __init__(
        self,
        stage: Stage,
        batch: Sample,
        before: Spec | None,
        after: Spec | None,
        zeros: bool,
        unit: int = 0,
        meter: MemoryMeter | None = None,
    ) -> None:
        self.stage, self.batch, self.before, self.after, self.zeros = stage, batch, before, after, zeros
        self.unit, self.meter = unit, meter or MemoryMeter()

    @property
    def _live(self) -> int:
        return self.meter.live_bytes[0]

    @property
    def _peak(self) -> int:
        return self.meter.peak_bytes[0]

    def forward(self, *, fused: bool, mode: str | None = None) -> _Found:
        held = self._live if self.unit else 0  # what an earlier run has left counts as the first slice's
        self.meter.restart_peak()
        received = self._received()
        forward = self.stage.forward_of(mode)
        forward(self.unit, received, self.batch[1] if self.after is None else None, offloads=True, fused=fused)
        del received
        return _Found(self._live - held, self._peak - self._live)

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
            self.stage.copy_out(self.unit, HostSlab())
        self.stage.free(self.unit)
        moved = held - self._live
        self.stage.allocate(self.unit)
        self.stage.copy_in(self.unit)
        return moved

    def recompute(self) -> int:
        held = self._live
        self.meter.restart_peak()
        self.stage.recompute(self.unit)
        return self._peak - held

    def backward(self, kind: str) -> _Found:
        held, gradients = self._live, self.stage.sequences.gradient_bytes(self.unit)
        self.meter.restart_peak()
        gradient = None if self.after is None else map_leaves(self._zero_gradient, self.after)
        backward = {
            "B": self.stage.backward_input,
            "BW": self.stage.backward,
            "CB": self.stage.recompute_and_backward_input,
            "CBW": self.stage.recompute_and_backward,
        }[kind]
        backward(self.unit, gradient)
        del gradient
        taken = self.stage.sequences.gradient_bytes(self.unit) - gradients
        work = max(self._peak - held - max(taken, 0), 0)
        return _Found(self._live - held - taken, work, max(taken, 0), max(-taken, 0))

    def backward_weight(self) -> int:
        held = self._live
        self.meter.restart_peak()
        self.stage.backward_weight(self.unit)
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
        del measured["gradients_taken_bytes"], measured["gradients_freed_bytes"]
        offload = stage.offload.to_data() | {"bytes": moved} if stage.offload else None
        data = stage.to_data() | measured | {"offload": offload, "modes": []}
        for mode in stage.modes if stage.backward == "full" else ():
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


def stages_of_slice(problem: Problem, sizes: Sequence[StageSizes]) -> list[UnitStage]:
    """The stages of a problem with the sizes measured of a slice (`measure_slices`)."""
    return [
        UnitStage.from_data(
            stage.to_data()
            | {"gradients_taken_bytes": size.gradients_taken_bytes, "gradients_freed_bytes": size.gradients_freed_bytes}
        )
        for stage, size in zip(with_measured_sizes(problem, [*sizes]).stages, sizes, strict=True)
    ]


Gather = Callable[[Any], list[Any]]
"""Collective function that returns the JSON values of all processes in every process."""


def learn_messages(
    stages: Mapping[int, Stage],
    count: int,
    microbatch: Tree,
    target: Tree,
    gather: Gather = lambda value: [value],
    *,
    evaluates: bool = False,
) -> list[Spec]:
    """Determine the spec of the message at each boundary of a model of `count` stages; this process has `stages`.

    Runs each stage forward once, the first on `microbatch`, which has the shape of all microbatches, the others on
    zeros: as in training, or if it `evaluates`, as in evaluation. Leaves no mark (`Stage.trial`). Collective: all
    processes call it. Raises TrainingError if a stage's output cannot be a message. What a stage raises is raised in
    its process, and a TrainingError that names it in all others.
    """
    specs: list[Spec] = []
    received = microbatch
    for s in range(count - 1):
        own, failure = None, None
        if s in stages:
            try:
                with evaluating([stages[s].module]) if evaluates else nullcontext():
                    own = _to_data(output_spec(stages[s].trial(0, received, target)))
            except Exception as error:
                if is_peer_error(error):  # of a wrapper, whose processes share the stage
                    text = f"what stages[{s}] exchanges with other processes did not come: {error}. Maybe one has ended"
                    raise RunFailedError(f"{text}: see what it printed.") from error
                own, failure = {"failure": f"{type(error).__name__}: {error}"}, error
            finally:
                stages[s].sequences.clear()
        [(rank, found)] = [(rank, data) for rank, data in enumerate(gather(own)) if data is not None]
        if failure is not None:
            raise failure
        if "failure" in found:
            raise TrainingError(f"stages[{s}] of rank {rank} failed at the first microbatch: {found['failure']}")
        specs.append(_from_data(found))
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
        if any(type(key) not in (str, int) for key in spec):
            raise bad_keys(spec)
        return {"dict": [[key, _to_data(part)] for key, part in spec.items()]}  # JSON has texts alone as keys
    return {"tensor": [str(spec.dtype).removeprefix("torch."), list(spec.shape)]}


def _from_data(data: Any) -> Spec:
    [(kind, value)] = data.items()
    if kind == "tensor":
        dtype, shape = value
        return MessageSpec(tuple(shape), getattr(torch, dtype))
    if kind == "dict":
        return {key: _from_data(part) for key, part in value}
    parts = [_from_data(part) for part in value]
    return parts if kind == "list" else tuple(parts)
