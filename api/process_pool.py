"""Process pool for CPU-heavy requests, with a time limit per task, turns between callers and quotas of each."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from http import HTTPStatus
from itertools import accumulate
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import UUID

import structlog

from api.errors import Fault, HttpError, retry_later, unprocessable
from solver.process import child_environment, module_command

MOST_SECONDS = 30.0
"""Time of one task, once there is a process for it. A process that takes longer is killed."""

MOST_WAITING = 64
MOST_WAITING_OF_ONE = 16
"""Tasks that may wait, in all and of one caller."""

T = TypeVar("T")

_log = structlog.get_logger("optpipe.heavy")


class ProcessPool:
    """Processes for heavy work; as an async context they end with it. The first starts at once, others when needed."""

    def __init__(
        self, processes: int, most_seconds: float = MOST_SECONDS, most_seconds_a_minute: float = float("inf")
    ) -> None:
        """`most_seconds_a_minute`: of one caller's tasks together; callers without a key have no such limit."""
        self.most_seconds = most_seconds
        self._slots = FairSlots(processes)
        self._budget = SecondsBudget(most_seconds_a_minute)
        self._idle: list[HeavyProcess] = []
        self._busy: set[HeavyProcess] = set()
        self._own_tasks: set[asyncio.Task[Any]] = set()
        """Starts and ends of processes: a request that is cancelled may not await them, and the pool ends with them."""
        self._shares = Quota("heavy_tasks", MOST_WAITING, MOST_WAITING_OF_ONE)

    async def __aenter__(self) -> Self:
        async def start_first() -> None:
            with suppress(ProcessDiedError):  # the first task that needs a process reports it
                self._idle.append(await HeavyProcess.start())

        self._first = self._apart(start_first())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._first.cancel()
        for process in [*self._idle, *self._busy]:
            self._apart(process.end())
        while self._own_tasks:
            await asyncio.wait(self._own_tasks)

    def _apart(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that no cancelled request takes with it."""
        task = asyncio.create_task(work)
        self._own_tasks.add(task)
        task.add_done_callback(self._own_tasks.discard)
        return task

    async def _started(self) -> HeavyProcess:
        start = self._apart(HeavyProcess.start())
        try:
            return await asyncio.shield(start)
        except asyncio.CancelledError:
            start.cancel()
            raise

    async def run(self, task: str, body: bytes, owner: UUID | None, **options: Any) -> bytes:
        """Run a task of `api.process_pool_child` on a body. Raises HttpError if it fails, times out or all are busy."""
        with self._shares.taken(owner):
            self._budget.check(owner)
            async with self._slots.taken(owner):
                began_s = time.monotonic()
                try:
                    async with self._process() as process, asyncio.timeout(self.most_seconds):
                        return await process.run(task, options, body)
                except TimeoutError:
                    detail = f"this takes more than {self.most_seconds:g} s. Maybe send a smaller document."
                    raise unprocessable("too_slow", detail) from None
                except ProcessDiedError:
                    _log.warning("process died", task=task)
                    text = "the process that worked on this ended before it was done. Maybe try again."
                    raise retry_later(HTTPStatus.SERVICE_UNAVAILABLE, "died", text, retry_after_s=1) from None
                finally:
                    self._budget.spend(owner, time.monotonic() - began_s)

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[HeavyProcess]:
        """A process for one task. One that was interrupted in a task is killed and not used again."""
        await asyncio.wait([self._first])
        self._idle = [process for process in self._idle if process.alive]
        process = self._idle.pop() if self._idle else await self._started()
        self._busy.add(process)
        try:
            yield process
        except HttpError:
            self._idle.append(process)
            raise
        except BaseException:
            await asyncio.shield(self._apart(process.end()))
            raise
        else:
            self._idle.append(process)
        finally:
            self._busy.discard(process)


class ProcessDiedError(Exception):
    """The process ended before it answered: out of memory, or a bug."""


class HeavyProcess:
    """A process that does one task after another. Use it from one event loop, one task at a time."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._reading = asyncio.Lock()

    @classmethod
    async def start(cls) -> HeavyProcess:
        """Start one, and return when it has loaded what is slow to load. Raises ProcessDiedError."""
        launch = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *module_command("api.process_pool_child", str(os.getpid())),
                stdin=PIPE,
                stdout=PIPE,
                env=child_environment(),
                start_new_session=True,
            )
        )
        try:
            started = cls(await asyncio.shield(launch))
        except asyncio.CancelledError:  # it is there all the same, or will be: nobody else would end it
            await cls(await launch).end()
            raise
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
        """True until the process has ended."""
        return self._process.returncode is None

    async def run(self, task: str, options: dict[str, Any], body: bytes) -> bytes:
        """Run a task; returns its answer. Raises HttpError as the task did, ProcessDiedError."""
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
            async with self._reading:
                answer = json.loads(await self._process.stdout.readuntil())
                content = await self._process.stdout.readexactly(answer["bytes"])
        except (ConnectionError, asyncio.IncompleteReadError):
            raise ProcessDiedError from None
        if answer["status"] == HTTPStatus.OK:
            return content
        raise HttpError(HTTPStatus(answer["status"]), [Fault(**fault) for fault in json.loads(content)])

    async def end(self) -> None:
        """Kill it and wait until it is gone, and its pipes are closed: a loop that ends sooner complains of them."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()
        if self._process.stdout is not None:
            with suppress(ConnectionError):
                async with self._reading:  # a task that still reads sees the end first
                    await self._process.stdout.read()


class FairSlots:
    """Slots for which callers take turns: the next free one goes to the caller that holds the fewest, and of these to
    the one that was served longest ago. Use it from one event loop.

    A key never holds all of several slots, so that what another key asks for can begin at once.
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._most_of_key = max(1, slots - 1)
        self._held: Counter[UUID | None] = Counter()
        self._waiting: dict[UUID | None, deque[asyncio.Future[None]]] = {}
        self._served: dict[UUID | None, int] = {}
        """The turn that each caller had last; older ones of callers that neither hold nor wait are forgotten."""
        self._turn = 0

    @asynccontextmanager
    async def taken(self, owner: UUID | None) -> AsyncIterator[None]:
        """Hold a slot, when it is the caller's turn."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(granted)
        self._grant()
        try:
            await granted
            yield
        finally:
            if granted.done() and not granted.cancelled():
                self._free += 1
                self._held[owner] -= 1
            self._grant()

    def _grant(self) -> None:
        """Hand out the free slots."""
        while self._free:
            for owner, queue in list(self._waiting.items()):
                while queue and queue[0].done():  # its caller was cancelled
                    queue.popleft()
                if not queue:
                    del self._waiting[owner]
            able = [owner for owner in self._waiting if owner is None or self._held[owner] < self._most_of_key]
            if not able:
                break
            owner = min(able, key=lambda owner: (self._held[owner], self._served.get(owner, 0)))
            self._waiting[owner].popleft().set_result(None)
            self._free -= 1
            self._held[owner] += 1
            self._turn += 1
            self._served[owner] = self._turn
        self._served = {owner: turn for owner, turn in self._served.items() if turn > self._turn - MOST_REMEMBERED}
        self._held = +self._held


MOST_REMEMBERED = 1000
"""Turns after which a caller counts as one that was never served."""

MINUTE_S = 60.0


class SecondsBudget:
    """Seconds of work that one key may have in any sixty."""

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most_s, self._clock = most_s, clock
        self._spent: dict[UUID, deque[tuple[float, float]]] = {}
        """End and duration of the tasks of each key."""

    def spend(self, owner: UUID | None, seconds: float) -> None:
        """Count a task that has ended."""
        if owner is not None:
            self._spent.setdefault(owner, deque()).append((self._clock(), seconds))

    def check(self, owner: UUID | None) -> None:
        """Raise HttpError 429 where the key has spent its seconds."""
        now_s = self._clock()
        for key, tasks in list(self._spent.items()):
            while tasks and tasks[0][0] <= now_s - MINUTE_S:
                tasks.popleft()
            if not tasks:
                del self._spent[key]
        if owner is None or owner not in self._spent:
            return
        over_s = sum(seconds for _, seconds in self._spent[owner]) - self.most_s
        if over_s < 0:
            return
        # By when enough of them are more than a minute ago.
        sums_s = accumulate(seconds for _, seconds in self._spent[owner])
        ended_s = next(
            ended_s for (ended_s, _), sum_s in zip(self._spent[owner], sums_s, strict=True) if sum_s >= over_s
        )
        text = (
            f"this key's analyses, pictures and large bodies took {self.most_s:g} s in the last minute, which is all "
            "that it may have (max_heavy_seconds_a_minute). Maybe send smaller documents."
        )
        raise retry_later(HTTPStatus.TOO_MANY_REQUESTS, "too_many_heavy_seconds", text, ended_s + MINUTE_S - now_s)


class Quota:
    """Counts what is held. `name` is the code of the error; use it from one event loop.

    Nobody takes more than is left, so that however many hold all they may, there is room for one who holds nothing.
    """

    def __init__(self, name: str, most: int, most_of_one: int) -> None:
        self.name, self.most, self.most_of_one = name, most, most_of_one
        self._held: Counter[UUID | None] = Counter()

    @property
    def held(self) -> int:
        """Number of places that are held now."""
        return self._held.total()

    @contextmanager
    def taken(self, owner: UUID | None) -> Iterator[None]:
        """Hold one. Raises HttpError: 429 where the caller holds too many, 503 where all together do."""
        what = self.name.replace("_", " ")
        if self._held[owner] >= self.most_of_one:
            text = f"this caller has {self.most_of_one} {what} already, which is all that one key may have at once."
            raise retry_later(HTTPStatus.TOO_MANY_REQUESTS, f"too_many_{self.name}", text, retry_after_s=1)
        if self._held[owner] >= self.most - self.held:
            text = f"of the {self.most} {what} that the server takes at once, {self.held} are held, and the others are "
            text += "for callers that hold fewer."
            raise retry_later(HTTPStatus.SERVICE_UNAVAILABLE, f"too_many_{self.name}", text, retry_after_s=1)
        self._held[owner] += 1
        try:
            yield
        finally:
            self._held[owner] -= 1
            if not self._held[owner]:
                del self._held[owner]
