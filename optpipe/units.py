"""Text of times, sizes, shares and counts for people, in units that suit their size; documents have plain numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple


class Unit(NamedTuple):
    """A unit: its name and its size in us or bytes."""

    name: str
    size: float


TIME_UNITS = (Unit("s", 1e6), Unit("ms", 1e3), Unit("µs", 1.0))
MEMORY_UNITS = (Unit("TiB", 2.0**40), Unit("GiB", 2.0**30), Unit("MiB", 2.0**20), Unit("KiB", 2.0**10), Unit("B", 1.0))


def share_text(share: float) -> str:
    """A share as a percentage with two decimals; no sign of a zero, which rounding makes of a bubble."""
    return f"{100 * share:z.2f} %"


def time_unit(span_us: float) -> Unit:
    """Largest unit of which `span_us` is at least one."""
    return _fitting(TIME_UNITS, abs(span_us))


def time_text(time_us: float, unit: Unit | None = None) -> str:
    """A time with four significant digits, by default in a unit of suitable size."""
    unit = unit or time_unit(time_us)
    return f"{_rounded(time_us / unit.size, 4)} {unit.name}"


def times_text(times_us: Sequence[float | None]) -> list[str]:
    """Times that are compared with each other, in the unit of the longest; "-" for none."""
    unit = time_unit(max((abs(time_us) for time_us in times_us if time_us is not None), default=0.0))
    return ["-" if time_us is None else time_text(time_us, unit) for time_us in times_us]


def change_text(value: float, other: float) -> str:
    """A change from another value, as a percentage with its sign; "the same" where that would be zero."""
    share = value / other - 1 if other else 0.0
    return "the same" if abs(share) < 0.0005 else f"{100 * share:+.1f} %"


def difference_text(time_us: float, unit: Unit | None = None) -> str:
    """A difference of times, with its sign."""
    text = time_text(time_us, unit)
    return text if time_us <= 0 or text.startswith("0 ") else f"+{text}"


def memory_unit(size_bytes: float) -> Unit:
    """Largest unit of which `size_bytes` is at least one."""
    return _fitting(MEMORY_UNITS, abs(size_bytes))


def bytes_text(size_bytes: float, unit: Unit | None = None) -> str:
    """A size with three significant digits (two decimals below one), by default in a unit of suitable size."""
    unit = unit or memory_unit(size_bytes)
    return f"{_rounded(size_bytes / unit.size, 0 if unit.size == 1 else 3)} {unit.name}"


_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([A-Za-z]*)", re.ASCII)
_BYTES = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}


def bytes_of(text: str) -> int | None:
    """Bytes of a size such as ``8GiB`` or ``1.5 GB``: K and KiB are 1024 bytes, KB is 1000. None for other text."""
    match = _SIZE.fullmatch(text.strip())
    return int(float(match[1]) * _BYTES[match[2]]) if match and match[2] in _BYTES else None


def idle_text(idle_us: Sequence[float], unit: Unit) -> str:
    """Idle times of a device before, within and after its ops, with two decimals at most: ``20 + 4 + 0 ms``."""
    times = [us / unit.size for us in idle_us]
    texts = [f"{time:,.0f}" if time >= 100 else f"{round(time, 1 if time >= 10 else 2):g}" for time in times]
    return f"{' + '.join(texts)} {unit.name}"


def budget_text(used_bytes: float, budget_bytes: int | None) -> str:
    """A size, its budget, and what is left of that or what is lacking."""
    if budget_bytes is None:
        return f"{bytes_text(used_bytes)}, no limit"
    left, room = budget_bytes - used_bytes, "left" if used_bytes <= budget_bytes else "too few"
    return f"{bytes_text(used_bytes)} of {bytes_text(budget_bytes)}, {bytes_text(abs(left))} {room}"


def count_text(count: int, name: str) -> str:
    """A count with a noun, given in the singular: ``1 device``, ``1,024 microbatches``."""
    plural = "" if count == 1 else "es" if name.endswith("ch") else "s"
    return f"{count:,} {name}{plural}"


def percent_text(share: float) -> str:
    """A share as a percentage: one decimal, two below one percent; never 0 for a positive share."""
    percent = 100 * share
    if 0 < percent < 0.01:
        return "< 0.01 %"
    return f"{percent:.2f} %" if 0 < percent < 1 else f"{percent:.1f} %"


def _fitting(units: Sequence[Unit], amount: float) -> Unit:
    return next((unit for unit in units if amount >= unit.size), units[-1])


def _rounded(value: float, digits: int) -> str:
    if not value or math.isinf(value):
        return f"{value:z.0f}"
    decimals = max(0, digits - max(1, math.floor(math.log10(abs(value))) + 1))
    return f"{value:z,.{decimals}f}" if round(value, decimals) else "0"
