"""Measured times and sizes of every op, and the stopwatches.

A round takes a microbatch through all stages forward and then backward, in the order of a step, so that caches are as
warm as in a step: once with split B and W, once with fused BW, once with O and R in between. Forward times come from
the first two, because the third includes the hooks of offloading.

On a GPU sizes come from torch's allocator, which includes temporary buffers of kernels and rounds up to 512 bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns, thread_time_ns
from typing import Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from optpipe.errors import InputError, Issue
from optpipe.mode_names import IN_LOW_PRECISION, without_offload
from optpipe.profile.subject import Chain
from optpipe.runtime.activations import HostSlab
from optpipe.runtime.messages import Tree
from optpipe.runtime.parts import InParts, run_as_block, run_whole
from optpipe.runtime.probe import Modes, SizeRange, StageSizes, measure_samples, size_range, unchanged, until_alike
from optpipe.runtime.stage import Stage


def measure_op_sizes(
    chain: Chain, device: torch.device, modes: Mapping[int, Modes] | None = None
) -> Mapping[int, SizeRange]:
    """Measure the sizes of microbatches in each stage of this process. Leaves no mark on the stages.

    `modes` are those of each stage that recompute, to be measured too; not on a GPU.
    """
    if device.type == "cuda":
        samples = range(len(chain.batch))
        with unchanged(chain.stages.values()):
            return {
                s: size_range(until_alike(_AllocatorProbe(chain, s, device, i).sizes() for i in samples))
                for s in chain.stages
            }
    return {
        s: measure_samples(stage, chain.samples[s], chain.before(s), chain.after(s), modes=(modes or {}).get(s))
        for s, stage in chain.stages.items()
    }


class _AllocatorProbe:
    """Probe that runs a microbatch through a stage twice, like `measure_stage`, and reads the CUDA allocator.

    Written against torch 2.13, not yet tested on a GPU.
    """

    def __init__(self, chain: Chain, stage: int, device: torch.device, sample: int = 0) -> None:
        self._chain, self._number, self._device, self._sample = chain, stage, device, sample
        self._stage: Stage = chain.stages[stage]

    def sizes(self) -> StageSizes:
        self._stage.zero_gradients()
        self._forward(fused=True)
        self._backward()  # first use: libraries allocate workspaces and keep them
        activation, work_f = self._held_and_work(partial(self._forward, fused=True))
        offload = self._offload_and_reload()
        change, work_bw = self._held_and_work(self._backward)
        workspace = {"F": work_f - activation, "BW": work_bw}
        if self._stage.splits:
            split_activation, split_work_f = self._held_and_work(partial(self._forward, fused=False))
            workspace["F"] = max(workspace["F"], split_work_f - split_activation)
            activation = max(activation, split_activation)
            change, workspace["B"] = self._held_and_work(lambda: self._stage.backward_input(0, self._gradient()))
            _, workspace["W"] = self._held_and_work(lambda: self._stage.backward_weight(0))
        workspace = {kind: max(size, 0) for kind, size in workspace.items()}
        return StageSizes(activation, max(activation + change, 0), min(offload, activation), workspace)

    def _held_and_work(self, op: Callable[[], object]) -> tuple[int, int]:
        """Increase of the allocated bytes by an op, and the increase at its peak."""
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        op()
        after, peak = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        return after - before, peak - before

    def _forward(self, *, fused: bool) -> None:
        target = self._chain.target(self._number, self._sample)
        received = self._chain.received(self._number, self._device, self._sample)
        self._stage.forward(0, received, target, offloads=True, fused=fused)

    def _backward(self) -> None:
        self._stage.backward(0, self._gradient())

    def _gradient(self) -> object:
        return self._chain.gradient(self._number, self._device)

    def _offload_and_reload(self) -> int:
        held = torch.cuda.memory_allocated(self._device)
        self._stage.copy_out(0, HostSlab())
        torch.cuda.synchronize(self._device)
        self._stage.free(0)
        moved = held - torch.cuda.memory_allocated(self._device)
        self._stage.allocate(0)
        self._stage.copy_in(0)
        return moved


T = TypeVar("T")

ClockName = Literal["wall", "cpu"]
"""`wall`: elapsed time. `cpu`: CPU time of the computing thread, which other programs do not lengthen."""


class Key(NamedTuple):
    """Key of a timing: an op's kind, or `transfer`, the number of its stage or boundary, and that of its slice."""

    kind: str
    number: int
    slice: int = 0


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of `count` measurements, in microseconds."""

    median_us: float
    lower_us: float
    upper_us: float
    count: int

    @property
    def relative(self) -> float:
        """Interquartile range divided by the median."""
        return (self.upper_us - self.lower_us) / self.median_us if self.median_us else 0.0


def spread_of(samples_us: Sequence[float]) -> Spread:
    """Compute the spread of one or more measurements; quartiles are interpolated linearly."""
    lower, middle, upper = np.quantile(np.asarray(samples_us, np.float64), [0.25, 0.5, 0.75]).tolist()
    return Spread(middle, lower, upper, len(samples_us))


class Stopwatch(Protocol):
    """Stopwatch that collects times by key."""

    def time(self, key: Key, work: Callable[[], T]) -> T:
        """Run `work`, record its time under `key`, and return its result."""
        ...

    def restart(self) -> None:
        """Discard all times so far, as warm-up."""
        ...

    def samples_us(self) -> Mapping[Key, Sequence[float]]:
        """Times since the last restart by key, in order, in microseconds."""
        ...


class HostStopwatch:
    """Stopwatch for work that is complete when its call returns."""

    def __init__(self, clock: ClockName = "wall") -> None:
        self._clock_ns = perf_counter_ns if clock == "wall" else thread_time_ns
        self._samples_us: dict[Key, list[float]] = defaultdict(list)

    def time(self, key: Key, work: Callable[[], T]) -> T:
        """Run `work`, record its time under `key`, and return its result."""
        begin_ns = self._clock_ns()
        result = work()
        self._samples_us[key].append((self._clock_ns() - begin_ns) / 1000)
        return result

    def restart(self) -> None:
        """Discard all times so far."""
        self._samples_us.clear()

    def samples_us(self) -> Mapping[Key, Sequence[float]]:
        """Times since the last restart by key, in microseconds."""
        return self._samples_us


class CudaStopwatch:
    """Stopwatch for work on the current CUDA stream: an event before and after, read after a synchronisation.

    Written against torch 2.13, not yet tested on a GPU.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[Key, torch.cuda.Event, torch.cuda.Event]] = []

    def time(self, key: Key, work: Callable[[], T]) -> T:
        """Run `work` between two events on the current stream, and return its result."""
        begin, end = _timing_event(), _timing_event()
        begin.record()
        result = work()
        end.record()
        self._marks.append((key, begin, end))
        return result

    def restart(self) -> None:
        """Synchronise, and discard all events so far."""
        torch.cuda.synchronize()
        self._marks.clear()

    def samples_us(self) -> Mapping[Key, Sequence[float]]:
        """Synchronise; times since the last restart by key, in microseconds."""
        torch.cuda.synchronize()
        samples: dict[Key, list[float]] = defaultdict(list)
        for key, begin, end in self._marks:
            samples[key].append(1000 * begin.elapsed_time(end))
        return samples


def stopwatch_for(device: torch.device, clock: ClockName = "wall") -> Stopwatch:
    """Stopwatch for a device. Raises InputError if the clock `cpu` would miss work of other threads or of a GPU."""
    if clock == "cpu" and (device.type == "cuda" or torch.get_num_threads() > 1):
        computing = f"{torch.get_num_threads()} threads compute" if device.type == "cpu" else "a GPU computes"
        detail = f"is cpu, which counts one thread's time, but {computing}. Maybe set OMP_NUM_THREADS=1, or use wall."
        raise InputError([Issue("--clock", "not_counted", detail)])
    return CudaStopwatch() if device.type == "cuda" else HostStopwatch(clock)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def kinds_of_mode(mode: str) -> tuple[str, str, str]:
    """Kinds under which C, O and R are timed of a microbatch in a mode that recomputes."""
    return timed_kind("C", mode), timed_kind("O", mode), timed_kind("R", mode)


def timed_kind(kind: str, mode: str | None) -> str:
    """Kind under which an op is timed of a microbatch in the mode of this name; None: it is kept or offloaded whole."""
    if mode is None or kind not in ("C", "O", "R"):
        return kind
    return f"{kind} {without_offload(mode)}"


def kind_of_block(forward_stage: int) -> str:
    """Kind under which a backward is timed together with the forward of a stage."""
    return f"{BLOCK}{forward_stage}"


BLOCK = "BW with F of stage "

WARM_UP_ROUNDS = 2
"""Untimed rounds: threads start, memory is allocated, slabs grow to their size."""

OnRound = Callable[[int, int], None]
"""Called before each round with its number and the number of rounds, including the warm-up."""


def measure_op_times(
    chain: Chain,
    device: torch.device,
    rounds: int,
    watch: Stopwatch | None = None,
    on_round: OnRound = lambda _round, _rounds: None,
    modes: Mapping[int, Iterable[str]] | None = None,
    pairs: Sequence[tuple[int, int]] = (),
) -> Mapping[int, Mapping[str, Spread]]:
    """Measure the times of each kind of op in each stage of this process, by `watch`; None: by the wall clock.

    A compiled stage has no B and W. For each of a stage's `modes` there are C, O and R under its `kinds_of_mode`; no C
    for copies in low precision. Of `pairs`, stages of a forward and a backward with parts, the backward's has the time
    of their block under `kind_of_block`. Leaves no mark on the stages.
    """
    times = measure_slice_times([chain], device, rounds, watch, on_round, modes, pairs)
    return {s: whole for s, [whole] in times.items()}


def measure_slice_times(
    slices: Sequence[Chain],
    device: torch.device,
    rounds: int,
    watch: Stopwatch | None = None,
    on_round: OnRound = lambda _round, _rounds: None,
    modes: Mapping[int, Iterable[str]] | None = None,
    pairs: Sequence[tuple[int, int]] = (),
) -> Mapping[int, Sequence[Mapping[str, Spread]]]:
    """Measure the times of each slice of a microbatch as `measure_op_times` does those of a whole one.

    `slices` are the chains of the slices, all with the same stages; `pairs` are for whole microbatches alone.
    """
    total = WARM_UP_ROUNDS + rounds
    with unchanged(slices[0].stages.values()):
        measuring = _Rounds(slices, device, watch or stopwatch_for(device), modes or {}, pairs)
        for number in range(total):
            on_round(number, total)
            if number == WARM_UP_ROUNDS:
                measuring.watch.restart()
            measuring.run()
    times: dict[int, list[dict[str, Spread]]] = {s: [{} for _ in slices] for s in slices[0].stages}
    for key, samples_us in measuring.watch.samples_us().items():
        times[key.number][key.slice][key.kind] = spread_of(samples_us)
    return times


class _Rounds:
    """State of the timing rounds: samples, host slabs and the stopwatch.

    In each stage the slices of a microbatch run forward one after the other, and backward from the last.
    """

    def __init__(
        self,
        slices: Sequence[Chain],
        device: torch.device,
        watch: Stopwatch,
        modes: Mapping[int, Iterable[str]],
        pairs: Sequence[tuple[int, int]],
    ) -> None:
        self.watch = watch
        self._modes, self._pairs = modes, pairs
        self._slices, self._device, self._sample = slices, device, 0
        self._stages = slices[0].stages
        pinned = device.type == "cuda"
        self._slabs = {s: [HostSlab(pinned=pinned) for _ in slices] for s in self._stages}
        for stage in self._stages.values():
            stage.zero_gradients()

    def run(self) -> None:
        forward, backward = range(len(self._slices)), range(len(self._slices))[::-1]
        split = {s: stage for s, stage in self._stages.items() if stage.splits}
        for s in sorted(split):
            for q in forward:
                self._forward(s, q, fused=False)
        for s in sorted(split, reverse=True):
            for q in backward:
                gradient = self._slices[q].gradient(s, self._device)
                self.watch.time(Key("B", s, q), partial(split[s].backward_input, q, gradient))
                self.watch.time(Key("W", s, q), partial(split[s].backward_weight, q))
        for s in sorted(self._stages):
            for q in forward:
                self._forward(s, q, fused=True)
        for s, stage in sorted(self._stages.items(), reverse=True):
            for q in backward:
                gradient = self._slices[q].gradient(s, self._device)
                self.watch.time(Key("BW", s, q), partial(stage.backward, q, gradient))
        for s in sorted(self._stages):
            for q in forward:
                self._forward_and_copies(s, q)
        for s, stage in sorted(self._stages.items(), reverse=True):
            for q in backward:
                stage.backward(q, self._slices[q].gradient(s, self._device))
        for s, modes in sorted(self._modes.items()):
            stage = self._stages[s]
            for mode in modes:
                for q in forward:
                    self._forward_and_copies(s, q, mode)
                for q in backward:
                    if mode not in IN_LOW_PRECISION:
                        self.watch.time(Key(kinds_of_mode(mode)[0], s, q), partial(stage.recompute, q))
                    stage.backward(q, self._slices[q].gradient(s, self._device))
        for f, b in self._pairs:
            self._block(f, b)
        self._sample = (self._sample + 1) % len(self._slices[0].batch)

    def _block(self, f: int, b: int) -> None:
        """A block of the forward of stage `f` and the backward of stage `b`, of two microbatches."""
        chain, stages = self._slices[0], self._stages

        def forward(s: int, microbatch: int) -> InParts[Tree]:
            received, target = chain.received(s, self._device, self._sample), chain.target(s, self._sample)
            return stages[s].forward_in_parts(microbatch, received, target, fused=True)

        run_whole(forward(b, 0))
        passes = stages[b].backward_in_parts(0, chain.gradient(b, self._device)), forward(f, 1)
        self.watch.time(Key(kind_of_block(f), b), partial(run_as_block, *passes))
        stages[f].backward(1, chain.gradient(f, self._device))

    def _forward(self, s: int, q: int, *, fused: bool) -> None:
        chain, forward = self._slices[q], self._stages[s].forward
        received, target = chain.received(s, self._device, self._sample), chain.target(s, self._sample)
        self.watch.time(Key("F", s, q), partial(forward, q, received, target, offloads=False, fused=fused))

    def _forward_and_copies(self, s: int, q: int, mode: str | None = None) -> None:
        chain, stage, slab = self._slices[q], self._stages[s], self._slabs[s][q]
        precision = IN_LOW_PRECISION.get(mode or "")
        forward = stage.forward_of(None if precision else mode)
        copies = kinds_of_mode(mode)[1:] if mode else ("O", "R")
        received, target = chain.received(s, self._device, self._sample), chain.target(s, self._sample)
        forward(q, received, target, offloads=True, fused=True)
        del received
        self.watch.time(Key(copies[0], s, q), partial(stage.copy_out, q, slab, precision))
        stage.free(q)
        stage.allocate(q)
        self.watch.time(Key(copies[1], s, q), partial(stage.copy_in, q))
        if slab.too_small:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            slab.grow()
