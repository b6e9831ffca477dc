"""What is installed on request alone: how whoever needs it says that it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from optpipe.errors import MissingExtraError


@contextmanager
def needs_extra(extra: str, subject: str) -> Iterator[None]:
    """Turn a missing package into MissingExtraError: `subject` needs it, and ``optpipe[extra]`` brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        text = f"{subject} needs {error.name}, which is not installed. Maybe pip install 'optpipe[{extra}]'."
        raise MissingExtraError(text) from None
