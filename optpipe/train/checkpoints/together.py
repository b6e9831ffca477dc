"""Something done in all processes, which fails in all of them if it fails in one: none is left waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from optpipe.errors import CheckpointError, InputError, RunFailedError
from optpipe.train.launch import Launch

Value = TypeVar("Value")


def together(launch: Launch, do: Callable[[], Value]) -> list[Value]:
    """The JSON values of all processes, by rank.

    Raises CheckpointError with the first process's reason, and RunFailedError where another process has ended.
    """
    found: dict[str, Any]
    try:
        found = {"value": do()}
    except (CheckpointError, InputError, OSError) as error:
        found = {"error": _reason(error)}
    try:
        answers = launch.gather(found)
    except RunFailedError as lost:
        if "error" in found:
            raise RunFailedError(f"{found['error']} Then {lost}") from lost
        raise
    failed = [(rank, answer["error"]) for rank, answer in enumerate(answers) if "error" in answer]
    if failed:
        rank, reason = failed[0]
        raise CheckpointError(f"rank {rank}: {reason}" if launch.world > 1 else reason)
    return [answer["value"] for answer in answers]


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    return str(error)
