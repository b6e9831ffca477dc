"""Every error that OptPipe raises on purpose.

    OptPipeError
    ├── InputError            the caller's documents or options are wrong (exit code 2)
    ├── MissingExtraError     a command needs packages that come with an extra (exit code 2)
    ├── OrderError            orders that name unknown, repeated or misplaced ops
    ├── DeadlockError         orders in which ops wait for one another in a cycle
    ├── BudgetError           a compiled program holds more memory than a budget allows
    ├── MethodError           a method cannot handle this problem
    │   └── ModelTooLargeError  it would build a model beyond its limit
    ├── InfeasibleError       proved: no schedule keeps the budgets (exit code 3)
    ├── NoSolutionError       the time limit passed without a schedule (exit code 4)
    ├── VerificationError     a solver's schedule broke a rule: a bug in OptPipe, never returned
    ├── SolverDiedError       the process of a solver ended without a result (in solver.process)
    ├── ServiceError          a server is unreachable, rejects a request, or failed at a job
    ├── TrainingError         a schedule cannot be trained as asked (exit code 2)
    │   └── CheckpointError   a checkpoint cannot be written, read or resumed
    └── RunFailedError        a run that had started cannot continue: a loss is not finite, a process has ended

Messages name the field, the value and the limit, and end with "Maybe ..." where a likely fix is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

MOST_NAMES = 12
"""Most names of a cycle in a message; a cycle can include every op of a schedule."""


def shown(value: Any) -> str:
    """Short, JSON-like text of a value for messages."""
    text = json.dumps(value, default=str) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class OptPipeError(Exception):
    """Base of all errors raised on purpose.

    They pass between processes with all their fields, though their constructors take other arguments than a text.
    `only_here`: something failed in this process, and the others of its run cannot know what.
    """

    only_here = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Exception.__new__, (type(self), *self.args), self.__dict__


@dataclass(frozen=True, init=False)
class Issue:
    """One fault of a document or an option.

    `loc` is the path of a field such as ``("stages", 3, "offload", "bytes")``, empty for the whole document; a string
    stands for an option or a top-level field. `code` is a stable short name, `detail` a sentence with value and limit.
    """

    loc: tuple[str | int, ...]
    code: str
    detail: str

    def __init__(self, loc: str | Iterable[str | int], code: str, detail: str) -> None:
        names = (loc,) if isinstance(loc, str) else loc
        # Assignment is disabled in a frozen class.
        self.__dict__.update(loc=tuple(names) if loc else (), code=code, detail=detail)

    @property
    def pointer(self) -> str:
        """The path as text, such as ``stages[3].offload.bytes``."""
        parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.loc)
        return "".join(parts).removeprefix(".")

    def __str__(self) -> str:
        return f"{self.pointer} {self.detail}" if self.pointer else self.detail


class InputError(OptPipeError):
    """A document or an option is wrong; `issues` lists every fault, `source` names the document."""

    def __init__(self, issues: Sequence[Issue], source: str = "") -> None:
        self.issues = tuple(issues)
        self.source = source
        super().__init__("\n".join(str(issue) for issue in self.issues))


class MissingExtraError(OptPipeError):
    """A command needs a package that comes with an extra, such as ``optpipe[serve]``, and it is not installed."""


class OrderError(OptPipeError):
    """Orders name an op that is unknown, repeated, or on a device or stream that is not its own."""


class DeadlockError(OptPipeError):
    """Ops wait for one another in a cycle; `cycle` names them, each waiting for the one before it."""

    def __init__(self, cycle: Sequence[str], blocked: int) -> None:
        self.cycle = tuple(cycle)
        self.blocked = blocked
        super().__init__(
            f"the orders deadlock: {blocked} ops never start; these wait for one another: {cycle_text(self.cycle)}. "
            f"Maybe the order on one device contradicts a dependency or a wait on another."
        )


def cycle_text(names: Sequence[str]) -> str:
    """Text ``a -> b -> a`` of a cycle in which each op waits for the one before it; long cycles are cut."""
    shown = names if len(names) <= MOST_NAMES else (*names[:MOST_NAMES], "...")
    return " -> ".join((*shown, names[0]))


class BudgetError(OptPipeError):
    """A compiled program, run in its own order, holds more memory than the problem's budget allows."""


class MethodError(OptPipeError):
    """A method cannot handle this problem; the message gives the reason with numbers."""


class ModelTooLargeError(MethodError):
    """A method would build a model of this problem with more ops than its limit."""


class InfeasibleError(OptPipeError):
    """Proved: no schedule keeps the budgets.

    `budgets_bytes` holds, for each device, the smallest budget known to suffice; None for a device without a limit.
    """

    def __init__(self, reason: str, budgets_bytes: Sequence[int | None]) -> None:
        self.budgets_bytes = tuple(budgets_bytes)
        budgets = ", ".join("no limit" if b is None else str(b) for b in self.budgets_bytes)
        super().__init__(f"{reason} Maybe raise devices[].memory_bytes to [{budgets}], which is known to do.")


class NoSolutionError(OptPipeError):
    """The time limit passed before any schedule within the budgets was found."""


class VerificationError(OptPipeError):
    """A solver's schedule broke a rule of the model. This is a bug, and the schedule is not returned."""


class ServiceError(OptPipeError):
    """A server is unreachable, rejects the request, or failed at a job.

    `status` is the HTTP status, if there was a response. `passing`: the fault is temporary, and a retry after
    `retry_after_s` seconds (0 if the server gave none) may succeed.
    """

    def __init__(
        self, text: str, *, status: int | None = None, passing: bool = False, retry_after_s: float = 0.0
    ) -> None:
        self.status, self.passing, self.retry_after_s = status, passing, retry_after_s
        super().__init__(text)


class TrainingError(OptPipeError):
    """A schedule cannot be trained on this model, device or launch."""


class CheckpointError(TrainingError):
    """A checkpoint cannot be written, is damaged, or is of another run; raised in every process."""


class RunFailedError(OptPipeError):
    """Training or measuring had started and cannot continue.

    For example, a loss is not finite, a layer fails in a step, another process has ended, or the last checkpoint cannot
    be written.
    """


@contextmanager
def needs_extra(extra: str, subject: str) -> Iterator[None]:
    """Turn a missing package into MissingExtraError: `subject` needs it, ``optpipe[extra]`` installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        text = f"{subject} needs {error.name}, which is not installed. Maybe pip install 'optpipe[{extra}]'."
        raise MissingExtraError(text) from None
