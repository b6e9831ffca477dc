"""Text of times, sizes, shares and counts: exact for reports, rounded to a suitable unit for figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Unit(NamedTuple):
    """A unit: its name and its size in us or bytes."""

    name: str
    size: float


TIME_UNITS = (Unit("s", 1e6), Unit("ms", 1e3), Unit("µs", 1.0))
MEMORY_UNITS = (Unit("TiB", 2.0**40), Unit("GiB", 2.0**30), Unit("MiB", 2.0**20), Unit("KiB", 2.0**10), Unit("B", 1.0))


def us_text(time_us: float, decimals: int = 3) -> str:
    """A time in microseconds with thousands separators; `decimals` apply unless it is an integer."""
    return f"{number_text(time_us, decimals)} us"


def number_text(value: float, decimals: int) -> str:
    """A number with thousands separators; `decimals` apply unless it is an integer."""
    return f"{value:,.{0 if float(value).is_integer() else decimals}f}"


def share_text(share: float) -> str:
    """A share as a percentage with two decimals; no sign of a zero, which rounding makes of a bubble."""
    return f"{100 * share:z.2f} %"


def time_unit(span_us: float) -> Unit:
    """Largest unit of which `span_us` is at least two."""
    return _fitting(TIME_UNITS, span_us, 2)


def time_text(time_us: float, unit: Unit | None = None) -> str:
    """A time with four significant digits, by default in a unit of suitable size."""
    unit = unit or time_unit(time_us)
    return f"{_rounded(time_us / unit.size, 4)} {unit.name}"


def memory_unit(size_bytes: float) -> Unit:
    """Largest unit of which `size_bytes` is at least one."""
    return _fitting(MEMORY_UNITS, size_bytes, 1)


def bytes_text(size_bytes: float, unit: Unit | None = None) -> str:
    """A size with three significant digits (two decimals below one), by default in a unit of suitable size."""
    unit = unit or memory_unit(size_bytes)
    return f"{_rounded(size_bytes / unit.size, 0 if unit.size == 1 else 3)} {unit.name}"


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


def _fitting(units: Sequence[Unit], amount: float, least: float) -> Unit:
    return next((unit for unit in units if amount >= least * unit.size), units[-1])


def _rounded(value: float, digits: int) -> str:
    whole_digits = math.floor(math.log10(abs(value))) + 1 if value else 1
    return f"{value:,.{max(0, digits - max(1, whole_digits))}f}"
