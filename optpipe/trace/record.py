"""Record of a rank's steps in a trainer (document `optpipe.record/1`): what `Recorder` writes and a profile reads.

Times are nanoseconds by the clock of the pipeline's first rank, bytes are those alive on the rank's device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar

from pydantic import Field, model_validator

from optpipe.compile import compile_schedule
from optpipe.document import Document, read_document
from optpipe.errors import InputError, Issue
from optpipe.fields import Bytes, Index, TimeUs, reject
from optpipe.ops import Op
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from optpipe.stage import Offload
from optpipe.timed import timed_schedule
from optpipe.trace.document import MAX_TRACE_BYTES, ActionRow, Part, Trace, assemble

RECORDING = "recording"
"""Method of schedules to record by: times and sizes of their problems stand for nothing."""

Kind = Annotated[str, Field(pattern=r"^[A-Z][A-Z_]{0,19}$")]


class Timed(NamedTuple):
    """A recorded action: it was next at `turn_ns`, its waits were over at `start_ns`, its work at `end_ns`."""

    key: Op
    turn_ns: int
    start_ns: int
    end_ns: int


class Held(NamedTuple):
    """Bytes alive before an action, most while it ran, and after it."""

    key: Op
    before_bytes: int
    peak_bytes: int
    after_bytes: int


Row = TypeVar("Row", Timed, Held)


class _Columns(Document, Generic[Row]):
    """Rows by column, one entry an action in each list, in the order in which they ran."""

    row: ClassVar[type[Any]]
    kind: list[Kind]
    stage: list[Index]
    microbatch: list[Index]

    @model_validator(mode="after")
    def _same_length(self) -> Self:
        lengths = {name: len(getattr(self, name)) for name in type(self).model_fields}
        if len(set(lengths.values())) > 1:
            raise reject("wrong_length", f"has lists of different lengths: {lengths}")
        return self

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        """Columns of the rows: those of the action, and those of what was recorded of it."""
        kind, stage, microbatch = map(list, zip(*(row.key for row in rows), strict=True)) if rows else ([], [], [])
        recorded = {name: [getattr(row, name) for row in rows] for name in cls.row._fields[1:]}
        return cls(**{"kind": kind, "stage": stage, "microbatch": microbatch, **recorded})

    def rows(self) -> Iterator[Row]:
        """One row an action."""
        keys = map(Op, self.kind, self.stage, self.microbatch)
        return map(self.row, keys, *(getattr(self, name) for name in self.row._fields[1:]))


class RecordedStep(_Columns[Timed]):
    """Times of the actions of one step."""

    row = Timed
    turn_ns: list[int]
    start_ns: list[int]
    end_ns: list[int]


class RecordedMemory(_Columns[Held]):
    """Memory of the actions of one step."""

    row = Held
    before_bytes: list[Bytes]
    peak_bytes: list[Bytes]
    after_bytes: list[Bytes]


class RecordedStage(Document):
    """A stage of the rank.

    `parameter_bytes`: parameters and buffers as this rank keeps them, those that are trained four times (weight,
    gradient, two moments of Adam). What FSDP adds to them in a step: `gathered_bytes`, whole parameters that stay from
    the first F to the reduction, and `gradient_bytes`, whole gradients until they are reduced. `message_bytes`: what
    one microbatch sends to the next stage. `splits`: B and W can run apart. `trained`: it has parameters to
    train. `modes`: microbatches by the name of their activation mode, those left out that are kept or offloaded whole.
    """

    stage: Index
    parameter_bytes: Bytes
    gathered_bytes: Bytes
    gradient_bytes: Bytes
    message_bytes: Bytes
    splits: bool
    trained: bool = True
    modes: dict[str, list[Index]] = Field(default_factory=dict)


class RankRecord(Document):
    """Recorded steps of one rank.

    `device` is its rank in the pipeline, `rank` that among all `processes`. `steps` were timed, `memory` is of one
    further step. `schedule` is the one that ran; None where another class of schedules did.
    """

    format: Literal["optpipe.record/1"]
    name: str = Field(default="", max_length=200)
    hardware: str = Field(default="", max_length=200)
    rank: Index
    processes: Annotated[int, Field(ge=1)]
    device: Index
    placement: list[Index]
    microbatches: Annotated[int, Field(ge=1)]
    runtime: Literal["optpipe", "torch"]
    clock_error_us: TimeUs
    stages: list[RecordedStage]
    steps: list[RecordedStep]
    memory: RecordedMemory
    schedule: Schedule | None = None

    @model_validator(mode="after")
    def _stages_are_placed_here(self) -> Self:
        placed = [s for s, device in enumerate(self.placement) if device == self.device]
        if (found := sorted(stage.stage for stage in self.stages)) != placed:
            raise reject("other_stages", f"stages has {found} but placement puts {placed} on device {self.device}")
        if not self.steps:
            raise reject("empty", "steps is empty but at least one timed step is needed")
        return self


def load_records(folder: Path) -> list[RankRecord]:
    """Read the records of all ranks of a run (`rank*.json`), ascending.

    Raises InputError if a file is no record, a device of the pipeline has none, or they are of different runs.
    """
    paths = sorted(folder.glob("rank*.json"))
    if not paths:
        maybe = "the run ended before its recorded steps were over" if folder.is_dir() else "the folder is misspelt"
        detail = f"has no records (rank0.json and so on). Maybe {maybe}."
        raise InputError([Issue("", "no_records", detail)], str(folder))
    records = [RankRecord.from_data(read_document(path, MAX_TRACE_BYTES, "record"), str(path)) for path in paths]
    first = records[0]
    for record, path in zip(records, paths, strict=True):
        for field in ("placement", "microbatches", "processes", "runtime"):
            if getattr(record, field) != getattr(first, field):
                detail = (
                    f"is {getattr(record, field)} but {getattr(first, field)} in {paths[0].name}. Maybe the folder "
                    "holds records of two runs."
                )
                raise InputError([Issue(field, "other_run", detail)], str(path))
    missing = sorted(set(first.placement) - {record.device for record in records})
    if missing:
        detail = f"has no record of devices {missing}. Maybe copy the files of all hosts into one folder."
        raise InputError([Issue("", "missing_ranks", detail)], str(folder))
    return sorted(records, key=lambda record: record.rank)


def trace_of_records(records: Sequence[RankRecord]) -> Trace:
    """The last timed step of a recorded run, with the planned schedule that it ran; the times of one to record by are
    the medians of the step.

    Memory is that of the step in which it was counted. Of replicas, those of the lowest rank. Raises InputError for a
    run by another class of schedules.
    """
    ran = next((record.schedule for record in records if record.schedule), None)
    if ran is None:
        detail = "has no planned schedule: torch's own ran. Maybe 'optpipe profile --from-run' on it, and solve."
        raise InputError([Issue("", "no_schedule", detail)])
    schedule, peaks = ran, [device.peak_bytes for device in ran.devices]
    if ran.method == RECORDING:
        schedule, peaks = _with_recorded_times(ran, records), [0] * len(ran.devices)
    parts: dict[int, Part] = {}
    for record in reversed(records):
        held = {row.key: row for row in record.memory.rows()}
        rows = []
        for row in record.steps[-1].rows():
            memory = held.get(row.key)
            bytes_ = (memory.peak_bytes, memory.after_bytes) if memory else (0, 0)
            rows.append(ActionRow(*row.key, None, row.turn_ns, row.start_ns, row.end_ns, *bytes_))
        parts[record.device] = Part(record.device, record.clock_error_us, {record.device: rows})
    return assemble(
        list(parts.values()),
        schedule,
        program=compile_schedule(schedule).digest,
        step=len(records[0].steps) - 1,
        planned_peak_bytes=peaks,
        source=f"{records[0].name or 'a run'}; recorded on {records[0].hardware}"[:2000],
    )


def _with_recorded_times(schedule: Schedule, records: Sequence[RankRecord]) -> Schedule:
    """A schedule to record by, which has no times of its own: with the median of each kind of op on each stage.

    Its sizes stand for nothing.
    """
    took_us: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in (row for record in records for row in record.steps[-1].rows()):
        took_us[row.key[:2]].append((row.end_ns - row.start_ns) / 1000)

    def copies(copy: Offload | None, s: int) -> Offload | None:
        return copy and copy.replaced(offload_us=typical_us("O", s), reload_us=typical_us("R", s))

    def typical_us(kind: str, s: int, otherwise_us: float = 0.0) -> float:
        return round(median(took_us[kind, s]), 1) if (kind, s) in took_us else otherwise_us

    stages = []
    for s, stage in enumerate(schedule.problem.stages):
        half_us = typical_us("BW", s) / 2
        again_us = typical_us("C", s)
        modes = [
            mode.replaced(offload=copies(mode.offload, s), **({"recompute_us": again_us} if mode.recompute_us else {}))
            for mode in stage.modes
        ]
        times_us = {
            "forward_us": typical_us("F", s),
            "backward_input_us": typical_us("B", s, half_us),
            "backward_weight_us": typical_us("W", s, half_us),
        }
        stages.append(stage.replaced(offload=copies(stage.offload, s), modes=modes, **times_us))
    problem = schedule.problem.replaced(name=records[0].name, stages=stages)
    orders = schedule.orders_in(problem)
    return timed_schedule(orders, simulate(problem, orders), RECORDING)
