"""CUDA's streams and events without a GPU, with a detector of races.

Work really runs at once, on the CPU. What is kept is only what a GPU would guarantee: each stream has a vector clock,
events carry clocks from one stream to another, and the host has one too, for what it has seen finished. Two accesses
to one storage, one of them a write, must be ordered by these clocks; and when a storage is freed, every access to it
must come before whatever its own stream does next, because that is who gets the memory from the caching allocator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[int, int]


class Stamp(NamedTuple):
    """The `time`th piece of work of a stream."""

    stream: int
    time: int
    what: str

    def before(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.time


class FakeCuda:
    """Stands for `torch.cuda`; `races` says what no GPU would guarantee."""

    def __init__(self, seed: int = 0) -> None:
        self.races: list[str] = []
        self.host: Clock = {}
        self._numbers, self._rng = count(), Random(seed)
        self.current = FakeStream(self)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Until the end of the test."""
        monkeypatch.setattr(torch.cuda, "Stream", lambda _device=None: FakeStream(self))
        monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: self.current)
        monkeypatch.setattr(torch.cuda, "set_stream", self._set_stream)
        monkeypatch.setattr(torch.cuda, "stream", self._on)

    def number(self) -> int:
        return next(self._numbers)

    def finished(self) -> bool:
        """True if the host finds some work finished: at random."""
        return self._rng.random() < 0.5

    def work(self, what: str) -> tuple[Stamp, Clock]:
        """The current stream gets a piece of work; its stamp, and the clock of all that comes before it."""
        stream = self.current
        merge(stream.clock, self.host)
        before = stream.clock.copy()
        stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        return Stamp(stream.number, stream.clock[stream.number], what), before

    def _set_stream(self, stream: FakeStream) -> None:
        self.current = stream

    @contextmanager
    def _on(self, stream: FakeStream) -> Iterator[None]:
        outer, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = outer


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.number = cuda.number()
        self.clock: Clock = {}

    def wait_event(self, event: FakeEvent) -> None:
        merge(self.clock, event.clock)

    def wait_stream(self, other: FakeStream) -> None:
        merge(self.clock, other.clock)

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._cuda)
        event.record(self)
        return event

    def synchronize(self) -> None:
        merge(self._cuda.host, self.clock)


class FakeEvent:
    """An event that was never recorded is over, as in CUDA."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.clock: Clock = {}

    def record(self, stream: FakeStream) -> None:
        self.clock = stream.clock.copy()

    def query(self) -> bool:
        if self._cuda.finished():
            merge(self._cuda.host, self.clock)
            return True
        return False


def merge(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


class RaceDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Open it around the work to watch."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cuda = cuda
        self._written: dict[int, Stamp] = {}
        self._read: dict[int, list[Stamp]] = {}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema  # type: ignore[attr-defined]
        given = [(a, s) for a, s in zip(args, schema.arguments, strict=False)]
        written = {key(s) for a, spec in given if _writes(spec) for s in storages(a)}
        read = {key(s): s for s in storages((args, kwargs))}
        if not _is_view(schema):
            stamp, before = self._cuda.work(f"{func} on stream {self._cuda.current.number}")
            for k in read:
                self._access(k, stamp, before, writes=k in written)
            for storage in storages(result):
                if key(storage) not in read:
                    self._new(storage, stamp)
        return result

    def _access(self, k: int, stamp: Stamp, before: Clock, *, writes: bool) -> None:
        others = [self._written[k]] if k in self._written else []
        if writes:
            others += self._read.get(k, [])
        self._cuda.races += [f"{stamp.what} races with {other.what}" for other in others if not other.before(before)]
        if writes:
            self._written[k], self._read[k] = stamp, []
        else:
            self._read.setdefault(k, []).append(stamp)

    def _new(self, storage: torch.UntypedStorage, stamp: Stamp) -> None:
        """Memory of the current stream, which gets it back in the end."""
        k, home = key(storage), self._cuda.current
        self._written[k], self._read[k] = stamp, []

        def freed(_: object) -> None:
            merge(home.clock, self._cuda.host)
            accesses = [self._written.pop(k), *self._read.pop(k)]
            self._cuda.races += [
                f"memory of stream {home.number} is freed, perhaps before {access.what}"
                for access in accesses
                if not access.before(home.clock)
            ]
            del self._alive[k]

        self._alive[k] = weakref.ref(storage, freed)


def storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for value in tree_leaves(values):
        if isinstance(value, Tensor):
            yield value.untyped_storage()


def key(storage: torch.UntypedStorage) -> int:
    return storage._cdata


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_view(schema: Any) -> bool:
    """True if an operator only looks at memory in another way."""
    arguments = [argument.alias_info for argument in schema.arguments if argument.alias_info]
    return bool(arguments) and not any(info.is_write for info in arguments)
