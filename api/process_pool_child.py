"""What runs inside a process beside the server: tasks in on stdin, answers out on stdout.

A task is one line of JSON and as many bytes as it names; so is an answer. The first answer is to no task: it says that
all is loaded. Started by `process.HeavyProcess` as
``python -m api.heavy.child PARENT_PID``.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, BinaryIO

from api.faults import ProblemError, problem_of_input, unprocessable
from api.heavy.tasks import TASKS
from optpipe.errors import InputError, OptPipeError
from solver.process.loading import load_verifier

MOST_MEMORY_BYTES = 2 * 2**30
"""What one process may hold; beyond it a task fails, and not the machine."""

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Do tasks until stdin ends."""
    _die_with_parent(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))
    out = _own_stdout()
    load_verifier()
    _send(out, HTTPStatus.OK, b"")  # ready
    while line := sys.stdin.buffer.readline():
        _do(json.loads(line), out)


def _do(request: Mapping[str, Any], out: BinaryIO) -> None:
    body = sys.stdin.buffer.read(request["bytes"])
    _send(out, *_answer(request["task"], request["options"], body))


def _send(out: BinaryIO, status: HTTPStatus, content: bytes) -> None:
    out.write(json.dumps({"status": status, "bytes": len(content)}).encode() + b"\n")
    out.write(content)
    out.flush()


def _answer(task: str, options: dict[str, Any], body: bytes) -> tuple[HTTPStatus, bytes]:
    try:
        return HTTPStatus.OK, TASKS[task](body, **options)
    except ProblemError as error:
        raised = error
    except InputError as error:
        raised = problem_of_input(error)
    except OptPipeError as error:
        raised = unprocessable("cannot_be_done", str(error))
    except MemoryError:
        raised = unprocessable("too_large", f"this takes more than {MOST_MEMORY_BYTES:,} bytes of memory.")
    return raised.status, json.dumps([fault.model_dump() for fault in raised.faults]).encode()


def _own_stdout() -> BinaryIO:
    """The pipe to the parent under another number: what a library prints goes to stderr and garbles no answer."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return out


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it died before the line above


if __name__ == "__main__":
    main()
