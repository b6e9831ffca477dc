"""A suite of regression instances (document `optpipe.suite/1`): problems, methods, and what was recorded of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from optpipe.document import Document, read_document
from optpipe.errors import InputError, Issue
from optpipe.fields import Count, Instant, reject
from optpipe.problem import Problem
from solver.finish import snapped_bound

MAX_SUITE_BYTES = 4 * 2**20

INSTALLED = Path(__file__).parents[1] / "instances"
"""The instances and suites that a wheel brings with it."""

Seconds = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]


class Recorded(Document):
    """What a run of one method on one instance gave, and how it was run."""

    value_us: Instant
    bound_us: Instant
    seconds: Seconds
    time_limit_s: Seconds
    workers: Count
    version: str = Field(max_length=50)

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
        """Whether the value was proved optimal."""
        return snapped_bound(self.value_us, self.bound_us) == self.value_us


class Entry(Document):
    """One method on one instance.

    The instance is the file `problem` (relative to the suite's own), with `microbatches` in place of its own and
    `memory_share` times its budgets where they are given. A value may be `tolerance` (a share) above the recorded one
    before it counts as a regression, a bound as much below.
    """

    problem: str = Field(min_length=1, max_length=500)
    microbatches: Count | None = None
    memory_share: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] | None = None
    method: str = Field(default="auto", max_length=100)
    tolerance: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    recorded: Recorded | None = None

    @property
    def derived(self) -> bool:
        """Whether the instance is not the file as it stands."""
        return self.microbatches is not None or self.memory_share is not None

    @property
    def instance(self) -> str:
        """The instance's name: that of the file, and what is changed."""
        changes = [f"m {self.microbatches}"] if self.microbatches is not None else []
        changes += [f"memory x {self.memory_share:g}"] if self.memory_share is not None else []
        return ", ".join([Path(self.problem).name.removesuffix(".json"), *changes])

    def load_problem(self, folder: Path) -> Problem:
        """The instance; `folder` is the suite's. Raises InputError."""
        path = folder / self.problem
        problem = Problem.load(path)
        return self._changed(problem, str(path)) if self.derived else problem

    def _changed(self, problem: Problem, source: str) -> Problem:
        data = problem.to_data() | {"name": self.instance}
        if self.microbatches is not None:
            data["microbatches"] = self.microbatches
        if self.memory_share is not None:
            limited = [device for device in data["devices"] if device["memory_bytes"] is not None]
            if not limited:
                detail = f"is {self.memory_share:g}, but no device of {source} has a budget. Maybe leave it out."
                raise InputError([Issue("memory_share", "no_budget", detail)])
            for device in limited:
                device["memory_bytes"] = math.floor(self.memory_share * device["memory_bytes"])
        return Problem.from_data(data, source)


class Suite(Document):
    """Entries, and the file with what public schedulers reach on the instances (`reference`, relative to the suite).

    With `never_above_public` a value above the best public one is a regression, whatever was recorded.
    """

    format: Literal["optpipe.suite/1"]
    description: str = Field(default="", max_length=2000)
    reference: str | None = Field(default=None, max_length=500)
    never_above_public: bool = False
    time_limit_s: Annotated[float, Field(ge=0.01, le=1e6, allow_inf_nan=False)] | None = None
    entries: Annotated[list[Entry], Field(min_length=1)]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a suite. Raises InputError naming the field, the value and the limit."""
        problem = "is a problem but a suite is needed. Maybe use the command 'optpipe solve' or 'compare'."
        schedule = "is a schedule but a suite is needed. Maybe use the command 'optpipe verify' or 'plot'."
        hints = {"optpipe.problem/": problem, "optpipe.schedule/": schedule}
        return cls.from_data(read_document(path, MAX_SUITE_BYTES, hints), str(path))

    @model_validator(mode="after")
    def _entries_differ(self) -> Self:
        seen: dict[tuple[str, str], int] = {}
        for place, entry in enumerate(self.entries):
            key = entry.instance, entry.method
            if key in seen:
                raise reject(
                    "repeated_entry",
                    f"entries[{place}] is {entry.instance} with {entry.method}, as is entries[{seen[key]}]. "
                    "Maybe one was meant for another method",
                )
            seen[key] = place
        return self

    @cached_property
    def by_instance(self) -> dict[str, dict[str, Entry]]:
        """The entries of each instance by their method, in the order of the file."""
        result: dict[str, dict[str, Entry]] = {}
        for entry in self.entries:
            result.setdefault(entry.instance, {})[entry.method] = entry
        return result

    def to_text(self) -> str:
        """The document as text that `load` reads back, one entry a line, so that records can be compared by line."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        data = self.to_data()
        entries = data.pop("entries")
        yield "{"
        yield from (f"  {json.dumps(key)}: {_one_line(value)}," for key, value in data.items())
        yield '  "entries": ['
        yield ",\n".join(f"    {_one_line(entry)}" for entry in entries)
        yield "  ]"
        yield "}"


def suites_folder() -> Path:
    """Return the folder of the named suites: the installed one, or that of the checkout this module lies in."""
    instances = INSTALLED if INSTALLED.is_dir() else Path(__file__).parents[2] / "instances"
    return instances / "suites"


def _one_line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
