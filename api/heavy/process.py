"""One process beside the server, from outside: a task and a body in, bytes or an error out."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from api.faults import Fault, ProblemError
from solver.process import import_path


class ProcessDiedError(Exception):
    """It ended before it answered: out of memory, or a bug."""


class HeavyProcess:
    """A process that does one task after another. Use it from one event loop, one task at a time."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> HeavyProcess:
        """Start one, and return when it has loaded what is slow to load. Raises ProcessDiedError."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "api.heavy.child", str(os.getpid())),
            stdin=PIPE,
            stdout=PIPE,
            env=os.environ | {"PYTHONPATH": import_path()},
            start_new_session=True,
        )
        started = cls(process)
        try:
            await started._answer()
        except BaseException:
            await started.end()
            raise
        return started

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None

    async def run(self, task: str, options: dict[str, Any], body: bytes) -> bytes:
        """What the task makes of the body. Raises ProblemError as the task did, ProcessDiedError."""
        assert self._process.stdin is not None
        head = json.dumps({"task": task, "options": options, "bytes": len(body)}).encode()
        self._process.stdin.writelines((head, b"\n", body))
        try:
            await self._process.stdin.drain()
        except ConnectionError:
            raise ProcessDiedError from None
        return await self._answer()

    async def _answer(self) -> bytes:
        assert self._process.stdout is not None
        try:
            answer = json.loads(await self._process.stdout.readuntil())
            content = await self._process.stdout.readexactly(answer["bytes"])
        except (ConnectionError, asyncio.IncompleteReadError):
            raise ProcessDiedError from None
        if answer["status"] == HTTPStatus.OK:
            return content
        raise ProblemError(HTTPStatus(answer["status"]), [Fault(**fault) for fault in json.loads(content)])

    async def end(self) -> None:
        """Kill it and wait until it is gone."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()
