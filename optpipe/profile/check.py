"""A profile's prediction against real steps: a schedule of the measured problem, run with the stages measured.

Devices of one process run one after the other, so their step is predicted as the sum of what all ops and messages take.
Whether the times are those of a pipeline's is told by the trace: re-timed, the schedule's makespan with the durations
measured in a step, beside the makespan that the profile predicted.
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
from optpipe.ops import KINDS, Op
from optpipe.profile.measured import Measured
from optpipe.profile.ops import Key, Spread, Stopwatch, spread_of, stopwatch_for
from optpipe.profile.subject import Chain
from optpipe.runtime.messages import Tree
from optpipe.runtime.pipeline import Pipeline
from optpipe.runtime.trace_step import record_step
from optpipe.runtime.transport import local_transport
from optpipe.schedule import Schedule
from optpipe.trace import Trace
from optpipe.trace.compare import Comparison, compare
from optpipe.trace.document import ActionRow, Part, assemble

Batch = tuple[Sequence[Tree], Sequence[Tree]]

WARM_UP_STEPS = 2
STEPS = 7


@dataclass(frozen=True)
class Share:
    """What a step spends on one kind of action: predicted (None: it is taken to be nothing), and in a recorded step."""

    kind: str
    actions: int
    predicted_us: float | None
    recorded_us: float


@dataclass(frozen=True)
class Check:
    """`serial_us` was predicted for a step in one process, `step` is what steps took.

    `shares` and `comparison` are of one more step, which was recorded. `failures`: a sentence for each device whose
    peak is not as predicted; empty where all are.
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
        """Measured over predicted."""
        return self.step.median_us / self.serial_us


def check_prediction(
    measured: Measured, chain: Chain, schedule: Schedule, device: torch.device, margin: float = 0.0
) -> Check:
    """Run the schedule, whose stages are all in `chain`, on the subject's microbatches, in turns.

    Peaks may exceed the prediction by the `margin` that devices had left free. Sets the gradients of the stages, and no
    weight.
    """
    program = compile_schedule(schedule)
    pipeline = _pipeline(measured, chain, program, device)
    samples = [chain.batch[i % len(chain.batch)] for i in range(program.microbatches)]
    batch = [inputs for inputs, _ in samples], [targets for _, targets in samples]
    step = _step_times(pipeline, batch, stopwatch_for(device, measured.clock))
    part = record_step(pipeline, *batch, device=device)
    if measured.clock == "cpu":
        part = _on_thread_clock(part, pipeline, batch)
    planned = planned_memory(program, schedule.problem, measured.message_bytes)
    trace = assemble(
        [part],
        schedule,
        program=program.digest,
        step=0,
        planned_peak_bytes=[device.peak_bytes for device in planned],
        source=f"{measured.name}, {measured.hardware}",
    )
    exact = device.type == "cpu" and not measured.varying
    failures = _peaks_that_differ([d.peak_bytes for d in trace.devices], planned, margin, exact=exact)
    serial, shares = serial_us(measured, program), _shares(measured, trace)
    return Check(schedule.method, serial, step, shares, trace, compare(trace), [*failures])


def _peaks_that_differ(
    peaks_bytes: Sequence[int], planned: Sequence[PlannedMemory], margin: float, *, exact: bool
) -> Iterator[str]:
    """With `exact` a peak may not be below the prediction either: sizes are the same for all data, and not rounded."""
    for d, (peak_bytes, plan) in enumerate(zip(peaks_bytes, planned, strict=True)):
        if excess := plan.excess(d, peak_bytes, margin):
            yield excess
        elif exact and peak_bytes < plan.peak_bytes:
            yield (
                f"device {d} held {peak_bytes:,} bytes at its peak, but {plan.peak_bytes:,} were predicted. Maybe a "
                "module of its stages keeps less after its first microbatch."
            )


def serial_us(measured: Measured, program: Program) -> float:
    """The time of all ops and messages of a program, one after the other."""
    return sum(_predicted_us(measured, action.key) or 0.0 for action in program.actions())


def _predicted_us(measured: Measured, action: Op) -> float | None:
    """What the profile says of an action; of a message as a whole at its send; None of what it takes to be nothing."""
    if action.kind in KINDS:
        return measured.stages[action.stage].times[action.kind].median_us
    if action.kind in SENDS:
        spread = measured.transfers.spreads[message_of(action).boundary]
        return spread.median_us if spread else 0.0
    return None


def _shares(measured: Measured, trace: Trace) -> Sequence[Share]:
    """The recorded step by kind of action, in the order of a microbatch's life."""
    found: dict[str, list[tuple[float | None, float]]] = defaultdict(list)
    for device in trace.devices:
        for action in device.actions:
            found[action.action].append((_predicted_us(measured, action.key), action.duration_us))
    order = [*KINDS, *sorted(found.keys() - set(KINDS))]
    return [
        Share(
            kind,
            len(found[kind]),
            _sum_or_none([predicted for predicted, _ in found[kind]]),
            sum(us for _, us in found[kind]),
        )
        for kind in order
        if kind in found
    ]


def _sum_or_none(times_us: Sequence[float | None]) -> float | None:
    known = [time_us for time_us in times_us if time_us is not None]
    return sum(known) if known else None


def _pipeline(measured: Measured, chain: Chain, program: Program, device: torch.device) -> Pipeline:
    sizes = {s: figures.sizes.offload_bytes for s, figures in enumerate(measured.stages)}
    devices = range(len(program.devices))
    return Pipeline(program, chain.stages, devices, local_transport(device), chain.messages, offload_bytes=sizes)


class _ThreadRecorder:
    """Times actions by the time that the computing thread gets (`optpipe.runtime.recorder.Recorder`)."""

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
    """The same part with the times of another step, by the thread's clock. One thread plays all devices."""
    recorder = _ThreadRecorder()
    pipeline.run(*batch, recorder=recorder)
    devices = {d: [_retimed(row, recorder) for row in rows] for d, rows in part.devices.items()}
    return part._replace(devices=devices)


def _retimed(row: ActionRow, recorder: _ThreadRecorder) -> ActionRow:
    turn_ns, start_ns, end_ns = recorder.times_ns[Op(row.kind, row.stage, row.microbatch)]
    return row._replace(turn_ns=turn_ns, start_ns=start_ns, end_ns=end_ns)


def _step_times(pipeline: Pipeline, batch: Batch, watch: Stopwatch) -> Spread:
    key = Key("step", 0)
    for _ in range(WARM_UP_STEPS):
        pipeline.run(*batch)
    for _ in range(STEPS):
        watch.time(key, partial(pipeline.run, *batch))
    return spread_of(watch.samples_us()[key])
