"""Steps of other trainers: a schedule from observed orders, and a trace from profiles of `torch.profiler`.

A profile is a Chrome trace, one a rank of the pipeline. Ops are found by the names of their ranges: those of torch's
schedule classes (`PP:1F0`, and `Forward 0` where each rank has one stage), and `forward_step` and `backward_step`, with
which code around Megatron-LM is often marked, counted in their order. On a GPU the ranges of its streams count, not
those of the host.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from optpipe.compile import compile_schedule
from optpipe.document import read_bounded
from optpipe.errors import InputError, Issue
from optpipe.ops import STREAMS, DeviceOrders, Op, OpArray, Orders
from optpipe.problem import Problem
from optpipe.schedule import PlannedOps, Schedule, named_modes
from optpipe.simulate import simulate
from optpipe.trace.document import MAX_TRACE_BYTES, ActionRow, Part, Trace, assemble
from optpipe.worst_case_memory import worst_case_peak_bytes

ACTION = re.compile(r"PP:(\d+)([FBIW])(\d+)")
SINGLE = re.compile(r"(Forward|Backward) (\d+)")
COUNTED = {"forward_step": "F", "backward_step": "BW", "forward-compute": "F", "backward-compute": "BW"}
KIND_OF_TORCH = {"F": "F", "I": "B", "W": "W", "B": "BW"}


def observed_schedule(problem: Problem, orders: Orders, method: str) -> Schedule:
    """The schedule of given orders, at its simulated times. Nothing is searched or proved."""
    simulation = simulate(problem, orders)
    spans = zip(simulation.start_us.tolist(), simulation.end_us.tolist(), strict=True)
    times = dict(zip(simulation.ops, spans, strict=True))
    devices = []
    for d, device in enumerate(orders.devices):
        plan: dict[str, Any] = {
            name: PlannedOps(
                OpArray.of(ops),
                [times[op][0] for op in ops],
                [times[op][1] for op in ops],
                modes=named_modes(problem, orders.modes, OpArray.of(ops)),
            )
            for name, ops in zip(STREAMS, device.streams(), strict=True)
        }
        busy_us = float(sum(times[op][1] - times[op][0] for op in device.compute))
        plan["peak_bytes"] = simulation.device_memory(d).peak_bytes
        streams = device.compute, device.offload, device.reload
        plan["peak_bytes_any_timing"] = worst_case_peak_bytes(problem, streams, orders.waits, orders.modes)
        plan |= {"busy_us": busy_us, "bubble": max(0.0, 1 - busy_us / simulation.value_us)}
        devices.append(plan)
    return Schedule.from_data(
        {
            "format": "optpipe.schedule/1",
            "problem": problem,
            "status": "feasible",
            "objective": problem.objective,
            "value_us": simulation.value_us,
            "bound_us": 0.0,
            "gap": 1.0,
            "method": method,
            "solve_seconds": 0,
            "devices": devices,
        }
    )


class Range(NamedTuple):
    """An op in a profile."""

    op: Op
    start_us: float
    end_us: float


def is_profile(path: Path) -> bool:
    """True for a Chrome trace, False for a document of OptPipe."""
    if path.suffix == ".gz":
        return True
    with path.open("rb") as file:
        head = file.read(4096).lstrip()
    return head.startswith(b"[") or b'"optpipe.' not in head


def load_profiles(paths: Sequence[Path]) -> Trace:
    """The last complete step in the profiles of all ranks, in the order of the pipeline.

    The plan beside it has the same order, each op with the median time of its kind and stage, and as many microbatches
    in flight as its budget. Raises InputError where ops are missing.
    """
    ranks = [_steps(path, rank) for rank, path in enumerate(paths)]
    count = min(map(len, ranks))
    lengths = [max(map(len, steps), default=0) for steps in ranks]
    complete = [k for k in range(count) if all(len(steps[k]) == n for steps, n in zip(ranks, lengths, strict=True))]
    if not complete:
        detail = "has no step of which all ranks have all ops. Maybe profile two steps or more, the same on every rank."
        raise InputError([Issue("", "no_step", detail)], str(paths[0]))
    step = [steps[complete[-1]] for steps in ranks]
    placement = _placement(step, paths)
    at = {found.op: found for ranges in step for found in ranges}
    step = [[_after_message(found, at, placement) for found in ranges] for ranges in step]
    schedule = _schedule(step, placement)
    parts = []
    for rank, ranges in enumerate(step):
        rows = []
        for (kind, s, i), start_us, end_us in ranges:
            start_ns = round(start_us * 1000)
            rows.append(ActionRow(kind, s, i, None, start_ns, start_ns, round(end_us * 1000), 0, 0))
        parts.append(Part(rank, 0.0, {rank: rows}))
    return assemble(
        parts,
        schedule,
        program=compile_schedule(schedule).digest,
        step=complete[-1],
        planned_peak_bytes=[0] * len(paths),
        source=f"profiles of {len(paths)} rank(s), by each one's clock: {paths[0].name}",
    )


def _steps(path: Path, rank: int) -> list[list[Range]]:
    """The ops of each step in a profile, in order of time. A step ends where an op comes again."""
    steps: list[list[Range]] = [[]]
    seen: set[Op] = set()
    counts: Counter[str] = Counter()
    for name, start_us, length_us in _ranges(path):
        if found := ACTION.fullmatch(name):
            op = Op(KIND_OF_TORCH[found[2]], int(found[1]), int(found[3]))
        elif found := SINGLE.fullmatch(name):
            op = Op("F" if found[1] == "Forward" else "BW", rank, int(found[2]))
        else:
            kind = COUNTED[name]
            if kind == "F" and counts["F"] and counts["F"] == counts["BW"]:
                counts.clear()  # all backwards are done: the next forward is of another step, if any is
                steps.append([])
            op = Op(kind, rank, counts[kind])
            counts[kind] += 1
            steps[-1].append(Range(op, start_us, start_us + length_us))
            continue
        if op in seen:
            steps.append([])
            seen.clear()
        seen.add(op)
        steps[-1].append(Range(op, start_us, start_us + length_us))
    return steps


def _ranges(path: Path) -> Iterator[tuple[str, float, float]]:
    """Name, start and length in us of the ranges that are ops, by start."""
    content = read_bounded(path, MAX_TRACE_BYTES)
    try:
        data = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
        events = data["traceEvents"] if isinstance(data, dict) else data
        base_us = data.get("baseTimeNanoseconds", 0) / 1000 if isinstance(data, dict) else 0.0
        found = [
            (str(event.get("cat", "")), str(event["name"]), base_us + float(event["ts"]), float(event["dur"]))
            for event in events
            if event.get("ph") == "X" and _is_op(str(event.get("name", "")))
        ]
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        detail = f"is no Chrome trace: {type(error).__name__}: {error}. Maybe export_chrome_trace was interrupted."
        raise InputError([Issue("", "no_trace", detail)], str(path)) from None
    on_gpu = [event for event in found if event[0] == "gpu_user_annotation"]
    if not found:
        detail = (
            "has no ranges of a pipeline (PP:0F0, Forward 0, forward_step). Maybe the profile was taken with "
            "record_shapes alone, or of another rank."
        )
        raise InputError([Issue("", "no_ops", detail)], str(path))
    return ((name, start, length) for _, name, start, length in sorted(on_gpu or found, key=lambda event: event[2]))


def _is_op(name: str) -> bool:
    return bool(ACTION.fullmatch(name) or SINGLE.fullmatch(name) or name in COUNTED)


def _placement(step: Sequence[Sequence[Range]], paths: Sequence[Path]) -> list[int]:
    """The rank of each stage. Raises InputError unless every stage has every op once."""
    rank_of = {found.op.stage: rank for rank, ranges in enumerate(step) for found in ranges}
    ops = Counter(found.op for ranges in step for found in ranges)
    stages, microbatches = max(rank_of) + 1, 1 + max(op.microbatch for op in ops)
    for s in range(stages):
        for i in range(microbatches):
            backward = ops[Op("BW", s, i)] or min(ops[Op("B", s, i)], ops[Op("W", s, i)])
            if ops[Op("F", s, i)] != 1 or backward != 1:
                detail = f"and the others lack F or backward of stage {s}, microbatch {i}. Maybe a rank is missing."
                raise InputError([Issue("", "lacks_ops", detail)], str(paths[0]))
    return [rank_of[s] for s in range(stages)]


def _after_message(found: Range, at: dict[Op, Range], placement: Sequence[int]) -> Range:
    """The op without its wait for a message: torch's ranges begin with it."""
    kind, s, i = found.op
    before = None
    if kind == "F" and s > 0:
        before = at[Op("F", s - 1, i)]
    elif kind in ("B", "BW") and s + 1 < len(placement):
        before = at.get(Op("BW", s + 1, i)) or at[Op("B", s + 1, i)]
    if before is None:
        return found
    return found._replace(start_us=min(max(found.start_us, before.end_us), found.end_us))


def _schedule(step: Sequence[Sequence[Range]], placement: Sequence[int]) -> Schedule:
    times: dict[tuple[str, int], list[float]] = {}
    for found in (found for ranges in step for found in ranges):
        times.setdefault((found.op.kind, found.op.stage), []).append(found.end_us - found.start_us)

    def typical(kind: str, s: int) -> float | None:
        return round(median(times[kind, s]), 3) if (kind, s) in times else None

    stages = []
    for s, device in enumerate(placement):
        fused = typical("BW", s)
        half = None if fused is None else fused / 2
        stages.append(
            {
                "device": device,
                "forward_us": typical("F", s),
                "backward_input_us": typical("B", s) if half is None else half,
                "backward_weight_us": typical("W", s) if half is None else half,
                "activation_bytes": 1,
                "backward_weight_bytes": 1,
            }
        )
    data = {
        "format": "optpipe.problem/1",
        "name": "observed",
        "microbatches": 1 + max(found.op.microbatch for ranges in step for found in ranges),
        "devices": [{"memory_bytes": None}] * len(step),
        "stages": stages,
        "source": "medians of a profile; bytes are microbatches in flight",
    }
    orders = Orders([DeviceOrders(OpArray.of([found.op for found in ranges])) for ranges in step])
    free = observed_schedule(Problem.from_data(data), orders, "observed")
    data["devices"] = [{"memory_bytes": device.peak_bytes_any_timing} for device in free.devices]
    return observed_schedule(Problem.from_data(data), orders, "observed")
