"""Types of numbers that all documents share: times, bytes, counts and factors, with their ranges and errors.

Validators return the value unchanged, so that 10 stays 10 and 10.0 stays 10.0 on a round trip.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeGuard

import numpy as np
from pydantic import BeforeValidator, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from optpipe.errors import shown
from optpipe.units import bytes_of

MAX_TIME_US = 10**12
"""Longest op or transfer: eleven days."""
MAX_BYTES = 2**53 - 1
"""Largest integer that every JSON reader represents exactly."""
MAX_NUMBER = 1e30
"""Far above any sum of times, far below float overflow."""
MAX_NAME = 200
"""Longest name of a problem or a device."""
MAX_COUNT = 10**6
"""Most microbatches, slices of all of them, or stages."""
MAX_DEVICES = 4096
"""Most devices: each takes part of a millisecond wherever a schedule is timed or verified, also one without ops."""
MAX_FACTOR = 10**9
"""Largest factor of a time or of bytes: a stage may give its costs as 1, and a factor the time itself."""


def reject(code: str, detail: str) -> PydanticCustomError:
    """Validation error whose `detail` is shown to the user verbatim, after the path of the field."""
    # pydantic expands {} in templates; passing the text as a value keeps its braces intact.
    return PydanticCustomError(f"optpipe.{code}", "{detail}", {"detail": detail})


def at_most(most: int) -> BeforeValidator:
    """Validator of a list's length, before any of its entries is read. It is no part of the JSON schema: a client has
    no use for a document that is as large as can be."""

    def check(entries: Any) -> Any:
        if isinstance(entries, list) and len(entries) > most:
            detail = f"has {len(entries):,} entries but at most {most:,} are allowed"
            raise reject("too_long", f"{detail}. Maybe this is another kind of document")
        return entries

    return BeforeValidator(check)


def _is_real(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_number(value: Any) -> TypeGuard[int | float]:
    """Check that float arithmetic can take the value: a finite number, and no integer of 400 digits."""
    return _is_real(value) and abs(value) <= MAX_NUMBER


def _time_us(value: Any) -> int | float:
    if not _is_real(value) or value != value:
        raise reject("not_a_number", f"is {shown(value)} but must be a finite number of microseconds")
    if value < 0:
        raise reject("negative", f"is {shown(value)} but must be at least 0. Maybe a sign slipped in")
    if value > MAX_TIME_US:
        detail = f"is {shown(value)} but at most {MAX_TIME_US} us are allowed. Maybe the unit is nanoseconds"
        raise reject("too_large", detail)
    return value


def _factor(value: Any) -> int | float:
    if not _is_real(value) or not 0 <= value <= MAX_FACTOR:
        raise reject("not_a_factor", f"is {shown(value)} but must be a number from 0 to {MAX_FACTOR}")
    return value


def _whole(value: Any, low: int, high: int, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        is_whole = isinstance(value, float) and value.is_integer() and low <= value <= high
        maybe = f". Maybe {int(value)}, without a point or an exponent" if is_whole else ""
        raise reject("not_an_integer", f"is {shown(value)} but must be an integer ({what}){maybe}")
    if not low <= value <= high:
        raise reject("out_of_range", f"is {shown(value)} but must be from {low} to {high} ({what})")
    return value


def _size_bytes(value: Any) -> int:
    if isinstance(value, str) and (size_bytes := bytes_of(value)) is not None:
        raise reject("not_an_integer", f"is {shown(value)} but must be an integer (bytes). Maybe {size_bytes}")
    return _whole(value, 0, MAX_BYTES, "bytes")


def _positive_count(value: Any) -> int:
    return _whole(value, 1, MAX_COUNT, "a count")


def _index(value: Any) -> int:
    return _whole(value, 0, MAX_COUNT - 1, "counted from 0")


def _any_time_us(value: Any) -> int | float:
    if not _is_number(value):
        raise reject("not_a_number", f"is {shown(value)} but must be a finite number of at most {MAX_NUMBER:g}")
    # NumPy's float64 is a float, but its repr is not a number.
    return float(value) if isinstance(value, float) else value


def _share(value: Any) -> int | float:
    if not _is_number(value) or value > 1:
        raise reject("not_a_share", f"is {shown(value)} but must be a finite number of at most 1")
    return value


def are_indices(values: Iterable[Any]) -> bool:
    """Check a whole column at once: True if `Index` accepts every value."""
    values = list(values)
    return set(map(type, values)) <= {int} and (not values or (min(values) >= 0 and max(values) < MAX_COUNT))


def are_instants(values: Sequence[Any]) -> bool:
    """Check a whole column at once: True if `Instant` accepts every value; may be False for one at MAX_NUMBER."""
    if not set(map(type, values)) <= {int, float}:
        return False
    try:
        return bool((np.abs(np.asarray(values, np.float64)) < MAX_NUMBER).all())
    except OverflowError:
        return False


def _schema(kind: str, **limits: float) -> WithJsonSchema:
    return WithJsonSchema({"type": kind, **limits})


TimeUs = Annotated[int | float, PlainValidator(_time_us), _schema("number", minimum=0, maximum=MAX_TIME_US)]
Bytes = Annotated[int, PlainValidator(_size_bytes), _schema("integer", minimum=0, maximum=MAX_BYTES)]
Count = Annotated[int, PlainValidator(_positive_count), _schema("integer", minimum=1, maximum=MAX_COUNT)]
Index = Annotated[int, PlainValidator(_index), _schema("integer", minimum=0, maximum=MAX_COUNT - 1)]
Instant = Annotated[int | float, PlainValidator(_any_time_us), _schema("number")]
"""A point in time, or a claimed value or bound in microseconds: any finite number."""
Factor = Annotated[int | float, PlainValidator(_factor), _schema("number", minimum=0, maximum=MAX_FACTOR)]
"""A multiple of a cost."""
Share = Annotated[int | float, PlainValidator(_share), _schema("number", maximum=1)]
"""A gap or a bubble. A false claim may be negative: `verify` judges it."""
