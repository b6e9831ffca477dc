"""Check of a profile's prediction: runs steps of a schedule of the measured problem, with the stages measured.

Devices of one process run in turns, so the predicted step time is the sum of the times of all ops and messages. The
pipeline itself is compared by the trace: the makespan re-timed with the durations measured in a step, next to the
makespan that the profile predicted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import thread_time_ns

import torch

from optpipe.compile import Action, Program, compile_schedule
from optpipe.compile.memory import PlannedMemory, planned_memory
from optpipe.compile.program import SENDS, message_of
from optpipe.kinds import INSIDE, KINDS, PLAIN_BACKWARD
from optpipe.ops import Op
from optpipe.profile.measured import Measured
from optpipe.profile.ops import Key, Spread, spread_of, stopwatch_for, timed_kind
from optpipe.profile.subject import Chain
from optpipe.runtime.messages import Spec, Tree, size_bytes
from optpipe.runtime.pipeline import Pipeline
from optpipe.runtime.probe import unchanged
from optpipe.runtime.shapes import SliceMessages
from optpipe.runtime.trace_step import record_step
from optpipe.runtime.transport import local_transport
from optpipe.schedule import Schedule
from optpipe.trace import Trace
from optpipe.trace.compare import Comparison, compare
from optpipe.trace.document import ActionRow, Part, assemble
from optpipe.units import bytes_text

Batch = tuple[Sequence[Tree], Sequence[Tree]]

WARM_UP_STEPS = 2
STEPS = 7


@dataclass(frozen=True)
class Share:
    """Time of a step in one kind of action: predicted (None: not part of the cost model), and in a recorded step."""

    kind: str
    actions: int
    predicted_us: float | None
    recorded_us: float


@dataclass(frozen=True)
class Check:
    """Comparison of a prediction with real steps.

    `serial_us` is the predicted time of a step in one process, `step` the measured one. `shares` and `comparison`
    describe one further step, which was recorded. `failures`: a sentence for each device with another peak than
    predicted.
    """

    method: str
    serial_us: float
    step: Spread
    shares: Sequence[Share]
    trace: Trace
    comparison: Comparison
    failures: Sequence[str] = ()

    @property
    def ratio(self) -> float:
        """Measured over predicted step time."""
        return self.step.median_us / self.serial_us


def check_prediction(
    measured: Measured, slices: Sequence[Chain], schedule: Schedule, device: torch.device, margin: float = 0.0
) -> Check:
    """Run the schedule on the subject's microbatches, reused in turns.

    `slices` are the chains of the slices of a microbatch, or that of whole ones alone, with all stages. Peaks may
    exceed the prediction by the share `margin` that devices kept free. Leaves no mark on the stages.
    """
    with unchanged(slices[0].stages.values()):
        return _checked(measured, slices, schedule, device, margin)


def _checked(
    measured: Measured, slices: Sequence[Chain], schedule: Schedule, device: torch.device, margin: float
) -> Check:
    program = compile_schedule(schedule)
    offload_bytes = {s: figures.sizes.offload_bytes for s, figures in enumerate(measured.stages)}
    devices, transport = range(len(program.devices)), local_transport(device)
    messages: Sequence[Spec] | SliceMessages = slices[0].messages
    if len(slices) > 1:
        messages = SliceMessages([chain.messages for chain in slices])
    pipeline = Pipeline(program, slices[0].stages, devices, transport, messages, offload_bytes=offload_bytes)
    numbers = [i % len(slices[0].batch) for i in range(program.microbatches)]
    samples = [chain.batch[number] for number in numbers for chain in slices]
    batch = [inputs for inputs, _ in samples], [targets for _, targets in samples]
    for _ in range(WARM_UP_STEPS):
        pipeline.run(*batch)
    watch, key = stopwatch_for(device, measured.clock), Key("step", 0)
    for _ in range(STEPS):
        watch.time(key, partial(pipeline.run, *batch))
    step = spread_of(watch.samples_us()[key])
    part = record_step(pipeline, *batch, device=device)
    if measured.clock == "cpu":
        part = _on_thread_clock(part, pipeline, batch)
    columns = zip(*(chain.messages for chain in slices), strict=True)
    message_bytes = [[size_bytes(spec) for spec in column] * program.microbatches for column in columns]
    planned = planned_memory(program, schedule.problem, message_bytes)
    trace = assemble(
        [part],
        schedule,
        program=program.digest,
        step=0,
        planned_peak_bytes=[plan.peak_bytes for plan in planned],
        source=f"{measured.name}, {measured.hardware}",
    )
    exact = device.type == "cpu" and not measured.varying and len(slices) == 1  # which have the largest sizes of all
    failures = _wrong_peaks([d.peak_bytes for d in trace.devices], planned, margin, exact=exact)
    serial, shares = serial_us(measured, program), _shares(measured, program, trace)
    return Check(schedule.method, serial, step, shares, trace, compare(trace), [*failures])


def _wrong_peaks(
    peaks_bytes: Sequence[int], planned: Sequence[PlannedMemory], margin: float, *, exact: bool
) -> Iterator[str]:
    """Yield a sentence per wrong peak. With `exact`, where sizes neither vary nor are rounded, lower ones are wrong."""
    for d, (peak_bytes, plan) in enumerate(zip(peaks_bytes, planned, strict=True)):
        if excess := plan.excess(d, peak_bytes, margin):
            yield excess
        elif exact and peak_bytes < plan.peak_bytes:
            less = bytes_text(plan.peak_bytes - peak_bytes)
            yield (
                f"device {d} held {bytes_text(peak_bytes)} at its peak, {less} less than the "
                f"{bytes_text(plan.peak_bytes)} that were predicted. Maybe a module of its stages keeps less after its "
                "first microbatch."
            )


def serial_us(measured: Measured, program: Program) -> float:
    """Sum of the times of all ops and messages of a program."""
    return sum(_predicted_us(measured, program, action.key) or 0.0 for action in program.actions())


def _predicted_us(measured: Measured, program: Program, action: Op) -> float | None:
    """Predicted time of an action; a message counts at its send. None for actions outside the cost model."""
    q = action.microbatch % max(1, len(measured.slice_lengths))
    if action.kind in KINDS:
        figures = measured.stages[action.stage]
        times = figures.slicings[-1].times[q] if figures.slicings else figures.times
        mode = program.modes.get((action.stage, action.microbatch))
        if action.kind in INSIDE:  # a recomputation within a backward
            return times[timed_kind("C", mode)].median_us + times[PLAIN_BACKWARD[action.kind]].median_us
        return times[timed_kind(action.kind, mode)].median_us
    if action.kind in SENDS:
        transfers = measured.slice_transfers[q] if measured.slice_transfers else measured.transfers
        spread = transfers.spreads[message_of(action).boundary]
        return spread.median_us if spread else 0.0
    return None


def _shares(measured: Measured, program: Program, trace: Trace) -> Sequence[Share]:
    """Times of the recorded step by kind of action, in the order of a microbatch's ops."""
    times_us: dict[str, list[tuple[float | None, float]]] = defaultdict(list)
    for device in trace.devices:
        for action in device.actions:
            times_us[action.action].append((_predicted_us(measured, program, action.key), action.duration_us))
    shares = []
    for kind in [*KINDS, *sorted(times_us.keys() - set(KINDS))]:
        if kind in times_us:
            predicted = [predicted_us for predicted_us, _ in times_us[kind] if predicted_us is not None]
            recorded_us = sum(recorded_us for _, recorded_us in times_us[kind])
            shares.append(Share(kind, len(times_us[kind]), sum(predicted) if predicted else None, recorded_us))
    return shares


class _ThreadRecorder:
    """Recorder (`optpipe.runtime.recorder.Recorder`) that times actions by the CPU time of the computing thread."""

    def __init__(self) -> None:
        self.times_ns: dict[Op, tuple[int, int, int]] = {}

    def begin(self, _device: int, action: Action, _stream: torch.Stream | None = None, /) -> None:
        self._key = action.key
        self._begin_ns = self._start_ns = thread_time_ns()

    def waited(self) -> None:
        self._start_ns = thread_time_ns()

    def end(self) -> None:
        self.times_ns[self._key] = self._begin_ns, self._start_ns, thread_time_ns()


def _on_thread_clock(part: Part, pipeline: Pipeline, batch: Batch) -> Part:
    """Replace the times of a part by those of another step on the thread's clock. One thread runs all devices."""
    recorder = _ThreadRecorder()
    pipeline.run(*batch, recorder=recorder)

    def retimed(row: ActionRow) -> ActionRow:
        turn_ns, start_ns, end_ns = recorder.times_ns[Op(row.kind, row.stage, row.microbatch)]
        return row._replace(turn_ns=turn_ns, start_ns=start_ns, end_ns=end_ns)

    return part._replace(devices={d: [retimed(row) for row in rows] for d, rows in part.devices.items()})
