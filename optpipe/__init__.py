"""OptPipe: schedules for pipeline-parallel training, found by optimisation and run as planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.display import show_in

if TYPE_CHECKING:
    from optpipe.display import Room


def _notebook() -> Room:
    """Imported with the first object that is shown: it brings pictures, which take a moment."""
    from optpipe import notebook

    return notebook


show_in(_notebook)
