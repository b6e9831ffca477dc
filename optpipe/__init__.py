"""OptPipe: schedules for pipeline-parallel training, found by optimisation and run as planned.

>>> from optpipe import Problem, Schedule, simulate, verify
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe import lazy
from optpipe.display import set_renderer

if TYPE_CHECKING:
    from optpipe.display import Renderer
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule
    from optpipe.simulate import simulate
    from optpipe.verify import verify

__all__ = ["Problem", "Schedule", "simulate", "verify"]


def _notebook() -> Renderer:
    """Imported when the first object is displayed: matplotlib takes a moment to load."""
    from optpipe import notebook

    return notebook


set_renderer(_notebook)
lazy.offer(
    __name__,
    {
        "Problem": "optpipe.problem",
        "Schedule": "optpipe.schedule",
        "simulate": "optpipe.simulate",
        "verify": "optpipe.verify",
    },
)
