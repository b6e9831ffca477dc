"""Memory of processes and of the machine, and how long a process is kept waiting, as Linux tells it."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where a container's own limit stands (cgroup 2 and 1); "max" or a huge number where there is none."""


def resident_bytes(pid: int) -> int | None:
    """The memory that a process really holds, None if unknown; what it has only reserved does not count."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def kept_waiting_s(pid: int) -> float:
    """How long the main thread of a process was ready to run while no processor was free; 0 where nothing tells."""
    try:
        waited_ns = Path(f"/proc/{pid}/schedstat").read_text().split()[1]
    except (OSError, IndexError):
        return 0.0
    return int(waited_ns) / 1e9


def available_bytes() -> int | None:
    """What new processes can take without swapping, or a container's limit where that is less; None if unknown."""
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
