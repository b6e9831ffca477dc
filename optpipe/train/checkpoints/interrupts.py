"""Ctrl-C and SIGTERM while training: the first asks for a checkpoint and an end, a second Ctrl-C ends at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from time import monotonic
from types import FrameType, TracebackType
from typing import Any, Self

SAME_WISH_S = 0.5
"""A signal that comes again so soon is the same wish: launchers pass on what a terminal has sent already."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Within this context a signal sets `requested`, its name. Outside the main thread nothing is changed.

    A signal that is ignored stays ignored: a shell does so with SIGINT for what a script runs in the background.

    A second SIGINT raises KeyboardInterrupt, a third one kills the process. SIGTERM may come as often as it likes;
    whoever cannot wait sends SIGKILL.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._since = 0.0
        self._before: Mapping[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested, self._since = signal.Signals(number).name, monotonic()
        elif number == signal.SIGINT and monotonic() - self._since > SAME_WISH_S:
            signal.signal(number, signal.SIG_DFL)  # should this one be kept waiting, the next one is the kernel's
            raise KeyboardInterrupt
