"""All that a run leaves, put together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from optpipe.train.config import OutputConfig
from optpipe.train.output.metrics import Metrics
from optpipe.train.output.scalars import Scalars
from optpipe.train.result import StepReport

Report = Callable[[StepReport], None]


@contextmanager
def leaving(output: OutputConfig, title: str, report: Report | None, *, leads: bool) -> Iterator[Report | None]:
    """Reports each step to `report` and into the files, in the process that leads; None in others.

    Files are whole at the end, however the run ends. Raises MissingExtraError where a file needs a package that is not
    installed.
    """
    if not leads:
        yield None
        return
    with ExitStack() as files:
        sinks: list[Report] = [report] if report else []
        if output.metrics:
            metrics = Metrics(output.metrics)
            files.callback(metrics.close)
            sinks.append(metrics)
        if output.tensorboard:
            scalars = Scalars(output.tensorboard)
            files.callback(scalars.close)
            sinks.append(scalars)
        if output.plot:
            from optpipe.train.output.picture import Picture  # matplotlib takes a moment

            picture = Picture(output.plot, title)
            files.callback(picture.draw)
            sinks.append(picture)
        yield lambda step: _tell(sinks, step)


def _tell(sinks: list[Report], step: StepReport) -> None:
    for sink in sinks:
        sink(step)
