"""Ctrl-C: once asks a search to stop, twice ends the program."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from solver.limits import Cancel


@contextmanager
def ctrl_c_cancels(cancel: Cancel) -> Iterator[None]:
    """Within this context the first Ctrl-C requests `cancel`; the next one is a KeyboardInterrupt.

    Where SIGINT is ignored, as in what a script runs in the background, it stays ignored.
    """

    def handle(_number: int, _frame: object) -> None:
        if cancel.requested:
            raise KeyboardInterrupt
        cancel.request()

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
