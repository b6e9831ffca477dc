"""Where processes wait for one another: what torch raises where one is gone becomes one error that says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from optpipe.errors import RunFailedError


@contextmanager
def exchanging(what: str) -> Iterator[None]:
    """Within, processes exchange `what`. Raises RunFailedError where one has ended or does not answer in time."""
    try:
        yield
    except RuntimeError as error:
        raise RunFailedError(
            f"{what} did not come: {error}. Maybe another process has ended: see what it printed."
        ) from error
