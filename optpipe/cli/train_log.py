"""What training tells besides its steps - checkpoints, new schedules - goes to stderr, above the progress bar."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from optpipe.cli.output import stderr


class _Lines(logging.Handler):
    """A line a message; warnings say so."""

    def emit(self, record: logging.LogRecord) -> None:
        name = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        stderr().print(f"{name}{record.getMessage()}")


@contextmanager
def told() -> Iterator[None]:
    """Within: what `optpipe.train` logs is shown, in the processes that log it."""
    log, handler = logging.getLogger("optpipe.train"), _Lines()
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)  # which also forgets what loggers below it remember
        log.propagate = propagate
