"""What a run of a suite solves: instances by methods, with what is recorded and public of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from optpipe.errors import InputError, Issue
from optpipe.problem import Problem
from solver.bench.public import Public, load_public
from solver.bench.suite import Entry, Recorded, Suite
from solver.methods import method_named


@dataclass(frozen=True)
class Case:
    """One method on one instance; where the suite has no `entry` for the method, nothing is promised of it."""

    instance: str
    problem: Problem
    method: str
    entry: Entry | None = None
    public: Public | None = None
    never_above_public: bool = False

    @property
    def recorded(self) -> Recorded | None:
        """What an earlier run reached; None where the case is new."""
        return self.entry.recorded if self.entry else None

    @property
    def tolerance(self) -> float:
        """The share by which a value may be above its record."""
        return self.entry.tolerance if self.entry else 0.0


def cases_of(path: Path, suite: Suite, methods: Sequence[str] | None = None, only: str = "*") -> list[Case]:
    """The cases of the suite at `path`: its entries, or each of its instances with every one of `methods`.

    `only` is a pattern with * and ? that an instance's name must match. All problems are read and all methods looked
    up here, before anything runs. Raises InputError.
    """
    for name in methods or [entry.method for entry in suite.entries]:
        method_named(name)
    public = load_public(path.parent / suite.reference) if suite.reference else {}
    chosen = {name: entries for name, entries in suite.by_instance.items() if fnmatchcase(name, only)}
    if not chosen:
        detail = f"{only!r} matches none of the suite's instances, such as {suite.entries[0].instance!r}."
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
