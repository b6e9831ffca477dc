"""Regression suites (document `optpipe.suite/1`), measured runs of their cases, and public reference values."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, model_validator

from optpipe.document import Document, read_document
from optpipe.errors import InfeasibleError, InputError, Issue, MethodError, NoSolutionError
from optpipe.fields import Count, Instant, Share, TimeUs, reject
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from solver.bounds.lower_bound import best_bound
from solver.build import snapped_bound
from solver.limits import Limits
from solver.methods import method_named
from solver.searches import load_searches
from solver.solution import Progress
from solver.solve import solve_until_interrupted
from solver.strategy import wait_for_outlived

MAX_SUITE_BYTES = 4 * 2**20

INSTALLED = Path(__file__).parents[1] / "instances"
"""Instances and suites installed with a wheel."""

Seconds = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]


class Recorded(Document):
    """Recorded run of one method on one instance: its result and its limits.

    `found_by` and `proved_by`: the search, start or bound without search of which the value and the bound are; older
    records lack them.
    """

    value_us: Instant
    bound_us: Instant
    seconds: Seconds
    time_limit_s: Seconds
    workers: Count
    version: str = Field(max_length=50)
    found_by: str = Field(default="", max_length=100)
    proved_by: str = Field(default="", max_length=100)

    @model_validator(mode="after")
    def _bound_holds(self) -> Self:
        if snapped_bound(self.value_us, self.bound_us) > self.value_us:
            raise reject(
                "bound_above_value",
                f"has bound_us {self.bound_us} above value_us {self.value_us}. Maybe the two are swapped",
            )
        return self

    @property
    def proved(self) -> bool:
        """True if the value was proved optimal."""
        return snapped_bound(self.value_us, self.bound_us) == self.value_us


class Entry(Document):
    """One method on one instance, with its record.

    The instance is the file `problem` (relative to the suite's folder), changed to `microbatches` and to `memory_share`
    times its budgets if these are given. A value may exceed the recorded one by the share `tolerance`, and a bound fall
    below it by as much, before it counts as a regression.
    """

    problem: str = Field(min_length=1, max_length=500)
    microbatches: Count | None = None
    memory_share: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] | None = None
    method: str = Field(default="auto", max_length=100)
    tolerance: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    recorded: Recorded | None = None

    @property
    def instance(self) -> str:
        """Name of the instance: that of the file and the changes to it."""
        changes = [f"m {self.microbatches}"] if self.microbatches is not None else []
        changes += [f"memory x {self.memory_share:g}"] if self.memory_share is not None else []
        return ", ".join([Path(self.problem).name.removesuffix(".json"), *changes])

    def load_problem(self, folder: Path) -> Problem:
        """Load the instance; `folder` is the suite's. Raises InputError."""
        path = folder / self.problem
        problem = Problem.load(path)
        if self.microbatches is None and self.memory_share is None:
            return problem
        changes: dict[str, Any] = {"name": self.instance}
        if self.microbatches is not None:
            changes["microbatches"] = self.microbatches
        if (share := self.memory_share) is not None:
            if all(device.memory_bytes is None for device in problem.devices):
                detail = f"is {share:g}, but no device of {path} has a budget. Maybe leave it out."
                raise InputError([Issue("memory_share", "no_budget", detail)])
            changes["devices"] = [
                d if d.memory_bytes is None else d.replaced(memory_bytes=math.floor(share * d.memory_bytes))
                for d in problem.devices
            ]
        return Problem.from_data(problem.replaced(**changes).to_data(), str(path))


class Suite(Document):
    """Entries, and `reference`, the file with the values of public schedulers (relative to the suite's folder).

    With `never_above_public` a value above the best public one is a regression, regardless of the record.
    """

    format: Literal["optpipe.suite/1"]
    description: str = Field(default="", max_length=2000)
    reference: str | None = Field(default=None, max_length=500)
    never_above_public: bool = False
    time_limit_s: Annotated[float, Field(ge=0.01, le=1e6, allow_inf_nan=False)] | None = None
    entries: Annotated[list[Entry], Field(min_length=1)]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load a suite. Raises InputError naming the field, the value and the limit."""
        return cls.from_data(read_document(path, MAX_SUITE_BYTES, "suite"), str(path))

    @model_validator(mode="after")
    def _entries_differ(self) -> Self:
        seen: dict[tuple[str, str], int] = {}
        for index, entry in enumerate(self.entries):
            key = entry.instance, entry.method
            if key in seen:
                raise reject(
                    "repeated_entry",
                    f"entries[{index}] is {entry.instance} with {entry.method}, as is entries[{seen[key]}]. "
                    "Maybe one was meant for another method",
                )
            seen[key] = index
        return self

    @cached_property
    def by_instance(self) -> dict[str, dict[str, Entry]]:
        """Entries by instance and method, in the order of the file."""
        result: dict[str, dict[str, Entry]] = {}
        for entry in self.entries:
            result.setdefault(entry.instance, {})[entry.method] = entry
        return result

    def to_text(self) -> str:
        """The document as text that `load` reads back, with one line per entry for readable diffs."""

        def one_line(value: Any) -> str:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)

        data = self.to_data()
        entries = ",\n".join(f"    {one_line(entry)}" for entry in data.pop("entries"))
        fields = [f"  {json.dumps(key)}: {one_line(value)}," for key, value in data.items()]
        return "\n".join(["{", *fields, '  "entries": [', entries, "  ]", "}"]) + "\n"


def suites_folder() -> Path:
    """Return the folder of the named suites: the installed one, or that of this module's checkout."""
    instances = INSTALLED if INSTALLED.is_dir() else Path(__file__).parents[2] / "instances"
    return instances / "suites"


MOST_OUTLIVED_S = 60.0
"""Longest wait of the next run for a search that exceeds its limit, such as HiGHS or the build of a large model."""


class Point(NamedTuple):
    """Best value and bound `seconds` after the start, and what found the one and proved the other."""

    seconds: float
    value_us: float
    bound_us: float
    method: str
    proved_by: str = ""


@dataclass(frozen=True)
class Figures:
    """Figures of a verified schedule. The schedule itself is dropped: those of a suite take hundreds of MB."""

    value_us: float
    bound_us: float
    gap: float
    bubble: float
    seconds: float
    optimal: bool

    @classmethod
    def of(cls, schedule: Schedule) -> Figures:
        """The figures of a schedule."""
        optimal = schedule.status == "optimal"
        value_us, bound_us, seconds = schedule.value_us, schedule.bound_us, schedule.solve_seconds
        return cls(value_us, bound_us, schedule.gap, schedule.bubble, seconds, optimal)


@dataclass(frozen=True)
class MeasuredRun:
    """Run of a method: the figures of its schedule, or `why_not` there is none; `failed` if the reason is a bug.

    `curve` begins with the first schedule; its values fall and its bounds rise. An `interrupted` run was stopped by
    the user.
    """

    figures: Figures | None
    why_not: str
    failed: bool
    seconds: float
    interrupted: bool
    curve: tuple[Point, ...]

    def at(self, seconds: float) -> Point | None:
        """Last point of the curve at most `seconds` after the start; None before the first schedule."""
        points = [point for point in self.curve if point.seconds <= seconds]
        return points[-1] if points else None

    @property
    def proof_seconds(self) -> float | None:
        """Seconds until value and bound met; None if they did not."""
        return self.curve[-1].seconds if self.figures and self.figures.optimal else None

    def seconds_to(self, value_us: float) -> float | None:
        """Seconds until a schedule at least as good as `value_us` was found; None if none was."""
        return next((point.seconds for point in self.curve if point.value_us <= value_us), None)


def measure(problem: Problem, method: str, limits: Limits) -> MeasuredRun:
    """Run a method; Ctrl-C stops it and keeps its result. An exception in a method is an outcome, and is not raised.

    The clock starts once all searches are loaded. The run is in this process, because the start of a child and its
    pauses between incumbents would be measured as well. The figures are those at the time limit. A search that exceeds
    the limit is waited for before this returns, so that it does not slow down the next run.
    """
    load_searches()
    limits = replace(limits, began=time.perf_counter())
    curve: list[Point] = []

    def note(progress: Progress) -> None:
        best = progress.solution
        curve.append(Point(progress.seconds, best.value_us, best.bound_us, best.method, best.proved_by))

    figures, why_not, failed = None, "", False
    try:
        schedule = solve_until_interrupted(problem, method, limits, note)
        figures = Figures.of(schedule)
        # A published schedule that was asked for reports no progress; what a search leaves to drop is not a search's.
        found_by, proved_by = curve[-1][3:] if curve else (schedule.method, best_bound(problem, limits.without)[0])
        last = Point(figures.seconds, figures.value_us, figures.bound_us, found_by, proved_by)
        if not curve or curve[-1][1:3] != last[1:3]:
            curve.append(last)
    except (MethodError, InfeasibleError, NoSolutionError) as error:
        why_not = str(error)
    except Exception as error:
        why_not, failed = f"{type(error).__name__}: {error}", True
    seconds = limits.seconds
    if not limits.cancel.requested:
        try:
            wait_for_outlived(MOST_OUTLIVED_S)
        except KeyboardInterrupt:
            limits.cancel.request()
    return MeasuredRun(figures, why_not, failed, seconds, limits.cancel.requested, tuple(curve))


MAX_REFERENCE_BYTES = 4 * 2**20

PRINTED_BUBBLE_ERROR = 0.5e-4
"""Rounding error of published bubbles, which have four digits; values are computed from the upper end."""


@dataclass(frozen=True)
class Public:
    """Best public schedule of an instance: value of its objective and name of its scheduler."""

    value_us: float
    scheduler: str

    def bubble(self, ours: Figures) -> float:
        """Bubble of the public schedule, which does the same work as ours."""
        return 1 - (1 - ours.bubble) * ours.value_us / self.value_us


class _Part(Document):
    """Part of the reference, with more fields than are read here."""

    model_config = ConfigDict(extra="ignore")


class _BestPublic(_Part):
    scheduler: str
    value_us: TimeUs


class _Entry(_Part):
    """Public results for one instance; `best_public` is None if no public scheduler found a schedule."""

    best_public: _BestPublic | None = None
    zero_bubble_heuristic_us: TimeUs | None = None
    zb_v_us: TimeUs | None = None
    public_bubble: dict[str, Share] = {}
    work_us: TimeUs | None = None

    def public(self) -> Public | None:
        """The best exact value, else the best value computed from a published bubble."""
        candidates = [
            Public(value_us, scheduler)
            for value_us, scheduler in (
                (self.zero_bubble_heuristic_us, "Zero Bubble heuristic"),
                (self.zb_v_us, "ZB-V"),
                (self.best_public.value_us, self.best_public.scheduler) if self.best_public else (None, ""),
            )
            if value_us is not None
        ]
        if not candidates and self.work_us is not None:
            candidates = [
                Public(self.work_us / (1 - bubble - PRINTED_BUBBLE_ERROR), scheduler)
                for scheduler, bubble in self.public_bubble.items()
            ]
        return min(candidates, key=lambda public: public.value_us, default=None)


def load_public(path: Path) -> dict[str, Public]:
    """Load the best public value of each instance in a reference file. Raises InputError."""
    reference = read_document(path, MAX_REFERENCE_BYTES)
    if not isinstance(reference, dict):
        detail = "must be an object with an entry for each instance. Maybe it is another file than a reference."
        raise InputError([Issue("", "not_an_object", detail)], str(path))
    entries = {name: _Entry.from_data(entry, f"{path}: {name}") for name, entry in reference.items()}
    return {name: public for name, entry in entries.items() if (public := entry.public()) is not None}


@dataclass(frozen=True)
class Case:
    """One method on one instance; without an `entry` of the suite there is no record to compare with."""

    instance: str
    problem: Problem
    method: str
    entry: Entry | None = None
    public: Public | None = None
    never_above_public: bool = False

    @property
    def recorded(self) -> Recorded | None:
        """Record of an earlier run; None for a new case."""
        return self.entry.recorded if self.entry else None

    @property
    def tolerance(self) -> float:
        """Share by which a value may exceed its record."""
        return self.entry.tolerance if self.entry else 0.0


def expand_cases(path: Path, suite: Suite, methods: Sequence[str] | None = None, only: str = "*") -> list[Case]:
    """Cases of the suite at `path`: its entries, or each of its instances with each of `methods`.

    `only` is a pattern with * and ? for the names of instances. All problems and methods are loaded here, before the
    first run. Raises InputError.
    """
    for name in methods or [entry.method for entry in suite.entries]:
        method_named(name)
    public = load_public(path.parent / suite.reference) if suite.reference else {}
    chosen = {name: entries for name, entries in suite.by_instance.items() if fnmatchcase(name, only)}
    if not chosen:
        detail = f"is {only!r}, which matches no instance. Maybe one such as {suite.entries[0].instance!r}."
        raise InputError([Issue("only", "no_match", detail)], str(path))
    cases = []
    for name, entries in chosen.items():
        first = next(iter(entries.values()))
        problem = first.load_problem(path.parent)
        cases += [
            Case(
                name,
                problem,
                method,
                entries.get(method),
                public.get(name),
                suite.never_above_public and method in entries,
            )
            for method in methods or entries
        ]
    return cases
