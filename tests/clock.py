"""A clock for promises in seconds, which stands still while others use the machine."""

from __future__ import annotations

import time
from pathlib import Path


class Clock:
    """Seconds since it was made, without those for which threads of this process were ready and no processor was free.

    Where the system does not tell (it is not Linux), all seconds count.
    """

    def __init__(self) -> None:
        self._began_s, self._waited_s = time.perf_counter(), waited_s()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began_s - max(0.0, waited_s() - self._waited_s)


def waited_s() -> float:
    """Seconds for which the threads of this process have waited for a processor, all together."""
    waited_ns = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        try:
            waited_ns += int(thread.read_text().split()[1])
        except (OSError, IndexError):  # it has ended meanwhile
            continue
    return waited_ns / 1e9
