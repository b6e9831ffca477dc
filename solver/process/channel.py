"""Child process with a JSON channel: pipes, messages, memory and end."""

from __future__ import annotations

import binascii
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal, Self

import numpy as np

from optpipe import errors
from optpipe.errors import Issue, OptPipeError
from optpipe.kinds import STREAMS
from optpipe.ops import DeviceOrders, OpArray, Orders, WaitArray
from optpipe.problem import Problem
from solver.limits import Limits
from solver.process.start import child_environment, module_command
from solver.solution import Progress, Solution

Message = dict[str, Any]

Limit = Literal["time", "gap", "memory", "interrupted"]
"""Reason why a search ended early."""

CANCEL: Message = {"type": "cancel"}
SEARCHING: Message = {"type": "searching"}
OUT_OF_MEMORY: Message = {"type": "out_of_memory"}

_LIMITS = ("time_limit_s", "gap", "workers", "seed", "began", "deterministic_limit", "lane")
"""The clock goes over as it is: `time.perf_counter` is the same in every process of a machine."""


@dataclass(frozen=True)
class Heartbeat:
    """The child lives, `seconds` after the start, and holds `memory_bytes` (None where the system does not tell)."""

    seconds: float
    memory_bytes: int | None


def to_line(message: Message) -> bytes:
    """A message as it is sent."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def request_message(problem: Problem, method: str, limits: Limits, starts: Sequence[Orders] = ()) -> Message:
    """The request to a child: problem, method, limits and known orders. `limits.cancel` stays in the parent."""
    return {
        "type": "request",
        "problem": problem.to_data(),
        "method": method,
        "limits": limits_data(limits),
        "starts": [_pack(orders) for orders in starts],
    }


def limits_data(limits: Limits) -> Message:
    """Fields of limits, from which a child makes its own."""
    return {name: getattr(limits, name) for name in _LIMITS}


def read_request(message: Message) -> tuple[Problem, str, Limits, list[Orders]]:
    """Problem, method, limits and known orders of a request."""
    starts = [_unpack(packed) for packed in message["starts"]]
    return Problem.from_data(message["problem"]), message["method"], Limits(**message["limits"]), starts


def solution_message(
    kind: Literal["incumbent", "answer", "fed"], progress: Progress, *, with_orders: bool = True
) -> Message:
    """A solution and its time: found by a search, its last one, or fed to it.

    The orders are left out where the message before had the same ones.
    """
    solution = progress.solution
    message: Message = {
        "type": kind,
        "seconds": progress.seconds,
        "value_us": solution.value_us,
        "bound_us": solution.bound_us,
        "method": solution.method,
        "proved_by": solution.proved_by,
    }
    if with_orders and solution.orders is not None:
        message["orders"] = _pack(solution.orders)
    return message


def read_solution(message: Message, before: Solution) -> Progress:
    """The solution of a message; orders that it leaves out are those of the one before."""
    orders = _unpack(message["orders"]) if "orders" in message else before.orders
    fields = (message[name] for name in ("value_us", "bound_us", "method", "proved_by"))
    solution = Solution(orders, *fields)
    return Progress(solution, message["seconds"])


_BITS = 24
"""Bits of a stage and of a microbatch in the number of an op: their names have seven digits at most."""


def _pack(orders: Orders) -> Message:
    """Orders in a message: the ops of all their lists as 64-bit integers in base64.

    The names of a million ops take half a second to write, while no thread of the child searches, and as long to read.
    """
    waits = WaitArray.of(orders.waits)
    lists = [OpArray.of(stream) for device in orders.devices for stream in device.streams()]
    lists += [waits.op, waits.before, OpArray.of([*orders.blocks]), OpArray.of([*orders.blocks.values()])]
    lists += map(OpArray.of, orders.channels)
    ops = OpArray.joined(lists)
    numbers = (ops.kind << 2 * _BITS) + (ops.stage << _BITS) + ops.microbatch
    return {
        "devices": len(orders.devices),
        "lengths": [len(ops) for ops in lists],
        "passes": list(ops.passes),
        "ops": binascii.b2a_base64(numbers.tobytes(), newline=False).decode("ascii"),
        "modes": None if orders.modes is None else orders.modes.tolist(),
        "microbatch_order": None if orders.microbatch_order is None else list(orders.microbatch_order),
    }


def _unpack(packed: Message) -> Orders:
    """The orders of a message."""
    numbers = np.frombuffer(binascii.a2b_base64(packed["ops"]), np.int64)
    mask = (1 << _BITS) - 1
    ops = OpArray(numbers >> 2 * _BITS, numbers >> _BITS & mask, numbers & mask, packed["passes"])
    ends = np.cumsum(packed["lengths"]).tolist()
    lists = [ops[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    streams = len(STREAMS) * packed["devices"]
    return Orders(
        [DeviceOrders(*lists[first : first + len(STREAMS)]) for first in range(0, streams, len(STREAMS))],
        WaitArray(*lists[streams : streams + 2]),
        lists[streams + 4 :],
        None if packed["modes"] is None else np.array(packed["modes"], np.int64),
        packed["microbatch_order"],
        dict(zip(*lists[streams + 2 : streams + 4], strict=True)),
    )


def error_message(raised: OptPipeError) -> Message:
    """An error with its fields."""
    fields = json.loads(json.dumps(vars(raised), default=asdict))
    return {"type": "error", "error": type(raised).__name__, "message": str(raised), "fields": fields}


def read_error(message: Message) -> OptPipeError:
    """Rebuild the error that was raised in the child."""
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


LAST_WORDS = 2000
"""Characters of a dead child's stderr that an error repeats."""


class Child:
    """A process that loads the solvers and waits for one problem. As a context it leaves nothing behind.

    On Linux it dies with the thread that made it: make it in the thread that will use it.
    """

    def __init__(self, module: str = "solver.process.child") -> None:
        self.folder = tempfile.mkdtemp(prefix="optpipe-solve-")
        self._errors = Path(self.folder) / "stderr.txt"
        try:
            with self._errors.open("wb") as errors:
                self._process = subprocess.Popen(
                    module_command(module, str(os.getpid())),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    bufsize=0,
                    cwd=self.folder,
                    env=child_environment(TMPDIR=self.folder),
                    start_new_session=True,
                )
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pipe(self._process.stdout), selectors.EVENT_READ)
        os.set_blocking(self._pipe(self._process.stdin).fileno(), False)
        self._to_say = bytearray()
        self._heard = bytearray()
        self.silent = False

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe

    @property
    def pid(self) -> int:
        """The number of the process, which is that of its group and session as well."""
        return self._process.pid

    @property
    def memory_bytes(self) -> int | None:
        """Resident memory now."""
        return resident_bytes(self.pid)

    @property
    def kept_waiting_s(self) -> float:
        """Seconds for which its main thread, which loads and makes published schedules, found no free processor."""
        return kept_waiting_s(self.pid)

    def say(self, message: Message) -> None:
        """Send a message, as soon as it is read."""
        if not self._to_say:
            self._selector.register(self._pipe(self._process.stdin), selectors.EVENT_WRITE)
        self._to_say += to_line(message)

    def listen(self, timeout_s: float) -> Iterator[Message]:
        """The messages that come within the timeout; once the child has ended, `silent` is True and none will."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._process.stdin:
                self._send()
            else:
                yield from self._receive()

    def _send(self) -> None:
        pipe = self._pipe(self._process.stdin)
        try:
            del self._to_say[: os.write(pipe.fileno(), self._to_say)]
        except BrokenPipeError:
            self._to_say.clear()  # its end is heard on the other pipe
        if not self._to_say:
            self._selector.unregister(pipe)

    def _receive(self) -> Iterator[Message]:
        pipe = self._pipe(self._process.stdout)
        data = os.read(pipe.fileno(), 1 << 20)
        if not data:
            self._selector.unregister(pipe)
            self.silent = True
        self._heard += data
        if b"\n" in data:
            *lines, rest = self._heard.split(b"\n")
            self._heard = rest
            yield from (json.loads(text) for text in lines)

    def kill(self) -> None:
        """End it and all that it may have started. What it said before can still be heard."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def how_it_ended(self) -> str:
        """The end of a process that has ended, in words."""
        code = self._process.wait()
        words = self._errors.read_text(errors="replace").strip()[-LAST_WORDS:]
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{how} after saying: {words}" if words else how

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.wait()
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout):
            self._pipe(pipe).close()
        shutil.rmtree(self.folder, ignore_errors=True)


_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with a container's memory limit (cgroup 2 and 1); "max" or a huge number without one."""


def resident_bytes(pid: int) -> int | None:
    """The memory that a process really holds, None if unknown; what it has only reserved does not count."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def kept_waiting_s(pid: int) -> float:
    """Seconds for which the main thread of a process was ready to run while no processor was free; 0 if unknown."""
    try:
        waited_ns = Path(f"/proc/{pid}/schedstat").read_text().split()[1]
    except (OSError, IndexError):
        return 0.0
    return int(waited_ns) / 1e9


def available_bytes() -> int | None:
    """Memory that new processes can take without swapping, or a container's limit if that is less; None if unknown."""
    limits = [_cgroup_limit(Path(path)) for path in _CGROUP_LIMITS]
    known = [limit for limit in (*limits, _machine_available()) if limit is not None]
    return min(known, default=None)


def _machine_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    entry = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    return int(entry[1]) * 1024 if entry else None


def _cgroup_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
