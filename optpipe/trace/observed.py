"""Steps of other trainers: a schedule from observed orders, and a trace from profiles of `torch.profiler`.

A profile is a Chrome trace, one a rank of the pipeline. Ops are found by the names of their ranges: those of torch's
schedule classes (`PP:1F0`, and `Forward 0` where each rank has one stage); and `forward_step` and `backward_step` of
Megatron-LM, as ranges of one's own or as the frames of its `schedules.py` that a profile with call stacks has. These
have no numbers and are counted: stage and microbatch follow from Megatron's order. On a GPU its times count, not those
of the host: of a range as the profiler gives them, of a frame from the kernels that were launched in it.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from optpipe.compile import compile_schedule
from optpipe.document import read_bounded, refuse_kind
from optpipe.document_kinds import CHROME_TRACE, kind_of_data, kind_of_text
from optpipe.errors import InputError, Issue
from optpipe.kinds import KIND_OF_TORCH
from optpipe.ops import DeviceOrders, Op, OpArray, Orders
from optpipe.problem import Device, Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from optpipe.timed import timed_schedule
from optpipe.trace.document import MAX_TRACE_BYTES, ActionRow, Part, Trace, assemble

ACTION = re.compile(r"PP:(\d+)([FBIW])(\d+)")
SINGLE = re.compile(r"(Forward|Backward) (\d+)")
COUNTED = {"forward_step": "F", "backward_step": "BW", "forward-compute": "F", "backward-compute": "BW"}
FRAME = re.compile(r"(?:.*/)?schedules\.py\(\d+\): (forward_step|backward_step)")
"""Call of Megatron-LM in a profile with stacks; the user's own `forward_step`, which it calls, is in another file."""
NUMBERED = "is for ranges of Megatron-LM, which have no numbers. Maybe leave it out."
PEER = re.compile(r"nccl(Dev)?Kernel_SendRecv")
"""Messages between stages, which an op may only wait for."""
PIPELINE_GROUP = re.compile(r"^(mesh_)?pp$|^PIPELINE_MODEL_PARALLEL_GROUP$")
"""Names of the pipeline's process group: of a device mesh, and of Megatron-LM."""
ANY_GROUP = ("", "default_pg", "undefined")
"""Names of process groups that may be the pipeline's: its messages take the default group where none is given."""
RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,6})(?!\d)", re.IGNORECASE)
MAX_CLOCK_US = 2.0**53
"""Largest time of an event, more than 200 years: above it a float's microseconds are no longer exact."""
UNREADABLE = (OSError, EOFError, zlib.error, RecursionError, OverflowError)
"""Errors of damaged compression, of JSON that nests too deeply, and of integers that no float holds."""


class Range(NamedTuple):
    """An op in a profile."""

    op: Op
    start_us: float
    end_us: float


class Mark(NamedTuple):
    """A range in a profile whose name says what op it is, or of which kind."""

    name: str
    start_us: float
    end_us: float


class Profile(NamedTuple):
    """Content of a file: its ops, its rank, and the ranks of its pipeline where it knows them.

    `receives_us`: when it began to receive messages, by the host's clock; empty where ops have a GPU's times.
    `processes`: of the whole job; 0 where the file does not say it. `peers`: ranks that messages go to or come from.
    """

    path: Path
    marks: Sequence[Mark]
    receives_us: Sequence[float]
    rank: int | None
    pipeline: Sequence[int] | None
    processes: int
    peers: Set[int]

    @property
    def counted(self) -> bool:
        """True if the ops have no numbers; all ranges of a file are of one form."""
        return self.marks[0].name in COUNTED

    @property
    def says_stages(self) -> bool:
        """True if the ops have the number of their stage, so that the order of the files says nothing."""
        return ACTION.fullmatch(self.marks[0].name) is not None


def is_profile(path: Path) -> bool:
    """True for a Chrome trace, False for a document of OptPipe."""
    if path.suffix == ".gz":
        return True
    with path.open("rb") as file:
        head = file.read(4096).lstrip()
    return head.startswith(b"[") or b'"optpipe.' not in head


def load_profiles(paths: Sequence[Path], chunks: int | None = None) -> Trace:
    """The last complete step in the profiles of all ranks, in the order of the pipeline.

    `chunks`: stages of a rank where ranges have no numbers; None: by their order. The plan of the step has the same
    order, each op with the median time of its kind and stage, and as many microbatches in flight as its budget. Raises
    InputError where ops are missing.
    """
    profiles = [_profile(path) for path in paths]
    marks = [found.marks for found in profiles]
    counted = [found.counted for found in profiles]
    if any(counted) and not all(counted):
        rank = counted.index(False)
        detail = f"has ranges with numbers ({marks[rank][0].name}), others have none. Maybe it is of another run."
        raise InputError([Issue("", "other_form", detail)], str(paths[rank]))
    _check_ranks(profiles)
    if any(counted):
        ranks = _counted_steps(marks, chunks, paths)
    elif chunks is not None:
        raise InputError([Issue("--chunks", "not_counted", NUMBERED)], str(paths[0]))
    else:
        ranks = [_numbered_steps(found, rank) for rank, found in enumerate(marks)]
    count = min(map(len, ranks))
    lengths = [max(map(len, steps), default=0) for steps in ranks]
    complete = [k for k in range(count) if all(len(steps[k]) == n for steps, n in zip(ranks, lengths, strict=True))]
    if not complete:
        detail = "has no step of which all ranks have all ops. Maybe profile two steps or more, the same on every rank."
        raise InputError([Issue("", "no_step", detail)], str(paths[0]))
    step = [steps[complete[-1]] for steps in ranks]
    placement = _placement(step, paths)
    at = {found.op: found for ranges in step for found in ranges}
    _check_messages(profiles, placement)
    _check_times(at, placement, paths)
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
        source=f"profiles of {len(paths)} rank(s), by each one's clock: {paths[0].name}{_doubt(profiles)}",
    )


def _numbered_steps(marks: Sequence[Mark], rank: int) -> list[list[Range]]:
    """The ops of each step of a rank, in order of time. A step ends where an op comes again."""
    steps: list[list[Range]] = [[]]
    seen: set[Op] = set()
    for name, start_us, end_us in marks:
        if found := ACTION.fullmatch(name):
            op = Op(KIND_OF_TORCH[found[2]], int(found[1]), int(found[3]))
        else:
            forward, microbatch = name.split()
            op = Op("F" if forward == "Forward" else "BW", rank, int(microbatch))
        if op in seen:
            steps.append([])
            seen.clear()
        seen.add(op)
        steps[-1].append(Range(op, start_us, end_us))
    return steps


def _counted_steps(
    ranks: Sequence[Sequence[Mark]], chunks: int | None, paths: Sequence[Path]
) -> list[list[list[Range]]]:
    """The ops of each step of all ranks, in order of time, numbered as Megatron-LM runs them.

    A step has ended where all its forwards have had their backward: on ranks whose forwards run ahead. Those of the
    last rank of 1F1B do not, so the rank with the fewest steps says how long they are.
    """
    kinds = [[COUNTED[mark.name] for mark in marks] for marks in ranks]
    forwards = min(map(_forwards_of_steps, kinds), key=len)
    leads = [of_rank.index("BW") if "BW" in of_rank else len(of_rank) for of_rank in kinds]
    count, group = _interleaving(leads, forwards[0], chunks, paths)
    steps: list[list[list[Range]]] = []
    for rank, marks in enumerate(ranks):
        steps.append([])
        begin = 0
        for total in forwards:
            table = _megatron_order(total // count, count, group)
            backwards = [(count - 1 - chunk, i) for chunk, i in table]
            numbers: dict[str, Iterator[tuple[int, int]]] = {"F": iter(table), "BW": iter(backwards)}
            steps[-1].append([])
            for mark in marks[begin : begin + 2 * total]:
                kind = COUNTED[mark.name]
                chunk, microbatch = next(numbers[kind], (0, total))  # one too many is found to be so with the others
                op = Op(kind, chunk * len(ranks) + rank, microbatch)
                steps[-1][-1].append(Range(op, mark.start_us, mark.end_us))
            begin += 2 * total
    return steps


def _forwards_of_steps(kinds: Iterable[str]) -> list[int]:
    """Number of forwards in each step of a rank whose forwards run ahead of its backwards."""
    forwards, ahead = [0], 0
    for kind in kinds:
        if kind == "F" and not ahead and forwards[-1]:
            forwards.append(0)
        forwards[-1] += kind == "F"
        ahead += 1 if kind == "F" else -1
    return forwards


def _interleaving(leads: Sequence[int], total: int, chunks: int | None, paths: Sequence[Path]) -> tuple[int, int]:
    """Chunks of a rank, and the microbatches that pass one chunk before the next one has its turn.

    `leads`: forwards of each rank before its first backward; `total`: its forwards in a step. Interleaved 1F1B of v
    chunks and groups of g has (v - 1) g + 1 of them on the last rank, and two more on each rank before
    (arXiv 2104.04473, section 2.2); a group is as large as the pipeline unless Megatron's
    `--microbatch-group-size-per-virtual-pipeline-stage` says more. Raises InputError where `chunks` do not fit.
    """
    p, last = len(leads), leads[-1]
    fits = all(lead == min(total, last + 2 * (p - 1 - rank)) for rank, lead in enumerate(leads))
    if chunks is None:
        one_each = [min(total, p - rank) for rank in range(p)]
        if list(leads) == one_each or last == total:
            return 1, p
        if p == 1 or not fits or last == 1:
            detail = (
                f"begins a step of {total} forwards with {last} of them, and the ranks in their order with "
                f"{', '.join(map(str, leads))}: 1F1B of {p} ranks begins with {', '.join(map(str, one_each))}. Maybe a "
                "rank is missing, or they are in another order."
            )
            raise InputError([Issue("", "no_order", detail)], str(paths[-1]))
        count, rest = divmod(last - 1, p)
        if rest or total % (count + 1):
            detail = (
                f"is missing: {paths[-1].name} begins a step of {total} forwards with {last} of them, as in "
                "interleaved chunks, but not in groups as large as the pipeline. Maybe give Megatron-LM's chunks of a "
                "rank, or a rank is missing."
            )
            raise InputError([Issue("--chunks", "missing", detail)])
        return count + 1, p
    group, rest = divmod(last - 1, chunks - 1) if chunks > 1 and last < total else (p, 0)
    if total % chunks or rest or not group or (chunks > 1 and not fits):
        detail = (
            f"is {chunks}, but {paths[-1].name} begins a step of {total} forwards with {last} of them, which is not "
            "how Megatron-LM interleaves as many. Maybe it is the number of chunks of all ranks, or ranks are in "
            "another order."
        )
        raise InputError([Issue("--chunks", "no_interleaving", detail)])
    return chunks, group


def _megatron_order(microbatches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    """Chunk and microbatch of each forward of a rank, in its order; backwards take the chunks in reverse."""
    return [
        (chunk, i)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for i in range(first, min(first + group, microbatches))
    ]


def _check_ranks(profiles: Sequence[Profile]) -> None:
    """Raise InputError for files that are not those of one pipeline, by the ranks that they state."""
    first_of: dict[int | Path, Profile] = {}
    for found in profiles:
        keys: list[int | Path] = [found.path.resolve()]
        for key in keys if found.rank is None else [*keys, found.rank]:
            if key in first_of:
                detail = f"is of the same rank as {first_of[key].path}. Maybe one file is given twice."
                raise InputError([Issue("", "same_rank", detail)], str(found.path))
            first_of[key] = found
    ranks = [found.rank for found in profiles if found.rank is not None]
    text = ", ".join(map(str, ranks))
    _check_peers(profiles, ranks)
    if len(ranks) < len(profiles):
        return
    for found in profiles:
        if found.pipeline is not None and set(found.pipeline) != set(ranks):
            detail = f"is of a pipeline of ranks {', '.join(map(str, found.pipeline))}, but given are ranks {text}"
            missing = [str(rank) for rank in found.pipeline if rank not in ranks]
            fix = f"Maybe add the profile of rank {', '.join(missing)}." if missing else "Maybe give these alone."
            raise InputError([Issue("", "other_ranks", f"{detail}. {fix}")], str(found.path))
    steps = {after - before for before, after in pairwise(ranks)}
    if not all(found.says_stages for found in profiles) and (len(steps) > 1 or min(steps, default=1) < 0):
        detail = (
            f"and the others are of ranks {text}, but the ranks of a pipeline ascend at one distance. Maybe one is "
            "missing, or they are in another order."
        )
        raise InputError([Issue("", "other_order", detail)], str(profiles[0].path))
    _check_mesh(profiles, ranks)


def _check_peers(profiles: Sequence[Profile], ranks: Sequence[int]) -> None:
    """Raise InputError where messages go to ranks of which no profile is given, or come from these."""
    known = frozenset(ranks).union(*(found.peers for found in profiles))
    count = max(len(known), *(len(found.peers) + 1 for found in profiles))  # a rank sends nothing to itself
    if count > len(profiles):
        found = max(profiles, key=lambda one: len(one.peers - {*ranks}))
        others, missing = (", ".join(map(str, sorted(some - {*ranks}))) for some in (found.peers, known))
        detail = f"has messages to or from rank {others}: with all of these there are {count} ranks, "
        fix = f"Maybe add the profile of rank {missing}." if len(ranks) == len(profiles) else "Maybe one is missing."
        raise InputError([Issue("", "missing_ranks", f"{detail}but given are {len(profiles)}. {fix}")], str(found.path))


def _check_mesh(profiles: Sequence[Profile], ranks: Sequence[int]) -> None:
    """Raise InputError for ranks that are no pipeline in any mesh of a job's processes.

    The pipelines of a mesh, each of p ranks at a distance d, divide the job: every p d ranks in a row hold d of them.
    """
    processes, p = max(found.processes for found in profiles), len(ranks)
    distances = {after - before for before, after in pairwise(sorted(ranks))} or {1}
    if not processes or len(distances) > 1 or any(found.pipeline for found in profiles):
        return
    [distance] = distances
    if processes % (p * distance) or min(ranks) % (p * distance) >= distance:
        text = ", ".join(map(str, sorted(ranks)))
        detail = (
            f"is of a job of {processes:,} ranks, which are not divided into pipelines such as the one given, {text}. "
            "Maybe a rank is missing."
        )
        raise InputError([Issue("", "missing_ranks", detail)], str(profiles[0].path))


def _doubt(profiles: Sequence[Profile]) -> str:
    """The ranks, where they are not all that a job has at their distance, and no file says which its pipeline has.

    Those of files that state none are by their names.
    """
    names = [RANK_IN_NAME.search(found.path.name) for found in profiles]
    numbers = sorted(int(name[1]) for name in names if name)
    if all(found.rank is None and not found.peers for found in profiles) and len(numbers) == len(profiles):
        if numbers[0] < (numbers[1] - numbers[0] if len(numbers) > 1 else 1):
            return ""
        given = ", ".join(map(str, numbers))
        return f" (by their names of ranks {given}; if a pipeline has those before, some are missing)"
    ranks = [found.rank for found in profiles if found.rank is not None]
    processes = max(found.processes for found in profiles)
    distance = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    whole = range(ranks[0] % distance, processes, distance) if ranks and distance > 0 else range(0)
    if any(found.pipeline for found in profiles) or len(ranks) < len(profiles) or len(whole) <= len(ranks):
        return ""
    given, all_of = ", ".join(map(str, ranks)), ", ".join(map(str, whole[:8])) + (", ..." if len(whole) > 8 else "")
    return f" (of ranks {given}; if the pipeline has ranks {all_of}, some are missing)"


def _check_messages(profiles: Sequence[Profile], placement: Sequence[int]) -> None:
    """Raise InputError where a rank receives what its place does not need, or not what it needs.

    The first stage's rank receives nothing for its first forward, the last one's nothing after its last forward, and
    every other rank does both. Several stages on one rank send to and fro, and say their numbers.
    """
    if len(set(placement)) < len(placement) or not any(found.receives_us for found in profiles):
        return
    for s, rank in enumerate(placement):
        found = profiles[rank]
        forwards = [mark for mark in found.marks if _is_forward(mark.name)]
        before = any(at_us < forwards[0].end_us for at_us in found.receives_us)  # torch's GPipe waits within its range
        after = any(at_us > forwards[-1].end_us for at_us in found.receives_us)
        for does, needed, what in (
            (before, s > 0, "messages for its first forward"),
            (after, s + 1 < len(placement), "messages after its last forward"),
        ):
            if does != needed:
                place = "first" if s == 0 else "last" if s + 1 == len(placement) else "middle"
                detail = (
                    f"{'receives' if does else 'receives no'} {what}, but the rank of a pipeline's {place} stage "
                    f"{'has none' if does else 'does'}. Maybe a rank is missing, or they are in another order."
                )
                raise InputError([Issue("", "other_place", detail)], str(found.path))


def _is_forward(name: str) -> bool:
    action = ACTION.fullmatch(name)
    return action[2] == "F" if action else name.startswith("Forward") or COUNTED.get(name) == "F"


def _check_times(at: Mapping[Op, Range], placement: Sequence[int], paths: Sequence[Path]) -> None:
    """Raise InputError where most ops of a stage end before those that they need, more than clocks can be off."""
    early: dict[tuple[str, int], list[bool]] = {}
    for op, found in at.items():
        if (before := _needed(op, at, len(placement))) is not None and placement[before.op.stage] != placement[
            op.stage
        ]:
            early.setdefault((op.kind, op.stage), []).append(found.end_us < before.end_us)
    for (kind, s), are_early in sorted(early.items()):
        if 2 * sum(are_early) > len(are_early):
            neighbour = s - 1 if kind == "F" else s + 1
            detail = (
                f"has {sum(are_early)} of {len(are_early)} {kind} of stage {s} end before those of stage {neighbour}, "
                f"which they need, in {paths[placement[neighbour]].name}. Maybe the files are not in the order of the "
                "pipeline, a rank is missing, or the clocks of the hosts differ."
            )
            raise InputError([Issue("", "other_order", detail)], str(paths[placement[s]]))


def _needed(op: Op, at: Mapping[Op, Range], stages: int) -> Range | None:
    """The op on the stage before, or for a backward behind, whose message an op needs."""
    kind, s, i = op
    if kind == "F":
        return at[Op("F", s - 1, i)] if s > 0 else None
    if kind == "W" or s + 1 == stages:
        return None
    return at.get(Op("BW", s + 1, i)) or at[Op("B", s + 1, i)]


def _profile(path: Path) -> Profile:
    """Read a profile: ranges that are ops, by start, those with numbers where it has any."""
    content = read_bounded(path, MAX_TRACE_BYTES)
    try:
        text = gzip.decompress(content) if path.suffix == ".gz" else content
        refuse_kind(kind_of_text(text), [CHROME_TRACE], str(path))
        data = json.loads(text)
        refuse_kind(kind_of_data(data), [CHROME_TRACE], str(path))
        base_us = data.get("baseTimeNanoseconds", 0) / 1000 if isinstance(data, dict) else 0.0
        events = [
            event for event in (data["traceEvents"] if isinstance(data, dict) else data) if event.get("ph") == "X"
        ]
        found: dict[str, list[Mark]] = {}
        owners: dict[str, set[Any]] = {}
        for event in events:
            name, category = str(event.get("name", "")), str(event.get("cat", ""))
            if call := FRAME.fullmatch(name):
                name, category = call[1], "frame"
            if name in COUNTED or ACTION.fullmatch(name) or SINGLE.fullmatch(name):
                start_us, took_us = base_us + float(event["ts"]), float(event["dur"])
                if not (abs(start_us) <= MAX_CLOCK_US and 0 <= took_us <= MAX_CLOCK_US):
                    raise ValueError(f"{name} begins at {start_us:g} us and takes {took_us:g} us")
                found.setdefault(category, []).append(Mark(name, start_us, start_us + took_us))
                owners.setdefault(category, set()).add(event.get("pid"))
        receives_us = [base_us + float(event["ts"]) for event in events if event.get("name") == "c10d::recv_"]
        peers = frozenset(_peers(events))
        frames = _on_gpu(found.pop("frame", []), events, base_us)
        rank, pipeline, processes = _ranks(data.get("distributedInfo") if isinstance(data, dict) else None)
    except (*UNREADABLE, ValueError, KeyError, TypeError, AttributeError) as error:
        detail = f"is no Chrome trace: {type(error).__name__}: {error}. Maybe export_chrome_trace was interrupted."
        raise InputError([Issue("", "no_trace", detail)], str(path)) from None
    if any(len(several) > 1 for several in owners.values()):  # a GPU's ranges name the device in place of the process
        detail = f"has ranges of {max(map(len, owners.values()))} processes. Maybe give a file for each rank."
        raise InputError([Issue("", "many_ranks", detail)], str(path))
    marks = found.pop("gpu_user_annotation", None) or [mark for of_category in found.values() for mark in of_category]
    numbered = [mark for mark in marks if mark.name not in COUNTED]
    if not (marks := numbered or marks or frames):
        detail = (
            "has no ranges of a pipeline (PP:0F0, Forward 0, forward_step). Maybe the profile was taken with "
            "record_shapes alone, or of another rank."
        )
        raise InputError([Issue("", "no_ops", detail)], str(path))
    on_host = not any(event.get("cat") == "kernel" for event in events)  # else the host is ahead of the ops
    marks = sorted(marks, key=lambda mark: mark.start_us)
    return Profile(path, marks, receives_us if on_host else (), rank, pipeline, processes, peers)


def _ranks(info: Any) -> tuple[int | None, Sequence[int] | None, int]:
    """Rank of a profile, ranks of its pipeline, and number of processes, where torch.profiler wrote them.

    The pipeline's group is known by its name, or by being the only one.
    """
    if not isinstance(info, dict) or not isinstance(info.get("rank"), int):
        return None, None, 0
    rank, groups = info["rank"], [group for group in info.get("pg_config") or () if isinstance(group, dict)]
    whole = [group for group in groups if rank in (group.get("ranks") or ()) and len(group["ranks"]) > 1]
    named = [group["ranks"] for group in whole if PIPELINE_GROUP.search(str(group.get("pg_desc", "")))]
    pipeline = named[0] if named else whole[0]["ranks"] if len(groups) == len(whole) == 1 else None
    return rank, pipeline, int(info.get("world_size") or 0)


def _peers(events: Iterable[Mapping[str, Any]]) -> Iterator[int]:
    """Ranks that the messages of a profile go to or come from, where torch.profiler wrote them (torch 2.5 does)."""
    for arguments in (event.get("args") or {} for event in events):
        group = str(arguments.get("Process Group Description", ""))
        if group in ANY_GROUP or PIPELINE_GROUP.search(group):
            yield from (int(arguments[name]) for name in ("Src Rank", "Dst Rank") if name in arguments)


def _on_gpu(frames: Sequence[Mark], events: Sequence[Mapping[str, Any]], base_us: float) -> list[Mark]:
    """Frames with the times of the kernels that were launched in them, if the profile has any of a GPU.

    Kernels of a backward are launched by another thread, while the frame waits for it. A frame without kernels is left
    out.
    """
    launches, spans = [], {}
    for event in events if frames else ():
        if "correlation" not in (arguments := event.get("args") or {}):
            continue
        start_us = base_us + float(event["ts"])
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            launches.append((start_us, arguments["correlation"]))
        elif event.get("cat") == "kernel" and not PEER.match(str(event.get("name", ""))):
            spans[arguments["correlation"]] = (start_us, start_us + float(event["dur"]))
    if not spans:
        return list(frames)
    launches = sorted((start_us, number) for start_us, number in launches if number in spans)
    starts = [start_us for start_us, _ in launches]
    marks = []
    for name, start_us, end_us in frames:
        within = [spans[n] for _, n in launches[bisect_left(starts, start_us) : bisect_right(starts, end_us)]]
        if within:
            marks.append(Mark(name, min(start for start, _ in within), max(end for _, end in within)))
    return marks


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
    if (before := _needed(found.op, at, len(placement))) is None:
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
    problem = Problem.from_data(data)
    free = timed_schedule(orders, simulate(problem, orders), "observed")
    devices = [Device(memory_bytes=device.peak_bytes_any_timing) for device in free.devices]
    problem = problem.replaced(devices=devices)
    return timed_schedule(orders, simulate(problem, orders), "observed")
