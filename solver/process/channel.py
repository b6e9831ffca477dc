"""The child process from outside: its pipes, its folder, its memory and its end."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from solver.process import messages
from solver.process.memory_use import kept_waiting_s, resident_bytes
from solver.process.messages import Message

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
            self._process = self._started(module)
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pipe(self._process.stdout), selectors.EVENT_READ)
        os.set_blocking(self._pipe(self._process.stdin).fileno(), False)
        self._to_say = bytearray()
        self._heard = bytearray()
        self.silent = False

    def _started(self, module: str) -> subprocess.Popen[bytes]:
        with self._errors.open("wb") as errors:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                cwd=self.folder,
                env=os.environ | {"TMPDIR": self.folder, "PYTHONPATH": import_path()},
                start_new_session=True,
            )

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
        """What it holds now."""
        return resident_bytes(self.pid)

    @property
    def kept_waiting_s(self) -> float:
        """How long its main thread, which loads and makes published schedules, found no free processor."""
        return kept_waiting_s(self.pid)

    def say(self, message: Message) -> None:
        """Send a message, as soon as it is read."""
        if not self._to_say:
            self._selector.register(self._pipe(self._process.stdin), selectors.EVENT_WRITE)
        self._to_say += messages.line(message)

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


def import_path() -> str:
    """What this process imports from, as PYTHONPATH for a child that may have another working folder."""
    return os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
