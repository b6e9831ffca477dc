"""Costs of the stages of a trainer, from the records of its ranks: a scheduling problem, without the model.

Times and bytes are medians; where several replicas ran a stage, those of the slowest and of the largest, because the
others wait for it; workspaces are the largest. The first F and the first backward of a stage in a step are left out
where there are others: a wrapper may gather parameters in the one, and gradients are allocated in the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from statistics import median
from typing import Any

from optpipe.compile import compile_schedule
from optpipe.compile.memory import ReplicaMemory, planned_peaks_bytes
from optpipe.errors import InputError, Issue
from optpipe.kinds import BACKWARDS, COPIES, KINDS, LAST_BACKWARDS, PLAIN_BACKWARD, ROWS, covering
from optpipe.mode_names import IN_LOW_PRECISION, OFFLOAD, WITH_OFFLOAD, without_offload
from optpipe.ops import Op
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.stage import WITHOUT_BACKWARD
from optpipe.trace.record import Held, RankRecord, RecordedStage, Timed
from optpipe.units import bytes_text

FIRST_BEFORE = {row.name: {kind for duty in row.duties if duty != "C" for kind in covering(duty)} for row in ROWS}
"""Kinds of ops of a stage before which an op is its first: F may gather parameters then, backwards make gradients."""


COPYING = (*COPIES, "RELEASE", "PREPARE")
"""Kinds of actions that depend on what a mode lets leave."""


@dataclass(frozen=True)
class RecordedCosts:
    """Costs of a stage: median times by kind of op or collective, bytes of a microbatch, and what replicas add.

    `splits`: B and W can run apart. `trained`: it has parameters to train. `modes`: entries of `stages[].modes`, by
    name, that the run had.
    `estimated` says what the run had not and was put in its place.
    """

    times_us: Mapping[str, float]
    activation_bytes: int
    backward_weight_bytes: int
    offload_bytes: int
    workspace_bytes: Mapping[str, int]
    parameter_bytes: int
    message_bytes: int
    splits: bool
    trained: bool
    replica: ReplicaMemory
    modes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    estimated: Sequence[str] = ()


@dataclass(frozen=True)
class RecordedRun:
    """Costs of all stages and transfers of a run. `transfers_us`: forward and backward by boundary; None: not seen."""

    name: str
    source: str
    placement: Sequence[int]
    microbatches: int
    stages: Sequence[RecordedCosts]
    transfers_us: Sequence[tuple[float | None, float | None]]

    def problem(
        self,
        microbatches: int | None = None,
        memory_bytes: int | None = None,
        margin: float = 0.0,
        modes: Sequence[str] | None = None,
        reduce_every: int | None = None,
    ) -> Problem:
        """Build the scheduling problem, by default with the run's microbatches.

        `memory_bytes` is the memory of a device; a share `margin` of it stays free. Parameters, gradients, Adam's
        moments and what replicas gather and reduce are subtracted; where gradients are reduced after each microbatch
        (`reduce_every` 1), whole gradients of one stage at a time, else of all stages of a device. `modes` are names of
        those to allow, `offload` among them; None: all that the run had. Raises InputError if there is too little
        memory, or the run had no such mode.
        """
        recorded = [OFFLOAD, *dict.fromkeys(name for costs in self.stages for name in costs.modes)]
        for name in modes or ():
            if name not in recorded:
                detail = (
                    f"has {name!r}, but the modes of the recorded run are {', '.join(recorded)}. Maybe record it: "
                    f"recording_schedule(..., modes=[{name!r}])."
                )
                raise InputError([Issue("--modes", "not_recorded", detail)])
        budgets = self._budgets_bytes(memory_bytes, margin, reduce_every)
        first_trained = next((s for s, costs in enumerate(self.stages) if costs.trained), 0)
        return Problem.from_data(
            {
                "format": "optpipe.problem/1",
                "name": self.name[:200],
                "microbatches": microbatches or self.microbatches,
                "transfer_us": [
                    {"forward": forward or 0.0, "backward": backward or 0.0} for forward, backward in self.transfers_us
                ]
                or 0,
                "devices": [{"memory_bytes": budget} for budget in budgets],
                "stages": [
                    {"device": device}
                    | _stage(costs, recorded if modes is None else modes)
                    | (WITHOUT_BACKWARD if s < first_trained else {})
                    for s, (device, costs) in enumerate(zip(self.placement, self.stages, strict=True))
                ],
                "source": self.source[:2000],
            }
        )

    @property
    def message_bytes(self) -> Sequence[int]:
        """Bytes of a message over each boundary."""
        return [costs.message_bytes for costs in self.stages[:-1]]

    @property
    def replicas(self) -> Sequence[ReplicaMemory]:
        """Bytes that each stage holds because its replicas share out parameters and gradients."""
        return [costs.replica for costs in self.stages]

    def reduce_every(self, schedule: Schedule, memory_bytes: int, margin: float = 0.0) -> int | None:
        """The most microbatches after which a `PlannedSchedule` may reduce gradients; None: once, at a step's end.

        The order of the schedule's program decides: rarer reductions are fewer, but gradients are held for longer.
        Raises InputError if `memory_bytes` of a device, less the share `margin`, never is enough.
        """
        problem = schedule.problem
        limit_bytes = int(memory_bytes * (1 - margin))
        candidates: list[int | None] = [None, *range(problem.microbatches - 1, 0, -1)]
        excess: list[int] = []
        for every in candidates:
            program = compile_schedule(schedule, reduce_gradients=True, gather_parameters=True, reduce_every=every)
            peaks = planned_peaks_bytes(program, problem, self.message_bytes, self.replicas)
            for costs, device in zip(self.stages, self.placement, strict=True):
                peaks[device] += costs.parameter_bytes
            excess.append(max(peaks) - limit_bytes)
            if excess[-1] <= 0:
                return every
        detail = (
            f"is {bytes_text(memory_bytes)}, {bytes_text(min(excess))} too few for this schedule however often "
            "gradients are reduced. Maybe solve for less memory."
        )
        raise InputError([Issue("--memory", "too_small", detail)])

    def _budgets_bytes(self, memory_bytes: int | None, margin: float, reduce_every: int | None) -> list[int | None]:
        budgets: list[int | None] = []
        for device in range(max(self.placement) + 1):
            own = [costs for d, costs in zip(self.placement, self.stages, strict=True) if d == device]
            held = sum(costs.parameter_bytes for costs in own)
            held += sum(costs.replica.gathered_bytes + costs.replica.reduced_bytes for costs in own)
            gradients = [costs.replica.gradient_bytes for costs in own]
            held += max(gradients, default=0) if reduce_every == 1 else sum(gradients)
            held += max(
                (max(c.replica.gather_workspace_bytes, c.replica.reduce_workspace_bytes) for c in own), default=0
            )
            if memory_bytes is None:
                budgets.append(None)
                continue
            left = int(memory_bytes * (1 - margin)) - held
            if left < 0:
                detail = (
                    f"is {bytes_text(memory_bytes)}, but parameters, gradients and Adam's moments take "
                    f"{bytes_text(held)} on device {device}, with what is gathered and reduced in a step: "
                    f"{bytes_text(-left)} too few. Maybe shard more, use more devices, or reduce gradients after "
                    "every microbatch (--reduce-every 1)."
                )
                raise InputError([Issue("--memory", "too_small", detail)])
            budgets.append(left)
        return budgets


def join_records(records: Sequence[RankRecord]) -> RecordedRun:
    """Join the records of all ranks of a run (`optpipe.trace.record.load_records`)."""
    first = records[0]
    found: dict[int, list[RecordedCosts]] = {}
    for record in records:
        for stage in record.stages:
            found.setdefault(stage.stage, []).append(_costs(record, stage.stage, _messages(records)))
    counts = [sum(kind == "F" for kind in record.steps[0].kind) for record in records]
    how = f"recorded in {len(first.steps)} steps of {len(records)} rank(s) of a run on {first.hardware}"
    estimated = sorted({text for costs in found.values() for one in costs for text in one.estimated})
    return RecordedRun(
        name=first.name or "recorded run",
        source="; ".join([how, f"{max(counts)} forwards a rank and step", *estimated]),
        placement=first.placement,
        microbatches=first.microbatches,
        stages=[_largest(found[s]) for s in range(len(first.placement))],
        transfers_us=_transfers(records),
    )


def _messages(records: Iterable[RankRecord]) -> Mapping[int, int]:
    return {stage.stage: stage.message_bytes for record in records for stage in record.stages}


def _largest(replicas: Sequence[RecordedCosts]) -> RecordedCosts:
    """The slowest times and the largest bytes of the replicas of a stage."""
    most, *others = replicas
    for other in others:
        values: dict[str, Any] = {k: max(v, getattr(other, k)) for k, v in vars(most).items() if type(v) is int}
        for name in ("times_us", "workspace_bytes"):
            own = getattr(most, name)
            values[name] = own | {
                kind: max(value, own.get(kind, value)) for kind, value in getattr(other, name).items()
            }
        values["replica"] = ReplicaMemory(*map(max, astuple(most.replica), astuple(other.replica)))
        values["modes"] = dict(most.modes) | {
            name: _larger(most.modes[name], entry) if name in most.modes else entry
            for name, entry in other.modes.items()
        }
        most = replace(most, **values)
    return most


def _larger(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The larger of each number of two entries of a mode, and of their offloads."""
    return {
        key: _larger(value, other[key]) if isinstance(value, Mapping) else max(value, other[key])
        for key, value in one.items()
        if key in other
    }


@dataclass
class _Samples:
    """Samples by kind of op, those of the first F and the first backward of a stage apart."""

    usual: dict[str, list[float]] = field(default_factory=dict)
    first: dict[str, list[float]] = field(default_factory=dict)

    def add(self, kind: str, value: float, *, first: bool) -> None:
        (self.first if first else self.usual).setdefault(kind, []).append(value)

    def of(self, kind: str) -> list[float]:
        """The usual ones, or if there are none the first ones."""
        return self.usual.get(kind) or self.first.get(kind, [])

    def median(self, kind: str) -> int:
        """Their median, in whole bytes; 0 if there are none."""
        return round(median(self.of(kind))) if self.of(kind) else 0

    @property
    def kinds(self) -> set[str]:
        return self.usual.keys() | self.first.keys()


def _costs(record: RankRecord, number: int, messages: Mapping[int, int]) -> RecordedCosts:
    [stage] = [stage for stage in record.stages if stage.stage == number]
    times = _times(record, number)
    memory = [row for row in record.memory.rows() if row.key.stage == number]
    last = number + 1 == len(record.placement)
    used = messages.get(number - 1, 0) if number else 0
    made = 0 if last else stage.message_bytes
    held, work = _Samples(), _Samples()
    begun: set[str] = set()
    named = _Names(stage)
    for row in memory:
        kind = row.key.kind
        first = kind not in begun and begun.isdisjoint(FIRST_BEFORE.get(kind, {kind}))
        begun.add(kind)
        if kind in ("REDUCE", "REDUCE_PART"):
            begun -= {*BACKWARDS, *LAST_BACKWARDS}  # the next ones allocate gradients anew
        # A message is the device's before the op that uses it and after the op that makes it; else it is the op's.
        arrived, leaving = (used, made) if kind == "F" else (made, used) if kind in BACKWARDS else (0, 0)
        if record.runtime == "torch":
            arrived = leaving = 0  # its buffers are there throughout
        change = row.after_bytes - row.before_bytes + arrived - leaving
        held.add(named(row.key), change, first=first)
        beyond = (
            max(change, 0) if kind in ("F", "C") else stage.gradient_bytes if first and kind in LAST_BACKWARDS else 0
        )
        work.add(named(row.key), max(row.peak_bytes - row.before_bytes + arrived - beyond, 0), first=first)
    # Where all microbatches were recomputed, what one leaves in F and what C (or at most CB, CBW) makes of it.
    forwards = [f"F {name}" for name in {without_offload(name) for name in stage.modes} if held.of(f"F {name}")]
    if forwards and not held.of("F"):
        held.usual["F"] = [max(_whole_bytes(held, work, kind.removeprefix("F ")) for kind in forwards)]
        work.usual["F"] = [max(max(work.of(kind)) for kind in forwards)]
    activation = max(held.median("F"), 0)
    estimated = []
    if held.of("B") and held.of("W"):
        kept = activation + held.median("B")
    elif stage.splits:
        kept = activation
        estimated.append("no B and W apart were recorded: each takes half of BW, and B frees nothing")
    else:
        kept = 0
        estimated.append("compiled stages have no B and W: B stands for BW, and W takes nothing")
    workspace = {kind: round(max(work.of(kind))) for kind in ("F", "B", "W", "BW") if work.of(kind)}
    if "BW" not in workspace and "B" in workspace:
        workspace["BW"] = workspace["B"] + workspace.get("W", 0)
    for kind in ("B", "W"):
        workspace.setdefault(kind, workspace.get("BW", 0))
    offload = min(max(-held.median("RELEASE"), 0), activation)
    modes = {}
    for name in stage.modes:
        if entry := _mode(name, activation, times, held, work):
            modes[name] = entry
    by_kind = {row.key.kind: row for row in memory}
    return RecordedCosts(
        times,
        activation,
        min(max(kept, 0), 2 * activation) if activation else max(kept, 0),
        offload,
        workspace,
        stage.parameter_bytes,
        stage.message_bytes,
        stage.splits,
        stage.trained,
        _replica(by_kind, stage.gathered_bytes, stage.gradient_bytes),
        modes,
        estimated,
    )


def _whole_bytes(held: _Samples, work: _Samples, mode: str) -> int:
    """Bytes of an activation in a mode that recomputes: those kept, and those made anew."""
    inside = [size for kind in PLAIN_BACKWARD for size in work.of(f"{kind} {mode}")]
    again = held.median(f"C {mode}") if held.of(f"C {mode}") else round(max(inside, default=0))
    return held.median(f"F {mode}") + again


class _Names:
    """Names under which samples of a stage's ops are kept: the kind, and with it the mode where it depends on that.

    What a mode keeps depends on what it recomputes, not on whether that leaves; its copies depend on both.
    """

    def __init__(self, stage: RecordedStage) -> None:
        self._mode = {i: name for name, microbatches in stage.modes.items() for i in microbatches}

    def __call__(self, key: Op) -> str:
        mode = self._mode.get(key.microbatch)
        if mode is None or key.kind in ("B", "BW", "W"):
            return key.kind
        return f"{key.kind} {mode if key.kind in COPYING else without_offload(mode)}"


def _mode(
    name: str, activation: int, times: Mapping[str, float], held: _Samples, work: _Samples
) -> dict[str, Any] | None:
    """Entry of `stages[].modes`, without its name; None where the mode saves nothing, or nothing left in it."""
    moved = -held.median(f"RELEASE {name}")
    copies = None
    if moved > 0 and {f"O {name}", f"R {name}"} <= times.keys():
        copies = {"bytes": moved, "offload_us": times[f"O {name}"], "reload_us": times[f"R {name}"]}
    if name in IN_LOW_PRECISION:
        return copies and {"offload": copies | {"bytes": min(moved, activation)}}
    again = without_offload(name)
    kept = max(held.median(f"F {again}"), 0)
    recompute_us = times.get(f"C {again}")
    if recompute_us is None:
        inside_us = [(times.get(f"{kind} {again}"), times.get(plain)) for kind, plain in PLAIN_BACKWARD.items()]
        longer_us = [whole - part for whole, part in inside_us if whole is not None and part is not None]
        recompute_us = max(round(median(longer_us), 1), 0.0) if longer_us else None
    if kept >= activation or recompute_us is None:
        return None

    def most(kind: str) -> int:
        return round(max(work.of(kind), default=0))

    entry: dict[str, Any] = {
        "kept_bytes": kept,
        "recompute_us": recompute_us,
        "forward_workspace_bytes": max(most(f"F {again}") - most("F"), 0),
        "workspace_bytes": most(f"C {again}"),
    }
    inside = [
        most(f"{c} {again}") - most(b) for c, b in PLAIN_BACKWARD.items() if work.of(f"{c} {again}") and work.of(b)
    ]
    if inside:
        entry["segment_bytes"] = max(*inside, 0)
    if not name.endswith(WITH_OFFLOAD):
        return entry
    return copies and entry | {"offload": copies | {"bytes": min(moved, kept)}}


def _replica(by_kind: Mapping[str, Held], gathered_bytes: int, gradient_bytes: int) -> ReplicaMemory:
    """Bytes that the collectives of a step hold, measured where the run had them as actions of their own."""
    workspace = gathered_bytes
    if gather := by_kind.get("GATHER"):
        workspace = gather.peak_bytes - gather.before_bytes - gathered_bytes
    left, reducing = 0, gradient_bytes
    if reduce := by_kind.get("REDUCE"):
        left = reduce.after_bytes - reduce.before_bytes + gathered_bytes + gradient_bytes
        reducing = reduce.peak_bytes - reduce.before_bytes
    return ReplicaMemory(
        gathered_bytes, max(workspace, 0), gradient_bytes, max(left, 0), max(reducing, 0) if gradient_bytes else 0
    )


def _times(record: RankRecord, number: int) -> Mapping[str, float]:
    """Median times of the ops of a stage. F of offloaded microbatches counts only where there is no other."""
    samples = _Samples()
    named = _Names(next(stage for stage in record.stages if stage.stage == number))
    for step in record.steps:
        rows = [row for row in step.rows() if row.key.stage == number]
        moved = {row.key.microbatch for row in rows if row.key.kind == "O"}
        forwards = 0
        for row in rows:
            forwards += row.key.kind == "F"
            unusual = row.key.kind == "F" and (forwards == 1 or row.key.microbatch in moved)
            samples.add(named(row.key), (row.end_ns - row.start_ns) / 1000, first=unusual)
    times = {kind: round(median(samples.of(kind)), 1) for kind in samples.kinds}
    if "F" not in times:  # all microbatches were recomputed
        times |= {"F": max((us for kind, us in times.items() if kind.startswith("F ")), default=0.0)}
    return times


def _stage(costs: RecordedCosts, modes: Sequence[str]) -> dict[str, Any]:
    times = costs.times_us
    if "B" in times and "W" in times:
        backward, weight = times["B"], times["W"]
    else:
        fused = times.get("BW", 0.0)
        backward, weight = (fused / 2, fused / 2) if costs.splits else (fused, 0.0)
    offload = None
    if OFFLOAD in modes and costs.offload_bytes and "O" in times and "R" in times:
        offload = {"bytes": costs.offload_bytes, "offload_us": times["O"], "reload_us": times["R"]}
    entries = [{"name": name, **entry} for name, entry in costs.modes.items() if name in modes]
    whole = {} if costs.splits else {"split_backward": False}
    return {
        "forward_us": times.get("F", 0.0),
        "backward_input_us": backward,
        "backward_weight_us": weight,
        "activation_bytes": costs.activation_bytes,
        "backward_weight_bytes": costs.backward_weight_bytes,
        "workspace_bytes": dict(costs.workspace_bytes),
        "offload": offload,
        **whole,
    } | ({"modes": entries} if entries else {})


def _transfers(records: Sequence[RankRecord]) -> list[tuple[float | None, float | None]]:
    """Medians over the messages for which the receiver was waiting: from the end of the op to that of the wait.

    Between replicas nothing is sent, so each pipeline is looked at by itself: the ranks of one, by their records' order
    among those of a device.
    """
    placement = records[0].placement
    pipelines: list[dict[int, RankRecord]] = []
    for device in sorted({record.device for record in records}):
        for k, record in enumerate(record for record in records if record.device == device):
            while len(pipelines) <= k:
                pipelines.append({})
            pipelines[k][device] = record
    boundaries: list[tuple[float | None, float | None]] = []
    for b in range(len(placement) - 1):
        forward, backward = [], []
        if placement[b] != placement[b + 1]:
            for pipeline in pipelines:
                ends = [pipeline.get(placement[s]) for s in (b, b + 1)]
                if ends[0] is None or ends[1] is None:
                    continue
                forward += _waited(ends[0], b, ends[1], b + 1, ("F",))
                backward += _waited(ends[1], b + 1, ends[0], b, BACKWARDS)
        boundaries.append((_median(forward), _median(backward)))
    return boundaries


def _waited(sender: RankRecord, source: int, receiver: RankRecord, target: int, kinds: Sequence[str]) -> list[float]:
    waited = []
    for sent, received in zip(sender.steps, receiver.steps, strict=False):
        ends_ns = {row.key.microbatch: row.end_ns for row in _ops(sent.rows(), source, kinds)}
        for row in _ops(received.rows(), target, kinds):
            end_ns = ends_ns.get(row.key.microbatch)
            if end_ns is not None and row.turn_ns <= end_ns:
                waited.append(max(row.start_ns - end_ns, 0) / 1000)
    return waited


def _ops(rows: Iterable[Timed], stage: int, kinds: Sequence[str]) -> Iterable[Timed]:
    return (row for row in rows if row.key.stage == stage and row.key.kind in kinds and row.key.kind in KINDS)


def _median(values: Sequence[float]) -> float | None:
    return round(median(values), 1) if values else None
