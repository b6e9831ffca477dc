"""What a solve in a child process and its parent say to each other: JSON, one message a line, never pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from optpipe import errors
from optpipe.errors import Issue, OptPipeError
from optpipe.gap import gap_of
from optpipe.orders import Orders
from optpipe.problem import Problem
from solver.limits import Limits
from solver.orders_text import orders_data, read_orders

Message = dict[str, Any]

Limit = Literal["time", "gap", "memory", "interrupted"]
"""What ended a search before it was done."""

CANCEL: Message = {"type": "cancel"}
SEARCHING: Message = {"type": "searching"}
OUT_OF_MEMORY: Message = {"type": "out_of_memory"}

_LIMITS = ("time_limit_s", "gap", "workers", "seed", "began", "deterministic_limit")
"""The clock goes over as it is: `time.perf_counter` is the same in every process of a machine."""


@dataclass(frozen=True)
class Incumbent:
    """The best schedule so far, `seconds` after the start, found by `method`; the bound holds for every schedule."""

    seconds: float
    value_us: float
    bound_us: float
    method: str
    orders_data: Mapping[str, Any]

    @property
    def gap(self) -> float:
        """``(value - bound) / value``."""
        return gap_of(self.value_us, self.bound_us)

    @cached_property
    def orders(self) -> Orders:
        """Its orders, with waits and channels."""
        return read_orders(dict(self.orders_data))


@dataclass(frozen=True)
class Heartbeat:
    """The child lives, `seconds` after the start, and holds `memory_bytes` (None where the system does not tell)."""

    seconds: float
    memory_bytes: int | None


def line(message: Message) -> bytes:
    """A message as it is sent."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def request(problem: Problem, method: str, limits: Limits, starts: Sequence[Orders] = ()) -> Message:
    """What the child is asked to do, and from which known orders; how to cancel it stays here."""
    return {
        "type": "request",
        "problem": problem.to_data(),
        "method": method,
        "limits": {name: getattr(limits, name) for name in _LIMITS},
        "starts": [orders_data(orders) for orders in starts],
    }


def read_request(message: Message) -> tuple[Problem, str, Limits, list[Orders]]:
    """Problem, method, limits and known orders of a request."""
    starts = [read_orders(data) for data in message["starts"]]
    return Problem.from_data(message["problem"]), message["method"], Limits(**message["limits"]), starts


def error(raised: OptPipeError) -> Message:
    """An error with its fields."""
    fields = json.loads(json.dumps(vars(raised), default=asdict))
    return {"type": "error", "error": type(raised).__name__, "message": str(raised), "fields": fields}


def read_error(message: Message) -> OptPipeError:
    """The same error as it was raised in the child."""
    kind: type[OptPipeError] = getattr(errors, message["error"])
    # The constructors compose the message from the fields; here it is composed already.
    rebuilt = kind.__new__(kind, message["message"])
    for name, value in message["fields"].items():
        setattr(rebuilt, name, _field(name, value))
    return rebuilt


def _field(name: str, value: Any) -> Any:
    if name == "issues":
        return tuple(Issue(**issue) for issue in value)
    return tuple(value) if isinstance(value, list) else value
