"""Figures to files: png, svg, and html with the svg inside. The same schedule always gives the same bytes."""

from __future__ import annotations

import html
import io
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib.style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from optpipe.errors import InputError, Issue

FORMATS = ("png", "svg", "html")
PNG_DPI = 160
MOST_PIXELS = 30_000
"""Along a side of a png, which is coarser where it would have more; the library draws no 2^16."""

_SETTINGS = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica Neue", "Arial", "sans-serif"],
    "svg.fonttype": "none",
    "svg.hashsalt": "optpipe",
    "text.parse_math": False,
    "text.usetex": False,
}
_LOCK = threading.Lock()

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>body {{ margin: 1rem; background: white; }} svg {{ width: 100%; height: auto; }}</style>
</head>
<body>
{svg}</body>
</html>
"""


@contextmanager
def settings() -> Iterator[None]:
    """Draw with our settings, whatever the caller's are; those are back afterwards.

    matplotlib keeps its settings for the whole process, so one thread draws at a time.
    """
    with _LOCK, matplotlib.style.context(["default", _SETTINGS]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # such a name is drawn with boxes
        yield


def format_of(path: Path) -> str:
    """The format that a file's suffix names. Raises InputError where it is none of FORMATS."""
    suffix = path.suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        allowed = ", ".join(f".{name}" for name in FORMATS)
        detail = (
            f"has the suffix {path.suffix!r}, but pictures end in {allowed}. Maybe name it {path.with_suffix('.svg')}."
        )
        raise InputError([Issue("", "unknown_format", detail)], str(path))
    return suffix


def encode(figure: Figure, picture_format: str, title: str) -> bytes:
    """The figure as bytes in one of FORMATS; call within `settings`."""
    if picture_format == "png":
        return _png(figure)
    svg = _svg(figure, title)
    if picture_format == "svg":
        return svg.encode()
    return _PAGE.format(title=html.escape(title), svg=svg[svg.index("<svg") :]).encode()


def _png(figure: Figure) -> bytes:
    target = io.BytesIO()
    FigureCanvasAgg(figure)
    dpi = min(PNG_DPI, MOST_PIXELS / max(figure.get_size_inches()))
    figure.savefig(target, format="png", dpi=dpi, metadata={"Software": "OptPipe"})
    return target.getvalue()


def _svg(figure: Figure, title: str) -> str:
    target = io.StringIO()
    FigureCanvasSVG(figure)
    figure.savefig(target, format="svg", metadata={"Date": None, "Creator": "OptPipe", "Title": title})
    return target.getvalue()
