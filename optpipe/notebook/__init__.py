"""Objects in notebooks, in IPython and on rich consoles: what `optpipe.display` asks for.

A schedule, for example, shows a table with a row for each device and its Gantt chart. Nothing has to be called: an
object at the end of a cell, or one given to `display` or `rich.print`, shows itself.
"""

from optpipe.notebook.comparison import SideBySide
from optpipe.notebook.views import html_of, line_of, renderable_of

__all__ = ["SideBySide", "html_of", "line_of", "renderable_of"]
