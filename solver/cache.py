"""Cache of solved problems on disk, keyed by their canonical form.

One file a problem, in a folder for each family of problems that differ in microbatches, budgets and objective alone.
A file is written whole or not at all, so several processes may share the folder; one that cannot be read, whose
checksum is wrong or that lacks a field counts as absent. Whatever comes out is simulated and verified again.

Times are divided by the largest time of which all are multiples. Sizes are divided by the largest size of which all
are multiples; memory then only takes multiples of it, so a budget is as good as the largest multiple within it, and is
rounded down. The host holds nothing but what is offloaded, so its budget is rounded to the divisor of those sizes.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from optpipe.errors import OptPipeError
from optpipe.kinds import COPIES, SizeName, TimeName
from optpipe.ops import Orders, orders_from_data, orders_to_data
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.task_graph import lower
from solver.limits import Limits
from solver.scale import time_unit_us

if TYPE_CHECKING:
    from solver.adapt import Kept

Data = dict[str, Any]


@dataclass(frozen=True)
class Canonical:
    """A problem without names and units. A time of 1 in `data` is `time_us` microseconds of the problem."""

    data: Data
    time_us: Fraction

    @property
    def key(self) -> str:
        """Digest that only equal problems share."""
        return _digest(self.data)

    @property
    def family_key(self) -> str:
        """Digest that problems share which differ in microbatches, budgets and objective alone."""
        same = ("stages", "forward_delay", "backward_delay", "channels", "slices", "classes", "free_order", "overlaps")
        return _digest({name: self.data[name] for name in same if name in self.data})


def canonical_form(problem: Problem) -> Canonical:
    """The canonical form of a problem."""
    time_us, graph = time_unit_us(problem), lower(problem)
    times, sizes = (  # rows for each option and class of a stage
        [np.stack([part[s, :count].ravel() for part in parts], axis=1) for s, count in enumerate(graph.options)]
        for parts in (graph.times_us.values(), graph.sizes_bytes.values())
    )
    unit_bytes = int(np.gcd.reduce(np.concatenate(sizes).ravel()))
    moved_bytes = int(np.gcd.reduce(np.concatenate(sizes)[:, [*graph.sizes_bytes].index("copied")]))

    @cache  # stages repeat their times, and reading digits is most of the work
    def ticks(time: float) -> int | None:
        if isnan(time):
            return None
        exact = Fraction(str(time))
        return exact.numerator * time_us.denominator // (exact.denominator * time_us.numerator)

    data: Data = {
        "microbatches": problem.microbatches,
        "objective": problem.objective,
        "budgets": [_units(device.memory_bytes, unit_bytes) for device in problem.devices],
        "host_budget": _units(problem.host_memory_bytes, moved_bytes),
        "stages": [
            {
                "device": stage.device,
                "split": stage.split_backward,
                "options": int(graph.options[s]),
                "whole": int(graph.whole_option[s]),
                "times": [[ticks(time) for time in row] for row in times[s].tolist()],
                "sizes": (sizes[s] // (unit_bytes or 1)).tolist(),
            }
            for s, stage in enumerate(problem.stages)
        ],
        "channels": _channels(problem) if any(graph.duties[kind].any() for kind in COPIES) else None,
    }
    for direction, delays_us in graph.delays_us.items():
        of_classes = delays_us[:, problem.class_units].tolist()
        data[f"{direction}_delay"] = [[ticks(time) for time in row] for row in of_classes]
    if problem.slice_count > 1:
        data["slices"] = problem.slice_count
    if problem.has_free_order:
        data["free_order"] = True
    if problem.overlaps:
        data["overlaps"] = sorted([*pair, ticks(time)] for pair, time in problem.block_us.items())
    if problem.has_factors:
        data["classes"] = problem.unit_class.tolist()
    return Canonical(data, time_us)


def _channels(problem: Problem) -> Data:
    shared = sorted(sorted(group) for group in problem.channel_groups if len(group) > 1)
    return {"duplex": problem.copy_channels.duplex, "shared_by": shared}


def _units(budget_bytes: int | None, unit_bytes: int) -> int | None:
    """Units that fit; None if any number does, or units have no size."""
    return budget_bytes // unit_bytes if budget_bytes is not None and unit_bytes else None


FORMAT = "cache-4"
"""The folder's name, and a part of every digest. A new one forgets all proofs, here and in the service's database:
needed where a bound turns out to have been wrong, or the canonical form changes."""


def text_digest(text: bytes) -> bytes:
    """Digest under which the service keeps its answer to a problem given as this text."""
    return hashlib.sha256(FORMAT.encode() + b"\n" + text).digest()


def _digest(data: Data) -> str:
    return text_digest(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hex()


MAX_ENTRY_BYTES = 16 * 2**20
MAX_BYTES = 256 * 2**20
MAX_AGE_S = 90 * 24 * 3600.0

MAX_NEIGHBOURS = 8
"""Neighbours that are tried as starts, those with the most similar number of microbatches first."""

_NO_ORDERS = (OptPipeError, ValueError, TypeError, LookupError, AttributeError)
"""Errors of reading orders from JSON of another shape, and of judging those that are none of the problem."""


def default_folder() -> Path:
    """The user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optpipe"


@dataclass(frozen=True)
class CachedSchedule:
    """A verified schedule from the cache, with the requested method and the time times threads that it was given."""

    schedule: Schedule
    requested_method: str
    cpu_seconds: float

    def answers(self, method: str, limits: Limits) -> bool:
        """True if it was solved at least as well as a new solve is asked to."""
        return solved_well_enough(self.schedule.gap, self.requested_method, self.cpu_seconds, method, limits)


def solved_well_enough(gap: float, requested_method: str, cpu_seconds: float, method: str, limits: Limits) -> bool:
    """True if a known schedule answers a new solve with `method` and `limits`: its gap is small enough, or it was
    requested of the same method with no less time times threads.

    Where work is counted instead of time, only a new solve gives the same answer on every machine.
    """
    if limits.deterministic_limit is not None:
        return False
    good_enough = gap <= limits.gap and method in (requested_method, "auto")
    return good_enough or (method == requested_method and cpu_seconds >= limits.time_limit_s * limits.workers)


def rebuild_schedule(
    problem: Problem, orders: str | Data, bound_us: float, method: str, solve_seconds: float
) -> Schedule | None:
    """Schedule of stored orders (JSON data, or its text), timed and verified for this problem.

    None where the orders are damaged or not valid for the problem: an older version had other rules.
    """
    from solver.build import build_schedule

    try:
        read = orders_from_data(json.loads(orders) if isinstance(orders, str) else orders)
        return build_schedule(problem, read, bound_us, method, solve_seconds)
    except _NO_ORDERS:
        return None


class _Entry(BaseModel):
    """The content of a file. Values and bounds are in units of the problem's canonical form."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    problem: dict[str, Any]
    asked: str
    worker_s: Annotated[float, Field(ge=0)]
    method: str
    solve_seconds: Annotated[float, Field(ge=0)]
    value: Annotated[float, Field(ge=0)]
    bound: Annotated[float, Field(ge=0)]
    orders: dict[str, Any]

    @field_validator("problem")
    @classmethod
    def _has_microbatches(cls, problem: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(problem.get("microbatches"), int):
            raise ValueError("no number of microbatches")
        return problem

    @property
    def microbatches(self) -> int:
        """Microbatches of the problem, by which neighbours differ."""
        return int(self.problem["microbatches"])

    def updated(self, new: Self) -> Self:
        """The one with the better value, of equal ones the one that was given more time; with the higher bound."""
        better = new if (new.value, -new.worker_s) <= (self.value, -self.worker_s) else self
        return better.model_copy(update={"bound": max(self.bound, new.bound)})


class Cache:
    """The solved problems in a folder, which need not exist. Never raises for what is or is not on disk."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or default_folder()) / FORMAT
        self._last: tuple[Problem, Canonical] | None = None

    def lookup(self, problem: Problem) -> CachedSchedule | None:
        """The best known schedule of this problem or an equal one, in this one's units; None where there is none."""
        form = self._form(problem)
        path = self._path(problem, form)
        entry = _read(path)
        if entry is None or entry.problem != form.data:
            return None
        bound_us = entry.bound * float(form.time_us)
        schedule = rebuild_schedule(problem, entry.orders, bound_us, entry.method, entry.solve_seconds)
        if schedule is None:
            return None
        with suppress(OSError):
            os.utime(path)
        return CachedSchedule(schedule, entry.asked, entry.worker_s)

    def neighbours(self, problem: Problem, allowed_s: float = float("inf")) -> list[Orders]:
        """Orders for this problem made of schedules for other budgets, objectives or microbatches, within its budgets.

        Periods are repeated, or cut short, within about `allowed_s`.

        Those for the nearest number of microbatches come first. Schedules of the same stages with other activation
        modes, or without any, are neighbours too.
        """
        from solver.adapt import adapt_orders

        form = self._form(problem)
        paths = self._path(problem, form).parent.glob("*.json")
        entries = [entry for path in paths if (entry := _read(path)) is not None]
        others = [entry for entry in entries if entry.problem != form.data]
        others.sort(key=lambda entry: abs(entry.microbatches - problem.microbatches))
        found = []
        until_s = time.perf_counter() + allowed_s
        for entry in others[:MAX_NEIGHBOURS]:
            with suppress(*_NO_ORDERS):
                orders = orders_from_data(entry.orders)
                same = entry.problem["stages"] == form.data["stages"]
                modes = None if same else [_kept(stage) for stage in entry.problem["stages"]]
                left_s = until_s - time.perf_counter()
                found.append(adapt_orders(problem, orders, entry.microbatches, modes, left_s))
        return [orders for orders in found if orders is not None]

    def store(self, schedule: Schedule, requested_method: str, cpu_seconds: float) -> None:
        """Keep a schedule and what it was given (time times threads), unless a better one is there.

        The higher bound is kept in either case.
        """
        form = self._form(schedule.problem)
        time_us = float(form.time_us)
        entry = _Entry(
            problem=form.data,
            asked=requested_method,
            worker_s=cpu_seconds,
            method=schedule.method,
            solve_seconds=schedule.solve_seconds,
            value=schedule.value_us / time_us,
            bound=schedule.bound_us / time_us,
            orders=orders_to_data(schedule.orders),
        )
        path = self._path(schedule.problem, form)
        known = _read(path)
        if known is not None and known.problem == form.data:
            entry = known.updated(entry)
        with suppress(OSError):
            _write(path, entry)
            self._prune()

    def _form(self, problem: Problem) -> Canonical:
        """The canonical form, kept for the last problem: a solve looks up, finds neighbours and stores."""
        if self._last is None or self._last[0] is not problem:
            self._last = (problem, canonical_form(problem))
        return self._last[1]

    def _path(self, problem: Problem, form: Canonical) -> Path:
        """The file of a problem, in the folder of those that differ in microbatches, budgets, objective and modes."""
        family = canonical_form(problem.without_modes()) if problem.has_modes else form
        return self.folder / family.family_key / f"{form.key}.json"

    def _prune(self) -> None:
        """Remove what was not used for long, and the longest unused where there is too much."""
        held_bytes = 0
        for used_s, size_bytes, path in sorted(self._files(), reverse=True):
            held_bytes += size_bytes
            if held_bytes > MAX_BYTES or time.time() - used_s > MAX_AGE_S:
                path.unlink(missing_ok=True)

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        for path in self.folder.glob("*/*"):
            with suppress(OSError):  # another process may have removed it
                state = path.stat()
                yield state.st_mtime, state.st_size, path


def _kept(stage: Data) -> list[Kept]:
    """The modes of a stage of a canonical form, in the order of its choices."""
    from solver.adapt import Kept

    times, sizes = (
        [dict(zip(get_args(names), row, strict=True)) for row in stage[part]]
        for names, part in ((TimeName, "times"), (SizeName, "sizes"))
    )
    rows = list(zip(times, sizes, strict=True))
    return [
        Kept(size["kept"] / size["activation"] if size["activation"] else 1.0, leaves=time["offload"] is not None)
        for time, size in rows[:: len(rows) // stage["options"]]
    ]


def _read(path: Path) -> _Entry | None:
    """The entry in a file; None where there is none, or it was damaged or written by other code."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    checksum, _, body = content.partition(b"\n")
    if checksum != _checksum(body):
        return None
    try:
        return _Entry.model_validate(json.loads(body))
    except (ValueError, RecursionError):  # a ValidationError is a ValueError
        return None


def _write(path: Path, entry: _Entry) -> None:
    body = json.dumps(entry.model_dump(), separators=(",", ":"), allow_nan=False).encode()
    if len(body) > MAX_ENTRY_BYTES:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix="new-", delete=False) as file:
        try:
            file.write(_checksum(body) + b"\n" + body)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
